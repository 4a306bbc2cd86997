"""Products of many rows by x86's tiles (AMX): sixteen tokens times sixteen outputs, group by group.

A tile register holds the integers of up to 16 tokens, another one the weights of a block just as they lie in
memory (matmul.py), and one instruction adds all their products. Invariant: a group's sums are the exact
integers, and go into the same chain of float sums as elsewhere, so this changes no bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from paceline.cpu.compile import piece_named
from paceline.cpu.lanes import FLOAT, INT32, INT64, LANES, Emitter, bytes_, floats, instruction, ints
from paceline.models.quantize import BLOCK, DOT_ROWS, GROUP

ROWS = DOT_ROWS
TOKENS = 16  # of a tile, at most
FEWEST = 7  # tokens that are worth it: dot products take as many as six at a time
X_BYTES = 512 * 1024  # of x worked on at a time: the second-level cache has room for it
AHEAD = 2048  # prefetch distance in bytes
SUMS, WEIGHTS = (0, 1), (3, 4)  # tile registers of a pair of tiles of weights
INTEGERS = 2  # the tokens' one
ROW = 4 * 2 * ROWS  # bytes of a token's sums in memory
# Scratch: two groups' sums and factors, which are read while the next group is multiplied; and for int4 two
# groups' weights, unpacked while the one before is multiplied. A processor cannot read at once what it has just
# stored in other pieces.
SUMS_BYTES, FACTORS_BYTES, UNPACKED_BYTES = TOKENS * ROW, 2 * 4 * TOKENS, 2 * ROWS * GROUP[4]
FACTORS, UNPACKED = 2 * SUMS_BYTES, 2 * (SUMS_BYTES + FACTORS_BYTES)
SCRATCH = UNPACKED + 2 * UNPACKED_BYTES
BYTE = ir.IntType(8)


class Strip(NamedTuple):
    """What is multiplied. Addresses, strides in bytes and numbers, as LLVM's values."""

    weights: Any  # of the first of two tiles
    tile_bytes: Any
    x: Any
    scales: Any
    sums: Any
    bias: Any
    x_stride: Any
    group_stride: Any  # of scales and sums
    groups: Any
    y: Any
    y_stride: Any
    height: Any  # tokens
    scratch: Any


def _tile(number: int) -> Any:
    return ir.Constant(BYTE, number)


def _move(emit: Emitter, name: str, tile: int, at: Any, stride: Any) -> None:
    emit.call(f"llvm.x86.{name}", ir.VoidType(), [_tile(tile), emit.pointer(at, BYTE), stride])


def _scratch(emit: Emitter, size: int) -> Any:
    """The address of memory that lives as long as the call of the function that asks."""
    room = cgutils.alloca_once(emit.builder, ir.ArrayType(BYTE, size))
    room.align = 64
    return emit.builder.ptrtoint(room, INT64)


def _turn(emit: Emitter, s: Strip, start: int, size: int, group: Any) -> Any:
    """Where a group has its place in the scratch: every other one the same."""
    return emit.offset(s.scratch, start, emit.times(emit.builder.and_(group, emit.const(1)), size))


def _block(emit: Emitter, bits: int, s: Strip, group: Any, tile: int) -> Any:
    return emit.offset(s.weights, emit.times(group, BLOCK[bits]), emit.times(s.tile_bytes, tile))


def write_configuration(emit: Emitter, bits: int, height: Any) -> None:
    """How large each tile register is: rows, and bytes of a row."""
    at, tokens = _scratch(emit, 64), emit.builder.trunc(height, BYTE)
    widths = dict.fromkeys((*SUMS, *WEIGHTS), 4 * ROWS) | {INTEGERS: GROUP[bits]}
    heights = dict.fromkeys((*SUMS, INTEGERS), tokens) | dict.fromkeys(WEIGHTS, _tile(GROUP[bits] // 4))
    emit.store(bytes_(64)([1] + [0] * 63), at)  # the first byte says that there are tiles of 16 rows
    for tile, width in widths.items():
        emit.store(ir.Constant(ir.IntType(16), width), emit.offset(at, 16 + 2 * tile))
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
        emit.call("llvm.x86.tilezero", ir.VoidType(), [_tile(sums)])
        factors = [_tile(number) for number in (sums, INTEGERS, weights)]
        emit.call("llvm.x86.tdpbssd", ir.VoidType(), factors)
        _move(emit, "tilestored64", sums, emit.offset(out, 4 * ROWS * tile), emit.const(ROW))


def _there(emit: Emitter, s: Strip, start: Any, group: Any, kind: str) -> Any:
    """A group's scales or sums of the tokens that are there; of the others zeros."""
    wide = {"f32": floats, "i32": ints}[kind](LANES)
    height = emit.broadcast(emit.builder.trunc(s.height, INT32), LANES)
    is_there = emit.builder.icmp_signed("<", ints(LANES)(list(range(LANES))), height)
    at = emit.pointer(emit.offset(start, emit.times(group, s.group_stride)), wide)
    operands = [at, INT32(4), is_there, ir.Constant(wide, None)]
    return emit.call(f"llvm.masked.load.v{LANES}{kind}.p0", wide, operands)


def _factors(emit: Emitter, bits: int, s: Strip, group: Any) -> None:
    """What a group's sums are multiplied by for each token, into the scratch: a number that is read from there
    for all outputs is part of the instruction that multiplies by it."""
    builder, out = emit.builder, _turn(emit, s, FACTORS, FACTORS_BYTES, group)
    scales = _there(emit, s, s.scales, group, "f32")
    emit.store(scales, out)
    if bits == 4:  # what minima are multiplied by: minus the scaled sum of integers
        whole = builder.sitofp(_there(emit, s, s.sums, group, "i32"), floats(LANES))
        emit.store(builder.fneg(builder.fmul(whole, scales)), emit.offset(out, 4 * TOKENS))


def _both(emit: Emitter, bits: int, s: Strip, group: Any, back: int) -> Any:
    """Scales or minima of both tiles' rows, which begin `back` bytes before the end of a block."""
    ends = [emit.offset(_block(emit, bits, s, group, tile), BLOCK[bits] - back) for tile in range(2)]
    return emit.shuffle(range(LANES), *(emit.halves(end, ROWS) for end in ends))


def _finish(emit: Emitter, total: Any) -> None:
    """No code, but what comes after is read after it: the compiler would read all tokens' sums first, and run
    out of registers."""
    kind = ir.FunctionType(floats(LANES), [floats(LANES)])
    emit.builder.store(emit.builder.asm(kind, "", "=v,0,~{memory}", [emit.builder.load(total)], True), total)


def _add(emit: Emitter, bits: int, s: Strip, totals: list[Any], group: Any) -> None:
    """A group's sums, times the scales, to the totals: as matmul.py does it."""
    builder, found = emit.builder, _turn(emit, s, 0, SUMS_BYTES, group)
    factors = _turn(emit, s, FACTORS, FACTORS_BYTES, group)
    scales = _both(emit, bits, s, group, (2 if bits == 8 else 4) * ROWS)
    minima = _both(emit, bits, s, group, 2 * ROWS) if bits == 4 else None
    for token, total in enumerate(totals):
        here = emit.offset(factors, 4 * token)
        whole = builder.sitofp(emit.load(emit.offset(found, ROW * token), ints(LANES)), floats(LANES))
        emit.accumulate(total, whole, builder.fmul(scales, emit.broadcast(emit.load(here, FLOAT), LANES)))
        if bits == 4:
            offset = emit.load(emit.offset(here, 4 * TOKENS), FLOAT)
            emit.accumulate(total, minima, emit.broadcast(offset, LANES))
        _finish(emit, total)


def write_pair(emit: Emitter, bits: int, *operands: Any) -> None:
    """16 outputs, of two tiles of weights side by side, of the tokens of a Strip. A group is multiplied while
    the sums of the one before are added."""
    s, builder = Strip(*operands, scratch=_scratch(emit, SCRATCH)), emit.builder
    start, last = emit.load(s.bias, floats(LANES)), emit.offset(s.groups, -1)
    totals = [emit.variable(start) for _ in range(TOKENS)]

    def up_to_last(group: Any) -> Any:
        return builder.select(builder.icmp_signed("<", group, last), group, last)

    if bits == 4:
        _unpack(emit, s, emit.const(0))
        _unpack(emit, s, up_to_last(emit.const(1)))
    _multiply(emit, bits, s, emit.const(0))
    with emit.loop(last) as group:
        if bits == 4:  # behind the last group the last one once more
            _unpack(emit, s, up_to_last(emit.offset(group, 2)))
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


def tile_product(bits: int) -> Any:
    """One thread's share of a product with at least two tiles, as matmul.product_32 has it."""
    group, block_bytes = GROUP[bits], BLOCK[bits]

    @piece_named(f"tile_product_{bits}")
    def product(part, threads, m, x, y, rows):  # type: ignore[no-untyped-def]
        tiles, groups, stride = m.n // ROWS, m.k // group, m.n * 4
        step = max(TOKENS, X_BYTES // m.k // TOKENS * TOKENS)
        for first in range(0, rows, step):
            last = min(first + step, rows)
            strips, height = (last - first + TOKENS - 1) // TOKENS, min(TOKENS, last - first)
            configure(bits, height)
            # A few tokens' weights are shared out tile by tile, since reading them takes the time; else a
            # pair of tiles and a strip of tokens is what a thread does of it. What is left over at an end is
            # computed together with what was computed already, which gives the same bits once more.
            count = tiles if strips == 1 else (tiles + 1) // 2 * strips
            begin, end = count * part // threads, count * (part + 1) // threads
            for item in range(begin, end, 2 if strips == 1 else 1):
                tile = min(item, end - 2) if strips == 1 else min(item // strips * 2, tiles - 2)
                tile, row = max(tile, 0), min(first + item % strips * TOKENS, last - height)
                weights, out = m.weight + tile * groups * block_bytes, y + row * stride + tile * ROWS * 4
                own, scales, sums = x.values + row * m.k, x.scales + row * 4, x.sums + row * 4
                bias, size, apart = m.bias + tile * ROWS * 4, groups * block_bytes, rows * 4
                # fmt: off
                tile_pair(bits, weights, size, own, scales, sums, bias, m.k, apart, groups, out, stride,
                          height)
                # fmt: on
            release()

    return product
