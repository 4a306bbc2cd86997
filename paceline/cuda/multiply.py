"""The Triton kernels of cuda/linear.py: a product, the sum of its parts, whole weights from small integers.

The weights are the left operand of the tensor cores: [rows of W, K] times [K, T]. Small integers and floats
become bfloat16 in registers. Invariant: a row of the result is a sum over its own row of x, in an order that
K and the number of splits fix; before a gate it is rounded to the dtype, so the bits are those of separate
kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from paceline.cuda.rows import OVERLAPS, activated, added_up, let_next_start, wait_for_previous

_FOUR = tl.constexpr("""{
    .reg .b32 a, b, c, d;
    shl.b32 a, $4, 3;
    shr.u32 b, $4, 1;
    shr.u32 c, $4, 5;
    shr.u32 d, $4, 9;
    lop3.b32 a, a, 0x00780078, 0x41804180, 0xEA;
    lop3.b32 b, b, 0x00780078, 0x41804180, 0xEA;
    lop3.b32 c, c, 0x00780078, 0x41804180, 0xEA;
    lop3.b32 d, d, 0x00780078, 0x41804180, 0xEA;
    fma.rn.bf16x2 $0, a, $5, $7;
    fma.rn.bf16x2 $1, b, $5, $7;
    fma.rn.bf16x2 $2, c, $5, $7;
    fma.rn.bf16x2 $3, d, $5, $7;
}""")  # a register: two bfloat16, or two words of four integers, which share their row's scale and offset

_TWO = tl.constexpr("""{
    .reg .b32 a, b, h, z;
    mov.b32 z, 0x80008000;
    shr.u32 h, $2, 8;
    lop3.b32 a, $2, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 b, $2, 0x00800080, 0x43004300, 0xEA;
    sub.rn.bf16x2 a, a, b;
    fma.rn.bf16x2 $0, a, $3, z;
    lop3.b32 a, h, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 b, h, 0x00800080, 0x43004300, 0xEA;
    sub.rn.bf16x2 a, a, b;
    fma.rn.bf16x2 $1, a, $3, z;
}""")  # 128 + the low seven bits, less 128 or, where the sign bit is set, 256

_FLOATS = tl.constexpr("""{
    .reg .b32 a, b, f, z;
    mov.b32 f, 0x7B807B80;
    mov.b32 z, 0x80008000;
    shl.b32 a, $2, 4;
    shl.b32 b, $2, 8;
    and.b32 b, b, 0x80008000;
    lop3.b32 a, a, 0x07F007F0, b, 0xEA;
    fma.rn.bf16x2 $0, a, f, z;
    shr.u32 a, $2, 4;
    and.b32 b, $2, 0x80008000;
    lop3.b32 a, a, 0x07F007F0, b, 0xEA;
    fma.rn.bf16x2 $1, a, f, z;
}""")  # the bits of E4M3 as a bfloat16 are 2**-120 times its number, of subnormal ones too

_FOUR_FLOATS = tl.constexpr("""{
    .reg .b32 a, b, f, z;
    mov.b32 f, 0x7E007E00;
    mov.b32 z, 0x80008000;
    shl.b32 a, $4, 6;
    shl.b32 b, $4, 12;
    and.b32 b, b, z;
    lop3.b32 a, a, 0x01C001C0, b, 0xEA;
    fma.rn.bf16x2 a, a, f, z;
    fma.rn.bf16x2 $0, a, $5, z;
    shl.b32 a, $4, 2;
    shl.b32 b, $4, 8;
    and.b32 b, b, z;
    lop3.b32 a, a, 0x01C001C0, b, 0xEA;
    fma.rn.bf16x2 a, a, f, z;
    fma.rn.bf16x2 $1, a, $7, z;
    shr.u32 a, $4, 2;
    shl.b32 b, $4, 4;
    and.b32 b, b, z;
    lop3.b32 a, a, 0x01C001C0, b, 0xEA;
    fma.rn.bf16x2 a, a, f, z;
    fma.rn.bf16x2 $2, a, $9, z;
    shr.u32 a, $4, 6;
    and.b32 b, $4, z;
    lop3.b32 a, a, 0x01C001C0, b, 0xEA;
    fma.rn.bf16x2 a, a, f, z;
    fma.rn.bf16x2 $3, a, $11, z;
}""")  # the bits of E2M1 as a bfloat16 are 2**-126 times its number; half of it, times twice the scale

_POWERS = tl.constexpr("""{
    prmt.b32 $0, $4, 0, 0x4040;
    shl.b32 $0, $0, 7;
    prmt.b32 $1, $4, 0, 0x4141;
    shl.b32 $1, $1, 7;
    prmt.b32 $2, $4, 0, 0x4242;
    shl.b32 $2, $2, 7;
    prmt.b32 $3, $4, 0, 0x4343;
    shl.b32 $3, $3, 7;
}""")  # of each byte, the exponent of a bfloat16, two such

_FETCH = tl.constexpr("cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;")


@triton.jit
def _floats(words: tensor, scales: tensor, ASSEMBLY: constexpr, dtype: constexpr) -> tl.tuple:
    """words [N, W] int16 -> the numbers of each part of the group, [N, W] each. The assembly is given the
    scales [N, 1], which multiply sums, as a loop loads early only what its products depend on."""
    if ASSEMBLY:
        parts = tl.inline_asm_elementwise(
            _FLOATS, "=r,=r,r,f,f", [words, scales], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        low = words.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(dtype)
        parts = low, (words >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(dtype)
    return parts


@triton.jit
def _four_floats(words: tensor, scales: tensor, ASSEMBLY: constexpr, dtype: constexpr) -> tl.tuple:
    """words [N, W] int16, scales [N, 1] uint32 -> the weights of each part of the group, [N, W] each. All are
    bfloat16 numbers."""
    if ASSEMBLY:
        powers = tl.inline_asm_elementwise(
            _POWERS, "=&r,=&r,=&r,=&r,r", [scales], (tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True, pack=1,
        )  # fmt: skip
        parts = tl.inline_asm_elementwise(
            _FOUR_FLOATS, "=&r,=&r,=&r,=r,r,r,r,r,r,r,r,r,r",
            [words, powers[0], powers[1], powers[2], powers[3]],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        parts = ()
        for i in tl.static_range(4):
            bits = (words >> (4 * i)).to(tl.int32)
            halves = (((bits & 7) << 22) | ((bits & 8) << 28)).to(tl.float32, bitcast=True) * 2.0**125
            power = (((scales >> (8 * i)) & 255) << 23).to(tl.float32, bitcast=True)
            parts += ((halves * power).to(dtype),)
    return parts


@triton.jit
def _parts(words: tensor, scales: tensor, BITS: constexpr, ASSEMBLY: constexpr, dtype: constexpr) -> tl.tuple:
    """words [N, W] int16, scales [N, 1] int32 -> the weights of each part of the group, [N, W] each. Of FP8,
    whose scales are float32, these are numbers that still want them; scales of MXFP4 are uint32."""
    if scales.dtype == tl.float32:
        parts = _floats(words, scales, ASSEMBLY, dtype)
    elif scales.dtype == tl.uint32:
        parts = _four_floats(words, scales, ASSEMBLY, dtype)
    elif ASSEMBLY:
        # Twice, for two words at a time; made for a row and not for each of its words.
        scale = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $1, 0x1010;", "=r,r", [scales], tl.int32, is_pure=True, pack=1
        )
        if BITS == 4:
            offset = tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, $1, 0x3232;", "=r,r", [scales], tl.int32, is_pure=True, pack=1
            )
            parts = tl.inline_asm_elementwise(
                _FOUR, "=r,=r,=r,=r,r,r,r,r,r", [words, scale, offset],
                (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            parts = tl.inline_asm_elementwise(
                _TWO, "=r,=r,r,r,r", [words, scale], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
    else:
        # in float32, which holds the weights exactly: rounded once, as by the assembly
        parts, scale = (), (scales << 16).to(tl.float32, bitcast=True)
        for i in tl.static_range(16 // BITS):
            if BITS == 4:
                offset = (scales & -65536).to(tl.float32, bitcast=True)
                weights = (((words >> (4 * i)) & 15) + 16).to(tl.float32) * scale + offset
            else:
                weights = ((words << (8 - 8 * i)) >> 8).to(tl.float32) * scale
            parts += (weights.to(dtype),)
    return parts


@triton.jit
def _rows_of_tile(
    i: tensor, tile: tensor, num_outputs: tensor, BLOCK_N: constexpr, GATED: constexpr, FILLED: constexpr
) -> tensor:
    """The rows of W at i in a tile; a gated one has rows of the gate, then the same ones of the up half."""
    if GATED:
        HALF: tl.constexpr = BLOCK_N // 2
        n = tile * HALF + i % HALF
        n = (n if FILLED else tl.minimum(n, num_outputs // 2 - 1)) + i // HALF * (num_outputs // 2)
    else:
        n = tile * BLOCK_N + i
        n = n if FILLED else tl.minimum(n, num_outputs - 1)
    return n


@triton.jit(do_not_specialize=["num_rows", "num_inputs", "splits"])
def multiply(
    x: tensor, packed: tensor, scales: tensor, bias: tensor, out: tensor, tiles: tensor, order: tensor,
    shares: tensor, num_rows: tensor, num_inputs: tensor, num_outputs: tensor, width: tensor, rows: tensor,
    groups: tensor, splits: tensor, row_step: tensor, group_step: tensor, BITS: constexpr, GROUP: constexpr,
    BLOCK_T: constexpr, BLOCK_N: constexpr, STAGES: constexpr, WHOLE: constexpr, FILLED: constexpr,
    ASSEMBLY: constexpr, ACTIVATION: constexpr, UNROLL: constexpr, AHEAD: constexpr, THREADS: constexpr,
    IS_EARLY: constexpr,
) -> None:  # fmt: skip
    """x [T, K], packed (steps to the next row and group) -> out [splits, T, N]; gated: [T, N / 2]. With tiles
    (cuda/route.py) W has the rows of experts one below the other, row t of `out` is of row t % num_inputs of
    x, and it is multiplied by its share."""
    if IS_EARLY:
        let_next_start()
    WORDS: tl.constexpr = GROUP if BITS >= 16 else GROUP * BITS // 16
    GATED: tl.constexpr = ACTIVATION is not None
    split, t = tl.program_id(2), tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = _rows_of_tile(tl.arange(0, BLOCK_N), tl.program_id(1), num_outputs, BLOCK_N, GATED, FILLED)
    j, source, is_row = tl.arange(0, WORDS), t, (t < num_rows)[None, :]
    if tiles is not None:
        wait_for_previous()
        tile = tiles + 3 * tl.program_id(0)
        count, at = tl.load(tile + 2), tl.arange(0, BLOCK_T)
        if count == 0:
            return
        t = tl.load(order + tl.load(tile + 1) + at, mask=at < count, other=0)
        source, is_row, n = t % num_inputs, (at < count)[None, :], n + tl.load(tile) * num_outputs
    lines = packed + n[:, None].to(tl.int64) * row_step + j[None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    first, end = groups * split // splits, groups * (split + 1) // splits
    # With few rows it is bound by instructions: fewer of those that only keep the loop going.
    FLOATS: tl.constexpr = scales.dtype.element_ty == tl.float32
    # Sums carried from group to group make the larger tensor instruction wait for each product; but those of
    # MXFP4 are then the ones of its weights in bfloat16, to the last bit.
    IS_MXFP4: tl.constexpr = scales.dtype.element_ty == tl.uint32
    CARRIED: tl.constexpr = IS_MXFP4 or (BLOCK_T == 8 and BITS < 16 and not FLOATS)
    if AHEAD and OVERLAPS:
        # No kernel computes weights: the first AHEAD groups come while the kernel before still runs, into the
        # second-level cache. A thread asks for a row's groups, one run of bytes, or for a piece of it.
        PIECES: tl.constexpr = THREADS // BLOCK_N
        thread, num_ahead = tl.arange(0, THREADS), tl.minimum(end - first, AHEAD)
        line = _rows_of_tile(thread // PIECES, tl.program_id(1), num_outputs, BLOCK_N, GATED, FILLED)
        each = num_ahead * GROUP // PIECES
        at = thread % PIECES * each
        runs = packed + line.to(tl.int64) * row_step + first * group_step + at
        sizes = tl.zeros((THREADS,), tl.int32) + each * (BITS // 8)
        tl.inline_asm_elementwise(
            _FETCH, "=r,l,r", [runs.to(tl.int64), sizes], tl.int32, is_pure=False, pack=1
        )
    if tiles is None:
        wait_for_previous()
    for group in tl.range(first, end, num_stages=STAGES, loop_unroll_factor=UNROLL):
        if BITS >= 16:
            k = group * GROUP + j
            if WHOLE:
                weights, mask = tl.load(lines + group * group_step), is_row
            else:
                weights = tl.load(lines + group * group_step, mask=(k < width)[None, :], other=0.0)
                mask = is_row & (k < width)[:, None]
            inputs = tl.load(x + source[None, :] * width + k[:, None], mask=mask, other=0.0)  # [GROUP, T]
            sums = tl.dot(weights, inputs, sums, input_precision="ieee")
        else:
            words, of_row = tl.load(lines + group * group_step), tl.load(scales + group * rows + n)[:, None]
            parts = _parts(words, of_row, BITS, ASSEMBLY, x.dtype.element_ty)
            of_group = sums if CARRIED else tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
            for i in tl.static_range(16 // BITS):
                k = group * GROUP + i * WORDS + j
                mask = is_row if WHOLE else is_row & (k < width)[:, None]
                inputs = tl.load(x + source[None, :] * width + k[:, None], mask=mask, other=0.0)
                of_group = tl.dot(parts[i], inputs, of_group, input_precision="ieee")
            if FLOATS:
                of_group *= of_row
            sums = of_group if CARRIED else sums + of_group
    if not IS_EARLY:
        let_next_start()
    if bias is not None:
        sums += tl.where(split == 0, tl.load(bias + n).to(tl.float32), 0.0)[:, None]
    if shares is not None:
        sums *= tl.load(shares + t)[None, :]
    result, line = sums.to(out.dtype.element_ty), (split * num_rows + t)[None, :]
    if GATED:
        halves = tl.permute(tl.reshape(result.to(tl.float32), (2, BLOCK_N // 2, BLOCK_T)), (1, 2, 0))
        gate, up = tl.split(halves)
        n, size = (tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2))[:, None], num_outputs // 2
        place, mask = line * size + n, is_row & (n < size)
        result = activated(gate, up, ACTIVATION).to(out.dtype.element_ty)
    else:
        n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
        place, mask = line * num_outputs + n, is_row & (n < num_outputs)
    tl.store(out + place, result, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def add_parts(
    parts: tensor, out: tensor, num_rows: tensor, num_outputs: tensor, SPLITS: constexpr, BLOCK: constexpr,
    ACTIVATION: constexpr,
) -> None:  # fmt: skip
    """parts [SPLITS, T, N] -> out [T, N], or [T, N / 2] if gated."""
    let_next_start()
    wait_for_previous()
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    size = num_outputs if ACTIVATION is None else num_outputs // 2
    dtype = out.dtype.element_ty
    mask, step = n < size, num_rows * num_outputs
    line = parts + row * num_outputs + n
    result = added_up(line, step, mask, SPLITS, dtype)
    if ACTIVATION is not None:
        result = activated(result, added_up(line + size, step, mask, SPLITS, dtype), ACTIVATION)
    tl.store(out + row * size + n, result.to(dtype), mask=mask)


@triton.jit
def expand(
    packed: tensor, scales: tensor, out: tensor, num_outputs: tensor, width: tensor, rows: tensor,
    BITS: constexpr, GROUP: constexpr, BLOCK_N: constexpr,
) -> None:  # fmt: skip
    """packed -> out [N, K]."""
    WORDS: tl.constexpr = GROUP * BITS // 16
    group = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, WORDS)
    row = group * rows + n
    words, of_row = tl.load(packed + row[:, None] * WORDS + j[None, :]), tl.load(scales + row)[:, None]
    FLOATS: tl.constexpr = scales.dtype.element_ty == tl.float32
    parts = _parts(words, of_row, BITS, False, out.dtype.element_ty)
    for i in tl.static_range(16 // BITS):
        k, weights = group * GROUP + i * WORDS + j, parts[i]
        if FLOATS:
            weights = (weights.to(tl.float32) * of_row).to(out.dtype.element_ty)
        place = n[:, None].to(tl.int64) * width + k[None, :]
        tl.store(out + place, weights, mask=(n < num_outputs)[:, None] & (k < width)[None, :])
