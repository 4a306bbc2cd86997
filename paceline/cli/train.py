"""`paceline train`: a drafter for the user's own model. The target writes the text, and the head learns to
guess it.

Invariant: DIR/text and DIR/state are all that is needed to go on with --resume; the head in DIR is complete
whenever it is there.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import console, options

if TYPE_CHECKING:
    from paceline.train.acceptance import Acceptance
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
        Kind,
        typer.Argument(help="medusa (heads), eagle (EAGLE-3), dflash (blocks) or draft (a small model)."),
    ],
    target: Annotated[str, typer.Option("--target", "-m", help=options.MODEL_HELP)] = "default",
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the head is written.")] = Path("head"),
    prompts: Annotated[
        Path | None,
        typer.Option(help="What the target answers (.jsonl or .txt); left out: it invents prompts."),
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1000, help="How many tokens the target writes.")] = None,
    hours: Annotated[
        float | None, typer.Option(min=0.001, help="Time for all of it, instead of --tokens.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Written text (a folder of shards) to use instead of writing.")
    ] = None,
    rounds: Annotated[
        float, typer.Option(min=0.01, help="How often the text is read, with --tokens or --text.")
    ] = 4,
    device: options.Device = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a training that was interrupted.")
    ] = False,
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
        Path | None, typer.Option(help="A head to learn on from; with --trunk an EAGLE head, too.")
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

      paceline generate --speculative-config '{"method": "eagle", "model": "my-eagle"}' "Hello"
    """
    from paceline.core.options import require
    from paceline.train.recipes import recipe_for

    require(tokens is None or hours is None, "--hours", hours, "give --tokens or --hours, not both")
    require(bits in (8, 16), "--bits", bits, "use 16 or 8")
    require(not trunk or kind is Kind.medusa, "--trunk", kind.value, "only medusa has heads that read one")
    require(
        start is None or (start / "config.json").is_file(),
        "--start",
        start,
        "name the folder of a head that paceline trained",
    )
    recipe = recipe_for(
        kind.value, has_trunk=trunk, **({"draft_vocab_size": draft_vocab} if draft_vocab else {})
    )
    with _progress() as bar:
        begun = out / "text" if resume and (out / "state").is_dir() and text is None else text
        texts = _texts(target, prompts, out, begun, tokens, hours, device, seed, bar)
        recipe, limit = _plan(recipe, texts, rounds, hours)
        found = _train(target, texts, recipe, limit, out, device, seed, resume, bits, start, bar)
    console.write(
        console.stdout(),
        f"{out}: {found.tau:.2f} tokens a step on held-out answers, drafts of {recipe.num_steps}\n",
    )


def _texts(
    target: str,
    prompts: Path | None,
    out: Path,
    text: Path | None,
    tokens: int | None,
    hours: float | None,
    device: str,
    seed: int,
    bar: _Bar,
) -> Texts:
    """Given, or written now."""
    from paceline import LLM
    from paceline.measure import prompts as prompt_files
    from paceline.runtime.device import resolve
    from paceline.train.data import write
    from paceline.train.shards import load_shards

    if text is not None:
        return load_shards(text)
    turns = [prompt.turns for prompt in prompt_files.load(prompts)] if prompts is not None else []
    is_gpu = resolve(device).type == "cuda"
    wanted = None if hours is not None else tokens or DEFAULT_TOKENS
    seconds = hours * 3600 * WRITING if hours is not None else None
    sizes: dict[str, Any] = (
        {"max_num_seqs": 256, "max_num_batched_tokens": 8192} if is_gpu else {"max_num_seqs": 16}
    )
    with LLM(target, speculative_config=None, device=device, enable_prefix_caching=False, **sizes) as llm:
        bar.begin("the target writes", wanted)
        return write(llm, turns, out / "text", seed=seed, tell=bar.reach, num_tokens=wanted, seconds=seconds)


def _plan(recipe: Recipe, texts: Texts, rounds: float, hours: float | None) -> tuple[Recipe, Limit]:
    """Batches small enough for a few hundred steps, and the end of the training."""
    from dataclasses import replace

    from paceline.train.trainer import Limit

    total = int(int(texts.starts[-1]) * rounds)
    batch = max(min(recipe.batch_tokens, total // FEWEST_STEPS), 1024)
    limit = Limit(tokens=total) if hours is None else Limit(seconds=hours * 3600 * (1 - WRITING))
    return replace(recipe, batch_tokens=batch if hours is None else recipe.batch_tokens), limit


def _train(
    target: str, texts: Texts, recipe: Recipe, limit: Limit, out: Path, device: str, seed: int, resume: bool, bits: int,
    start: Path | None, bar: _Bar,
) -> Acceptance:  # fmt: skip
    from paceline.loaders.checkpoint import open_checkpoint
    from paceline.runtime.device import resolve
    from paceline.train.session import train as run

    bar.begin(f"training {recipe.kind}", 1000)
    checkpoint = open_checkpoint(target, progress=False)
    (found,) = run(
        checkpoint, texts, [recipe], limit, [out], device=resolve(device), seed=seed, command=sys.argv, report=bar.report,
        is_resumed=resume, bits=bits, start=start, num_measures=10,
    )  # fmt: skip
    return found


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
            self.progress.console.print(
                f"{numbers['tokens']:>13,} tokens read: {self.tau:.3f} tokens a step on held-out answers "
                f"({', '.join(f'{chance:.2f}' for chance in numbers['by_position'])})",
                highlight=False,
            )
        elif what == "step" and numbers["step"] % 10 == 0:
            note = f"loss {float(numbers['loss']):.3f}, {self.tau:.2f} tokens a step"
            self.progress.update(self.task, completed=int(1000 * numbers["share"]), note=note)


@contextmanager
def _progress() -> Iterator[_Bar]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console.stderr()) as progress:
        yield _Bar(progress)
