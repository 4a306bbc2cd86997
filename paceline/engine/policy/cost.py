"""What passes and drafts cost, measured and corrected on the way. No clock of its own and no tensors.

Invariant: a pass never gets cheaper as rows are added.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError
from paceline.core.types import ScheduledRequest

WINDOW = 15  # timings of which the median counts
OUTLIER = 8.0  # times the median: no timing counts as more
REBUILD = 32  # timings between two corrections of the table
OUTLYING = 1.5  # the same of a draft, up and down
FORGET = 1024  # timings after which a row count that was not among them follows the others
FADING = 0.95  # of the weight of a draft's timing, from one draft to the next


class Median:
    """Of the last few numbers. One that waited for a compiler must not be believed for long, so it is
    capped.
    """

    __slots__ = ("_order", "_recent", "value")

    def __init__(self, first: float) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._order: list[float] = []
        self.value = first  # until something is seen

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, number: float) -> None:
        if len(self._recent) == WINDOW:
            del self._order[bisect_left(self._order, self._recent[0])]
        number = min(number, OUTLIER * self.value) if self.value > 0 else number
        self._recent.append(number)
        insort(self._order, number)
        self.value = self._order[(len(self._order) - 1) // 2]


class DraftCost:
    """Seconds of a draft: fixed + each x length, a line fitted to the last few. No timing counts as further
    from what was expected than OUTLYING, so that the line follows most of them, as the passes' medians do.
    """

    __slots__ = ("_sums", "each", "fixed")

    def __init__(self, fixed: float, each: float) -> None:
        """Until something is seen; that guess is worth two drafts."""
        self.fixed, self.each = fixed, each
        # of 1, x, x^2, y and xy over counts of 1 and 5
        self._sums = (2.0, 6.0, 26.0, 2 * self.fixed + 6 * self.each, 6 * self.fixed + 26 * self.each)

    def of(self, length: int) -> float:
        return self.fixed + self.each * length

    def add(self, length: int, seconds: float) -> None:
        expected = max(self.of(length), 1e-6)
        y = min(max(seconds, expected / OUTLYING), OUTLYING * expected)
        n, x, xx, total, xy = (FADING * each for each in self._sums)
        n, x, xx, total, xy = n + 1, x + length, xx + length * length, total + y, xy + length * y
        self._sums = n, x, xx, total, xy
        spread = n * xx - x * x
        if spread > 0.01 * n * n:  # else all counts are the same, and only the level can be told
            self.each = max((n * xy - x * total) / spread, 0.0)
        self.fixed = max((total - self.each * x) / n, 0.0)


class CostTable:
    """Seconds of a pass: base(rows) + per_request_token x (cached tokens of all requests)
    + per_row_token x (cached tokens that each row sees, summed).

    The base is linear between the row counts that were measured at the start. Later timings correct it: at
    each row count by the median of measured over expected, between them linearly, beyond them as at the
    nearest.
    """

    def __init__(
        self, seconds: Mapping[int, float], per_request_token: float = 0.0, per_row_token: float = 0.0
    ) -> None:
        """seconds: by rows, of passes with (nearly) nothing cached."""
        if not seconds or any(rows < 1 or not 0 < s < 1e6 for rows, s in seconds.items()):
            raise ConfigError(
                f"a cost profile holds {dict(seconds)!r:.60}; measure it again with `paceline tune`"
            )
        self.seconds = dict(sorted(seconds.items()))
        self.per_request_token, self.per_row_token = per_request_token, per_row_token
        self._ratios: dict[int, Median] = {}  # by rows: measured over expected
        self._last: dict[int, int] = {}  # by rows: which timing was its last
        self._num_timed = 0
        self._base: list[float] = [0.0]
        self.version = 0  # grows when the base changes

    def base(self, most_rows: int) -> list[float]:
        """[most_rows + 1 at least]: seconds by rows, nothing cached. Not to be changed."""
        if most_rows >= len(self._base):
            ratios = {rows: seen.value for rows, seen in self._ratios.items() if len(seen)} or {1: 1.0}
            known = sorted(ratios)
            for rows in range(len(self._base), 2 * most_rows + 1):
                self._base.append(max(self._profile(rows) * _between(known, ratios, rows), self._base[-1]))
        return self._base

    def _profile(self, rows: int) -> float:
        """As measured at the start; beyond the last row count as steep as before it."""
        known = list(self.seconds)
        if rows <= known[-1]:
            return _between(known, self.seconds, rows)
        before = known[-2] if len(known) > 1 else 0
        rise = self.seconds[known[-1]] - self.seconds.get(before, 0.0)
        return self.seconds[known[-1]] + max(rise, 0.0) / (known[-1] - before) * (rows - known[-1])

    def pass_seconds(self, rows: int, request_tokens: int = 0, row_tokens: int = 0) -> float:
        return (
            self.base(rows)[rows] + self.per_request_token * request_tokens + self.per_row_token * row_tokens
        )

    def observe(self, rows: int, request_tokens: int, row_tokens: int, seconds: float) -> None:
        """A pass in which every request was decoding took that long."""
        cached = self.per_request_token * request_tokens + self.per_row_token * row_tokens
        self._ratios.setdefault(rows, Median(1.0)).add(seconds / (self._profile(rows) + cached))
        self._num_timed += 1
        self._last[rows] = self._num_timed
        if self._num_timed % REBUILD == 0:
            self._base, self.version = [0.0], self.version + 1
            for old in [r for r, last in self._last.items() if self._num_timed - last > FORGET]:
                del self._ratios[old], self._last[old]

    def fresh(self) -> CostTable:
        """The table without what was learned since."""
        return CostTable(self.seconds, self.per_request_token, self.per_row_token)

    def to_json(self) -> dict[str, Any]:
        seconds = {str(rows): s for rows, s in self.seconds.items()}
        return {
            "seconds": seconds,
            "per_request_token": self.per_request_token,
            "per_row_token": self.per_row_token,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostTable:
        try:
            seconds = {int(rows): float(s) for rows, s in data["seconds"].items()}
            return cls(seconds, float(data["per_request_token"]), float(data["per_row_token"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"a cost profile cannot be read ({error!r:.60}); measure it again with `paceline tune`"
            ) from None


def _between(known: Sequence[int], values: Mapping[int, float], rows: int) -> float:
    """Linear between the known, level beyond them."""
    place = bisect_left(known, rows)
    if place == 0 or place == len(known):
        return values[known[place - (place > 0)]]
    a, b = known[place - 1], known[place]
    return values[a] + (values[b] - values[a]) * (rows - a) / (b - a)


class Load(NamedTuple):
    """The pass of a step as it would be without drafts: what they are weighed against."""

    rows: int
    speaking: int  # requests that emit a token
    cached: int  # tokens that those see, summed
    seconds: float  # of a pass of the speaking requests alone: a prompt's chunk is not theirs to pay
    by_row: float  # seconds of what one more row sees, on average
    base: Sequence[float]  # seconds by rows, long enough for every draft

    @classmethod
    def of(cls, scheduled: Sequence[ScheduledRequest], costs: CostTable, most_nodes: int) -> Load:
        rows = sum(one.num_new for one in scheduled)
        cached = [one.request.cache.num_cached for one in scheduled if one.is_caught_up]
        speaking, total = len(cached), sum(cached)
        seconds = costs.pass_seconds(speaking, total, total) if speaking else 0.0
        by_row = costs.per_row_token * total / speaking if speaking else 0.0
        return cls(rows, speaking, total, seconds, by_row, costs.base(rows + most_nodes * max(speaking, 1)))

    @property
    def is_decoding(self) -> bool:
        """No prompt is read in it."""
        return self.rows == self.speaking

    @property
    def token_seconds(self) -> float:
        """What a token takes without drafts."""
        return self.seconds / self.speaking

    def seen_with(self, nodes: int) -> int:
        """Cached tokens that the rows see, summed, with this many drafted nodes."""
        return self.cached * (self.speaking + nodes) // self.speaking

    def added(self, count: int, each: float = 0.0, fixed: float = 0.0) -> list[float]:
        """[count + 1]: seconds that 0, 1, ... nodes add to the pass, `each` more for every one and `fixed`
        for having any.
        """
        start, each = self.base[self.rows], each + self.by_row
        more = [self.base[self.rows + n] - start + n * each + fixed for n in range(1, count + 1)]
        return [0.0, *more]
