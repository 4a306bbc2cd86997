"""`paceline bench step`: a pass by rows and context, on a CPU or a GPU, beside the floor of its roofline.

Invariant: passes are timed by the loop that the engine's own start-up measurement uses (runtime/timing.py).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError
from paceline.loaders.checkpoint import describe
from paceline.measure import limits
from paceline.measure.engines import load
from paceline.measure.options import Step
from paceline.measure.results import Table, Tell, table_of
from paceline.measure.roofline import Deployment
from paceline.measure.rows import names_of, sizes_of
from paceline.measure.timed import Subject, limits_json, take_turns
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
    return plan.asked.repeats + 1


def run(plan: Plan, tell: Tell) -> dict[str, Any]:
    asked, longest = plan.asked, max(plan.contexts) + max(plan.rows)
    most = describe(asked.model).config.max_context
    if longest > most:
        raise ConfigError(f"--contexts and --rows need {longest} tokens; the model's context is {most}")
    room = {"max_model_len": min(longest + SPARE, most), "max_num_seqs": asked.requests}
    subjects = list[Subject]()
    with ExitStack() as stack:
        executors = {}
        for dtype in plan.dtypes:
            tell(f"loading {dtype}", 0)
            llm = load(replace(asked, dtype=dtype), **room, speculative_config=None, progress=False)
            executors[dtype] = stack.enter_context(llm).engine.executor
        device = next(iter(executors.values())).device
        tell("measuring the machine", 0)
        found = limits.measure() if device.type == "cpu" else limits.of_device(device)
        for dtype, executor in executors.items():
            name = executor.backend.default_dtype if dtype == "auto" else dtype
            on = Deployment(executor.config, found, name, found.kv_dtype(name), asked.requests)
            passes = Timed(executor, longest, asked.requests)
            for context in plan.contexts:
                for count in (1, QUEUED):
                    subjects.append(_subject(passes, replace(on, context=context), count))
        records = take_turns(subjects, plan.rows, asked.repeats, found, tell)
    queued = {_shape(record): record["ms"] for record in records if record["num_passes"] == QUEUED}
    alone = [record for record in records if record["num_passes"] == 1]
    added = {"exact": asked.exact}
    rows = [{**r, **added, "rows": r["tokens"], "queued_ms": queued[_shape(r)]} for r in alone]
    return {"model": asked.model, "device": device.type, "limits": limits_json(found), "rows": rows}


def _shape(record: dict[str, Any]) -> tuple[str, int, int]:
    return record["dtype"], record["context"], record["tokens"]


def _subject(passes: Timed, on: Deployment, num_passes: int) -> Subject:
    labels = {"dtype": on.dtype, "requests": on.batch, "context": on.context, "num_passes": num_passes}

    def seconds(rows: int) -> float:
        passes.seconds(rows, on.context)  # what ran before matters, so each shape runs once by itself
        return passes.seconds(rows, on.context, num_passes=num_passes)

    return Subject(labels, seconds, on.work)


def tables(report: dict[str, Any]) -> list[Table]:
    title = f"a pass of {report['model']}, {report['rows'][0]['requests']} requests"
    title += ", exact" * report["rows"][0]["exact"]
    said = f"reading {report['limits']['read_gb_s']:,.0f} GB/s, measured in this run"
    made = table_of(title, ("dtype", "context", "rows"), FIGURES, report["rows"])
    return [made._replace(notes=[said])]
