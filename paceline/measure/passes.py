"""Forward passes to be timed: some tokens over a cached context, again and again. Nothing is committed, so
every pass is the same.

Invariant: a pass of one token runs untimed before each timed one, as in decoding: the threads are awake and
the code is in the caches.
"""

from __future__ import annotations

import time

from paceline.core.types import Cached, Segment
from paceline.runtime.kv_cache import BLOCK_SIZE
from paceline.runtime.runner import Runner

STRIDE = 7  # between the made-up tokens, so that their embeddings lie apart


def tokens_of(vocab_size: int, count: int) -> list[int]:
    return [(STRIDE * i) % vocab_size for i in range(count)]


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


class Passes:
    """Passes of at most `widest` tokens after `context` cached ones."""

    def __init__(self, runner: Runner, context: int, widest: int) -> None:
        self._runner, self._cache = runner, Cached()
        tokens = tokens_of(runner.config.vocab_size, context + widest)
        assert runner.kv.reserve(self._cache, len(tokens)), "the caller made room in the cache"
        if context:
            runner.forward([Segment(tokens[:context], self._cache, None, 1)])
        self._cache.num_cached = context
        self._new = tokens[context:]

    def seconds(self, size: int, num_logits: int | None = None) -> float:
        """Of one pass over `size` tokens, with the logits of all or of the last `num_logits`."""
        segment = Segment(self._new[:size], self._cache, None, size if num_logits is None else num_logits)
        self._runner.forward([Segment(self._new[:1], self._cache, None, 1)])
        started = time.perf_counter()
        self._runner.forward([segment])
        return time.perf_counter() - started

    def free(self) -> None:
        self._runner.kv.free(self._cache)
