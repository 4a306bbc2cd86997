"""What passes of a model take here and now: some rows over a cached context, timed. Nothing is committed, so
every pass is alike.

Invariant: a pass follows right after another, as in decoding, and of several alike the quickest counts:
whatever else a machine does can only make them slower. So can more rows, and a pass that was slower than one
over more rows is taken to have been disturbed.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from paceline.core.types import BLOCK_SIZE, Cached, Output, Pick, Segment
from paceline.runtime.executor import LocalExecutor

ROWS = (1, 2, 4, 8, 3, 6, 16, 12)  # the first ones say most, should time run out
ROWS_ON_GPU = (1, 8, 64)  # few, since something is recorded for each; between them a pass changes little
CONTEXT = 512  # over which a pass is timed to know what cached tokens cost
MOST_SWEEPS = 5
STRIDE = 7  # between the made-up tokens, so that their embeddings lie apart


class Timings(NamedTuple):
    seconds: dict[int, float]  # rows -> of a pass with nearly nothing cached
    per_request_token: float  # of each cached token of a request
    per_row_token: float  # of each cached token, for each row that sees it


class Timed:
    """Passes of one request whose context is made up: what lies in its blocks does not change what a pass
    takes.
    """

    def __init__(self, executor: LocalExecutor, most_tokens: int) -> None:
        self._executor, self._cache = executor, Cached()
        self.room = min(most_tokens, executor.kv.pool.num_free * BLOCK_SIZE, executor.config.max_context)
        is_reserved = executor.kv.reserve(self._cache, self.room)
        assert is_reserved, "as many blocks as are free can be had"
        executor.memory.touch(self._cache.blocks)

    def seconds(self, rows: int, context: int = 0) -> float:
        self._cache.num_cached = context
        tokens = [(STRIDE * i) % self._executor.config.vocab_size for i in range(rows)]
        output, taken = self._timed(tokens)
        # what was recorded on the way is no cost of a pass
        return self._timed(tokens)[1] if output.is_first else taken

    def _timed(self, tokens: list[int]) -> tuple[Output, float]:
        started = time.perf_counter()
        output = self._executor.forward([Segment(tokens, self._cache, None, len(tokens), Pick(0.0, 0))])
        output.logits[-1, -1].item()  # a device may still be at it
        return output, time.perf_counter() - started

    def free(self) -> None:
        self._cache.num_cached = 0
        self._executor.kv.free(self._cache)


def measure(executor: LocalExecutor, seconds: float = 0.3) -> Timings:
    """As far as the time goes: every row count once at least where passes are short, the smallest ones where
    they are long.
    """
    rows_of_interest = ROWS if executor.device.type == "cpu" else ROWS_ON_GPU
    passes = Timed(executor, CONTEXT + max(rows_of_interest))
    try:
        sizes = [n for n in rows_of_interest if n <= passes.room]
        for rows in sizes[:4]:  # what is compiled on first use is no cost of a pass
            passes.seconds(rows)
        return _measure(passes, sizes, time.perf_counter() + seconds)
    finally:
        passes.free()


def _measure(passes: Timed, sizes: list[int], until: float) -> Timings:
    context = min(CONTEXT, passes.room - max(sizes))
    seen: dict[tuple[int, int], list[float]] = {}
    # A short pass and a long one over the context tell what a request's and what a row's view of it cost.
    wide = max(n for n in sizes if n <= 8)
    wanted = (
        [(n, 0) for n in sizes[:4]]
        + [(1, context), (wide, context)] * (context > 0)
        + [(n, 0) for n in sizes[4:]]
    )
    for _ in range(MOST_SWEEPS):
        for size, cached in wanted:
            if time.perf_counter() > until and len(seen) >= min(2, len(sizes)):
                break
            seen.setdefault((size, cached), []).append(passes.seconds(size, cached))
    found = {key: min(times) for key, times in seen.items()}
    base: dict[int, float] = {}
    for size in sorted((size for size, cached in found if not cached), reverse=True):
        base[size] = min([found[size, 0], *base.values()])
    return Timings(dict(sorted(base.items())), *_slopes(found, base, wide, context))


def _slopes(
    found: dict[tuple[int, int], float], base: dict[int, float], wide: int, context: int
) -> tuple[float, float]:
    if (wide, context) not in found or wide == 1 or context == 0:
        return 0.0, 0.0
    one, many = ((found[n, context] - base[n]) / context for n in (1, wide))
    per_row = max((many - one) / (wide - 1), 0.0)
    return max(one - per_row, 0.0), per_row
