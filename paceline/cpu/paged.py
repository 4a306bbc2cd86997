"""Attention over a paged KV cache under token trees: which positions a row sees and where they lie, and runs
of rows over them.

A row sees its request's cached prefix, its ancestors in this pass and itself, in position order, whatever
else is in the pass. Invariant: a score depends on a row and a position, a weight on all scores of its row,
and a weighted sum is one chain over the row's positions in order, or a sum of integers. So the bits depend on
the context alone: which rows go side by side and which thread does what changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray

from paceline.cpu.compile import piece
from paceline.cpu.key_tiles import VALUE_SCALE, score_rounded
from paceline.cpu.lanes import LANES, LOG2_E, float_pointer, int_pointer
from paceline.cpu.rows import fill
from paceline.cpu.tiles import LOWEST, MIXED, PLACE, SCORED, SPAN, mix_tile, score_tile, weigh_lanes
from paceline.cpu.value_tiles import (
    ADDED,
    CHUNK,
    TURN,
    add_turned,
    combine,
    copy_scales,
    stack_memory,
    turn_some,
    turn_values,
    weigh_rounded,
)

BLOCK = 16  # positions whose keys all KV heads read before the next: neighbours are read at one time
FLOAT_CHUNK = (
    64  # positions whose values are added before the next columns' turn: they stay in the nearest cache
)
TURNED = (CHUNK + TURN) * LANES  # bytes of a chunk's rounded values, sixteen columns, wherever it begins


class Run(NamedTuple):
    """Rows of one request side by side, and the memory of what is computed for them, KV head by KV head."""

    first: int  # row
    last: int  # and one
    prefix: int  # cached positions
    places: int  # address of their offsets
    scores: int  # address of [KV heads, rows, group, span], then weights: floats, or two bytes each
    scales: int  # address of [KV heads, rows, span]: of rounded values
    totals: int  # address of [KV heads, rows, group]: sums of weights
    mixed: int  # address of [KV heads, rows, group, dim]; of rounded values [..., 2, dim]
    rows: int  # in these four: 0 if only one KV head is there
    start: int  # their first row


@piece
def is_rounded(m):  # type: ignore[no-untyped-def]
    """Whether queries, keys and values are integers with scales."""
    return m.key_bytes < m.dim * 4


@piece
def value_bytes(m):  # type: ignore[no-untyped-def]
    """Of a head of a cached value."""
    return m.dim if is_rounded(m) else m.dim * 4


@piece
def _sum_bytes(m):  # type: ignore[no-untyped-def]
    """Of a query's sums."""
    return m.dim * 8 if is_rounded(m) else m.dim * 4


@piece
def trace_paths(b, m, paths_at):  # type: ignore[no-untyped-def]
    """paths[row, :depth]: places of its ancestors in this pass and its own; paths[row, rows, 0]: depth."""
    parents, slots = carray(int_pointer(b.parents), b.rows), carray(int_pointer(b.slots), b.rows)
    paths = carray(int_pointer(paths_at), (b.rows, b.rows + 1, 2))
    for row in range(b.rows):
        parent, depth = parents[row], 0
        if parent >= 0:
            depth = paths[parent, b.rows, 0]
            for i in range(depth):
                paths[row, i, 0], paths[row, i, 1] = paths[parent, i, 0], paths[parent, i, 1]
        paths[row, depth, 0] = slots[row] * m.num_kv_heads * m.key_bytes
        paths[row, depth, 1] = slots[row] * m.num_kv_heads * value_bytes(m)
        paths[row, b.rows, 0] = depth + 1


@piece
def expand_tables(share, b, m, places_at):  # type: ignore[no-untyped-def]
    """places[request, position]: offsets of the cached prefixes' keys and values."""
    room = b.max_blocks * b.block_size
    lengths = carray(int_pointer(b.prefix_lens), b.num_requests)
    of_keys, of_values = m.num_kv_heads * m.key_bytes, m.num_kv_heads * value_bytes(m)
    for request in range(share.part, b.num_requests, share.threads):
        table = carray(int_pointer(b.block_tables + request * b.max_blocks * 8), b.max_blocks)
        places = carray(int_pointer(places_at + request * room * PLACE), (room, 2))
        for position in range(lengths[request]):
            slot = table[position // b.block_size] * b.block_size + position % b.block_size
            places[position, 0], places[position, 1] = slot * of_keys, slot * of_values


@piece
def run_of(b, w, first, most):  # type: ignore[no-untyped-def]
    """Rows of one request from `first` on, `most` of them at most, in the memory that all threads share."""
    requests = carray(int_pointer(b.request_of), b.rows)
    request, last = requests[first], first + 1
    while last < b.rows and last - first < most and requests[last] == request:
        last += 1
    prefix = carray(int_pointer(b.prefix_lens), b.num_requests)[request]
    places = w.places + request * b.max_blocks * b.block_size * PLACE
    return Run(first, last, prefix, places, w.scores, w.value_scales, w.totals, w.mixed, b.rows, 0)


@piece
def row_of(run, row):  # type: ignore[no-untyped-def]
    scores, scales, totals, mixed = run.scores, run.scales, run.totals, run.mixed
    return Run(row, row + 1, run.prefix, run.places, scores, scales, totals, mixed, run.rows, run.start)


@piece
def length_of(b, w, run, row):  # type: ignore[no-untyped-def]
    """How many positions a row sees, itself included."""
    return run.prefix + carray(int_pointer(w.paths), (b.rows, b.rows + 1, 2))[row, b.rows, 0]


@piece
def start_of(window, length):  # type: ignore[no-untyped-def]
    """The first position a row sees."""
    return max(0, length - window) if window > 0 else 0


@piece
def starts_of(b, w, run, window):  # type: ignore[no-untyped-def]
    """The first position that some row sees, and the first that none sees only in part."""
    lowest = highest = start_of(window, length_of(b, w, run, run.first))
    for row in range(run.first + 1, run.last):
        start = start_of(window, length_of(b, w, run, row))
        lowest, highest = min(lowest, start), max(highest, start)
    return lowest, highest


@piece
def common_length(b, w, run):  # type: ignore[no-untyped-def]
    """How many positions all rows see: the prefix, and in a chain all that its first row sees."""
    parents = carray(int_pointer(b.parents), b.rows)
    for row in range(run.first + 1, run.last):
        if parents[row] != row - 1:
            return run.prefix
    return length_of(b, w, run, run.first)


@piece
def _at(run, m, kv_head):  # type: ignore[no-untyped-def]
    """Which query is the run's first in memory of its own."""
    return (kv_head * run.rows + run.first - run.start) * (m.num_heads // m.num_kv_heads)


@piece
def _places(b, w, run, first, last):  # type: ignore[no-untyped-def]
    """Where the places of positions from `first` on lie, and how far they lie there, at most to `last`."""
    if first < run.prefix:
        return run.places + first * PLACE, min(last, run.prefix)
    return w.paths + (run.first * (b.rows + 1) + first - run.prefix) * PLACE, last


@piece
def _score_queries(m, count, queries, keys, places, positions, out, stride):  # type: ignore[no-untyped-def]
    """`count` queries, SCORED at most, over some positions."""
    whole = positions // SPAN * SPAN
    if is_rounded(m):
        for p in range(0, whole, SPAN):
            score_rounded(SPAN, count, queries, keys, places + p * PLACE, m.dim, out + p * 4, stride)
        for p in range(whole, positions):
            score_rounded(1, count, queries, keys, places + p * PLACE, m.dim, out + p * 4, stride)
    else:
        for p in range(0, whole, SPAN):
            score_tile(SPAN, count, queries, keys, places + p * PLACE, m.dim, out + p * 4, stride)
        for p in range(whole, positions):
            score_tile(1, count, queries, keys, places + p * PLACE, m.dim, out + p * 4, stride)


@piece
def _keep_scales(b, m, run, kv_head, keys, places, first, positions):  # type: ignore[no-untyped-def]
    """Of some positions' values, for every row of the run: `weigh` finds them side by side."""
    row, rows = kv_head * run.rows + run.first - run.start, run.last - run.first
    whole = positions // SPAN * SPAN
    scale, out = keys + m.dim + VALUE_SCALE, run.scales + (row * b.span + first) * 4
    for p in range(0, whole, SPAN):
        copy_scales(SPAN, scale, places + p * PLACE, rows, out + p * 4, b.span * 4)
    for p in range(whole, positions):
        copy_scales(1, scale, places + p * PLACE, rows, out + p * 4, b.span * 4)


@piece
def score(b, m, w, run, kv_heads, first, last, keys):  # type: ignore[no-untyped-def]
    """Scores of positions first to last, which all rows see at the same places, for a range of KV heads."""
    group, stride = m.num_heads // m.num_kv_heads, b.span * 4
    total = (run.last - run.first) * group
    while first < last:
        places, end = _places(b, w, run, first, min(first + BLOCK, last))
        for kv_head in range(kv_heads[0], kv_heads[1]):
            queries = w.queries + (kv_head * b.rows + run.first) * group * m.key_bytes
            to, done = run.scores + _at(run, m, kv_head) * stride + first * 4, 0
            key = keys + kv_head * m.key_bytes
            if is_rounded(m):
                _keep_scales(b, m, run, kv_head, key, places, first, end - first)
            while done < total:
                tiles = (total - done + SCORED - 1) // SCORED
                count = (total - done + tiles - 1) // tiles
                query, out = queries + done * m.key_bytes, to + done * stride
                _score_queries(m, count, query, key, places, end - first, out, stride)
                done += count
        first = end


@piece
def _surround(at, first, start, length, last, value):  # type: ignore[no-untyped-def]
    """A value before and after what lies in floats start to length, from `first` to `last`."""
    x = carray(float_pointer(at), last)
    for i in range(first, start):
        x[i] = value
    for i in range(length, last):
        x[i] = value


@piece
def weigh(b, m, run, row, head, start, length):  # type: ignore[no-untyped-def]
    """Scores of one query over positions start to length become weights, in sixteens."""
    group = m.num_heads // m.num_kv_heads
    query = _at(run, m, head // group) + (row - run.first) * group + head % group
    first, last = start // LANES * LANES, (length + LANES - 1) // LANES * LANES
    _surround(run.scores + query * b.span * 4, first, start, length, last, np.float32(LOWEST))
    at, scale = run.scores + (query * b.span + first) * 4, np.float32(m.scale * LOG2_E)
    if not is_rounded(m):
        weigh_lanes(at, (last - first) // LANES, scale, run.totals + query * 4)
        return
    scales_at = run.scales + query // group * b.span * 4
    _surround(scales_at, first, start, length, last, np.float32(0))
    out = run.scores + query * b.span * 4 + first * 2
    weigh_rounded(at, scales_at + first * 4, (last - first) // LANES, scale, out, run.totals + query * 4)


@piece
def _turn(values, places, first, last, out, asked):  # type: ignore[no-untyped-def]
    """Sixteen columns of positions first to last, and zeros before and after, from one multiple of TURN to
    another; returns the turns. `places` are the values' offsets from position `first` on."""
    begin, turns = first // TURN * TURN, (last + TURN - 1) // TURN - first // TURN
    whole, end = (first + 3) // 4 * 4, last // 4 * 4
    for p in range(begin, min(whole, begin + TURN * turns), 4):
        turn_some(values, places + (p - first) * PLACE, first - p, last - p, out + (p - begin) * LANES)
    if whole < end:
        to = out + (whole - begin) * LANES
        turn_values(values, places + (whole - first) * PLACE, (end - whole) // 4, to, asked)
    for p in range(max(whole, end), begin + TURN * turns, 4):
        turn_some(values, places + (p - first) * PLACE, 0, last - p, out + (p - begin) * LANES)
    return turns


@piece
def _mix_rounded(b, m, run, strip, first, last, values, places):  # type: ignore[no-untyped-def]
    """One strip of a chunk of positions. Their values are turned once for all queries."""
    turned, strips = stack_memory(TURNED), m.dim // LANES
    turns = _turn(values + strip * LANES, places, first, last, turned, strip % 2 * 2)
    query, done = _at(run, m, strip // strips), 0
    total = (run.last - run.first) * (m.num_heads // m.num_kv_heads)
    while done < total:
        count = min(ADDED, total - done)
        weights = run.scores + (query + done) * b.span * 4 + first // TURN * TURN * 2
        to = run.mixed + (query + done) * m.dim * 8 + strip % strips * LANES * 4
        add_turned(count, weights, b.span * 4, turned, turns, to, m.dim * 8)
        done += count


@piece
def mix(b, m, w, run, columns, first, last, values):  # type: ignore[no-untyped-def]
    """Add the values of positions first to last to the sums of all rows, for a range of strips of columns."""
    group, strips = m.num_heads // m.num_kv_heads, m.dim // LANES
    total = (run.last - run.first) * group
    while first < last:
        places, end = _places(b, w, run, first, min(first + (CHUNK if is_rounded(m) else FLOAT_CHUNK), last))
        for strip in range(columns[0], columns[1]):
            if is_rounded(m):
                _mix_rounded(b, m, run, strip, first, end, values, places + 8)
                continue
            query, done = _at(run, m, strip // strips), 0
            while done < total:
                tiles = (total - done + MIXED - 1) // MIXED
                count = (total - done + tiles - 1) // tiles
                weights = run.scores + ((query + done) * b.span + first) * 4
                to = run.mixed + ((query + done) * m.dim + strip % strips * LANES) * 4
                value, size = values + strip * LANES * 4, end - first
                mix_tile(count, weights, b.span * 4, value, places + 8, size, to, m.dim * 4)
                done += count
        first = end


@piece
def clear(m, run, strip):  # type: ignore[no-untyped-def]
    """Sums of a strip of columns begin at zero."""
    group, strips = m.num_heads // m.num_kv_heads, m.dim // LANES
    for query in range((run.last - run.first) * group):
        at = run.mixed + (_at(run, m, strip // strips) + query) * _sum_bytes(m) + strip % strips * LANES * 4
        for part in range(_sum_bytes(m) // (m.dim * 4)):
            fill(at + part * m.dim * 4, 0, LANES)


@piece
def finish(m, w, run, strip):  # type: ignore[no-untyped-def]
    """Weighted means of a strip of columns, into the input of the next product."""
    group, strips = m.num_heads // m.num_kv_heads, m.dim // LANES
    kv_head, column = strip // strips, strip % strips * LANES
    for query in range((run.last - run.first) * group):
        own = _at(run, m, kv_head) + query
        row, head = run.first + query // group, kv_head * group + query % group
        at = run.mixed + own * _sum_bytes(m) + column * 4
        to = w.ready + (row * w.widest + head * m.dim + column) * 4
        shrink = np.float32(1) / carray(float_pointer(run.totals), own + 1)[own]
        if is_rounded(m):
            combine(at, m.dim * 4, shrink, to)
            continue
        sums, out = carray(float_pointer(at), LANES), carray(float_pointer(to), LANES)
        for i in range(LANES):
            out[i] = sums[i] * shrink
