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
from paceline.measure.engines import answer, engine_of, ids_of, load, rotated, rows_of
from paceline.measure.options import Decode
from paceline.measure.prompts import Prompt, chosen
from paceline.measure.report import Sample, report_rows
from paceline.measure.results import OVERALL, Table, Tell, cell
from paceline.measure.rows import AUTO, OURS, PLAIN, Row, Task

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


def run(plan: Plan, tell: Tell) -> dict[str, Any]:
    asked = plan.asked
    tell("loading the model", 0)
    with load(asked, enable_prefix_caching=False, progress=False) as llm:
        own = llm.engine  # `auto` as every user has it
        engines = {row: own if row == AUTO else engine_of(llm, row) for row in plan.rows}
        params = SamplingParams(temperature=0, max_tokens=asked.max_new_tokens)
        for row, engine in engines.items():
            tell(f"warming up {row}", 0)
            answer(llm, ids_of(llm, WARM_UP), params, engine)
        samples = _samples(llm, engines, plan, params, tell)
        is_exact = llm.engine.executor.decoder.is_exact
    rows = report_rows([Row(OURS, asked.dtype, row) for row in plan.rows], samples, {})
    for record in rows:
        record["different"] = record["prompts"] - record["identical"]
    return {"rows": rows, "is_exact": is_exact, "is_ok": not (is_exact and any(r["different"] for r in rows))}


def _samples(
    llm: LLM, engines: dict[str, Engine], plan: Plan, params: SamplingParams, tell: Tell
) -> list[Sample]:
    samples, started, backend = list[Sample](), time.perf_counter(), llm.engine.executor.backend
    for number, prompt in enumerate(plan.prompts):
        if plan.asked.seconds is not None and time.perf_counter() - started > plan.asked.seconds:
            break
        ids, num_recorded, found = ids_of(llm, prompt.text), backend.num_recordings, list[Sample]()
        unit = (Task(prompt.id, prompt.category, tuple(ids), plan.asked.max_new_tokens),)
        for name, engine in rotated(engines, number):
            record = answer(llm, ids, params, engine).record()
            found.append(Sample(Row(OURS, plan.asked.dtype, name), 0, unit, record["total_s"], [record]))
            tell(name, 1)
        if backend.num_recordings == num_recorded:
            samples += found
    if not samples:
        raise RequestError("no prompt counts: CUDA graphs were recorded in all of them; give more prompts")
    return samples


def tables(report: dict[str, Any]) -> list[Table]:
    known = {(row["method"], row["task"]): row for row in report["rows"]}
    names, tasks = (list(dict.fromkeys(row[key] for row in report["rows"])) for key in ("method", "task"))
    tasks.sort(key=lambda task: task != OVERALL)
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
