"""How threads share attention: of few rows positions, then heads, then columns; of many the rows.

Invariant: both ways are made of the same chains (paged.py), so they give the same bits.
"""

from __future__ import annotations

from numba import carray

from paceline.cpu.compile import piece
from paceline.cpu.key_tiles import VALUE_SCALE, round_head, round_key
from paceline.cpu.lanes import LANES, int_pointer
from paceline.cpu.layer import turn_head
from paceline.cpu.paged import (
    BLOCK,
    Run,
    clear,
    common_length,
    finish,
    is_rounded,
    length_of,
    mix,
    row_of,
    run_of,
    score,
    start_of,
    starts_of,
    value_bytes,
    weigh,
)
from paceline.cpu.rows import copy
from paceline.cpu.sync import barrier, range_of
from paceline.cpu.value_tiles import round_value

FEW_ROWS = 16  # up to this, the positions of a context are shared out; with more, the rows are
TOGETHER = 4  # of many rows, those that share what is read


@piece
def place(share, b, m, layer, w, keys, values):  # type: ignore[no-untyped-def]
    """Norm and rotate queries and keys; keys and values go into the cache, queries to w.queries."""
    positions, slots = carray(int_pointer(b.positions), b.rows), carray(int_pointer(b.slots), b.rows)
    units, dim, group = m.num_heads + 2 * m.num_kv_heads, m.dim, m.num_heads // m.num_kv_heads
    first, last = range_of(share, b.rows * units)
    for item in range(first, last):
        row, unit = item // units, item % units
        here, slot = w.wide + (row * layer.qkv.n + unit * dim) * 4, slots[row] * m.num_kv_heads
        if unit < m.num_heads:
            turn_head(m, layer, layer.q_norm, here, positions[row])
            query = (unit // group * b.rows + row) * group + unit % group
            _keep_head(m, here, w.queries + query * m.key_bytes, 1)
        elif unit < m.num_heads + m.num_kv_heads:
            turn_head(m, layer, layer.k_norm, here, positions[row])
            _keep_head(m, here, keys + (slot + unit - m.num_heads) * m.key_bytes, 0)
        else:
            head = slot + unit - m.num_heads - m.num_kv_heads
            to, key = values + head * value_bytes(m), keys + head * m.key_bytes  # which has the value's scale
            if is_rounded(m):
                round_value(here, dim, to, key + dim + VALUE_SCALE)
            else:
                copy(here, to, dim)


@piece
def _keep_head(m, source, to, has_sums):  # type: ignore[no-untyped-def]
    if not is_rounded(m):
        copy(source, to, m.dim)
    elif has_sums:
        round_head(source, m.dim, to)
    else:
        round_key(source, m.dim, to)


@piece
def attend(share, b, m, layer, w, keys, values):  # type: ignore[no-untyped-def]
    """From queries and the cache to `ready`. All threads must have placed what is theirs."""
    if b.rows > FEW_ROWS:
        _attend_by_rows(share, b, m, layer.window, w, keys, values)
        return
    _share_scores(share, b, m, layer.window, w, keys)
    barrier(share)
    _share_weights(share, b, m, layer.window, w)
    barrier(share)
    _share_columns(share, b, m, layer.window, w, values)


@piece
def _blocks(b, w, run, window):  # type: ignore[no-untyped-def]
    """The first position of the prefix that a row sees, rounded down, and the number of blocks from there."""
    low = starts_of(b, w, run, window)[0] // BLOCK * BLOCK
    return low, max(0, (run.prefix - low + BLOCK - 1) // BLOCK)


@piece
def _share_scores(share, b, m, window, w, keys):  # type: ignore[no-untyped-def]
    """A thread takes a stretch of all prefixes' blocks, weighed by rows, and some rows' own positions."""
    work, row = 0, 0
    while row < b.rows:
        run = run_of(b, w, row, b.rows)
        work, row = work + _blocks(b, w, run, window)[1] * (run.last - run.first), run.last
    begin, end = range_of(share, work)
    heads, row, before = (0, m.num_kv_heads), 0, 0
    while row < b.rows:
        run = run_of(b, w, row, b.rows)
        low, blocks = _blocks(b, w, run, window)
        count = run.last - run.first
        # blocks that begin in this thread's stretch of the work
        first = min(max((begin - before + count - 1) // count, 0), blocks)
        last = min(max((end - before + count - 1) // count, 0), blocks)
        score(b, m, w, run, heads, low + first * BLOCK, min(low + last * BLOCK, run.prefix), keys)
        for own in range(run.first, run.last):
            if own % share.threads == share.part:
                length = length_of(b, w, run, own)
                start = max(run.prefix, start_of(window, length))
                score(b, m, w, row_of(run, own), heads, start, length, keys)
        before, row = before + blocks * count, run.last


@piece
def _share_weights(share, b, m, window, w):  # type: ignore[no-untyped-def]
    """A thread takes a stretch of the queries, KV head by KV head, most of whose values it will add up."""
    group, row = m.num_heads // m.num_kv_heads, 0
    while row < b.rows:
        run = run_of(b, w, row, b.rows)
        count = (run.last - run.first) * group
        first, last = range_of(share, count * m.num_kv_heads)
        for item in range(first, last):
            own, head = run.first + item % count // group, item // count * group + item % group
            length = length_of(b, w, run, own)
            weigh(b, m, run, own, head, start_of(window, length), length)
        row = run.last


@piece
def _share_columns(share, b, m, window, w, values):  # type: ignore[no-untyped-def]
    """A thread takes some columns of all KV heads' values."""
    columns, row = range_of(share, m.num_kv_heads * m.dim // LANES), 0
    while row < b.rows:
        run = run_of(b, w, row, b.rows)
        _mix_rows(b, m, w, run, run.prefix, window, columns, values)
        row = run.last


@piece
def _mix_rows(b, m, w, run, common, window, columns, values):  # type: ignore[no-untyped-def]
    """Each row's positions in order: those that only some rows still see, that all see, that are its own."""
    highest = min(starts_of(b, w, run, window)[1], common)
    for strip in range(columns[0], columns[1]):
        clear(m, run, strip)
    for row in range(run.first, run.last):
        mix(b, m, w, row_of(run, row), columns, start_of(window, length_of(b, w, run, row)), highest, values)
    mix(b, m, w, run, columns, highest, common, values)
    for row in range(run.first, run.last):
        length = length_of(b, w, run, row)
        mix(b, m, w, row_of(run, row), columns, max(common, start_of(window, length)), length, values)
    for strip in range(columns[0], columns[1]):
        finish(m, w, run, strip)


@piece
def _attend_by_rows(share, b, m, window, w, keys, values):  # type: ignore[no-untyped-def]
    """A thread takes a KV head of a few rows, every so many: later rows of a prompt see more."""
    group, item = m.num_heads // m.num_kv_heads, 0
    own = TOGETHER * group * share.part
    scores, totals, mixed = w.scores + own * b.span * 4, w.totals + own * 4, w.mixed + own * m.dim * 8
    scales = w.value_scales + TOGETHER * share.part * b.span * 4
    for kv_head in range(m.num_kv_heads):
        row = 0
        while row < b.rows:
            shared = run_of(b, w, row, TOGETHER)
            if item % share.threads == share.part:
                last, prefix, places = shared.last, shared.prefix, shared.places
                run = Run(row, last, prefix, places, scores, scales, totals, mixed, 0, row)
                _attend_run(b, m, window, w, run, kv_head, keys, values)
            item, row = item + 1, shared.last


@piece
def _attend_run(b, m, window, w, run, kv_head, keys, values):  # type: ignore[no-untyped-def]
    heads, group, strips = (kv_head, kv_head + 1), m.num_heads // m.num_kv_heads, m.dim // LANES
    common = common_length(b, w, run)
    score(b, m, w, run, heads, starts_of(b, w, run, window)[0] // BLOCK * BLOCK, common, keys)
    for row in range(run.first, run.last):
        length = length_of(b, w, run, row)
        start = start_of(window, length)
        score(b, m, w, row_of(run, row), heads, max(common, start), length, keys)
        for head in range(group):
            weigh(b, m, run, row, kv_head * group + head, start, length)
    _mix_rows(b, m, w, run, common, window, (kv_head * strips, (kv_head + 1) * strips), values)
