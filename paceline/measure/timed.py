"""What `bench step` and `bench kernels` time: subjects that take turns, each beside what the machine allows.

Invariant: medians are reported, without the first repeat, which compiles. Subjects take turns at every number
of tokens, so noise hits all alike and what one left in the caches is gone when its turn comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

from paceline.measure.results import Tell
from paceline.measure.roofline import Deployment, Hardware, Work
from paceline.runtime.timing import Timed


class Subject(NamedTuple):
    labels: dict[str, Any]  # of its records
    seconds: Callable[[int], float]  # of one run with that many tokens
    work: Callable[[int], Work]  # what any implementation must do


def passes_of(
    timed: Timed, on: Deployment, labels: dict[str, Any], num_logits: int | None = None, num_passes: int = 1
) -> Subject:
    """Passes over the deployment's context, each right after another one of its shape, as in decoding."""

    def seconds(rows: int) -> float:
        timed.seconds(rows, on.context, num_logits)
        return timed.seconds(rows, on.context, num_logits, num_passes)

    return Subject(labels, seconds, lambda rows: on.work(rows, num_logits))


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
    """Of one pass or kernel: its median, its spread, its cost relative to one token, and its distance from
    the floor."""
    ms, floor = 1000 * median(seconds), 1000 * hardware.seconds(work)
    is_known = ms > 0  # a difference of two times can come out as nothing
    spread = round(1000 * (max(seconds) - min(seconds)) / ms, 4) if is_known and len(seconds) > 1 else None
    return {
        "ms": round(ms, 4),
        "spread": spread,
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
