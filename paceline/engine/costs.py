"""What a draft is expected to gain: the formulas of speculative decoding, and a model of what passes cost. No
clock and no tensors.

α is the chance that a drafted token is accepted given that all before it were: one number for every depth, or
a sequence with one for each. Costs are relative to a pass of the target over one token: `draft_cost` of
drafting one token, `verify_cost` of the pass that checks the draft. Invariants: drafting nothing gains
exactly 1; a pass never gets cheaper as rows are added.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.core.errors import ConfigError

Alpha = float | Sequence[float]
PRECISION = 1e-9  # of a break-even α
WINDOW = 15  # timings of which the median counts
FARTHEST = 8.0  # times the median: no timing counts as more
REBUILD = 32  # timings between two looks at them all
FADING = 0.95  # of the weight of a call, from one to the next
FADE = 0.9  # of the weight of a row count's timings, from one look to the next


def expected_tokens(alpha: Alpha, k: int) -> float:
    """Tokens a pass gives on average when it checks a chain of k, the target's own included: (1 - α^(k+1)) /
    (1 - α) for one α.
    """
    total, survival = 1.0, 1.0
    for depth in range(k):
        survival *= alpha if isinstance(alpha, (int, float)) else alpha[depth] if depth < len(alpha) else 0.0
        total += survival
    return total


def speedup(alpha: Alpha, k: int, draft_cost: float, verify_cost: float) -> float:
    """Over plain decoding: tokens a step gives, over what the step costs."""
    return expected_tokens(alpha, k) / (k * draft_cost + verify_cost)


def best_k(alpha: Alpha, draft_cost: float, verify_cost: Callable[[int], float], most: int) -> int:
    """The length of draft that gains most, 0 if none gains; the shortest of equally good ones. verify_cost:
    of a pass over n tokens.
    """
    gains = [speedup(alpha, k, draft_cost, verify_cost(k + 1)) for k in range(most + 1)]
    return max(range(most + 1), key=lambda k: (gains[k], -k))


def break_even_alpha(k: int, draft_cost: float, verify_cost: float) -> float | None:
    """The α from which drafting k tokens pays; None where even perfect drafts cost more than they give."""
    if speedup(1.0, k, draft_cost, verify_cost) < 1:
        return None
    low, high = 0.0, 1.0
    while high - low > PRECISION:
        middle = (low + high) / 2
        low, high = (low, middle) if speedup(middle, k, draft_cost, verify_cost) >= 1 else (middle, high)
    return high


class Median:
    """Of the last few numbers, cheap to ask for at any time. One much larger than it counts as FARTHEST times
    it: the first of a kind may have waited for a compiler, and if nothing else were seen for long, that would
    be believed."""

    __slots__ = ("_order", "_recent", "value")

    def __init__(self, first: float, size: int = WINDOW) -> None:
        self._recent: deque[float] = deque(maxlen=size)
        self._order: list[float] = []
        self.value = first  # until something is seen

    def add(self, number: float) -> None:
        if len(self._recent) == self._recent.maxlen:
            del self._order[bisect_left(self._order, self._recent[0])]
        number = min(number, FARTHEST * self.value) if self.value > 0 else number
        self._recent.append(number)
        insort(self._order, number)
        self.value = self._order[(len(self._order) - 1) // 2]


class Line:
    """Seconds of a call: fixed + each x count, fitted to the last few calls. One that took very long counts
    as twice what was expected.
    """

    __slots__ = ("_sums", "each", "fixed")

    def __init__(self, fixed: float, each: float) -> None:
        """What is expected until something is seen, worth two calls."""
        self.fixed, self.each = fixed, each
        self._sums = (
            2.0,
            6.0,
            26.0,
            2 * fixed + 6 * each,
            6 * fixed + 26 * each,
        )  # of 1, x, x^2, y and xy over counts of 1 and 5

    def add(self, count: float, seconds: float) -> None:
        y = min(seconds, 2 * (self.fixed + self.each * count) + 1e-9)
        n, x, xx, total, xy = self._sums
        n, x, xx = FADING * n + 1, FADING * x + count, FADING * xx + count * count
        total, xy = FADING * total + y, FADING * xy + count * y
        self._sums = n, x, xx, total, xy
        spread = n * xx - x * x
        if spread > 0.01 * n * n:  # else all counts are the same, and only the level can be told
            self.each = max((n * xy - x * total) / spread, 0.0)
        self.fixed = max((total - self.each * x) / n, 0.0)


class CostModel:
    """Seconds of a pass of the target: base(rows) + per_request_token x (cached tokens of all requests)
    + per_row_token x (cached tokens that each row sees, summed).

    The base is linear between the row counts of the profile. Timings that come later are kept as ratios to
    it, the median of the last few at each row count; a row count not seen for long follows the others. So
    neither a wrong profile nor an hour on a busy machine stays in the books.
    """

    def __init__(
        self, seconds: Mapping[int, float], per_request_token: float = 0.0, per_row_token: float = 0.0
    ) -> None:
        """seconds: of passes over so many rows with (nearly) nothing cached."""
        if not seconds or any(rows < 1 or not 0 < s < 1e6 for rows, s in seconds.items()):
            raise ConfigError(
                f"a cost profile holds {dict(seconds)!r:.60}; measure it again with `paceline tune`"
            )
        self.seconds = dict(sorted(seconds.items()))
        self.per_request_token, self.per_row_token = per_request_token, per_row_token
        self._ratios: dict[int, Median] = {}
        self._weights: dict[int, float] = {}
        self._corrected: dict[int, float] = {1: 1.0}
        self._num_timed = 0
        self._profile: list[float] = []  # by rows, nothing cached, before any correction
        self._base: list[float] = [0.0]
        self.version = 0  # grows when the base changes

    def base(self, most_rows: int) -> list[float]:
        """[most_rows + 1 at least]: seconds by rows, nothing cached. Not to be changed."""
        if most_rows >= len(self._base):
            self._extend(2 * most_rows)
        return self._base

    def _extend(self, most_rows: int) -> None:
        known, measured = sorted(self._corrected), list(self.seconds)
        self._profile += [
            _linear(measured, self.seconds, rows) for rows in range(len(self._profile), most_rows + 1)
        ]
        for rows in range(len(self._base), most_rows + 1):
            self._base.append(max(self._profile[rows] * _level(known, self._corrected, rows), self._base[-1]))

    def pass_seconds(self, rows: int, request_tokens: int = 0, row_tokens: int = 0) -> float:
        return (
            self.base(rows)[rows] + self.per_request_token * request_tokens + self.per_row_token * row_tokens
        )

    def observe(self, rows: int, request_tokens: int, row_tokens: int, seconds: float) -> None:
        """A pass in which every request was decoding took so long."""
        seen = self._ratios.get(rows)
        if seen is None:
            seen = self._ratios[rows] = Median(1.0)
            self.base(rows)
        cached = self.per_request_token * request_tokens + self.per_row_token * row_tokens
        seen.add(seconds / (self._profile[rows] + cached))
        self._weights[rows] = min(self._weights.get(rows, 0.0) + 1.0, 2.0 * WINDOW)
        self._num_timed += 1
        if self._num_timed % REBUILD == 0:
            self._look()

    def _look(self) -> None:
        """Correct the profile by what was seen: each row count by its own timings, and by all of them as its
        own grow old.
        """
        self._weights = {rows: weight * FADE for rows, weight in self._weights.items()}
        total = sum(self._weights.values())
        common = sum(self._weights[rows] * seen.value for rows, seen in self._ratios.items()) / total
        self._corrected = {
            rows: (common + self._weights[rows] * seen.value) / (1 + self._weights[rows])
            for rows, seen in self._ratios.items()
        }
        self._base = [0.0]
        self.version += 1

    def fresh(self) -> CostModel:
        """The profile without what was learned since."""
        return CostModel(self.seconds, self.per_request_token, self.per_row_token)

    def to_json(self) -> dict[str, Any]:
        return {
            "seconds": {str(rows): s for rows, s in self.seconds.items()},
            "per_request_token": self.per_request_token,
            "per_row_token": self.per_row_token,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostModel:
        try:
            seconds = {int(rows): float(s) for rows, s in data["seconds"].items()}
            return cls(seconds, float(data["per_request_token"]), float(data["per_row_token"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"a cost profile cannot be read ({error!r:.60}); measure it again with `paceline tune`"
            ) from None


def _level(known: Sequence[int], values: Mapping[int, float], rows: int) -> float:
    """Linear between the known, level beyond them."""
    place = bisect_left(known, rows)
    if place == 0 or place == len(known):
        return values[known[place - (place > 0)]]
    a, b = known[place - 1], known[place]
    return values[a] + (values[b] - values[a]) * (rows - a) / (b - a)


def _linear(known: Sequence[int], values: Mapping[int, float], rows: int) -> float:
    """Linear between the known, and beyond the last as steep as before it (in proportion, where only one is
    known).
    """
    last = known[-1]
    if rows <= last:
        return _level(known, values, rows)
    before, value = (known[-2], values[known[-2]]) if len(known) > 1 else (0, 0.0)
    return values[last] + max(values[last] - value, 0.0) / (last - before) * (rows - last)
