"""`paceline verify --fuzz MINUTES` and `--replay FILE`: random cases (measure/fuzz.py) until time is up;
each that fails is made small, saved, and named with the command that runs it again. Invariant: a case is on
disk while it runs, so that one that takes the process down with it is not lost.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import typer

from paceline import __version__
from paceline.api.options import EngineOptions
from paceline.cli import console
from paceline.core.errors import ConfigError
from paceline.measure.fuzz import Case, Maker
from paceline.measure.fuzz_run import REPLAYS, Failure, Runner, minimise
from paceline.measure.prompts import load, text_of
from paceline.measure.results import Table, Tell

TELL_EVERY_S = 10.0
INTERRUPTED = 130
LOADED = ("model", "dtype", "device", "exact")  # what a saved case says of the engine besides its own options


class Asked(NamedTuple):
    """What the fuzzing options of `paceline verify` say."""

    minutes: float
    seed: int
    folder: Path  # where cases are saved
    prompts: Path | None
    configs: Sequence[dict[str, Any]]  # the drafters
    has_heads: bool  # with the learned heads that ship for the model


def replay(path: Path, engine: EngineOptions, given: Collection[str]) -> None:
    """given: options of the engine that hold whatever the saved case says."""
    text = text_of(path, "give a file that --fuzz has saved")
    case, known = Case.from_json(text), json.loads(text).get("loaded", {})
    engine = replace(engine, **{name: v for name, v in known.items() if name not in given})
    failure = Runner(engine).fails_again(case, tries=REPLAYS)
    screen = console.stdout()
    if failure is None:
        return screen.print(f"{path}: no difference in {REPLAYS} runs", style="bold green", soft_wrap=True)
    screen.print(f"{path}: {failure.kind}: {failure.what}", style="bold red", markup=False, soft_wrap=True)
    raise typer.Exit(1)


def fuzz(asked: Asked, engine: EngineOptions) -> None:
    try:
        asked.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--save {asked.folder}: cannot be made ({error.strerror}); name a folder"
        ) from None
    with console.telling(None) as tell:
        tell("loading", 0)
        runner = Runner(engine)
        maker = _maker(asked, runner)
        found, is_interrupted = list[tuple[Path, Failure]](), False
        try:
            for number in _numbers(60 * asked.minutes, runner, found, tell):
                _try(maker.case(asked.seed, number), f"{asked.seed}-{number}", asked.folder, runner, found)
        except KeyboardInterrupt:
            is_interrupted = True
    _report(runner, found)
    if is_interrupted or found:
        raise typer.Exit(INTERRUPTED if is_interrupted else 1)


def _maker(asked: Asked, runner: Runner) -> Maker:
    from paceline.drafters.registry import SHIPPED, head_for

    configs: list[dict[str, Any] | None] = [None, *asked.configs]
    if asked.has_heads and head_for(runner.plain.checkpoint, True):
        configs += [{"method": name} for name in SHIPPED]
    for config in configs:
        if config is not None:
            config.pop("num_speculative_tokens", None)
    llm, prompts = runner.plain, load(asked.prompts)
    texts = [turn for prompt in prompts for turn in prompt.turns]
    return Maker(texts, llm.tokenizer.encode, llm.checkpoint.config.vocab_size, runner.longest, configs)


def _numbers(seconds: float, runner: Runner, found: list[Any], tell: Tell) -> Any:
    """Of the cases, until the time is over; tells how far it is."""
    started = told = time.monotonic()
    number, counts, said = 0, runner.counts, ""
    while (now := time.monotonic()) - started < seconds:
        yield number
        number += 1
        what = f"{len(found)} failed" if found else "no difference"
        if now - told > TELL_EVERY_S or number == 1:
            told = now
            what = f"{counts['requests']} requests, {counts['tokens']} tokens, {what}"
            said = f"{now - started:.0f} of {seconds:.0f} s: {what}"
        tell(said, 1)


def _try(case: Case, name: str, folder: Path, runner: Runner, found: list[tuple[Path, Failure]]) -> None:
    path = folder / f"case-{name}.json"
    _save(path, case, Failure("crash", "the process ended while it ran"), runner)
    try:
        failure = runner.failure(case)
    except KeyboardInterrupt:
        path.unlink()
        raise
    if failure is None:
        path.unlink()
    else:
        _save(path, case, failure, runner)
        found.append((path, failure))
        case = minimise(case, partial(runner.fails_again, kind=failure.kind))
        failure = runner.fails_again(case) or failure
        _save(path, case, failure, runner)
        found[-1] = (path, failure)
    runner.forget()


def _save(path: Path, case: Case, failure: Failure, runner: Runner) -> None:
    loaded = {name: getattr(runner.options, name) for name in LOADED}
    more = {"failure": failure._asdict(), "loaded": loaded, "version": __version__}
    path.write_text(json.dumps(asdict(case) | more, indent=1) + "\n", encoding="utf-8")


def _report(runner: Runner, found: list[tuple[Path, Failure]]) -> None:
    screen, counts = console.stdout(), runner.counts
    rows = [(name, f"{count:,}") for name, count in counts.items()]
    console.show(screen, Table("random cases against plain decoding alone", ("what",), ("count",), rows))
    for path, failure in found:
        screen.print(f"{failure.kind}: {failure.what}", style="red", markup=False, soft_wrap=True)
        console.write(screen, f"  paceline verify --replay {shlex.quote(str(path))}\n")
    said = f"{len(found)} of {counts['cases']:,} cases failed" if found else "no difference, no crash"
    screen.print(said, style="bold red" if found else "bold green")
