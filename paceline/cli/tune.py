"""`paceline tune`: measures what drafters cost and gain on the user's model and prompts, and keeps what
`auto` starts from.

Invariant: the profile is saved when everything has been measured, or not at all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import console, options, parsing

if TYPE_CHECKING:
    from paceline.api.llm import LLM
    from paceline.cli.tune_report import Report
    from paceline.measure.prompts import Prompt
    from paceline.measure.tuning.findings import Asked, Findings

NUM_PROMPTS = 6  # where nothing is said, about so many, of all categories alike


def tune(
    model: options.Model = "default",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    exact: options.Exact = False,
    prompts: Annotated[
        Path | None, typer.Option(help="Your prompts (.jsonl or .txt) instead of the shipped ones.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="At most this many prompts of each category; left out: about six in all."),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Drafters, separated by commas; left out: ngram,suffix,lookahead,early_exit,quantized."
        ),
    ] = None,
    draft_model: options.DraftModel = None,
    k: Annotated[
        list[int] | None, typer.Option("--k", "-k", help="Tokens drafted a step; may be repeated.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=16, help="Most tokens of an answer.")] = 32,
    seconds: Annotated[
        float, typer.Option(min=1, help="Begin no further prompt when the work would take longer.")
    ] = 150,
    plot: Annotated[
        Path | None, typer.Option(help="Draw speedup over K into this PNG file: model and measurement.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the report to this file.")
    ] = None,
) -> None:
    """Measure which drafter gains most here, and with which K.

    Each drafter is first listened to while the model writes its plain greedy answers: how often is it right,
    at which depth, and what does asking it cost? With the cost of a pass over 1, 2, ... tokens that predicts
    the speedup for every K. Then every K is timed, in turn with plain decoding, one request at a time. What
    was learned is saved for this model, machine and number of threads; `auto` starts from it.

    Let nothing else run meanwhile. The default model takes about two minutes on two cores.

    Examples:

      paceline tune --plot speedup.png

      paceline tune --prompts mine.jsonl --methods suffix,quantized -k 2 -k 4 --json tune.json
    """
    from paceline.cli.tune_report import print_report
    from paceline.measure import prompts as prompt_files
    from paceline.measure.tuning import plots
    from paceline.measure.tuning.findings import METHODS, Asked

    parsing.check_target("--json", json_file)
    if plot is not None:
        plots.check()
        parsing.check_target("--plot", plot)
    names = (
        tuple(dict.fromkeys(name.strip() for name in methods.split(","))) if methods is not None else METHODS
    )
    asked = Asked(names, tuple(k or ()), draft_model, max_tokens, seconds)
    chosen = _choose(prompt_files.load(prompts), limit)
    report = _measure(model, {"dtype": dtype, "device": device, "exact": exact}, chosen, asked)
    print_report(console.stdout(), report)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        plots.save(plot, lambda axes: plots.model_and_measurement(axes, report.model, report.found))
        console.write(console.stderr(), f"wrote {plot}\n")
    where = f"saved {report.profile}" if report.profile else "not saved: the cache folder cannot be written"
    console.write(console.stderr(), f"{where}\n")


def _choose(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    from paceline.measure.prompts import first_of_each

    return first_of_each(
        prompts, limit or max(1, NUM_PROMPTS // len({prompt.category for prompt in prompts}))
    )


def _measure(model: str, loading: dict[str, Any], prompts: list[Prompt], asked: Asked) -> Report:
    """Everything that takes time, under one progress bar on stderr."""
    from paceline import LLM
    from paceline.cli.bench_console import telling
    from paceline.cli.tune_report import Report
    from paceline.cli.verify import input_of
    from paceline.measure.tuning.measure import Session

    with telling(asked.num_turns * len(prompts)) as tell:
        tell("loading the model", 0)
        with LLM(model, **loading, speculative_config=None, max_num_seqs=1) as llm:
            inputs = [input_of(llm, prompt) for prompt in prompts]
            found = Session(llm, asked, tell).run(inputs)
            tell("done", 0)
            return Report(llm.checkpoint.name, found, len(prompts), _save(llm, loading["dtype"], found))


def _save(llm: LLM, dtype: str, found: Findings) -> Path | None:
    """Where the profile is now; None if it cannot be written. What is known of other drafters stays."""
    from paceline.engine.profile import Profile, load_profile, profile_path, save_profile
    from paceline.runtime.runner import default_dtype

    runner = llm.engine.executor
    dtype = default_dtype(runner.kv.device, "exact") if dtype == "auto" else dtype
    path = profile_path(llm.checkpoint.fingerprint, dtype, runner)
    before = load_profile(path)
    # Another draft model would be another drafter of the same name, so nothing is kept of one.
    measured = {drafter.name: drafter.profile for drafter in found.drafters if drafter.name != "draft_model"}
    profile = Profile(found.costs, {**(before.drafters if before is not None else {}), **measured})
    return path if save_profile(path, profile) else None
