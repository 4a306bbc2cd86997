"""Where keys and values lie, and how threads share attention: of few rows positions, heads and then columns;
of many the rows.

Invariant: both ways are made of the same chains (paged.py), so they give the same bits.
"""

from __future__ import annotations

from numba import carray

from paceline.cpu.compile import piece
from paceline.cpu.lanes import LANES, float_pointer, int_pointer
from paceline.cpu.layer import turn_head
from paceline.cpu.paged import BLOCK, Attention, mix_rows, row_of, run_of, score, seen_by, starts_of, weigh
from paceline.cpu.rows import copy, normalize, times
from paceline.cpu.sync import barrier, range_of
from paceline.cpu.tiles import PLACE, VALUE_SCALE, round_head
from paceline.cpu.value_tiles import CHUNK, round_value

FEW_ROWS = 16  # up to this, the positions of a context are shared out; with more, the rows are
TOGETHER = 4  # of many rows, those that share what is read


@piece
def kept_of(b, w, kind):  # type: ignore[no-untyped-def]
    """Where paths and places of a kind of layers lie."""
    paths = w.paths + kind * (b.rows * (b.rows + 1) + 2 * CHUNK) * PLACE
    return paths, w.places + kind * (b.num_requests * b.max_blocks * b.block_size + 2 * CHUNK) * PLACE


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
        paths[row, depth, 1] = slots[row] * m.num_kv_heads * m.value_bytes
        paths[row, b.rows, 0] = depth + 1


@piece
def expand_tables(share, b, m, places_at):  # type: ignore[no-untyped-def]
    """places[request, position]: offsets of the cached prefixes' keys and values."""
    room = b.max_blocks * b.block_size
    lengths = carray(int_pointer(b.prefix_lens), b.num_requests)
    of_keys, of_values = m.num_kv_heads * m.key_bytes, m.num_kv_heads * m.value_bytes
    for request in range(share.part, b.num_requests, share.threads):
        table = carray(int_pointer(b.block_tables + request * b.max_blocks * 8), b.max_blocks)
        places = carray(int_pointer(places_at + request * room * PLACE), (room, 2))
        for position in range(lengths[request]):
            slot = table[position // b.block_size] * b.block_size + position % b.block_size
            places[position, 0], places[position, 1] = slot * of_keys, slot * of_values


@piece
def _norm_rows(share, b, m, layer, w):  # type: ignore[no-untyped-def]
    """A row's queries as one vector, and its keys, where their norms are over all heads."""
    of_queries, of_keys = m.all_heads * m.dim, m.all_kv_heads * m.dim
    for row in range(share.part, b.rows, share.threads):
        here = w.wide + row * layer.qkv.n * 4
        normalize(here, layer.q_norm, here, of_queries, m.eps)
        normalize(here + of_queries * 4, layer.k_norm, here + of_queries * 4, of_keys, m.eps)


@piece
def place(share, own, b, m, layer, w, keys, values):  # type: ignore[no-untyped-def]
    """Norm and rotate queries and keys; keys and values go into the cache, queries to w.queries. own: the
    share among the threads of this rank, which has some of the heads."""
    q_norm, k_norm = layer.q_norm, layer.k_norm
    if m.is_norm_over_heads:
        _norm_rows(share, b, m, layer, w)
        q_norm = k_norm = 0
        barrier(share)
    positions, slots = carray(int_pointer(b.positions), b.rows), carray(int_pointer(b.slots), b.rows)
    units, dim, group = m.num_heads + 2 * m.num_kv_heads, m.dim, m.num_heads // m.num_kv_heads
    queries_at, keys_at = m.first_kv_head * group, m.all_heads - m.num_heads + m.first_kv_head
    values_at = keys_at + m.all_kv_heads - m.num_kv_heads
    first, last = range_of(own, b.rows * units)
    for item in range(first, last):
        row, unit = item // units, item % units
        kv_head = unit - m.num_heads
        before = queries_at if kv_head < 0 else keys_at if kv_head < m.num_kv_heads else values_at
        here = w.wide + (row * layer.qkv.n + (before + unit) * dim) * 4
        slot = slots[row] * m.num_kv_heads + kv_head % m.num_kv_heads
        to = key = keys + slot * m.key_bytes
        if kv_head < 0:
            turn_head(m, layer, q_norm, here, positions[row])
            if m.query_scales != 0:
                times(here, dim, carray(float_pointer(m.query_scales), positions[row] + 1)[positions[row]])
            to = w.queries + ((unit // group * b.rows + row) * group + unit % group) * m.key_bytes
        elif kv_head < m.num_kv_heads:
            turn_head(m, layer, k_norm, here, positions[row])
        else:
            to = values + slot * m.value_bytes
            if layer.v_norm != 0:
                normalize(here, layer.v_norm, here, dim, m.eps)
        if not m.is_rounded:
            copy(here, to, dim)
        elif kv_head < 0:
            round_head(1, here, dim, to)
        elif kv_head < m.num_kv_heads:
            round_head(0, here, dim, to)
        else:
            round_value(here, dim, to, key + dim + VALUE_SCALE)


@piece
def attend(share, b, m, layer, w, keys, values):  # type: ignore[no-untyped-def]
    """From queries and the cache to `ready`. All threads must have placed what is theirs."""
    group, strips = m.num_heads // m.num_kv_heads, m.dim // LANES
    known = b, m, w, *kept_of(b, w, layer.kind), layer.window, layer.sinks, keys, values, group, strips
    if b.rows > FEW_ROWS:
        own = TOGETHER * share.part
        scores, scales = w.scores + own * group * b.span * 4, w.value_scales + own * b.span * 4
        memory = scores, scales, w.totals + own * group * 4, w.mixed + own * group * m.dim * 8
        _attend_by_rows(share, Attention(*known, *memory, 0))
        return
    a, row = Attention(*known, w.scores, w.value_scales, w.totals, w.mixed, b.rows), 0
    _share_scores(share, a)
    barrier(share)
    while row < b.rows:  # a thread takes a stretch of the queries, most of whose values it will add up
        run = run_of(a, row, b.rows)
        count = (run.last - run.first) * group
        first, last = range_of(share, count * m.num_kv_heads)
        for item in range(first, last):
            own, head = run.first + item % count // group, item // count * group + item % group
            start, length = seen_by(a, run, own)
            weigh(a, run, own, head, start, length)
        row = run.last
    barrier(share)
    columns, row = range_of(share, m.num_kv_heads * strips), 0
    while row < b.rows:  # a thread takes some columns of all KV heads' values
        run = run_of(a, row, b.rows)
        mix_rows(a, run, run.prefix, columns)
        row = run.last


@piece
def _blocks(a, run):  # type: ignore[no-untyped-def]
    """The first position of the prefix that a row sees, rounded down, and the number of blocks from there."""
    low = starts_of(a, run)[0] // BLOCK * BLOCK
    return low, max(0, (run.prefix - low + BLOCK - 1) // BLOCK)


@piece
def _share_scores(share, a):  # type: ignore[no-untyped-def]
    """A thread takes a stretch of all prefixes' blocks, weighed by rows, and some rows' own positions."""
    work, row, rows = 0, 0, a.b.rows
    while row < rows:
        run = run_of(a, row, rows)
        work, row = work + _blocks(a, run)[1] * (run.last - run.first), run.last
    begin, end = range_of(share, work)
    heads, row, before = (0, a.m.num_kv_heads), 0, 0
    while row < rows:
        run = run_of(a, row, rows)
        low, blocks = _blocks(a, run)
        count = run.last - run.first
        # blocks that begin in this thread's stretch of the work
        first = min(max((begin - before + count - 1) // count, 0), blocks)
        last = min(max((end - before + count - 1) // count, 0), blocks)
        score(a, run, heads, low + first * BLOCK, min(low + last * BLOCK, run.prefix))
        for own in range(run.first, run.last):
            if own % share.threads == share.part:
                start, length = seen_by(a, run, own)
                score(a, row_of(run, own), heads, max(run.prefix, start), length)
        before, row = before + blocks * count, run.last


@piece
def _common_length(a, run):  # type: ignore[no-untyped-def]
    """How many positions all rows see: the prefix, and in a chain all that its first row sees."""
    parents = carray(int_pointer(a.b.parents), a.b.rows)
    for row in range(run.first + 1, run.last):
        if parents[row] != row - 1:
            return run.prefix
    return seen_by(a, run, run.first)[1]


@piece
def _attend_by_rows(share, a):  # type: ignore[no-untyped-def]
    """A thread takes a KV head of a few rows in turn with the others: later rows of a prompt see more."""
    item = 0
    for kv_head in range(a.m.num_kv_heads):
        heads, columns, row = (kv_head, kv_head + 1), (kv_head * a.strips, (kv_head + 1) * a.strips), 0
        while row < a.b.rows:
            run = run_of(a, row, TOGETHER)
            if item % share.threads == share.part:
                common = _common_length(a, run)
                score(a, run, heads, starts_of(a, run)[0] // BLOCK * BLOCK, common)
                for own in range(run.first, run.last):
                    start, length = seen_by(a, run, own)
                    score(a, row_of(run, own), heads, max(common, start), length)
                    for head in range(kv_head * a.group, (kv_head + 1) * a.group):
                        weigh(a, run, own, head, start, length)
                mix_rows(a, run, common, columns)
            item, row = item + 1, run.last
