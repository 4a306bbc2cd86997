"""`paceline bench decode`: plain decoding and others take turns on one model, prompt by prompt, and texts are
compared.

Invariant: where the model is exact, a text that differs from plain decoding's fails the run. A prompt for
which a CUDA graph was recorded counts for no row.
"""

from __future__ import annotations

import time
from typing import Any

from paceline.api.llm import LLM
from paceline.core.errors import RequestError
from paceline.core.params import SamplingParams
from paceline.engine.engine import Engine
from paceline.measure.engines import answer, engine_of, ids_of, load, rows_of
from paceline.measure.options import Decode
from paceline.measure.prompts import chosen
from paceline.measure.report import Sample, Task, by_task, report_rows
from paceline.measure.results import OVERALL, Table, Tell, table_of
from paceline.measure.rows import AUTO, OURS, Row, in_turn

WARM_UP = "Hello, who are you and what do you do?"
FIGURES = {"tok/s": ("tokens_per_second", "{:.1f}"), "τ": ("tau", "{:.2f}"), "α": ("alpha", "{:.2f}")}
FIGURES |= {"different": ("different", "{}")}
LEGEND = """speedup: over plain decoding in this run, tokens after the first; τ: tokens a pass; α: share of
drafted tokens accepted; different: texts that are not plain decoding's.
"""


class Run:
    def __init__(self, asked: Decode) -> None:
        self.asked, self.rows = asked, rows_of(asked.rows)
        self.prompts = chosen(asked.prompts, asked.limit, asked.every)
        self.num_turns = len(self.prompts) * len(self.rows)
        self.params = SamplingParams(temperature=0, max_tokens=asked.max_new_tokens)

    def report(self, tell: Tell) -> dict[str, Any]:
        tell("loading the model", 0)
        with load(self.asked, enable_prefix_caching=False, progress=False) as llm:
            own = llm.engine  # `auto` as every user has it
            engines = {row: own if row == AUTO else engine_of(llm, row) for row in self.rows}
            for row, engine in engines.items():
                tell(f"warming up {row}", 0)
                answer(llm, ids_of(llm, WARM_UP), self.params, engine)
            samples = self._samples(llm, engines, tell)
            is_exact = llm.engine.executor.decoder.is_exact
        rows = report_rows([Row(OURS, self.asked.dtype, row) for row in self.rows], samples, {})
        for record in rows:
            record["different"] = record["prompts"] - record["identical"]
        is_ok = not (is_exact and any(record["different"] for record in rows))
        return {"rows": rows, "is_exact": is_exact, "is_ok": is_ok}

    def _samples(self, llm: LLM, engines: dict[str, Engine], tell: Tell) -> list[Sample]:
        samples, started, backend = list[Sample](), time.perf_counter(), llm.engine.executor.backend
        for number, prompt in enumerate(self.prompts):
            if self.asked.seconds is not None and time.perf_counter() - started > self.asked.seconds:
                break
            ids, num_recorded, found = ids_of(llm, prompt.text), backend.num_recordings, list[Sample]()
            unit = (Task(prompt.id, prompt.category, tuple(ids), self.asked.max_new_tokens),)
            for name, engine in in_turn(engines.items(), number):
                record = answer(llm, ids, self.params, engine)
                found.append(Sample(Row(OURS, self.asked.dtype, name), 0, unit, record["total_s"], [record]))
                tell(name, 1)
            if backend.num_recordings == num_recorded:
                samples += found
        if not samples:
            raise RequestError("no prompt counts: CUDA graphs were recorded in all; give more prompts")
        return samples


def tables(report: dict[str, Any]) -> list[Table]:
    overall = [row for row in report["rows"] if row["task"] == OVERALL]
    compared = "texts compared token by token" if report["is_exact"] else "not exact: use --exact"
    title = f"speedup over plain decoding, {overall[0]['prompts']} prompts, {compared}"
    speedups = by_task(report["rows"], title, "speedup", "{:.2f}")
    figures = table_of("", (), FIGURES, overall)
    rows = [(*line[1:], *more) for line, more in zip(speedups.rows, figures.rows, strict=True)]
    taus = by_task(report["rows"], "τ, tokens a pass", "tau", "{:.2f}")
    shown = Table(taus.title, ("row",), taus.numbers, [line[1:] for line in taus.rows])
    return [Table(title, ("row",), (*speedups.numbers, *FIGURES), rows), shown]
