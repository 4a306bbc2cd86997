"""`paceline bench step`: a pass by rows and context, on a CPU or a GPU, beside the floor of its roofline.

Invariant: shapes take turns and so do precisions, medians are reported, and the limits are measured in the
same run. Passes are timed by the loop that the engine's own start-up measurement uses (runtime/timing.py).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError
from paceline.loaders.dummy import describe
from paceline.measure import limits
from paceline.measure.engines import load
from paceline.measure.kernels import figures, limits_json
from paceline.measure.options import Step
from paceline.measure.results import Tell
from paceline.measure.roofline import Deployment
from paceline.measure.rows import names_of, sizes_of
from paceline.measure.tables import Table, cell
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


class Plan(NamedTuple):
    asked: Step
    dtypes: list[str]
    rows: list[int]
    contexts: list[int]


def prepare(asked: Step) -> Plan:
    rows, contexts = sizes_of("--rows", asked.rows), sizes_of("--contexts", asked.contexts)
    return Plan(asked, names_of("--dtypes", asked.dtypes or asked.dtype), rows, contexts)


def num_turns(plan: Plan) -> int:
    return (plan.asked.repeats + 1) * len(plan.contexts)


def run(plan: Plan, tell: Tell) -> dict[str, Any]:
    asked, longest = plan.asked, max(plan.contexts) + max(plan.rows)
    most = describe(asked.model).config.max_context
    if longest > most:
        raise ConfigError(f"--contexts and --rows need {longest} tokens; the model's context is {most}")
    with ExitStack() as stack:
        executors = {}
        for dtype in plan.dtypes:
            tell(f"loading {dtype}", 0)
            room = {"max_model_len": min(longest + SPARE, most), "max_num_seqs": asked.requests}
            llm = load(replace(asked, dtype=dtype), **room, speculative_config=None, progress=False)
            executors[dtype] = stack.enter_context(llm).engine.executor
        device = next(iter(executors.values())).device
        tell("measuring the machine", 0)
        found = limits.measure() if device.type == "cpu" else limits.of_device(device)
        passes = {dtype: Timed(executor, longest, asked.requests) for dtype, executor in executors.items()}
        records = []
        for context in plan.contexts:
            times = _take_turns(passes, context, plan, tell)
            for dtype, executor in executors.items():
                name = ("int8" if device.type == "cpu" else "bfloat16") if dtype == "auto" else dtype
                on = Deployment(executor.config, found, name, found.kv_dtype(name), asked.requests, context)
                first = 1000 * median(times[dtype, plan.rows[0], 1])
                for rows in plan.rows:
                    record = {"dtype": name, "exact": asked.exact, "requests": asked.requests}
                    record |= {"context": context, "rows": rows}
                    record |= figures(times[dtype, rows, 1], on.work(rows), found, first)
                    queued = 1000 * median(times[dtype, rows, QUEUED])
                    records.append({**record, "queued_ms": round(queued, 4)})
    return {"model": asked.model, "device": device.type, "limits": limits_json(found), "rows": records}


def _take_turns(
    passes: dict[str, Timed], context: int, plan: Plan, tell: Tell
) -> dict[tuple[str, int, int], list[float]]:
    """Seconds by dtype, rows and passes in flight. The first repeat, which compiles, does not count."""
    times: dict[tuple[str, int, int], list[float]] = {}
    for repeat in range(plan.asked.repeats + 1):
        for dtype, timed in passes.items():
            for rows in plan.rows:
                timed.seconds(rows, context)  # what ran before matters, so each shape runs once by itself
                for count in (1, QUEUED):
                    seconds = timed.seconds(rows, context, num_passes=count)
                    if repeat:
                        times.setdefault((dtype, rows, count), []).append(seconds)
        tell(f"timing passes over {context} tokens", 1)
    return times


def tables(report: dict[str, Any]) -> list[Table]:
    rows = []
    for record in report["rows"]:
        words = (record["dtype"] + ", exact" * record["exact"], str(record["context"]), str(record["rows"]))
        rows.append((*words, *(cell(record[name], form) for name, form in FIGURES.values())))
    title = f"a pass of {report['model']}, {report['rows'][0]['requests']} requests"
    said = f"reading {report['limits']['read_gb_s']:,.0f} GB/s, measured in this run"
    return [Table(title, ("dtype", "context", "rows"), tuple(FIGURES), rows, [said])]
