"""`paceline verify`: proves on the user's own model and machine that drafts change the time and not the text.

Two halves: equality of greedy and seeded texts (verify_equality), the law of unseeded ones
(verify_distribution).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.api.options import EngineOptions
from paceline.cli import console, options, parsing
from paceline.core.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from paceline.api.llm import LLM
    from paceline.cli.verify_distribution import RuleResult
    from paceline.cli.verify_equality import Check, Examination
    from paceline.measure.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Report:
    checks: list[Check]
    rules: list[RuleResult]

    @property
    def is_ok(self) -> bool:
        return all(not check.differences for check in self.checks) and all(rule.is_ok for rule in self.rules)

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.is_ok,
            "checks": [check.to_json() for check in self.checks],
            "distribution": [{"rule": rule.rule, "p_value": rule.p_value} for rule in self.rules],
        }


def verify(
    loading: Annotated[options.Given, options.LOADING],
    prompts: Annotated[
        Path | None, typer.Option(help="Your prompts (.jsonl or .txt) instead of the shipped ones.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the report to this file.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens an answer.")] = 16,
    limit: Annotated[int | None, typer.Option(min=1, help="Most prompts of each category.")] = None,
    methods: Annotated[str | None, typer.Option(help="Only these drafters, separated by commas.")] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="For draft_model (left out: the model itself), or a head's folder.")
    ] = None,
) -> None:
    """Check that every drafter gives the same text as plain decoding, and the same distribution.

    Exit status 0: no difference. 1: a difference, which the report names. 2: the check could not be run.

    Examples:

      paceline verify --json report.json

      paceline verify --limit 1 --methods ngram,early_exit
    """
    from paceline.cli.verify_report import print_report
    from paceline.measure import prompts as prompt_files

    chosen = prompt_files.load(prompts)
    chosen = prompt_files.first_of_each(chosen, limit) if limit is not None else chosen
    engine = parsing.engine_options(loading)
    configs = _drafters(methods, engine.model, draft_model)
    parsing.check_target("--json", json_file)
    _check_draft_model(engine.model, configs)
    report = _examine(engine, chosen, max_tokens, configs)
    print_report(console.stdout(), report.checks, report.rules)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    if not report.is_ok:
        raise typer.Exit(1)


def _drafters(methods: str | None, model: str, draft_model: str | None) -> dict[str, dict[str, Any]]:
    """All but learned heads if none is named: the target may have none."""
    from paceline.core.options import nearest
    from paceline.drafters.registry import DRAFTERS, HEADS, parse

    known = ["auto", *DRAFTERS]
    names = [name for name in known if name not in HEADS]
    if methods is not None:
        names = [name.strip() for name in methods.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"--methods holds {name!r}; {nearest(name, known)}")
    configs: dict[str, dict[str, Any]] = {name: {"method": name} for name in names}
    for name, config in configs.items():
        if name == "draft_model" or (name in HEADS and draft_model):
            config["model"] = draft_model or model
        if name != "auto":  # a named drafter is checked at its full length, whether that pays here or not
            config["num_speculative_tokens"] = parse(config)[1].num_speculative_tokens
    return configs


def _check_draft_model(model: str, configs: dict[str, dict[str, Any]]) -> None:
    """Another tokenizer would only be noticed when the drafter is built, after half of the work."""
    from paceline.loaders.checkpoint import open_checkpoint
    from paceline.loaders.tokenizer import Tokenizer

    draft = configs.get("draft_model", {}).get("model", model)
    if draft == model:
        return
    sources = [open_checkpoint(name).tokenizer_source() for name in (model, draft)]
    ours, theirs = map(Tokenizer.from_source, sources)
    if difference := ours.same_as(theirs):
        what = f"--draft-model {draft} has another tokenizer than {model} ({difference})"
        raise ConfigError(f"{what}; use a draft of the same family")


def _examine(
    engine: EngineOptions, prompts: list[Prompt], max_tokens: int, configs: dict[str, dict[str, Any]]
) -> Report:
    """Run everything under one progress bar, on stderr."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from paceline.cli.verify_distribution import RULES
    from paceline.cli.verify_equality import BATCHES, MODES

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console.stderr()) as progress:
        total = len(prompts) * (len(MODES) * (1 + len(BATCHES) * len(configs)) + len(RULES))
        task = progress.add_task("loading", total=total)

        def begin(what: str) -> Callable[[int], None]:
            progress.update(task, description=what)
            if not progress.console.is_terminal:
                console.write(progress.console, f"{what}\n")  # a log gets a line where a terminal gets a bar
            return lambda num_done: progress.advance(task, num_done)

        examination, plain, rules = _plain_half(engine, prompts, max_tokens, begin)
        checks: list[Check] = []
        for name, config in configs.items():
            quiet = replace(engine, speculative_config=config, max_num_seqs=max(BATCHES), progress=False)
            checks += _checks(quiet, name, examination, plain, begin)
        progress.update(task, description="done")
    return Report(checks, rules)


# Says what begins; returns what to call with the number of prompts done.
Begin = Callable[[str], Callable[[int], None]]
PlainTexts = dict[Any, list[list[int]]]  # mode -> token ids of each prompt's answer


def _plain_half(
    engine: EngineOptions, prompts: list[Prompt], max_tokens: int, begin: Begin
) -> tuple[Examination, PlainTexts, list[RuleResult]]:
    """What needs no drafter: the texts to compare with, and the accept rules on this model's logits."""
    from paceline import LLM
    from paceline.cli import verify_distribution as distribution
    from paceline.cli.verify_equality import BATCHES, MODES, Examination

    with LLM(engine, speculative_config=None, max_num_seqs=max(BATCHES)) as llm:
        examination = Examination(prompts, [input_of(llm, prompt) for prompt in prompts], max_tokens)
        plain = {}
        for mode in MODES:
            advance = begin(f"plain, T={mode.temperature}")
            plain[mode] = examination.plain(llm, mode)
            advance(len(prompts))
        landscape = distribution.survey(llm)
    rules = []
    for rule in distribution.RULES:
        advance = begin(f"distribution, {rule} rule")
        rules.append(distribution.check_rule(rule, landscape, distribution.NUM_SAMPLES))
        advance(len(prompts))
    return examination, plain, rules


def input_of(llm: LLM, prompt: Prompt) -> list[int]:
    """The prompt as the model reads it; one that cannot be run is named."""
    from paceline.cli.streaming import as_prompt
    from paceline.core.params import SamplingParams
    from paceline.core.types import Request

    try:
        text = as_prompt(llm, prompt.text)
        tokens = llm.tokenizer.encode(text) if isinstance(text, str) else text
        llm.engine.check_fits(Request(prompt.id, SamplingParams(), tokens, len(tokens), seed=0))
    except RequestError as error:
        raise RequestError(f"prompt {prompt.id}: {error}") from None
    return tokens


def _checks(
    engine: EngineOptions, name: str, examination: Examination, plain: PlainTexts, begin: Begin
) -> Iterator[Check]:
    from paceline import LLM
    from paceline.cli.verify_equality import BATCHES, MODES

    with LLM(engine) as llm:
        for mode in MODES:
            for batch in BATCHES:
                advance = begin(f"{name}, T={mode.temperature}, batch {batch}")
                yield examination.check(llm, name, mode, batch, plain[mode], advance)
