"""What passes of a model take here and now: some rows over a cached context, timed; nothing is committed.

Invariant: a pass follows right after another, as in decoding, and of several alike the quickest counts. One
that was slower than one over more rows is taken to have been disturbed.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from paceline.core.types import BLOCK_SIZE, Cached, Pick, Segment
from paceline.runtime.executor import LocalExecutor

ROWS = (1, 2, 4, 8, 3, 6, 16, 12)  # the first ones say most, should time run out
ROWS_ON_GPU = (1, 8, 64, 256)  # between them a pass changes little
CONTEXT = 512  # over which a pass is timed to know what cached tokens cost
MOST_SWEEPS = 5
LEAST, LEAST_OF_EXPERTS = 2, 4  # row counts that are timed at any rate: further rows wake further experts
STRIDE = 7  # between the made-up tokens, so that their embeddings lie apart


class Timings(NamedTuple):
    seconds: dict[int, float]  # rows -> of a pass with nearly nothing cached
    per_request_token: float  # of each cached token of a request
    per_row_token: float  # of each cached token, for each row that sees it


class Timed:
    """Passes of requests whose context is made up: what lies in their blocks does not change their time."""

    def __init__(self, executor: LocalExecutor, most_tokens: int, num_requests: int = 1) -> None:
        self._executor, self._caches = executor, [Cached() for _ in range(num_requests)]
        free = executor.kv.num_free // num_requests * BLOCK_SIZE
        self.room = min(most_tokens, free, executor.config.max_context)  # tokens of each request
        for cache in self._caches:
            is_reserved = executor.kv.reserve(cache, self.room)
            assert is_reserved, "as many blocks as are free can be had"
            executor.memory.touch(cache.blocks)

    def seconds(
        self, rows: int, context: int = 0, num_logits: int | None = None, num_passes: int = 1
    ) -> float:
        """Of one pass, with the logits of all rows or of the last ones. With several passes: of each, when a
        device is given the next before it has ended the last."""
        segments, vocab_size = [], self._executor.config.vocab_size
        for index, cache in enumerate(self._caches):
            tokens = [(STRIDE * (index * rows + i)) % vocab_size for i in range(rows)]
            before, *after = cache.states[:2] or [0]  # versions overwrite each other
            view = Cached(cache.blocks, context, states=[before, *(after * rows)] if after else [])
            segments.append(Segment(tokens, view, None, num_logits or rows, Pick(0.0, 0)))
        started = time.perf_counter()
        for _ in range(num_passes):
            output = self._executor.forward(segments)
        len(output.picked or output.logits[-1:, -1:].cpu())  # a device may still be at it
        return (time.perf_counter() - started) / num_passes

    def free(self) -> None:
        for cache in self._caches:
            self._executor.kv.free(cache)


def measure(executor: LocalExecutor, seconds: float = 0.3) -> Timings:
    """As far as the time goes: every row count where passes are short, the smallest where they are long."""
    rows_of_interest = ROWS if executor.device.type == "cpu" else ROWS_ON_GPU
    passes = Timed(executor, CONTEXT + max(rows_of_interest))
    seen: dict[tuple[int, int], list[float]] = {}
    try:
        sizes = [n for n in rows_of_interest if n <= passes.room]
        for rows in sizes[:4]:  # what is compiled on first use is no cost of a pass
            passes.seconds(rows)
        until, has_experts = time.perf_counter() + seconds, executor.config.experts is not None
        least = min(LEAST_OF_EXPERTS if has_experts else LEAST, len(sizes))
        context, wide = min(CONTEXT, passes.room - max(sizes)), max(n for n in sizes if n <= 8)
        # A short pass and a long one over the context tell what a request's and what a row's view of it cost.
        cached_passes = [(1, context), (wide, context)] if context else []
        wanted = [*((n, 0) for n in sizes[:4]), *cached_passes, *((n, 0) for n in sizes[4:])]
        for size, cached in wanted * MOST_SWEEPS:
            if time.perf_counter() > until and len(seen) >= least:
                break
            seen.setdefault((size, cached), []).append(passes.seconds(size, cached))
    finally:
        passes.free()
    found = {key: min(times) for key, times in seen.items()}
    base: dict[int, float] = {}
    for size in sorted((size for size, cached in found if not cached), reverse=True):
        base[size] = min([found[size, 0], *base.values()])
    per_request = per_row = 0.0
    if (wide, context) in found and wide > 1 and context:
        one, many = ((found[n, context] - base[n]) / context for n in (1, wide))
        per_row = max((many - one) / (wide - 1), 0.0)
        per_request = max(one - per_row, 0.0)
    return Timings(dict(sorted(base.items())), per_request, per_row)
