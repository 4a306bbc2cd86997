"""Attention over a paged KV cache under token trees: runs of rows over the positions that they see.

A row sees its request's cached prefix, its ancestors in this pass and itself, in position order. Invariant: a
score depends on a row and a position, a weight on all scores of its row, and a weighted sum is one chain over
the row's positions in order, or a sum of integers. So the bits depend on the context alone: which rows go
side by side and which thread does what changes nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from paceline.cpu import tiles
from paceline.cpu import value_tiles as rounded
from paceline.cpu.compile import piece
from paceline.cpu.lanes import LANES, LOG2_E, float_pointer, int_pointer
from paceline.cpu.matmul import even_height
from paceline.cpu.rows import fill
from paceline.cpu.tiles import PLACE, SCORED, VALUE_SCALE

BLOCK = 16  # positions whose keys all KV heads read before the next: neighbours are read at one time
FLOAT_CHUNK = 64  # positions whose values are added before the next columns' turn: the nearest cache has them


class Attention(NamedTuple):
    """A layer's, and the memory of what is computed, KV head by KV head."""

    b: Any  # forward.Pass
    m: Any  # layer.Model
    w: Any  # layer.Work
    paths: int  # addresses, of this kind of layers
    places: int
    window: int  # positions that a row sees; 0: all
    sinks: int  # address of a score more for each query head; 0: none
    keys: int  # address of the layer's cached keys
    values: int
    group: int  # query heads of a KV head
    strips: int  # of LANES columns of a head
    scores: int  # address of [KV heads, rows, group, span], then weights: floats, or two bytes each
    scales: int  # address of [KV heads, rows, span]: of rounded values
    totals: int  # address of [KV heads, rows, group]: sums of weights
    mixed: int  # address of [KV heads, rows, group, 2, dim]: sums by high and low bytes, or of floats
    rows: int  # in these four: 0 if only one KV head of a run is there


class Run(NamedTuple):
    """Rows of one request side by side."""

    first: int  # row
    last: int  # and one
    start: int  # the first row that has memory
    prefix: int  # cached positions
    places: int  # address of their offsets


@piece
def run_of(a, first, most):  # type: ignore[no-untyped-def]
    """Rows of one request from `first` on, `most` of them at most."""
    b = a.b
    requests = carray(int_pointer(b.request_of), b.rows)
    request, last = requests[first], first + 1
    while last < b.rows and last - first < most and requests[last] == request:
        last += 1
    prefix = carray(int_pointer(b.prefix_lens), b.num_requests)[request]
    places = a.places + request * b.max_blocks * b.block_size * PLACE
    return Run(first, last, 0 if a.rows else first, prefix, places)


@piece
def row_of(run, row):  # type: ignore[no-untyped-def]
    return Run(row, row + 1, run.start, run.prefix, run.places)


@piece
def seen_by(a, run, row):  # type: ignore[no-untyped-def]
    """The first position that a row sees, and its own and one."""
    paths = carray(int_pointer(a.paths), (a.b.rows, a.b.rows + 1, 2))
    length = run.prefix + paths[row, a.b.rows, 0]
    return max(0, length - a.window) if a.window > 0 else 0, length


@piece
def starts_of(a, run):  # type: ignore[no-untyped-def]
    """The first position that some row sees, and the first that none sees only in part."""
    lowest = highest = seen_by(a, run, run.first)[0]
    for row in range(run.first + 1, run.last):
        start = seen_by(a, run, row)[0]
        lowest, highest = min(lowest, start), max(highest, start)
    return lowest, highest


@piece
def _at(a, run, kv_head):  # type: ignore[no-untyped-def]
    """Which query is the run's first in memory."""
    return (kv_head * a.rows + run.first - run.start) * a.group


@piece
def _places(a, run, first, last):  # type: ignore[no-untyped-def]
    """Where the places of positions from `first` on lie, and how far they lie there, at most to `last`."""
    if first < run.prefix:
        return run.places + first * PLACE, min(last, run.prefix)
    return a.paths + (run.first * (a.b.rows + 1) + first - run.prefix) * PLACE, last


@piece
def score(a, run, kv_heads, first, last):  # type: ignore[no-untyped-def]
    """Scores of positions first to last, which all rows see at the same places, for a range of KV heads."""
    m, stride, rows = a.m, a.b.span * 4, run.last - run.first
    while first < last:
        places, end = _places(a, run, first, min(first + BLOCK, last))
        for kv_head in range(kv_heads[0], kv_heads[1]):
            queries = a.w.queries + (kv_head * a.b.rows + run.first) * a.group * m.key_bytes
            at, keys, done = _at(a, run, kv_head), a.keys + kv_head * m.key_bytes, 0
            if m.is_rounded:  # the values' scales, for every row: `weigh` finds them side by side
                out = a.scales + at // a.group * stride + first * 4
                rounded.copy_scales(keys + m.dim + VALUE_SCALE, places, end - first, rows, out, stride)
            while done < rows * a.group:
                count = even_height(rows * a.group - done, SCORED)
                query, out = queries + done * m.key_bytes, a.scores + (at + done) * stride + first * 4
                if m.is_rounded:
                    tiles.score_rounded(count, query, keys, places, end - first, m.dim, out, stride)
                else:
                    tiles.score_floats(count, query, keys, places, end - first, m.dim, out, stride)
                done += count
        first = end


@piece
def weigh(a, run, row, head, start, length):  # type: ignore[no-untyped-def]
    """Scores of one query over positions start to length become weights, in sixteens. A sink is one score
    more, after the last position: it counts for the largest and the total, and no value is read for it."""
    query = _at(a, run, head // a.group) + (row - run.first) * a.group + head % a.group
    end = length + 1 if a.sinks != 0 else length
    first, last = start // LANES * LANES, (end + LANES - 1) // LANES * LANES
    turns, scale, total_at = (last - first) // LANES, np.float32(a.m.scale * LOG2_E), a.totals + query * 4
    scores_at, scales_at = a.scores + query * a.b.span * 4, a.scales + query // a.group * a.b.span * 4
    fill(scores_at, first, start, np.float32(tiles.LOWEST))
    fill(scores_at, length, last, np.float32(tiles.LOWEST))
    if a.sinks != 0:  # it is a logit, and scores are still to be scaled
        sink = carray(float_pointer(a.sinks), a.m.num_heads)[head] / np.float32(a.m.scale)
        fill(scores_at, length, end, sink)
    if not a.m.is_rounded:
        tiles.weigh_lanes(scores_at + first * 4, turns, scale, total_at)
        return
    fill(scales_at, first, start)
    fill(scales_at, length, last)
    out = scores_at + first * 2
    rounded.weigh_rounded(scores_at + first * 4, scales_at + first * 4, turns, scale, out, total_at)


@piece
def _mix(a, run, columns, first, last):  # type: ignore[no-untyped-def]
    """Add the values of positions first to last to the sums of all rows, for a range of strips of columns."""
    m, stride, total = a.m, a.b.span * 4, (run.last - run.first) * a.group
    turned = rounded.turned_memory()
    chunk, most = (rounded.CHUNK, rounded.ADDED) if m.is_rounded else (FLOAT_CHUNK, tiles.MIXED)
    while first < last:
        places, end = _places(a, run, first, min(first + chunk, last))
        for strip in range(columns[0], columns[1]):
            query, done, turns = _at(a, run, strip // a.strips), 0, 0
            values = a.values + strip * LANES * (m.value_bytes // m.dim)
            if m.is_rounded:  # values are turned once for all queries
                turns = rounded.turn(values, places + 8, first, end, turned, strip % 2 * 2)
            while done < total:
                count, weights = even_height(total - done, most), a.scores + (query + done) * stride
                out = a.mixed + (query + done) * m.dim * 8 + strip % a.strips * LANES * 4
                if m.is_rounded:
                    at = weights + first // rounded.TURN * rounded.TURN * 2
                    rounded.add_turned(count, at, stride, turned, turns, out, m.dim * 8)
                else:
                    at = weights + first * 4
                    tiles.mix_floats(count, at, stride, values, places + 8, end - first, out, m.dim * 8)
                done += count
        first = end


@piece
def _finish(a, run, strip):  # type: ignore[no-untyped-def]
    """Weighted means of a strip of columns, into the input of the next product."""
    m, kv_head, column = a.m, strip // a.strips, strip % a.strips * LANES
    for query in range((run.last - run.first) * a.group):
        own = _at(a, run, kv_head) + query
        row, head = run.first + query // a.group, kv_head * a.group + query % a.group
        at = a.mixed + own * m.dim * 8 + column * 4
        to = a.w.attended + (row * a.w.widest + head * m.dim + column) * 4
        shrink = np.float32(1) / carray(float_pointer(a.totals), own + 1)[own]
        if m.is_rounded:
            rounded.combine(at, m.dim * 4, shrink, to)
            continue
        sums, out = carray(float_pointer(at), LANES), carray(float_pointer(to), LANES)
        for i in range(LANES):
            out[i] = sums[i] * shrink


@piece
def mix_rows(a, run, common, columns):  # type: ignore[no-untyped-def]
    """Each row's positions in order: those that only some rows still see, that all see, that are its own."""
    highest = min(starts_of(a, run)[1], common)
    for strip in range(columns[0], columns[1]):
        query, column = _at(a, run, strip // a.strips), strip % a.strips * LANES * 4
        for part in range(2 * query, 2 * (query + (run.last - run.first) * a.group)):
            fill(a.mixed + part * a.m.dim * 4 + column, 0, LANES)
    for row in range(run.first, run.last):
        _mix(a, row_of(run, row), columns, seen_by(a, run, row)[0], highest)
    _mix(a, run, columns, highest, common)
    for row in range(run.first, run.last):
        start, length = seen_by(a, run, row)
        _mix(a, row_of(run, row), columns, max(common, start), length)
    for strip in range(columns[0], columns[1]):
        _finish(a, run, strip)
