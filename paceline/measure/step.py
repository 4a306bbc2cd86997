"""`paceline bench step`: a pass by rows and context, beside the floor of its roofline; and the loop that it
and `bench kernels` time with. Invariant: medians are reported, without the first repeat, which compiles;
subjects take turns at every number of tokens, so noise hits all alike and what one left in the caches is gone
when its turn comes again. Passes are timed as the engine's own start-up measurement does (runtime/timing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError
from paceline.core.types import PassSizes
from paceline.loaders.checkpoint import describe
from paceline.measure import limits
from paceline.measure.engines import load_model
from paceline.measure.options import Step
from paceline.measure.results import Table, Tell, table_of
from paceline.measure.roofline import Deployment, Hardware, Work
from paceline.measure.rows import names_of, sizes_of
from paceline.runtime.timing import Timed

QUEUED = 8  # passes in flight together
SPARE = 64  # tokens of context that are not asked for
FIGURES = {"ms": "{ms:.3f}", "queued": "{queued_ms:.3f}", "×1": "{ratio:.2f}"}
FIGURES |= {"floor": "{floor_ms:.3f}", "reached": "{of_floor:.0%}"}
LEGEND = """ms: a pass whose result is waited for; queued: a pass among several in flight; ×1: ms relative to
the first row count; floor: the longer of reading weights and cached tokens at the measured bandwidth and
multiplying at the measured rate; reached: its share of ms.
"""
Labels = dict[str, Any]


class Subject(NamedTuple):
    labels: Labels  # of its records
    seconds: Callable[[int], float]  # of one run with that many tokens
    work: Callable[[int], Work]  # what any implementation must do


def passes_of(timed: Timed, on: Deployment, logits: int | None, labels: Labels, queued: int = 1) -> Subject:
    """Passes over the deployment's context, each right after another one of its shape, as in decoding."""

    def seconds(rows: int) -> float:
        timed.seconds(rows, on.context, logits)
        return timed.seconds(rows, on.context, logits, queued)

    return Subject(labels, seconds, lambda rows: on.work(rows, logits))


def take_turns(
    subjects: Sequence[Subject], sizes: Sequence[int], repeats: int, hardware: Hardware, tell: Tell
) -> list[dict[str, Any]]:
    """A record for each subject and number of tokens."""
    times: dict[tuple[int, int], list[float]] = {}
    for repeat in range(repeats + 1):
        for size in sizes:
            for i, subject in enumerate(subjects):
                seconds = subject.seconds(size)
                if repeat:
                    times.setdefault((i, size), []).append(seconds)
        tell("timing", 1)
    records = []
    for i, subject in enumerate(subjects):
        first = 1000 * median(times[i, sizes[0]]) if len(sizes) > 1 else None
        for size in sizes:
            measured = figures(times[i, size], subject.work(size), hardware, first)
            records.append({**subject.labels, "tokens": size, **measured})
    return records


def figures(seconds: list[float], work: Work, hardware: Hardware, first_ms: float | None) -> dict[str, Any]:
    """Of one pass or kernel: median, spread, cost relative to one token, distance from the floor."""
    ms, floor = 1000 * median(seconds), 1000 * hardware.seconds(work)
    is_known = ms > 0  # a difference of two times can come out as nothing
    spread = 1000 * (max(seconds) - min(seconds))
    return {
        "ms": round(ms, 4),
        "spread": round(spread / ms, 4) if is_known and len(seconds) > 1 else None,
        "ratio": round(ms / first_ms, 4) if first_ms else None,
        "gb_s": round(work.num_bytes / ms / 1e6, 2) if is_known else None,
        "gmac_s": round(work.flops / 2 / ms / 1e6, 2) if is_known else None,
        "floor_ms": round(floor, 4),
        "of_floor": round(floor / ms, 4) if is_known else None,
    }


def limits_json(found: Hardware) -> dict[str, Any]:
    rates = {"int8_gmac_s": found.int8_flops, "float32_gmac_s": found.float_flops}
    known = {name: round(rate / 2e9, 2) for name, rate in rates.items() if rate is not None}
    return {"threads": found.threads, "read_gb_s": round(found.bandwidth / 1e9, 2), **known}


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
                llm = load_model(replace(asked, dtype=dtype), **room, speculative_config=None, progress=False)
                executor = stack.enter_context(llm).engine.executor
                name = executor.backend.default_dtype(llm.checkpoint) if dtype == "auto" else dtype
                executors[name] = executor
            device = next(iter(executors.values())).device
            tell("measuring the machine", 0)
            found = limits.measure() if device.type == "cpu" else limits.of_device(device)
            for name, executor in executors.items():
                executor.record(PassSizes(asked.requests, max(self.rows)))  # as where drafts are checked
                timed = Timed(executor, longest, asked.requests)
                for context in self.contexts:
                    kept = found.kv_dtype(name)
                    on = Deployment(executor.config, found, name, kept, asked.requests, context)
                    labels = {"dtype": name, "requests": asked.requests, "context": context}
                    alone.append(passes_of(timed, on, None, {**labels, "exact": asked.exact}))
                    queued.append(passes_of(timed, on, None, labels, QUEUED))
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
