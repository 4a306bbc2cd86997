"""What passes and drafts cost, measured and corrected on the way. No clock of its own and no tensors.

Invariant: a pass never gets cheaper as rows are added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.core.errors import ConfigError
from paceline.core.types import ScheduledRequest
from paceline.engine.stats import Median

FORGET = 1024  # timings after which a row count that was not among them follows the others
CORRECT_EVERY = 32  # timings between two corrections of a table, after the first few


class CostTable:
    """Seconds of a pass: base(rows) + per_request_token x (cached tokens of all requests)
    + per_row_token x (cached tokens that each row sees, summed). Also of a draft, by its nodes.

    The base is linear between the row counts that were measured at the start. Later timings correct it by the
    median of measured over expected, which is linear between the row counts that were seen."""

    def __init__(
        self, seconds: Mapping[Any, float], per_request_token: float = 0.0, per_row_token: float = 0.0
    ) -> None:
        """seconds: by rows, of passes with (nearly) nothing cached."""
        seconds = {int(rows): float(each) for rows, each in seconds.items()}
        if not seconds or any(rows < 1 or not 0 < s < 1e6 for rows, s in seconds.items()):
            raise ConfigError(f"a cost profile holds {dict(seconds)!r:.60}; measure it with `paceline tune`")
        self.seconds = dict(sorted(seconds.items()))
        self.per_request_token, self.per_row_token = float(per_request_token), float(per_row_token)
        self._ratios: dict[int, Median] = {}  # by rows: measured over expected
        self._last: dict[int, int] = {}  # by rows: which timing was its last
        self._num_timed = 0
        self._first: list[float] = []  # the base as measured at the start
        self._base: list[float] = []

    def base(self, most_rows: int) -> list[float]:
        """[most_rows + 1 at least]: seconds by rows, nothing cached. Not to be changed."""
        if most_rows >= len(self._base):
            rows, known, seconds = np.arange(2 * most_rows + 1), [*self.seconds], [*self.seconds.values()]
            before, least = ((0, *known)[-2], (0.0, *seconds)[-2])  # beyond the last it rises as before it
            rise = max(seconds[-1] - least, 0.0) / (known[-1] - before)
            first = np.interp(rows, known, seconds) + np.maximum(rows - known[-1], 0) * rise
            ratios = {n: self._ratios[n].value for n in sorted(self._ratios)} or {1: 1.0}
            base = np.maximum.accumulate(first * np.interp(rows, [*ratios], [*ratios.values()]))
            base[0] = 0.0
            self._first, self._base = first.tolist(), base.tolist()
        return self._base

    def pass_seconds(self, rows: int, request_tokens: int = 0, row_tokens: int = 0) -> float:
        return self.base(rows)[rows] + self._cached(request_tokens, row_tokens)

    def _cached(self, request_tokens: int, row_tokens: int) -> float:
        return self.per_request_token * request_tokens + self.per_row_token * row_tokens

    def observe(self, seconds: float, rows: int, request_tokens: int = 0, row_tokens: int = 0) -> None:
        """A pass in which every request was decoding, or a draft, took that long."""
        self.base(rows)
        expected = self._first[rows] + self._cached(request_tokens, row_tokens)
        self._ratios.setdefault(rows, Median(1.0)).add(seconds / expected)
        self._num_timed += 1
        self._last[rows] = self._num_timed
        if self._num_timed in (1, 2, 4, 8, 16) or self._num_timed % CORRECT_EVERY == 0:
            self._base = []
            for old in [n for n, last in self._last.items() if self._num_timed - last > FORGET]:
                del self._ratios[old], self._last[old]

    def to_json(self) -> dict[str, Any]:
        """As measured at the start; CostTable(**it) is that table again."""
        slopes = {"per_request_token": self.per_request_token, "per_row_token": self.per_row_token}
        return {"seconds": {str(rows): s for rows, s in self.seconds.items()}, **slopes}


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
    def size(self) -> int:
        """Of the batch, as a power of two: batches of nearly the same size have costs in common."""
        return 1 << max(self.speaking - 1, 0).bit_length()

    @property
    def token_seconds(self) -> float:
        """What a token takes without drafts."""
        return self.seconds / self.speaking

    def with_nodes(self, nodes: int) -> tuple[int, int, int]:
        """What the pass costs with this many drafted nodes: rows, cached tokens, tokens that the rows see."""
        seen = self.cached * (self.speaking + nodes) // self.speaking if self.speaking else 0
        return self.rows + nodes, self.cached, seen

    def added(self, count: int, drafting: Sequence[float] = ()) -> list[float]:
        """[count + 1]: seconds that 0, 1, ... nodes add to the pass, and each request's share of drafting."""
        start, rows = self.base[self.rows], self.rows
        added = [self.base[rows + n] - start + n * self.by_row for n in range(count + 1)]
        return [a + d / self.speaking for a, d in zip(added, drafting, strict=False)] if drafting else added
