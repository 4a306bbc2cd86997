"""Products with weights of 4 or 8 bits: integers become bfloat16 in registers, so a weight leaves memory once and small.

The weights are the left operand of the tensor cores, which take it from registers: [rows of W, K] times [K, T]. K is split over programs
where W has too few rows to fill the device; a second kernel adds the parts in order. Invariant: how K is cut depends on W alone and each
output is a sum of its own row of x, so the bits of a row depend neither on other rows nor on how many there are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from paceline.cuda.pack import QuantizedWeight, pack

__all__ = ["QuantizedWeight", "Tile", "dequantized", "launch", "pack", "product", "splits_of", "tile_of", "workspace_size"]

FUSED_ROWS = 256  # with more rows of x a product is bound by arithmetic: whole weights are made and torch multiplies
_TILES = 512  # programs of 64 rows of W that fill a device
_INTERPRETED = triton.knobs.runtime.interpret  # the interpreter runs no assembly


class Tile(NamedTuple):
    block_t: int  # rows of x
    block_n: int  # rows of W
    warps: int
    stages: int


_BY_ROWS = (Tile(16, 128, 4, 4), Tile(32, 128, 4, 4), Tile(64, 256, 8, 3))


def tile_of(num_rows: int, weight: QuantizedWeight, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:  # no tensor cores: correct, not quick, and larger tiles outgrow shared memory
        return _BY_ROWS[0]._replace(stages=2)
    tile = next((tile for tile in _BY_ROWS if num_rows <= tile.block_t), _BY_ROWS[-1])
    return tile if weight.packed.shape[1] % tile.block_n == 0 else tile._replace(block_n=128, warps=4)


def splits_of(weight: QuantizedWeight) -> int:
    """Parts K is cut into: a power of two, at least four groups each."""
    groups, rows, _ = weight.packed.shape
    wanted = min(_TILES * 64 // rows, groups // 4)
    return 1 << (max(wanted, 1).bit_length() - 1)


def workspace_size(num_rows: int, weight: QuantizedWeight) -> int:
    """float32 numbers `product` needs beside its output."""
    splits = splits_of(weight)
    return splits * num_rows * weight.shape[0] if splits > 1 and num_rows <= FUSED_ROWS else 0


def product(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, K] -> x @ W.T + bias, [T, N] of x's dtype; `workspace`: float32, at least `workspace_size` of them."""
    (num_rows, width), num_outputs = x.shape, weight.shape[0]
    assert x.is_contiguous(), "rows of x lie one after another"
    assert width == weight.shape[1], f"x is {tuple(x.shape)}, the weight {weight.shape}"
    if out is None:
        out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((num_rows, num_outputs), x.dtype, True), (
        f"out is {tuple(out.shape)}, {out.dtype}"
    )
    if num_rows > FUSED_ROWS:
        torch.mm(x, dequantized(weight, x.dtype).T, out=out)
        return out if bias is None else out.add_(bias)
    if num_rows:
        launch(x, weight, bias, out, workspace, tile_of(num_rows, weight, x.dtype), splits_of(weight))
    return out


def launch(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
    tile: Tile,
    splits: int,
) -> None:
    """`product` with a tile and a cut of K of the caller's choice, for measuring them."""
    (num_rows, width), (groups, rows, _) = x.shape, weight.packed.shape
    num_outputs = weight.shape[0]
    if splits > 1:
        needed = splits * num_rows * num_outputs
        sums = torch.empty(needed, dtype=torch.float32, device=x.device) if workspace is None else workspace
        assert sums.dtype == torch.float32, f"the workspace is {sums.dtype}"
        assert sums.numel() >= needed, f"a workspace of {sums.numel()} is too small for {needed}"
    else:
        sums = out
    grid = (triton.cdiv(num_rows, tile.block_t), rows // tile.block_n, splits)
    _multiply[grid](
        x, weight.packed, weight.scales, bias if splits == 1 else None, sums, num_rows, num_outputs, width, rows, groups,
        BITS=weight.bits, GROUP=weight.group, SPLITS=splits, BLOCK_T=tile.block_t, BLOCK_N=tile.block_n, STAGES=tile.stages,
        WHOLE=width % weight.group == 0, ASSEMBLY=x.dtype == torch.bfloat16 and not _INTERPRETED, num_warps=tile.warps,
    )  # fmt: skip
    if splits > 1:
        _add_parts[(triton.cdiv(num_outputs, 512), num_rows)](sums, bias, out, num_rows, num_outputs, SPLITS=splits, BLOCK=512, num_warps=4)


def dequantized(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """-> [N, K], the very weights `product` multiplies with when x is of this dtype."""
    (groups, rows, _), (num_outputs, width) = weight.packed.shape, weight.shape
    out = torch.empty((num_outputs, width), dtype=dtype, device=weight.packed.device)
    _expand[(rows // 64, groups)](
        weight.packed, weight.scales, out, num_outputs, width, rows, BITS=weight.bits, GROUP=weight.group, BLOCK_N=64
    )  # fmt: skip
    return out


_FOUR = tl.constexpr("""{
    .reg .b32 a, b, c, d, s, o;
    prmt.b32 s, $5, $6, 0x5410;
    prmt.b32 o, $5, $6, 0x7632;
    shl.b32 a, $4, 3;
    shr.u32 b, $4, 1;
    shr.u32 c, $4, 5;
    shr.u32 d, $4, 9;
    lop3.b32 a, a, 0x00780078, 0x41804180, 0xEA;
    lop3.b32 b, b, 0x00780078, 0x41804180, 0xEA;
    lop3.b32 c, c, 0x00780078, 0x41804180, 0xEA;
    lop3.b32 d, d, 0x00780078, 0x41804180, 0xEA;
    fma.rn.bf16x2 $0, a, s, o;
    fma.rn.bf16x2 $1, b, s, o;
    fma.rn.bf16x2 $2, c, s, o;
    fma.rn.bf16x2 $3, d, s, o;
}""")  # each register: two bfloat16, or two words of four integers

_TWO = tl.constexpr("""{
    .reg .b32 a, b, h, s, z;
    prmt.b32 s, $3, $4, 0x5410;
    mov.b32 z, 0x80008000;
    shr.u32 h, $2, 8;
    lop3.b32 a, $2, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 b, $2, 0x00800080, 0x43004300, 0xEA;
    sub.rn.bf16x2 a, a, b;
    fma.rn.bf16x2 $0, a, s, z;
    lop3.b32 a, h, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 b, h, 0x00800080, 0x43004300, 0xEA;
    sub.rn.bf16x2 a, a, b;
    fma.rn.bf16x2 $1, a, s, z;
}""")  # 128 + the low seven bits, less 128 or, where the sign bit is set, 256


@triton.jit
def _part(words: tl.tensor, scales: tl.tensor, i: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """The weights of part i, by way of float32, which holds them exactly: rounded once, as the assembly does."""
    scale = (scales << 16).to(tl.float32, bitcast=True)
    if BITS == 4:
        offset = (scales & -65536).to(tl.float32, bitcast=True)
        weights = (((words >> (4 * i)) & 15) + 16).to(tl.float32) * scale + offset
    else:
        weights = ((words << (8 - 8 * i)) >> 8).to(tl.float32) * scale
    return weights.to(dtype)


@triton.jit
def _parts(words: tl.tensor, scales: tl.tensor, BITS: tl.constexpr, ASSEMBLY: tl.constexpr, dtype: tl.constexpr) -> tl.tuple:
    """words [N, W] int16, scales [N, 1] int32 -> the weights of each part of the group, [N, W] each."""
    if ASSEMBLY:
        if BITS == 4:
            parts = tl.inline_asm_elementwise(
                _FOUR, "=r,=r,=r,=r,r,r,r", [words, scales], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
        else:
            parts = tl.inline_asm_elementwise(_TWO, "=r,=r,r,r,r", [words, scales], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
    elif BITS == 4:
        parts = (
            _part(words, scales, 0, BITS, dtype),
            _part(words, scales, 1, BITS, dtype),
            _part(words, scales, 2, BITS, dtype),
            _part(words, scales, 3, BITS, dtype),
        )
    else:
        parts = (_part(words, scales, 0, BITS, dtype), _part(words, scales, 1, BITS, dtype))
    return parts


@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    x: tl.tensor, packed: tl.tensor, scales: tl.tensor, bias: tl.tensor, out: tl.tensor,
    num_rows: tl.tensor, num_outputs: tl.tensor, width: tl.tensor, rows: tl.tensor, groups: tl.tensor,
    BITS: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    WHOLE: tl.constexpr, ASSEMBLY: tl.constexpr,
) -> None:  # fmt: skip
    WORDS: tl.constexpr = GROUP * BITS // 16
    split = tl.program_id(2)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, WORDS)
    sums = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for group in tl.range(groups * split // SPLITS, groups * (split + 1) // SPLITS, num_stages=STAGES):
        row = group * rows + n
        words = tl.load(packed + row[:, None] * WORDS + j[None, :])
        parts = _parts(words, tl.load(scales + row)[:, None], BITS, ASSEMBLY, x.dtype.element_ty)
        of_group = tl.zeros(
            (BLOCK_N, BLOCK_T), tl.float32
        )  # sums carried from group to group would make the tensor cores wait for each product
        for i in tl.static_range(16 // BITS):
            k = group * GROUP + i * WORDS + j
            mask = (t < num_rows)[None, :] if WHOLE else (t < num_rows)[None, :] & (k < width)[:, None]
            inputs = tl.load(x + t[None, :] * width + k[:, None], mask=mask, other=0.0)  # [WORDS, BLOCK_T]
            of_group = tl.dot(parts[i], inputs, of_group, input_precision="ieee")
        sums += of_group
    if bias is not None:
        sums += tl.load(bias + n, mask=n < num_outputs, other=0.0).to(tl.float32)[:, None]
    place = (split * num_rows + t)[None, :] * num_outputs + n[:, None]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=(t < num_rows)[None, :] & (n < num_outputs)[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _add_parts(
    parts: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """parts [SPLITS, T, N] float32 -> out [T, N]."""
    row = tl.program_id(1)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(SPLITS):
        total += tl.load(parts + (i * num_rows + row) * num_outputs + n, mask=n < num_outputs, other=0.0)
    if bias is not None:
        total += tl.load(bias + n, mask=n < num_outputs, other=0.0).to(tl.float32)
    tl.store(out + row * num_outputs + n, total.to(out.dtype.element_ty), mask=n < num_outputs)


@triton.jit
def _expand(
    packed: tl.tensor, scales: tl.tensor, out: tl.tensor, num_outputs: tl.tensor, width: tl.tensor, rows: tl.tensor,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:  # fmt: skip
    WORDS: tl.constexpr = GROUP * BITS // 16
    group = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, WORDS)
    row = group * rows + n
    parts = _parts(tl.load(packed + row[:, None] * WORDS + j[None, :]), tl.load(scales + row)[:, None], BITS, False, out.dtype.element_ty)
    for i in tl.static_range(16 // BITS):
        k = group * GROUP + i * WORDS + j
        place = n[:, None].to(tl.int64) * width + k[None, :]
        tl.store(out + place, parts[i], mask=(n < num_outputs)[:, None] & (k < width)[None, :])
