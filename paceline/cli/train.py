"""`paceline train`: drafters for the user's own model. The target writes the text, and heads learn to guess
it.

Invariant: DIR/text and the heads' state folders are all that is needed to go on with --resume; a head is
complete whenever it is there.
"""

from __future__ import annotations

import enum
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import console, options
from paceline.core.options import nearest, require

if TYPE_CHECKING:
    from paceline.train.recipes import Recipe
    from paceline.train.shards import Texts
    from paceline.train.trainer import Limit

WRITING = 0.4  # of the time where hours are given
DEFAULT_TOKENS = 2_000_000
FEWEST_STEPS = 250  # a batch is made smaller where there would be fewer


class Kind(enum.StrEnum):
    medusa = "medusa"
    eagle = "eagle"
    dflash = "dflash"
    draft = "draft"


def train(
    kind: Annotated[
        Kind | None,
        typer.Argument(help="medusa (heads), eagle (EAGLE-3), dflash (blocks) or draft (a small model)."),
    ] = None,
    kinds: Annotated[
        str | None, typer.Option(help="Several, as eagle,medusa: one set of passes, each head in DIR/KIND.")
    ] = None,
    target: Annotated[str, typer.Option("--target", "-m", help=options.MODEL_HELP)] = "default",
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the head is written.")] = Path("head"),
    prompts: Annotated[
        Path | None,
        typer.Option(help="What the target answers (.jsonl or .txt); left out: it invents prompts."),
    ] = None,
    vary: Annotated[
        bool, typer.Option("--vary", help="Prompts are also summarized, translated, asked about and so on.")
    ] = False,
    tokens: Annotated[int | None, typer.Option(min=1000, help="How many tokens the target writes.")] = None,
    hours: Annotated[
        float | None, typer.Option(min=0.001, help="Time for all of it, instead of --tokens.")
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Engines that write at once, for a GPU with room for them.")
    ] = 1,
    text: Annotated[
        list[Path] | None, typer.Option(help="Written text (a folder of shards) to use instead of writing.")
    ] = None,
    rounds: Annotated[
        float, typer.Option(min=0.01, help="How often the text is read, with --tokens or --text.")
    ] = 4,
    device: options.Device = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a training that was interrupted.")
    ] = False,
    stop_after: Annotated[
        float | None, typer.Option(min=1, help="Seconds of training after which to stop; --resume goes on.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the text and the training.")] = 0,
    draft_vocab: Annotated[
        int | None, typer.Option(min=16, help="Tokens that can be drafted, the most frequent ones.")
    ] = None,
    bits: Annotated[int, typer.Option(help="Of a weight in the file: 16, or 8 for half the size.")] = 16,
    trunk: Annotated[
        bool,
        typer.Option("--trunk", help="Medusa: a layer reads the text before the heads. Better; ours alone."),
    ] = False,
    start: Annotated[
        Path | None,
        typer.Option(help="A head to learn on from, or a folder of one a kind; with --trunk EAGLE's, too."),
    ] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="Changes the recipe, as rate=8e-4 or num_held_out=256.")
    ] = None,
    evaluate: Annotated[
        list[Path] | None, typer.Option(help="Shards that acceptance is also measured on, at the end.")
    ] = None,
) -> None:
    """Train a drafter for a model, without a data set.

    The target answers your prompts, or invents prompts from its own chat template; half of the answers are
    greedy. The head learns to guess them, and shows on answers held back how many tokens a step it would
    give. Beside it lie its curves and how it came to be.

    A GPU is needed for more than a trial. Interrupted with Ctrl-C, it goes on with --resume.

    Examples:

      paceline train eagle --target default --tokens 20000000 -o my-eagle --device cuda

      paceline train medusa --target ./my-model --prompts prompts.jsonl --hours 2 -o my-medusa

      paceline train medusa --trunk --start my-eagle --tokens 5000000 -o my-medusa

      paceline train --kinds eagle,dflash --text my-eagle/text -o heads

      paceline generate --speculative-config '{"method": "eagle", "model": "my-eagle"}' "Hello"
    """
    from paceline.loaders.checkpoint import open_checkpoint
    from paceline.runtime.device import resolve
    from paceline.train.recipes import recipe_for
    from paceline.train.session import TrainConfig
    from paceline.train.session import train as run
    from paceline.train.shards import load_shard

    require(tokens is None or hours is None, "--hours", hours, "give --tokens or --hours, not both")
    require(bits in (8, 16), "--bits", bits, "use 16 or 8")
    require((kind is None) != (kinds is None), "--kinds", kinds, "name one kind, or several with --kinds")
    names = [kind.value] if kind is not None else [name.strip() for name in str(kinds).split(",")]
    require(
        not trunk or names == ["medusa"], "--trunk", ",".join(names), "only medusa has heads that read one"
    )
    changes = _changes(change or ()) | ({"draft_vocab_size": draft_vocab} if draft_vocab else {})
    recipes = [recipe_for(name, has_trunk=trunk, **changes) for name in names]
    folders = [out] if kind is not None else [out / name for name in names]
    _check_start(start)
    is_begun = resume and any((folder / "state").is_dir() for folder in folders)
    with _progress() as bar:
        given = text or ([out / "text"] if is_begun else [])
        writing = {"model": target, "folder": out / "text", "device": device, "is_varied": vary, "seed": seed}
        texts = _texts(given, prompts, tokens, hours, writing | {"processes": processes}, bar)
        recipes, limit = _plan(recipes, texts, rounds, hours)
        bar.begin(f"training {', '.join(names)}", 1000)
        end = time.monotonic() + (stop_after or float("inf"))
        config = TrainConfig(
            limit=limit, device=resolve(device), seed=seed, bits=bits, is_resumed=resume, start=start,
            others={path.stem: load_shard(path) for path in evaluate or ()}, num_measures=10,
            command=sys.argv, is_over=lambda: time.monotonic() > end,
        )  # fmt: skip
        found = run(open_checkpoint(target, progress=False), texts, recipes, folders, config, bar.report)
    for folder, recipe, acceptance in zip(folders, recipes, found, strict=True):
        drafts = f"drafts of {recipe.num_steps}"
        line = f"{folder}: {acceptance.tau:.2f} tokens a step on held-out answers, {drafts}\n"
        console.write(console.stdout(), line)


def _changes(settings: Sequence[str]) -> dict[str, Any]:
    """name=value of the recipe, the value as JSON."""
    from paceline.train.losses import Mix
    from paceline.train.recipes import Recipe

    known, found = [f.name for f in fields(Recipe) if f.name != "kind"], {}
    for setting in settings:
        name, _, value = setting.partition("=")
        require(name in known, "--set", setting, nearest(name, known))
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            require(False, "--set", setting, "write name=value, with a number, true, false or a list")
    if "mix" in found:
        found["mix"] = Mix(*found["mix"])
    return found


def _check_start(start: Path | None) -> None:
    folders = [] if start is None else [start, *(start / kind.value for kind in Kind)]
    is_head = start is None or any((folder / "config.json").is_file() for folder in folders)
    require(is_head, "--start", start, "name the folder of a head that paceline trained")


def _texts(
    given: Sequence[Path],
    prompts: Path | None,
    tokens: int | None,
    hours: float | None,
    writing: dict[str, Any],
    bar: _Bar,
) -> Texts:
    """Given, or written now."""
    from paceline.measure import prompts as prompt_files
    from paceline.train.data import WriteConfig, write_texts
    from paceline.train.shards import joined, load_shards

    if given:
        return joined([load_shards(path) for path in given])
    turns = [prompt.turns for prompt in prompt_files.load(prompts)] if prompts is not None else []
    wanted = None if hours is not None else tokens or DEFAULT_TOKENS
    seconds = hours * 3600 * WRITING if hours is not None else None
    bar.begin("the target writes", wanted)
    return write_texts(WriteConfig(**writing, turns=turns, num_tokens=wanted, seconds=seconds), bar.reach)


def _plan(
    recipes: Sequence[Recipe], texts: Texts, rounds: float, hours: float | None
) -> tuple[list[Recipe], Limit]:
    """Batches small enough for a few hundred steps, and the end of the training."""
    from paceline.train.trainer import Limit

    if hours is not None:
        return list(recipes), Limit(seconds=hours * 3600 * (1 - WRITING))
    total = int(int(texts.starts[-1]) * rounds)
    most = max(total // FEWEST_STEPS, 1024)
    return [replace(r, batch_tokens=min(r.batch_tokens, most)) for r in recipes], Limit(tokens=total)


class _Bar:
    """Two bars, one after the other, on stderr."""

    def __init__(self, progress: Any) -> None:
        self.progress, self.task = progress, None
        self.tau = 0.0

    def begin(self, what: str, total: int | None) -> None:
        self.task = self.progress.add_task(what, total=total, note="")

    def reach(self, count: int) -> None:
        self.progress.update(self.task, completed=count, note=f"{count:,} tokens")

    def report(self, what: str, numbers: dict[str, Any]) -> None:
        if what == "measured":
            self.tau = numbers["tau"]
            chances = ", ".join(f"{chance:.2f}" for chance in numbers["by_position"])
            line = f"{numbers['tokens']:>13,} tokens read: {numbers['kind']} has {self.tau:.3f} tokens a step"
            self.progress.console.print(f"{line} on held-out answers ({chances})", highlight=False)
        elif what == "step" and numbers["step"] % 10 == 0:
            note = f"loss {float(numbers['loss']):.3f}, {self.tau:.2f} tokens a step"
            self.progress.update(self.task, completed=int(1000 * numbers["share"]), note=note)
        elif what == "saved":
            for name, found in list(numbers["acceptance"].items())[1:]:  # the first is what was held out
                line = f"{numbers['kind']} has {found.tau:.3f} tokens a step on {name}"
                self.progress.console.print(line, highlight=False)


@contextmanager
def _progress() -> Iterator[_Bar]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    texts = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
    columns = [texts[0], BarColumn(), texts[1], TimeElapsedColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console.stderr()) as progress:
        yield _Bar(progress)
