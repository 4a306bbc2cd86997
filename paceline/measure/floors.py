"""How far a measured time is from what the machine allows: pure arithmetic on bytes, multiply-adds and
limits.

A step cannot be faster than its weights (and cached keys and values) can be read, nor than its products can
be multiplied; the floor is the larger of the two times. Integer and float multiply-adds share the arithmetic
units, so their times add up.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from paceline.measure.limits import Limits


class Work(NamedTuple):
    """What a step must do, however cleverly it is written."""

    num_bytes: float = 0.0  # read from memory
    int8_macs: float = 0.0
    float32_macs: float = 0.0

    def plus(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Work:
        return Work(*(part * factor for part in self))

    @property
    def macs(self) -> float:
        return self.int8_macs + self.float32_macs


def floor_ms(work: Work, limits: Limits) -> float:
    reading = work.num_bytes / limits.read_gb_s
    multiplying = work.int8_macs / limits.int8_gmac_s + work.float32_macs / limits.float32_gmac_s
    return max(reading, multiplying) / 1e6


def macs_of(count: float, is_integer: bool) -> Work:
    return Work(int8_macs=count) if is_integer else Work(float32_macs=count)


def figures(seconds: list[float], work: Work, limits: Limits, first_ms: float | None) -> dict[str, Any]:
    """The report of one step: its median, its spread, its cost relative to one token, and its distance from
    the floor.
    """
    ms = 1000 * median(seconds)
    lowest = floor_ms(work, limits)
    is_known = ms > 0  # a difference of two times can come out as nothing
    return {
        "ms": round(ms, 4),
        "spread": round(1000 * (max(seconds) - min(seconds)) / ms, 4)
        if is_known and len(seconds) > 1
        else None,
        "ratio": round(ms / first_ms, 4) if first_ms else None,
        "gb_s": round(work.num_bytes / ms / 1e6, 2) if is_known else None,
        "gmac_s": round(work.macs / ms / 1e6, 2) if is_known else None,
        "floor_ms": round(lowest, 4),
        "of_floor": round(lowest / ms, 4) if is_known else None,
    }
