"""`paceline train`: drafters for the user's own model. The target writes the text, heads learn to guess it.
Invariant: DIR/text and the heads' state folders are all that is needed to go on with --resume; a head is
complete whenever it is there.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import progress

from paceline.cli import console
from paceline.cli.options import DEVICE_HELP, MAIN, MODEL_HELP
from paceline.core.options import nearest, option, require

if TYPE_CHECKING:
    from paceline.train.texts import Texts

WRITING = 0.4  # of the time where hours are given
DEFAULT_TOKENS = 2_000_000
EVERY_S = 20.0  # a line of progress where there is no terminal
FEWEST_STEPS = 250  # a batch is made smaller where there would be fewer
KIND_HELP = "medusa (heads), eagle (EAGLE-3), dflash (blocks) or draft (a small model)."
PROMPTS_HELP = "What the target answers (.jsonl or .txt); left out: it invents prompts."
PROCESSES_HELP = "Engines that write at once; left out: as many as a GPU has room for."
CODE_HELP = "Share of conversations about programs, 0 to 1: the target thinks of them."
STOP_HELP = "Stop after these seconds, writing or training; --resume goes on."
RESUME_HELP = "Go on where an earlier call with the same options ended, or begin."
START_HELP = "A head to learn on from, or a folder of one a kind; with --trunk EAGLE's, too."


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a drafter for a model, without a data set.

    The target answers your prompts, or invents prompts from its own chat template; half of the answers are
    greedy. The head learns to guess them, and shows on answers held back how many tokens a step it would
    give. Beside it lie its curves and how it came to be.

    A GPU is needed for more than a trial. Interrupted with Ctrl-C, it goes on with --resume.

    Examples:

      paceline train eagle --target default --tokens 20000000 -o my-eagle --device cuda

      paceline train medusa --target ./my-model --prompts prompts.jsonl --hours 2 -o my-medusa

      paceline train eagle --target ./coder.gguf --code 0.6 --hours 1 -o coder --stop-after 540 --resume

      paceline train medusa --trunk --start my-eagle --tokens 5000000 -o my-medusa

      paceline train --kinds eagle,dflash --text my-eagle/text -o heads

      paceline generate --speculative-config '{"method": "eagle", "model": "my-eagle"}' "Hello"
    """

    kind: str | None = option(None, MAIN, KIND_HELP, is_argument=True)
    kinds: str | None = option(None, MAIN, "Several, as eagle,medusa: one set of passes, each in DIR/KIND.")
    target: str = option("default", MAIN, MODEL_HELP, "-m")
    out: Path = option(Path("head"), MAIN, "Where the head is written.", "-o")
    prompts: Path | None = option(None, MAIN, PROMPTS_HELP)
    vary: bool = option(False, MAIN, "Prompts are also summarized, translated, asked about and so on.")
    tokens: int | None = option(None, MAIN, "How many tokens the target writes.", min=1000)
    hours: float | None = option(None, MAIN, "Time for all of it, instead of --tokens.", min=0.001)
    code: float = option(0.0, MAIN, CODE_HELP, min=0)
    processes: int | None = option(None, MAIN, PROCESSES_HELP, min=1)
    text: tuple[Path, ...] = option((), MAIN, "Written text (a folder of shards) to use instead of writing.")
    rounds: float = option(4, MAIN, "How often the text is read, with --tokens or --text.", min=0.01)
    device: str = option("auto", MAIN, DEVICE_HELP)
    resume: bool = option(False, MAIN, RESUME_HELP)
    stop_after: float | None = option(None, MAIN, STOP_HELP, min=1)
    seed: int = option(0, MAIN, "Of the text and the training.")
    draft_vocab: int | None = option(None, MAIN, "Tokens that can be drafted, the most frequent.", min=16)
    bits: int = option(16, MAIN, "Of a weight in the file: 16, or 8 for half the size.")
    trunk: bool = option(False, MAIN, "Medusa: a layer reads the text before the heads. Better; ours alone.")
    start: Path | None = option(None, MAIN, START_HELP)
    set: tuple[str, ...] = option((), MAIN, "Changes the recipe, as rate=8e-4 or num_held_out=256.")
    evaluate: tuple[Path, ...] = option((), MAIN, "Shards that acceptance is also measured on, at the end.")


def train(asked: Train) -> None:
    from paceline.loaders.checkpoint import open_checkpoint
    from paceline.runtime.backend import resolve
    from paceline.train.lessons import check_teachable
    from paceline.train.recipes import recipe_for
    from paceline.train.session import train as run
    from paceline.train.texts import load_shard
    from paceline.train.trainer import TrainConfig

    end = time.monotonic() + (asked.stop_after or float("inf"))
    names, hours, changes = _kinds(asked), asked.hours, _changes(asked)
    recipes = [recipe_for(name, has_trunk=asked.trunk, **changes) for name in names]
    folders = [asked.out] if asked.kind is not None else [asked.out / name for name in names]
    checkpoint = open_checkpoint(asked.target)
    check_teachable(checkpoint.config)
    is_begun = asked.resume and any((folder / "state").is_dir() for folder in folders)
    with _Bar(console=console.stderr()) as bar:
        texts = _texts(asked, is_begun, end, bar)
        if time.monotonic() >= end:
            written = f"{texts.num_answer_tokens:,} tokens of answers so far"
            return console.write(console.stdout(), f"{written}; --resume goes on\n")
        total = None
        if hours is None:  # batches small enough for a few hundred steps
            total = int(int(texts.starts[-1]) * asked.rounds)
            most = max(total // FEWEST_STEPS, 1024)
            recipes = [replace(recipe, batch_tokens=min(recipe.batch_tokens, most)) for recipe in recipes]
        bar.begin(f"training {', '.join(names)}", 1000)
        config = TrainConfig(
            tokens=total,
            seconds=None if hours is None else hours * 3600 * (1 - WRITING),
            device=resolve(asked.device),
            seed=asked.seed,
            bits=asked.bits,
            is_resumed=is_begun,
            start=asked.start,
            others={path.stem: load_shard(path) for path in asked.evaluate},
            num_measures=10,
            command=sys.argv,
            is_over=lambda: time.monotonic() > end,
            report=bar.report,
        )
        made = dict(zip(folders, recipes, strict=True))
        found = run(checkpoint, texts, made, config)
    for folder, recipe, acceptance in zip(folders, recipes, found, strict=True):
        gain = f"{acceptance.tau:.2f} tokens a step on held-out answers"
        console.write(console.stdout(), f"{folder}: {gain}, drafts of {recipe.num_steps}\n")


def _kinds(asked: Train) -> list[str]:
    """What is to be trained; what cannot be understood is refused."""
    from paceline.train.recipes import RECIPES

    one, several, start = asked.kind, asked.kinds, asked.start
    is_one_limit = asked.tokens is None or asked.hours is None
    require(is_one_limit, "--hours", asked.hours, "give --tokens or --hours, not both")
    require(asked.code <= 0.9, "--code", asked.code, "use a share from 0 to 0.9")
    require(asked.bits in (8, 16), "--bits", asked.bits, "use 16 or 8")
    require((one is None) != (several is None), "--kinds", several, "name one kind, or several with --kinds")
    names = [one] if one is not None else [name.strip() for name in str(several).split(",")]
    is_medusa = names == ["medusa"]
    require(not asked.trunk or is_medusa, "--trunk", ",".join(names), "only medusa has heads that read one")
    heads = [] if start is None else [start, *(start / kind for kind in RECIPES)]
    is_head = start is None or any((folder / "config.json").is_file() for folder in heads)
    require(is_head, "--start", start, "name the folder of a head that paceline trained")
    return names


def _changes(asked: Train) -> dict[str, Any]:
    """Of the recipe: name=value, the value as JSON."""
    from paceline.train.recipes import Mix, Recipe

    known, found = [f.name for f in fields(Recipe) if f.name != "kind"], {}
    for setting in asked.set:
        name, _, value = setting.partition("=")
        require(name in known, "--set", setting, nearest(name, known))
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            require(False, "--set", setting, "write name=value, with a number, true, false or a list")
    if "mix" in found:
        found["mix"] = Mix(*found["mix"])
    return found | ({"draft_vocab_size": asked.draft_vocab} if asked.draft_vocab else {})


def _texts(asked: Train, is_begun: bool, end: float, bar: _Bar) -> Texts:
    """Given, left by a training that goes on, or written now."""
    from paceline.measure.prompts import load
    from paceline.train.data import WriteConfig, write_texts
    from paceline.train.texts import joined, load_shards

    own, hours = asked.out / "text", asked.hours
    if given := asked.text or ([own] if is_begun else []):
        return joined([load_shards(path) for path in given])
    num_tokens = None if hours is not None else asked.tokens or DEFAULT_TOKENS
    bar.begin("the target writes", num_tokens)  # the bar of a time has no end, for engines start first
    config = WriteConfig(
        model=asked.target,
        folder=own,
        device=asked.device,
        turns=[prompt.turns for prompt in load(asked.prompts)] if asked.prompts is not None else [],
        is_varied=asked.vary,
        seed=asked.seed,
        num_tokens=num_tokens,
        seconds=hours * 3600 * WRITING if hours is not None else None,
        deadline=end,
        processes=asked.processes,
        code=asked.code,
    )
    return write_texts(config, bar.reach)


class _Bar(progress.Progress):
    """Two bars, one after the other; where there is no terminal, a line now and then."""

    task, tau, begun, said = progress.TaskID(0), 0.0, 0.0, 0.0

    @classmethod
    def get_default_columns(cls) -> tuple[progress.ProgressColumn, ...]:
        what, note = progress.TextColumn("{task.description}"), progress.TextColumn("{task.fields[note]}")
        times = progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
        return what, progress.BarColumn(), note, *times

    def begin(self, what: str, total: int | None) -> None:
        self.task, self.begun = self.add_task(what, total=total, note=""), time.monotonic()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def reach(self, count: int) -> None:
        self._show(count, f"{count:,} tokens of answers")

    def _show(self, completed: int, note: str) -> None:
        self.update(self.task, completed=completed, note=note)
        now = time.monotonic()
        if not self.console.is_terminal and now > self.said + EVERY_S:
            self.said = now
            self.say(f"{now - self.begun:>7.0f} s: {note}")

    def report(self, what: str, numbers: dict[str, Any]) -> None:
        kind = numbers["kind"]
        if what == "begun":
            words = f"drafts {numbers['drafts']:,} tokens, {numbers['covered']:.1%} of the answers"
            self.say(f"{kind} has {numbers['weights'] / 1e6:.1f} million weights and {words}")
        elif what == "measured":
            self.tau = numbers["tau"]
            chances = ", ".join(f"{chance:.2f}" for chance in numbers["by_position"])
            line = f"{numbers['tokens']:>13,} tokens read: {kind} has {self.tau:.3f} tokens a step"
            self.say(f"{line} on held-out answers ({chances})")
        elif what == "step" and numbers["step"] % 10 == 0:
            speed = f"{numbers['tokens'] / max(numbers['seconds'], 1e-9):,.0f} tokens/s"
            note = f"loss {float(numbers['loss']):.3f}, {self.tau:.2f} tokens a step, {speed} read"
            self._show(int(1000 * numbers["share"]), note)
        elif what == "saved":
            for name, found in numbers["acceptance"].items():
                self.say(f"{kind} has {found.tau:.3f} tokens a step on {name}")
