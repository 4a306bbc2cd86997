"""`paceline bench step`: a pass by rows and context, on a CPU or a GPU, beside the floor of its roofline.

Invariant: passes are timed by the loop that the engine's own start-up measurement uses (runtime/timing.py).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from paceline.core.errors import ConfigError
from paceline.loaders.dummy import describe
from paceline.measure import limits
from paceline.measure.engines import load
from paceline.measure.options import Step
from paceline.measure.results import Table, Tell, table_of
from paceline.measure.roofline import Deployment
from paceline.measure.rows import names_of, sizes_of
from paceline.measure.timed import Subject, limits_json, passes_of, take_turns
from paceline.runtime.timing import Timed

QUEUED = 8  # passes in flight together
SPARE = 64  # tokens of context that are not asked for
FIGURES = {
    "ms": ("ms", "{:.3f}"),
    "queued": ("queued_ms", "{:.3f}"),
    "×1": ("ratio", "{:.2f}"),
    "floor": ("floor_ms", "{:.3f}"),
    "reached": ("of_floor", "{:.0%}"),
}
LEGEND = """ms: a pass whose result is waited for; queued: a pass among several in flight; ×1: ms relative to
the first row count; floor: the longer of reading weights and cached tokens at the measured bandwidth and
multiplying at the measured rate; reached: its share of ms.
"""


class Run:
    def __init__(self, asked: Step) -> None:
        self.asked, self.dtypes = asked, names_of("--dtypes", asked.dtypes or asked.dtype)
        self.rows, self.contexts = sizes_of("--rows", asked.rows), sizes_of("--contexts", asked.contexts)
        self.num_turns = asked.repeats + 1

    def report(self, tell: Tell) -> dict[str, Any]:
        asked, longest = self.asked, max(self.contexts) + max(self.rows)
        most = describe(asked.model).config.max_context
        if longest > most:
            raise ConfigError(f"--contexts and --rows need {longest} tokens; the model's context is {most}")
        room = {"max_model_len": min(longest + SPARE, most), "max_num_seqs": asked.requests}
        alone, queued = list[Subject](), list[Subject]()
        with ExitStack() as stack:
            executors = {}
            for dtype in self.dtypes:
                tell(f"loading {dtype}", 0)
                llm = load(replace(asked, dtype=dtype), **room, speculative_config=None, progress=False)
                executors[dtype] = stack.enter_context(llm).engine.executor
            device = next(iter(executors.values())).device
            tell("measuring the machine", 0)
            found = limits.measure() if device.type == "cpu" else limits.of_device(device)
            for dtype, executor in executors.items():
                name = executor.backend.default_dtype if dtype == "auto" else dtype
                timed = Timed(executor, longest, asked.requests)
                for context in self.contexts:
                    on = Deployment(
                        executor.config, found, name, found.kv_dtype(name), asked.requests, context
                    )
                    labels = {"dtype": name, "requests": asked.requests, "context": context}
                    alone.append(passes_of(timed, on, {**labels, "exact": asked.exact}))
                    queued.append(passes_of(timed, on, labels, num_passes=QUEUED))
            records = take_turns([*alone, *queued], self.rows, asked.repeats, found, tell)
        half = len(records) // 2
        pairs = zip(records[:half], records[half:], strict=True)
        rows = [{**r, "rows": r["tokens"], "queued_ms": other["ms"]} for r, other in pairs]
        return {"model": asked.model, "device": device.type, "limits": limits_json(found), "rows": rows}


def tables(report: dict[str, Any]) -> list[Table]:
    title = f"a pass of {report['model']}, {report['rows'][0]['requests']} requests"
    title += ", exact" * report["rows"][0]["exact"]
    said = f"reading {report['limits']['read_gb_s']:,.0f} GB/s, measured in this run"
    made = table_of(title, ("dtype", "context", "rows"), FIGURES, report["rows"])
    return [made._replace(notes=[said])]
