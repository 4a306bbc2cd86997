"""`paceline verify`: proves on the user's own model and machine that drafts change the time and not the text.
Two halves: equality of greedy and seeded texts (verify_equality), the law of unseeded ones
(verify_distribution).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

import paceline
from paceline.api.options import EngineOptions
from paceline.cli import console
from paceline.cli.options import LOADING, MAIN, Given, check_target, engine_options, group
from paceline.core.errors import ConfigError, RequestError
from paceline.core.options import option
from paceline.measure.results import Table

if TYPE_CHECKING:
    from paceline.cli.verify_equality import Check
    from paceline.measure.prompts import Prompt

MAX_NAMED = 10  # differences printed for each check
YES, OK, DIFFERS = "[green]yes[/green]", "[green]ok[/green]", "[bold red]differs[/bold red]"
Configs = dict[str, dict[str, Any]]  # of drafters, by name
Found = tuple[list["Check"], dict[str, float]]  # equality, and p-values by rule


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Check that every drafter gives the same text as plain decoding, and the same distribution.

    Exit status 0: no difference. 1: a difference, which the report names. 2: the check could not be run.

    Examples:

      paceline verify --json report.json

      paceline verify --limit 1 --methods ngram,early_exit"""

    loading: Given = group(LOADING)
    prompts: Path | None = option(None, MAIN, "Your prompts (.jsonl or .txt) instead of the shipped ones.")
    json: Path | None = option(None, MAIN, "Also write the report to this file.")
    max_tokens: int = option(16, MAIN, "Tokens an answer.", min=1)
    limit: int | None = option(None, MAIN, "Most prompts of each category.", min=1)
    methods: str | None = option(None, MAIN, "Only these drafters, separated by commas.")
    draft_model: str | None = option(None, MAIN, "Of draft_model (left out: the model), or a head's folder.")


def verify(asked: Verify) -> None:
    from paceline.measure.prompts import chosen

    prompts = chosen(asked.prompts, asked.limit)
    engine = engine_options(asked.loading)
    check_target("--json", asked.json)
    configs = _drafters(asked, engine.model)
    checks, p_values = _examine(engine, prompts, asked.max_tokens, configs)
    is_ok = _print_report(console.stdout(), checks, p_values)
    if asked.json is not None:
        told = [{name: v for name, v in c._asdict().items() if name != "differences"} for c in checks]
        rules = [{"rule": rule, "p_value": p} for rule, p in p_values.items()]
        report = {"ok": is_ok, "checks": told, "distribution": rules}
        asked.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if not is_ok:
        raise typer.Exit(1)


def _drafters(asked: Verify, model: str) -> Configs:
    """All but learned heads if none is named: the target may have none."""
    from paceline.drafters.registry import DRAFTERS, HEADS, parse
    from paceline.loaders.checkpoint import open_checkpoint
    from paceline.loaders.tokenizer import Tokenizer
    from paceline.measure.rows import names_of

    known = ["auto", *DRAFTERS]
    names = [name for name in known if name not in HEADS]
    if asked.methods is not None:
        names = names_of("--methods", asked.methods, known)
    configs: Configs = {name: {"method": name} for name in names}
    for name, config in configs.items():
        if name == "draft_model" or (name in HEADS and asked.draft_model):
            config["model"] = asked.draft_model or model
        if name != "auto":  # a named drafter is checked at its full length, whether that pays here or not
            config["num_speculative_tokens"] = parse(config)[1].num_speculative_tokens
    # Another tokenizer would only be noticed when the drafter is built, after half of the work.
    draft = configs.get("draft_model", {}).get("model", model)
    sources = [open_checkpoint(name).tokenizer_source() for name in dict.fromkeys((model, draft))]
    ours, *theirs = map(Tokenizer, sources)
    if difference := next(map(ours.same_as, theirs), None):
        what = f"--draft-model {draft} has another tokenizer than {model} ({difference})"
        raise ConfigError(f"{what}; use a draft of the same family")
    return configs


def _examine(engine: EngineOptions, prompts: list[Prompt], max_tokens: int, configs: Configs) -> Found:
    """Run everything under one progress bar; what needs no drafter first."""
    from paceline.cli import verify_distribution as distribution
    from paceline.cli.verify_equality import BATCHES, MODES, Examination

    checks, p_values, plain = [], {}, {}
    num_turns = len(MODES) * (1 + len(BATCHES) * len(configs)) + len(distribution.RULES)
    more: dict[str, Any] = {"max_num_seqs": max(BATCHES)}
    with console.telling(len(prompts) * num_turns) as tell:
        with paceline.LLM(engine, speculative_config=None, **more) as llm:
            inputs = []
            for prompt in prompts:
                try:
                    inputs.append(console.as_prompt(llm, prompt.text))
                    llm.stream(inputs[-1])  # refuses what does not fit; nothing runs before it is read
                except RequestError as error:
                    raise RequestError(f"prompt {prompt.id}: {error}") from None
            examination = Examination(prompts, inputs, max_tokens)
            for temperature in MODES:
                how = "plain", temperature, max(BATCHES)
                results = examination.answers(llm, how, tell, num_speculative_tokens=0)
                plain[temperature] = [list(result.token_ids) for result in results]
            landscape = distribution.survey(llm)
        for rule in distribution.RULES:
            tell(f"distribution, {rule} rule", 0)
            p_values[rule] = distribution.check_rule(rule, landscape, distribution.NUM_SAMPLES)
            tell(f"distribution, {rule} rule", len(prompts))
        for name, config in configs.items():
            with paceline.LLM(engine, speculative_config=config, progress=False, **more) as llm:
                for how in product([name], MODES, BATCHES):
                    checks.append(examination.check(llm, how, plain[how[1]], tell))
        tell("done", 0)
    return checks, p_values


def _print_report(screen: Console, checks: list[Check], p_values: dict[str, float]) -> bool:
    """Two tables, each difference by name, one verdict, which is returned."""
    from paceline.cli.verify_distribution import SMALLEST_P_VALUE
    from paceline.cli.verify_equality import NEAR_TIE

    names, numbers = ("drafter", "mode"), ("T", "batch", "prompts", "identical", "τ")
    rows = []
    for check in checks:
        same, count = YES, check.prompts
        if check.differences:
            same = f"[bold red]no[/bold red] ({count - len(check.differences)} of {count})"
        if check.near_ties:
            same += f", {check.near_ties} near ties"
        rows.append((*map(str, check[:5]), same, f"{check.tau:.2f}"))
    console.show(screen, Table("the same text as plain decoding", names, numbers, rows))
    for check in checks:
        for found in check.differences[:MAX_NAMED]:
            mode = f"{check.mode}, T={check.temperature}"
            where = f"{check.drafter}, {mode}, batch {check.batch}, prompt {found.prompt_id}"
            what = f"token {found.position} is {found.drafted}, plain decoding says {found.plain}"
            screen.print(f"{where}: {what}", style="red", markup=False, soft_wrap=True)
        if len(check.differences) > MAX_NAMED:
            screen.print(f"... and {len(check.differences) - MAX_NAMED} more prompts", style="red")
    verdicts = {rule: OK if p > SMALLEST_P_VALUE else DIFFERS for rule, p in p_values.items()}
    title = "the same distribution as the target (chi-square)"
    rows = [(rule, f"{p:.4f}", verdicts[rule]) for rule, p in p_values.items()]
    console.show(screen, Table(title, ("rule",), ("p-value", ""), rows))
    total = len(checks) + len(p_values)
    num_bad = sum(bool(check.differences) for check in checks) + [*verdicts.values()].count(DIFFERS)
    said = f"all {total} checks passed: drafts changed the time and not the text"
    said = f"{num_bad} of {total} checks found a difference" if num_bad else said
    screen.print(said, style="bold red" if num_bad else "bold green")
    if ties := sum(check.near_ties for check in checks):
        num_texts = sum(check.prompts for check in checks)
        what = f"{ties} of {num_texts} texts part at a near tie, where logits are within {NEAR_TIE}: "
        why = "half precision rounds differently in passes of other shapes; --exact does not"
        screen.print(what + why, style="yellow")
    return not num_bad
