"""Flattens the requests of one pass into a Batch. Prefill is a longer query, a draft is a few more rows, plain decoding is one row."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.runtime.kv_cache import BLOCK_SIZE, KvCache
from paceline.types import Batch, Columns, Draft, Pick, Request, Segment


def segment_of(request: Request, num_new: int, draft: Draft | None, pick: Pick | None = None) -> Segment:
    """A request's rows: `num_new` known tokens, then the nodes of its draft, which hangs from the last known token."""
    start = request.cache.num_cached
    known = request.tokens[start : start + num_new]
    if draft is None:
        return Segment(known, request.cache, None, num_logits=0)
    root = num_new - 1
    before_root = list(range(-1, root - 1))
    return Segment(
        [*known, *draft.tree.tokens[1:]],
        request.cache,
        before_root + [root + p for p in draft.tree.parents],
        num_logits=len(draft.tree.tokens),
        pick=pick,
    )


def build(segments: Sequence[Segment], kv: KvCache) -> Batch:
    """Slots for every row must have been reserved."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    parents: list[int] = []
    request_of: list[int] = []
    starts = [0]
    rows: list[int] = []
    for index, segment in enumerate(segments):
        first, count, base = len(ids), len(segment.tokens), segment.cache.num_cached
        local = segment.parents if segment.parents is not None else range(-1, count - 1)
        assert len(local) == count, "one parent a row"
        depths: list[int] = []
        for parent in local:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        ids.extend(segment.tokens)
        positions.extend(base + d for d in depths)
        slots.extend(kv.slots(segment.cache, base, base + count))
        parents.extend(-1 if p < 0 else first + p for p in local)
        request_of.extend([index] * count)
        starts.append(len(ids))
        rows.extend(range(len(ids) - segment.num_logits, len(ids)))
    width = max((len(s.cache.blocks) for s in segments), default=0) or 1
    tables = [block for s in segments for block in (*s.cache.blocks, *[0] * (width - len(s.cache.blocks)))]
    prefixes = [s.cache.num_cached for s in segments]
    columns = Columns(ids, positions, slots, parents, request_of, starts, tables, prefixes, rows)
    return Batch(columns, BLOCK_SIZE, kv.data.device, _picks(segments))


def _picks(segments: Sequence[Segment]) -> list[Pick] | None:
    """One a wanted row, if every segment that wants logits says how its tokens are chosen."""
    picks: list[Pick] = []
    for segment in segments:
        if segment.num_logits and segment.pick is None:
            return None
        if segment.pick is not None:
            picks.extend([segment.pick] * segment.num_logits)
    return picks or None
