"""`paceline bench decode`: plain decoding and others take turns on one model, prompt by prompt, and texts are
compared.

Invariant: where the model is exact, a text that differs from plain decoding's fails the run. A prompt for
which a CUDA graph was recorded counts for no row.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from paceline.api.llm import LLM
from paceline.core.errors import RequestError
from paceline.core.params import SamplingParams
from paceline.engine.engine import Engine
from paceline.measure.engines import Answer, answer, engine_of, ids_of, load, rotated, rows_of
from paceline.measure.options import Decode
from paceline.measure.prompts import Prompt, chosen
from paceline.measure.results import OVERALL, Table, Tell, cell
from paceline.measure.rows import AUTO, PLAIN

WARM_UP = "Hello, who are you and what do you do?"
LEGEND = """speedup: over plain decoding in this run, tokens after the first; τ: tokens a pass; α: share of
drafted tokens accepted; different: texts that are not plain decoding's.
"""


class Plan(NamedTuple):
    asked: Decode
    rows: list[str]
    prompts: list[Prompt]


class Sample(NamedTuple):
    """One prompt, decoded by one row."""

    row: str
    task: str
    answer: Answer
    is_different: bool


def prepare(asked: Decode) -> Plan:
    return Plan(asked, rows_of(asked.rows), chosen(asked.prompts, asked.limit, asked.every))


def num_turns(plan: Plan) -> int:
    return len(plan.prompts) * len(plan.rows)


def run(plan: Plan, tell: Tell) -> dict[str, Any]:
    asked = plan.asked
    tell("loading the model", 0)
    with load(asked, enable_prefix_caching=False, progress=False) as llm:
        own = llm.engine  # `auto` as every user has it
        engines = {row: own if row == AUTO else engine_of(llm, row) for row in plan.rows}
        params = SamplingParams(temperature=0, max_tokens=asked.max_new_tokens)
        for row, engine in engines.items():
            tell(f"warming up {row}", 0)
            answer(llm, engine, ids_of(llm, WARM_UP), params)
        samples = _samples(llm, engines, plan, params, tell)
        is_exact = llm.engine.executor.decoder.is_exact
    tasks = [OVERALL, *dict.fromkeys(sample.task for sample in samples)]
    rows = [_record(samples, row, task) for row in plan.rows for task in tasks]
    return {"rows": rows, "is_exact": is_exact, "is_ok": not (is_exact and any(r["different"] for r in rows))}


def _samples(
    llm: LLM, engines: dict[str, Engine], plan: Plan, params: SamplingParams, tell: Tell
) -> list[Sample]:
    samples, started, backend = list[Sample](), time.perf_counter(), llm.engine.executor.backend
    for number, prompt in enumerate(plan.prompts):
        if plan.asked.seconds is not None and time.perf_counter() - started > plan.asked.seconds:
            break
        ids, num_recorded, found = ids_of(llm, prompt.text), backend.num_recordings, dict[str, Answer]()
        for name, engine in rotated(engines, number):
            found[name] = answer(llm, engine, ids, params)
            tell(name, 1)
        if backend.num_recordings == num_recorded:
            plain = found[PLAIN].ids
            samples += [Sample(n, prompt.category, each, each.ids != plain) for n, each in found.items()]
    if not samples:
        raise RequestError("no prompt counts: CUDA graphs were recorded in all of them; give more prompts")
    return samples


def _record(samples: list[Sample], row: str, task: str) -> dict[str, Any]:
    mine = [s for s in samples if s.row == row and task in (OVERALL, s.task)]
    plain = [s for s in samples if s.row == PLAIN and task in (OVERALL, s.task)]
    names = ("num_tokens", "num_steps", "num_drafted", "num_accepted")
    tokens, steps, drafted, accepted = (sum(getattr(s.answer.stats, n) for s in mine) for n in names)
    speed, base = _speed(mine), _speed(plain)
    return {
        "row": row,
        "task": task,
        "prompts": len(mine),
        "tokens_per_second": round(speed, 2),
        "speedup": round(speed / base, 4) if base else None,
        "tau": round(tokens / max(steps, 1), 4),
        "alpha": round(accepted / drafted, 4) if drafted else None,
        "different": sum(s.is_different for s in mine),
    }


def _speed(samples: list[Sample]) -> float:
    seconds = sum(s.answer.seconds for s in samples)
    return sum(s.answer.num_timed for s in samples) / seconds if seconds else 0.0


def tables(report: dict[str, Any]) -> list[Table]:
    known = {(row["row"], row["task"]): row for row in report["rows"]}
    names, tasks = (list(dict.fromkeys(row[key] for row in report["rows"])) for key in ("row", "task"))
    forms = {"tokens_per_second": "{:.1f}", "tau": "{:.2f}", "alpha": "{:.2f}", "different": "{}"}
    rows = []
    for name in names:
        speedups = [cell(known[name, task]["speedup"], "{:.2f}") for task in tasks]
        rows.append(
            [name, *speedups, *(cell(known[name, OVERALL][key], form) for key, form in forms.items())]
        )
    taus = [(name, *(cell(known[name, task]["tau"], "{:.2f}") for task in tasks)) for name in names]
    compared = "texts compared token by token" if report["is_exact"] else "not exact: use --exact"
    title = f"speedup over plain decoding, {known[PLAIN, OVERALL]['prompts']} prompts, {compared}"
    columns = (*tasks, "tok/s", "τ", "α", "different")
    return [Table(title, ("row",), columns, rows), Table("τ, tokens a pass", ("row",), tasks, taus)]
