"""`paceline bench decode`: plain decoding and others take turns on one model, prompt by prompt, and texts are
compared. Invariant: where the model is exact, a text that differs from plain decoding's fails the run.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

from paceline.api.llm import LLM
from paceline.core.params import SamplingParams
from paceline.engine.engine import Engine
from paceline.measure import rows as planning
from paceline.measure.engines import answer, engine_of, ids_of, load_model, rows_of
from paceline.measure.options import Decode
from paceline.measure.prompts import chosen
from paceline.measure.results import OVERALL, Table, Tell, table_of
from paceline.measure.rows import AUTO, OURS, Answer, Row, Sample, Task, Unit

WARM_UP = "Hello, who are you and what do you do?"
FIGURES = {"tok/s": "{tokens_per_second:.1f}", "τ": "{tau:.2f}", "α": "{alpha:.2f}"}
FIGURES["different"] = "{different}"
LEGEND = """speedup: over plain decoding in this run, tokens after the first; τ: tokens a pass; α: share of
drafted tokens accepted; different: texts that are not plain decoding's.
"""


class Run:
    def __init__(self, asked: Decode) -> None:
        self.asked, self.rows = asked, [Row(OURS, asked.dtype, name) for name in rows_of(asked.rows)]
        self.prompts = chosen(asked.prompts, asked.limit, asked.every)
        self.num_turns = len(self.prompts) * len(self.rows)
        self.params = SamplingParams(temperature=0, max_tokens=asked.max_new_tokens)

    def report(self, tell: Tell) -> dict[str, Any]:
        tell("loading the model", 0)
        with load_model(self.asked, enable_prefix_caching=False, progress=False) as llm:
            own = llm.engine  # `auto` as every user has it
            engines = {row: own if row.method == AUTO else engine_of(llm, row.method) for row in self.rows}
            for row, engine in engines.items():
                tell(f"warming up {row}", 0)
                answer(llm, ids_of(llm.tokenizer, WARM_UP), self.params, engine)
            before = llm.engine.executor.backend.num_recordings
            samples = self._samples(llm, engines, tell)
            recordings = llm.engine.executor.backend.num_recordings - before
            is_exact = llm.engine.executor.decoder.is_exact
        rows = planning.report_rows(self.rows, samples, {})
        for record in rows:
            record["different"] = record["prompts"] - record["identical"]
        is_ok = not (is_exact and any(record["different"] for record in rows))
        return {"rows": rows, "recordings": recordings, "is_exact": is_exact, "is_ok": is_ok}

    def _samples(self, llm: LLM, engines: dict[Row, Engine], tell: Tell) -> list[Sample]:
        def run(engine: Engine, unit: Unit) -> tuple[float, list[Answer]]:
            record = answer(llm, list(unit[0].ids), self.params, engine)
            return record["total_s"], [record]

        texts, most = [tuple(ids_of(llm.tokenizer, p.text)) for p in self.prompts], self.asked.max_new_tokens
        units = [(Task(p.id, p.category, ids, most),) for p, ids in zip(self.prompts, texts, strict=True)]
        runners = {row: partial(run, engine) for row, engine in engines.items()}
        samples, end = list[Sample](), time.perf_counter() + (self.asked.seconds or math.inf)
        for found in planning.samples_of(runners, units, 1, tell):
            samples += found
            if time.perf_counter() > end:
                break
        return samples


def tables(report: dict[str, Any]) -> list[Table]:
    overall = [row for row in report["rows"] if row["task"] == OVERALL]
    compared = "texts compared token by token" if report["is_exact"] else "not exact: use --exact"
    title = f"speedup over plain decoding, {overall[0]['prompts']} prompts, {compared}"
    speedups = planning.by_task(report["rows"], title, "speedup", "{:.2f}", "method")
    figures = table_of("", (), FIGURES, overall)
    rows = [(*line, *more) for line, more in zip(speedups.rows, figures.rows, strict=True)]
    taus = planning.by_task(report["rows"], "τ, tokens a pass", "tau", "{:.2f}", "method")
    notes = [f"{n} CUDA graphs were recorded meanwhile"] if (n := report.get("recordings")) else []
    return [Table(title, ("row",), (*speedups.numbers, *FIGURES), rows, notes), taus._replace(names=("row",))]
