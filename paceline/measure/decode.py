"""`paceline bench decode`: plain decoding and others take turns on one model, prompt by prompt, and texts are
compared.

Invariant: where the model is exact, a text that differs from plain decoding's fails the run. A prompt for
which a CUDA graph was recorded counts for no row.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.api.llm import LLM
from paceline.core.errors import RequestError
from paceline.core.params import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.stats import SpecStats
from paceline.measure.engines import Answer, answer, engine_of, ids_of, load, rows_of
from paceline.measure.options import Decode
from paceline.measure.prompts import Prompt, chosen
from paceline.measure.report import OVERALL
from paceline.measure.results import Tell
from paceline.measure.rows import AUTO, PLAIN
from paceline.measure.tables import Table, cell

WARM_UP = "Hello, who are you and what do you do?"
LEGEND = """speedup: over plain decoding in this run, tokens after the first; τ: tokens a pass; α: share of
drafted tokens accepted; different: texts that are not plain decoding's.
"""


class Plan(NamedTuple):
    asked: Decode
    rows: list[str]
    prompts: list[Prompt]


def prepare(asked: Decode) -> Plan:
    return Plan(asked, rows_of(asked.rows), chosen(asked.prompts, asked.limit, asked.every))


def num_turns(plan: Plan) -> int:
    return len(plan.prompts) * len(plan.rows)


@dataclass(slots=True)
class Sums:
    """Of one row and task."""

    stats: SpecStats = field(default_factory=SpecStats)
    prompts: int = 0
    tokens: int = 0  # after each answer's first
    seconds: float = 0.0
    different: int = 0

    def add(self, found: Answer, is_different: bool) -> None:
        self.prompts += 1
        self.different += is_different
        self.tokens += found.num_timed
        self.seconds += found.seconds
        for name in ("num_steps", "num_tokens", "num_drafted", "num_accepted"):
            setattr(self.stats, name, getattr(self.stats, name) + getattr(found.stats, name))

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def run(plan: Plan, tell: Tell) -> dict[str, Any]:
    asked = plan.asked
    tell("loading the model", 0)
    with load(asked, enable_prefix_caching=False, progress=False) as llm:
        own = llm.engine  # what `auto` is for everyone
        engines = {row: own if row == AUTO else engine_of(llm, row) for row in plan.rows}
        params = SamplingParams(temperature=0, max_tokens=asked.max_new_tokens)
        for row, engine in engines.items():
            tell(f"warming up {row}", 0)
            answer(llm, engine, ids_of(llm, WARM_UP), params)
        sums = _take_turns(llm, engines, plan, params, tell)
        is_exact = llm.engine.executor.decoder.is_exact
    rows = _rows(sums)
    return {"rows": rows, "is_exact": is_exact, "is_ok": not (is_exact and any(r["different"] for r in rows))}


def _take_turns(
    llm: LLM, engines: dict[str, Engine], plan: Plan, params: SamplingParams, tell: Tell
) -> dict[tuple[str, str], Sums]:
    names, sums = list(engines), defaultdict[tuple[str, str], Sums](Sums)
    started = time.perf_counter()
    for number, prompt in enumerate(plan.prompts):
        if plan.asked.seconds is not None and time.perf_counter() - started > plan.asked.seconds:
            break
        ids, before, found = (
            ids_of(llm, prompt.text),
            llm.engine.executor.backend.num_recordings,
            dict[str, Answer](),
        )
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name] = answer(llm, engines[name], ids, params)
            tell(name, 1)
        if llm.engine.executor.backend.num_recordings == before:
            for name, each in found.items():
                for task in (prompt.category, OVERALL):
                    sums[name, task].add(each, each.ids != found[PLAIN].ids)
    if not sums:
        raise RequestError("no prompt counts: CUDA graphs were recorded in all of them; give more prompts")
    return dict(sums)


def _rows(sums: dict[tuple[str, str], Sums]) -> list[dict[str, Any]]:
    made = []
    for (name, task), each in sums.items():
        plain = sums[PLAIN, task].speed
        made.append(
            {
                "row": name,
                "task": task,
                "prompts": each.prompts,
                "tokens_per_second": round(each.speed, 2),
                "speedup": round(each.speed / plain, 4) if plain else None,
                "tau": round(each.stats.tau, 4),
                "alpha": round(each.stats.alpha, 4) if each.stats.num_drafted else None,
                "different": each.different,
            }
        )
    return made


def tables(report: dict[str, Any]) -> list[Table]:
    rows, tasks = report["rows"], list(dict.fromkeys(row["task"] for row in report["rows"]))
    tasks.sort(key=lambda task: task != OVERALL)
    names = sorted(dict.fromkeys(row["row"] for row in rows), key=lambda name: name != PLAIN)
    known = {(row["row"], row["task"]): row for row in rows}
    forms = {"tokens_per_second": "{:.1f}", "tau": "{:.2f}", "alpha": "{:.2f}", "different": "{}"}
    overall = []
    for name in names:
        speedups = [cell(known[name, task]["speedup"], "{:.2f}") for task in tasks]
        overall.append(
            (name, *speedups, *(cell(known[name, OVERALL][key], form) for key, form in forms.items()))
        )
    taus = [(name, *(cell(known[name, task]["tau"], "{:.2f}") for task in tasks)) for name in names]
    said = f"{known[PLAIN, OVERALL]['prompts']} prompts"
    said += (
        ", texts compared token by token" if report["is_exact"] else "; this model is not exact: use --exact"
    )
    columns = (*tasks, "tok/s", "τ", "α", "different")
    return [
        Table(f"speedup over plain decoding, {said}", ("row",), columns, overall),
        Table("τ, tokens a pass", ("row",), tasks, taus),
    ]
