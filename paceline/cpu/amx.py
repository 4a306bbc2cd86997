"""Products of many rows by x86's tiles (AMX): sixteen tokens times sixteen outputs, group by group.

A tile register holds the integers of up to 16 tokens, another one the weights of a block just as they lie in
memory (matmul.py), and one instruction adds all their products. Invariant: a group's sums are the exact
integers, and go into the same chain of float sums as elsewhere, so this changes no bit.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

from llvmlite import ir

from paceline.cpu.compile import piece_named
from paceline.cpu.lanes import FLOAT, INT32, INT64, LANES, Emitter, bytes_, floats, instruction, ints
from paceline.models.quantize import BLOCK, GROUP
from paceline.models.quantize import DOT_ROWS as ROWS

TOKENS = 16  # of a tile, at most
FEWEST = 7  # tokens that are worth it: dot products take as many as six at a time
X_BYTES = 512 * 1024  # of x worked on at a time: the second-level cache has room for it
AHEAD = 2048  # prefetch distance in bytes
SUMS, WEIGHTS, INTEGERS = (0, 1), (3, 4), 2  # tile registers: of two tiles of weights, and of the tokens
ROW = 4 * 2 * ROWS  # bytes of a token's sums in memory
# Scratch: two groups' sums and factors, which are read while the next group is multiplied, and for int4 two
# groups' weights, unpacked while the one before is: what was just stored in other pieces is slow to read.
SUMS_BYTES, FACTORS_BYTES, UNPACKED_BYTES = TOKENS * ROW, 2 * 4 * TOKENS, 2 * ROWS * GROUP[4]
FACTORS, UNPACKED = 2 * SUMS_BYTES, 2 * (SUMS_BYTES + FACTORS_BYTES)
BYTE = ir.IntType(8)
# What is multiplied: addresses, strides in bytes and numbers, as LLVM's values. weights: of two tiles, the
# second tile_bytes on; group_stride: of scales and sums; height: tokens.
Strip = namedtuple(
    "Strip", "weights tile_bytes x scales sums bias x_stride group_stride groups y y_stride height scratch"
)


def _move(emit: Emitter, name: str, tile: int, at: Any, stride: Any) -> None:
    emit.call(f"llvm.x86.{name}", ir.VoidType(), [BYTE(tile), emit.pointer(at, BYTE), stride])


def _turn(emit: Emitter, s: Strip, start: int, size: int, group: Any) -> Any:
    """Where a group has its place in the scratch: every other one the same."""
    return emit.offset(s.scratch, start, emit.times(emit.builder.and_(group, emit.const(1)), size))


def _block(emit: Emitter, bits: int, s: Strip, group: Any, tile: int) -> Any:
    return emit.offset(s.weights, emit.times(group, BLOCK[bits]), emit.times(s.tile_bytes, tile))


def write_configuration(emit: Emitter, bits: int, height: Any) -> None:
    """How large each tile register is: rows, and bytes of a row."""
    at, tokens = emit.memory(64), emit.builder.trunc(height, BYTE)
    widths = dict.fromkeys((*SUMS, *WEIGHTS), 4 * ROWS) | {INTEGERS: GROUP[bits]}
    heights = dict.fromkeys((*SUMS, INTEGERS), tokens) | dict.fromkeys(WEIGHTS, BYTE(GROUP[bits] // 4))
    emit.store(bytes_(64)([1] + [0] * 63), at)  # the first byte says that there are tiles of 16 rows
    for tile, width in widths.items():
        emit.store(ir.IntType(16)(width), emit.offset(at, 16 + 2 * tile))
        emit.store(heights[tile], emit.offset(at, 48 + tile))
    emit.call("llvm.x86.ldtilecfg", ir.VoidType(), [emit.pointer(at, BYTE)])


def write_release(emit: Emitter) -> None:
    emit.call("llvm.x86.tilerelease", ir.VoidType(), [])


def _unpack(emit: Emitter, s: Strip, group: Any) -> None:
    """A group of int4 weights of both tiles, a byte each, in the order of int8."""
    builder, kind, out = emit.builder, bytes_(4 * ROWS), _turn(emit, s, UNPACKED, UNPACKED_BYTES, group)
    for tile in range(2):
        block = _block(emit, 4, s, group, tile)
        for at in range(0, ROWS * GROUP[4] // 2, 4 * ROWS):
            raw, to = emit.load(emit.offset(block, at), kind), ROWS * GROUP[4] * tile + 2 * at
            emit.store(builder.and_(raw, kind([15] * 4 * ROWS)), emit.offset(out, to))
            emit.store(builder.lshr(raw, kind([4] * 4 * ROWS)), emit.offset(out, to + 4 * ROWS))


def _multiply(emit: Emitter, bits: int, s: Strip, group: Any) -> None:
    """The sums of one group into the scratch: [token][both tiles' rows]."""
    out = _turn(emit, s, 0, SUMS_BYTES, group)
    _factors(emit, bits, s, group)
    _move(emit, "tileloadd64", INTEGERS, emit.offset(s.x, emit.times(group, GROUP[bits])), s.x_stride)
    for tile, (sums, weights) in enumerate(zip(SUMS, WEIGHTS, strict=True)):
        at = block = _block(emit, bits, s, group, tile)
        for line in range(0, BLOCK[bits], 64):
            emit.prefetch(emit.offset(block, line + AHEAD))
        if bits == 4:
            at = emit.offset(_turn(emit, s, UNPACKED, UNPACKED_BYTES, group), ROWS * GROUP[4] * tile)
        _move(emit, "tileloadd64", weights, at, emit.const(4 * ROWS))
        emit.call("llvm.x86.tilezero", ir.VoidType(), [BYTE(sums)])
        emit.call("llvm.x86.tdpbssd", ir.VoidType(), [BYTE(each) for each in (sums, INTEGERS, weights)])
        _move(emit, "tilestored64", sums, emit.offset(out, 4 * ROWS * tile), emit.const(ROW))


def _factors(emit: Emitter, bits: int, s: Strip, group: Any) -> None:
    """What a group's sums are multiplied by for each token, 0 where there is none, into the scratch."""
    builder, out = emit.builder, _turn(emit, s, FACTORS, FACTORS_BYTES, group)
    height = emit.broadcast(builder.trunc(s.height, INT32), LANES)
    is_there = builder.icmp_signed("<", ints(LANES)(list(range(LANES))), height)

    def read(start: Any, name: str, kind: ir.Type) -> Any:
        at = emit.pointer(emit.offset(start, emit.times(group, s.group_stride)), kind)
        operands = [at, INT32(4), is_there, ir.Constant(kind, None)]
        return emit.call(f"llvm.masked.load.v{LANES}{name}.p0", kind, operands)

    scales = read(s.scales, "f32", floats(LANES))
    emit.store(scales, out)
    if bits == 4:  # what minima are multiplied by: minus the scaled sum of integers
        whole = builder.sitofp(read(s.sums, "i32", ints(LANES)), floats(LANES))
        emit.store(builder.fneg(builder.fmul(whole, scales)), emit.offset(out, 4 * TOKENS))


def _both(emit: Emitter, bits: int, s: Strip, group: Any, back: int) -> Any:
    """Scales or minima of both tiles' rows, which begin `back` bytes before the end of a block."""
    ends = [emit.offset(_block(emit, bits, s, group, tile), BLOCK[bits] - back) for tile in range(2)]
    return emit.shuffle(range(LANES), *(emit.halves(end, ROWS) for end in ends))


def _add(emit: Emitter, bits: int, s: Strip, totals: list[Any], group: Any) -> None:
    """A group's sums, times the scales, to the totals: as matmul.py does it."""
    builder, kind = emit.builder, ir.FunctionType(floats(LANES), [floats(LANES)])
    found, factors = _turn(emit, s, 0, SUMS_BYTES, group), _turn(emit, s, FACTORS, FACTORS_BYTES, group)
    scales = _both(emit, bits, s, group, (2 if bits == 8 else 4) * ROWS)
    minima = _both(emit, bits, s, group, 2 * ROWS) if bits == 4 else None
    for token, total in enumerate(totals):
        whole = builder.sitofp(emit.load(emit.offset(found, ROW * token), ints(LANES)), floats(LANES))
        factor, offset = (emit.offset(factors, 4 * at) for at in (token, TOKENS + token))
        emit.accumulate(total, whole, builder.fmul(scales, emit.broadcast(emit.load(factor, FLOAT), LANES)))
        if bits == 4:
            emit.accumulate(total, minima, emit.broadcast(emit.load(offset, FLOAT), LANES))
        # No code, but what follows is read after it: else all tokens' sums are, and do not fit the registers.
        builder.store(builder.asm(kind, "", "=v,0,~{memory}", [builder.load(total)], True), total)


def write_pair(emit: Emitter, bits: int, *operands: Any) -> None:
    """16 outputs, of two tiles of weights side by side, of the tokens of a Strip. A group is multiplied while
    the sums of the one before are added."""
    s, builder = Strip._make((*operands, emit.memory(UNPACKED + 2 * UNPACKED_BYTES))), emit.builder
    start, last = emit.load(s.bias, floats(LANES)), emit.offset(s.groups, -1)
    totals = [emit.variable(start) for _ in range(TOKENS)]
    if bits == 4:
        _unpack(emit, s, emit.const(0))
        _unpack(emit, s, emit.call("llvm.smin.i64", INT64, [emit.const(1), last]))
    _multiply(emit, bits, s, emit.const(0))
    with emit.loop(last) as group:
        if bits == 4:  # behind the last group the last one once more
            _unpack(emit, s, emit.call("llvm.smin.i64", INT64, [emit.offset(group, 2), last]))
        _multiply(emit, bits, s, emit.offset(group, 1))
        _add(emit, bits, s, totals, group)
    _add(emit, bits, s, totals, last)
    for token, total in enumerate(totals):
        emit.store(builder.load(total), emit.offset(s.scratch, ROW * token))
    with emit.loop(s.height) as token:
        row = emit.load(emit.offset(s.scratch, emit.times(token, ROW)), floats(LANES))
        emit.store(row, emit.offset(s.y, emit.times(token, s.y_stride)))


configure, release = instruction(constants=1)(write_configuration), instruction()(write_release)
tile_pair = instruction(constants=1, operands=len(Strip._fields) - 1)(write_pair)


def tile_product(bits: int, of_few: Any) -> Any:
    """One thread's share, as matmul.product_32 has it; of_few: for few rows, and a tile that has no other."""
    group, block_bytes = GROUP[bits], BLOCK[bits]

    @piece_named(f"tile_product_{bits}")
    def product(part, threads, m, x, y, rows):  # type: ignore[no-untyped-def]
        if rows < FEWEST or m.n == ROWS:
            of_few(part, threads, m, x, y, rows)
            return
        tiles, groups, stride, size = m.n // ROWS, m.k // group, m.n * 4, m.k // group * block_bytes
        step = max(TOKENS, X_BYTES // m.k // TOKENS * TOKENS)
        for first in range(0, rows, step):
            last = min(first + step, rows)
            strips, height = (last - first + TOKENS - 1) // TOKENS, min(TOKENS, last - first)
            configure(bits, height)
            # With few tokens reading the weights takes the time: they are shared out tile by tile. What is
            # left over at an end goes with what was computed already: the same bits once more.
            count = tiles if strips == 1 else (tiles + 1) // 2 * strips
            begin, end = count * part // threads, count * (part + 1) // threads
            for item in range(begin, end, 2 if strips == 1 else 1):
                tile = min(item, end - 2) if strips == 1 else min(item // strips * 2, tiles - 2)
                tile, row = max(tile, 0), min(first + item % strips * TOKENS, last - height)
                column, at = tile * ROWS * 4, m.weight + tile * size
                own, scale, sums = x.values + row * m.k, x.scales + row * 4, x.sums + row * 4
                bias, out = m.bias + column, y + row * stride + column
                tile_pair(bits, at, size, own, scale, sums, bias, m.k, rows * 4, groups, out, stride, height)
            release()

    return product
