"""Flattens the requests of one pass into a Batch: a prompt is many rows, a draft a few, plain decoding 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.core.types import (
    BLOCK_SIZE,
    Batch,
    Cached,
    Columns,
    ColumnsOf,
    Draft,
    Moves,
    Pick,
    ScheduledRequest,
    Segment,
)  # fmt: skip


def segment_of(one: ScheduledRequest, draft: Draft | None) -> Segment:
    """A request's rows: its known tokens, then the nodes of its draft, which hangs from the last of them."""
    request, cache = one.request, one.request.cache
    known = request.tokens[cache.num_cached : cache.num_cached + one.num_new]
    if draft is None:
        return Segment(known, cache, None, 0, None, one.num_scored)
    if len(draft.tree.tokens) == 1:
        return Segment(known, cache, None, 1, request.pick, one.num_scored)
    root, pick = one.num_new - 1, None if draft.q and request.is_sampled else request.pick
    parents = [*range(-1, root - 1), *(root + parent for parent in draft.tree.parents)]
    return Segment([*known, *draft.tree.tokens[1:]], cache, parents, len(draft.tree.tokens), pick)


def build(segments: Sequence[Segment], device: Any = "cpu", moves: Moves | None = None) -> Batch:
    """Slots for every row must have been reserved."""
    columns: ColumnsOf[list[int]] = ColumnsOf([], [], [], [], [], [0], [], [], [], [], [])
    ids, positions, slots, parents, request_of, starts, tables, prefixes, rows, _, _ = columns
    picks: list[Pick] | None = []
    width = max((len(segment.cache.blocks) for segment in segments), default=0) or 1
    zeros = [0] * width
    for index, (tokens, cache, local, num_logits, pick, num_scored) in enumerate(segments):
        first, count, base = len(ids), len(tokens), cache.num_cached
        ids += tokens
        if count == 1:  # by far the commonest
            positions.append(base)
            slots.append(cache.blocks[base // BLOCK_SIZE] * BLOCK_SIZE + base % BLOCK_SIZE)
            parents.append(-1)
            request_of.append(index)
        else:
            depths: list[int] = []
            for parent in range(-1, count - 1) if local is None else local:
                depths.append(0 if parent < 0 else depths[parent] + 1)
                parents.append(-1 if parent < 0 else first + parent)
            positions += (base + depth for depth in depths)
            request_of += [index] * count
            places = range(base, base + count)
            slots += [cache.blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in places]
        assert len(slots) == len(parents) == len(ids), "one parent a row"
        starts.append(first + count)
        prefixes.append(base)
        tables += cache.blocks
        tables += zeros[len(cache.blocks) :]
        rows += range(first + count - num_logits - num_scored, first + count)
        if cache.states:
            _add_states(columns, cache, range(first, first + count), max(num_logits, 1))
        if num_logits + num_scored and picks is not None:
            if pick is None:  # one row that needs more than a pick: the host chooses everywhere
                picks = None
            else:
                picks += [pick] * num_logits
    return Batch(columns, device, picks or None, moves)


def _add_states(columns: Columns, cache: Cached, rows: range, num_kept: int) -> None:
    """Each of the last `num_kept` rows leaves its state: the last known one and what was drafted after it."""
    first_kept, (before, *slots) = rows.stop - num_kept, cache.states
    for row in rows:
        parent = columns.parents[row]
        columns.states_in.append(before if parent < 0 else columns.states_out[parent])
        columns.states_out.append(slots[row - first_kept] if row >= first_kept else -1)
    if cache.snapshot is not None and cache.num_cached <= cache.snapshot[0] < cache.num_cached + len(rows):
        row = rows.start + cache.snapshot[0] - cache.num_cached
        if columns.states_out[row] < 0:
            columns.states_out[row] = cache.snapshot[1]
            # what follows it is in this pass, right after it
