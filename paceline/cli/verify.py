"""`paceline verify`: proves on the user's own model and machine that drafts change the time and not the text.
Two halves: the law of unseeded texts (verify_distribution), and equality of greedy and seeded ones: every
drafter, alone and in a batch. Plain texts are made once for each mode, in a batch, and every other run is
compared with them token by token: so equality also says that the batch a request is in changes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import typer
from rich.console import Console

import paceline
from paceline import SamplingParams
from paceline.api.options import EngineOptions
from paceline.api.results import Result
from paceline.cli import console
from paceline.cli.options import LOADING, MAIN, Given, check_target, engine_options, group, write_result
from paceline.core.errors import ConfigError, RequestError
from paceline.core.options import option
from paceline.measure.prompts import Prompt, chosen
from paceline.measure.results import Table, Tell

FUZZ = "Random cases"  # a panel of --help
MAX_NAMED = 10  # differences printed for each check
YES, OK, DIFFERS = "[green]yes[/green]", "[green]ok[/green]", "[bold red]differs[/bold red]"
Texts = Sequence[list[int]]  # token ids
Spell = Callable[[int], str]  # a token's text
How = tuple[str, float, int]  # the drafter's name, the temperature and the batch
BATCHES = (1, 8)
NEAR_TIE = 0.25  # logits: by this much, passes of other shapes may differ where kernels are not exact
MODES = {0.0: "greedy", 0.7: "seeded", 1.2: "seeded"}  # by temperature
Configs = dict[str, dict[str, Any]]  # of drafters, by name
Found = tuple[list["Check"], dict[str, float]]  # equality, and p-values by rule


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Check that every drafter gives the same text as plain decoding, and the same distribution.

    With several ranks (-tp) plain decoding is that of one process.

    Exit status 0: no difference. 1: a difference, which the report names. 2: the check could not be run.

    Examples:

      paceline verify --json report.json

      paceline verify --limit 1 --methods ngram,early_exit

      paceline verify --fuzz 10 --seed 1"""

    loading: Given = group(LOADING)
    prompts: Path | None = option(None, MAIN, "Your prompts (.jsonl or .txt) instead of the shipped ones.")
    json: Path | None = option(None, MAIN, "Also write the report to this file.")
    max_tokens: int = option(16, MAIN, "Tokens an answer.", min=1)
    limit: int | None = option(None, MAIN, "Most prompts of each category.", min=1)
    methods: str | None = option(None, MAIN, "Only these drafters, separated by commas.")
    draft_model: str | None = option(None, MAIN, "Of draft_model (left out: the model), or a head's folder.")
    fuzz: float | None = option(None, FUZZ, "Minutes of random requests on random engines instead.", min=0)
    seed: int = option(0, FUZZ, "The same seed makes the same cases.")
    save: Path = option(Path("paceline-fuzz"), FUZZ, "The folder for cases that fail, made small.")
    replay: Path | None = option(None, FUZZ, "Run a case again that --fuzz has saved.")


def verify(asked: Verify) -> None:
    from paceline.cli import verify_fuzz

    engine = engine_options(asked.loading)
    if asked.replay is not None:
        return verify_fuzz.replay(asked.replay, engine, asked.loading)
    if asked.fuzz is not None:
        drafters = [*drafters_of(asked, engine.model).values()]
        how = asked.fuzz, asked.seed, asked.save, asked.prompts, drafters, asked.methods is None
        return verify_fuzz.fuzz(verify_fuzz.Asked(*how), engine)
    prompts = chosen(asked.prompts, asked.limit)
    check_target("--json", asked.json)
    configs = drafters_of(asked, engine.model)
    checks, p_values = _examine(engine, prompts, asked.max_tokens, configs)
    is_ok = _print_report(console.stdout(), checks, p_values)
    if asked.json is not None:
        told = [{name: v for name, v in c._asdict().items() if name != "differences"} for c in checks]
        rules = [{"rule": rule, "p_value": p} for rule, p in p_values.items()]
        report = {"ok": is_ok, "checks": told, "distribution": rules}
        write_result(asked.json, json.dumps(report, indent=2) + "\n")
    if not is_ok:
        raise typer.Exit(1)
    return None


def drafters_of(asked: Verify, model: str) -> Configs:
    """All but learned heads if none is named: the target may have none."""
    from paceline.drafters.registry import DRAFTERS, HEADS, SMALLER, parse
    from paceline.loaders.checkpoint import open_checkpoint
    from paceline.loaders.tokenizer import Tokenizer
    from paceline.measure.rows import names_of

    known = ["auto", *DRAFTERS]
    names = [name for name in known if name not in HEADS]
    if asked.methods is not None:
        names = names_of("--methods", asked.methods, known)
    configs: Configs = {name: {"method": name} for name in names}
    for name, config in configs.items():
        if name in SMALLER or (name in HEADS and asked.draft_model):
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

    checks, p_values, plain = [], {}, {}
    alone = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "speculative_config": None}
    num_turns = len(MODES) * (1 + len(BATCHES) * len(configs)) + len(distribution.RULES)
    more: dict[str, Any] = {"max_num_seqs": max(BATCHES)}
    with console.telling(len(prompts) * num_turns) as tell:
        with paceline.LLM(engine, **alone, **more) as llm:
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


class Difference(NamedTuple):
    prompt_id: str
    position: int  # of the first token that differs, counted from the start of the answer
    plain: str  # the two tokens, id and text
    drafted: str
    # by how much plain decoding preferred its own token, in logits; looked up where arithmetic is not exact
    margin: float = math.inf


class Check(NamedTuple):
    """All answers of one drafter in one mode; all but the differences is what the report says."""

    drafter: str
    mode: str
    temperature: float
    batch: int
    prompts: int
    identical: bool
    near_ties: int  # prompts that part where two tokens were as good as equal: only inexact arithmetic may
    tau: float
    differences: tuple[Difference, ...]


class Examination(NamedTuple):
    """The questions, the same for every drafter."""

    prompts: Sequence[Prompt]
    inputs: Sequence[str | list[int]]  # each prompt as the model reads it
    max_tokens: int

    def answers(self, llm: paceline.LLM, how: How, tell: Tell, **more: Any) -> list[Result]:
        """Batch 1: one prompt after the other; else all at once, as many together as `max_num_seqs` says.
        Each prompt has its own seed, so that equal noise cannot hide a mix-up of requests."""
        (_, temperature, batch), what = how, "{}, T={}, batch {}".format(*how)
        more |= {"temperature": temperature, "max_tokens": self.max_tokens}
        seeds = [1000 + i if temperature else None for i in range(len(self.prompts))]
        params, results = [SamplingParams(seed=seed, **more) for seed in seeds], list[Result]()
        step = 1 if batch == 1 else len(params)
        tell(what, 0)
        for start in range(0, len(params), step):
            results += llm.generate(list(self.inputs[start : start + step]), params[start : start + step])
            tell(what, step)
        return results

    def check(self, llm: paceline.LLM, how: How, plain: Texts, tell: Tell) -> Check:
        (drafter, temperature, batch), results = how, self.answers(llm, how, tell)
        said = [result.token_ids for result in results]
        is_exact, spell = llm.engine.executor.decoder.is_exact, llm.tokenizer.token_text
        found = []
        for i, prompt in enumerate(self.prompts):
            difference = first_difference(prompt.id, plain[i], said[i], spell)
            if difference is not None and not is_exact:
                difference = self._weighed(llm, how, i, difference, (plain[i], said[i]))
            found += [difference] if difference is not None else []
        stats = [result.stats for result in results]
        tau = sum(s.num_tokens for s in stats) / max(1, sum(s.num_steps for s in stats))
        differences = tuple(d for d in found if d.margin > NEAR_TIE)
        ties, count = len(found) - len(differences), len(self.prompts)
        labels = drafter, MODES[temperature], temperature, batch
        return Check(*labels, count, not found, ties, round(tau, 4), differences)

    def _weighed(self, llm: paceline.LLM, how: How, i: int, found: Difference, texts: Texts) -> Difference:
        """With the margin between the plain and the drafted token: logits, and seeded noise times T."""
        at, (_, temperature, _), (plain, drafted) = found.position, how, texts
        if at >= min(len(plain), len(drafted)):
            return found
        pair, context = (plain[at], drafted[at]), [*self.inputs[i], *plain[:at]]
        logits = [_logprob(llm, context, token) for token in pair]
        if temperature:
            import numpy as np

            from paceline.core.noise import Purpose, gumbel

            noise = gumbel(1000 + i, len(context), Purpose.TARGET, np.array(pair))
            logits = [logit + temperature * float(n) for logit, n in zip(logits, noise, strict=True)]
        return found._replace(margin=abs(logits[0] - logits[1]))


def _logprob(llm: paceline.LLM, context: Sequence[Any], token: int) -> float:
    """Of the raw distribution: what may be chosen does not change it."""
    chosen: dict[str, Any] = {"allowed_token_ids": (token,), "max_tokens": 1, "logprobs": 1}
    params = SamplingParams(temperature=0, ignore_eos=True, num_speculative_tokens=0, **chosen)
    (result,) = llm.generate([list(context)], params)
    assert result.outputs[0].cumulative_logprob is not None, "asked for"
    return result.outputs[0].cumulative_logprob


def first_difference(prompt: str, plain: list[int], drafted: list[int], spell: Spell) -> Difference | None:
    if plain == drafted:
        return None
    pairs = enumerate(zip(plain, drafted, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(plain), len(drafted)))
    tokens = [text[position : position + 1] for text in (plain, drafted)]
    at = [f"{token[0]} {spell(token[0])!r}" if token else "the end" for token in tokens]
    return Difference(prompt, position, at[0], at[1])


def _print_report(screen: Console, checks: list[Check], p_values: dict[str, float]) -> bool:
    """Two tables, each difference by name, one verdict, which is returned."""
    from paceline.cli.verify_distribution import SMALLEST_P_VALUE

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
