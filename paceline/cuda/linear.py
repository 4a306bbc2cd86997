"""Products with weights of 4, 8, 16 or 32 bits that give a row the same bits whatever the other rows hold, up
to FUSED_ROWS rows.

K is split over programs where W has too few rows to fill the device. The parts are added in order by whatever
reads them next (`parts`: cuda/rows.py), or by a second kernel (a call). Invariant: each output is a sum
over its own row of x, and in exact mode how K is cut depends on W alone, so there the bits of a row do not
depend on how many rows there are either. Kernels: cuda/multiply.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from paceline.cuda.multiply import add_parts, expand, multiply
from paceline.cuda.overlap import INTERPRETED, LAUNCH
from paceline.cuda.pack import PackedWeight
from paceline.cuda.rows import Activation, gate

# With more rows of x a product is bound by arithmetic: whole weights are made and torch multiplies.
FUSED_ROWS = 256
# Programs that fill a device, well or just: of 132 multiprocessors, measured.
_ENOUGH, _MIDDLING, _FEW = 200, 150, 100
# With more rows, sums are many: to write and add parts of them costs more than further programs gain.
_SOME_ROWS = 16
_SHORTEST = 512  # inputs of a part of K, at least


class Tile(NamedTuple):
    block_t: int  # rows of x
    block_n: int  # rows of W
    warps: int  # four or eight: tiles of 16 rows and more then use one tensor instruction; fewer, another
    stages: int
    unroll: int = 1  # groups of K in a turn of the loop


_QUICK = Tile(8, 64, 2, 3, unroll=2)


def tile_of(num_rows: int, weight: PackedWeight, dtype: torch.dtype, splits: int) -> Tile:
    """Measured on an H200, whole steps in turns: of tiles that all give a row the same bits."""
    if dtype == torch.float32:  # no tensor cores: correct, not quick, and larger tiles outgrow shared memory
        return Tile(16, 128, 4, 2)
    block_t = next((size for size in (16, 32, 64) if num_rows <= size), 128)
    if not weight.is_whole:
        return Tile(min(block_t, 64), 128, 4, 4 if block_t == 16 else 3)
    if _rows_of_tile(weight) == 128:
        return _tile_without_parts(num_rows, block_t, weight.shape[0])
    # Where a multiprocessor has one or two programs, each has more on its way.
    high, low = (triton.cdiv(weight.shape[0], block_n) * splits for block_n in (128, 64))
    if block_t == 64 and high >= _FEW:
        return Tile(64, 128, 4, 6 if high < _MIDDLING else 4)
    if block_t == 128:
        return Tile(128, 64, 4, 6 if low * triton.cdiv(num_rows, 128) < _MIDDLING else 4)
    if low >= 3 * _FEW:
        return Tile(block_t, 64, 4, 4)
    if block_t == 16:
        is_long = weight.shape[1] > weight.shape[0] and num_rows > 8
        return Tile(16, 64, 4, 5 if is_long or _MIDDLING <= low < _ENOUGH else 8)
    return Tile(block_t, 64, 4, 5 if low >= _MIDDLING else 8)


def _tile_without_parts(num_rows: int, block_t: int, num_outputs: int) -> Tile:
    """For W of many rows. High tiles read x less often: with 64 rows a device is bound by its power too."""
    if 8 < num_rows <= 16:
        return Tile(16, 64, 4, 5)
    if block_t == 64 and triton.cdiv(num_outputs, 256) >= _FEW:
        return Tile(64, 256, 8, 4)
    return Tile(block_t, 128, 8, 3) if block_t == 128 else Tile(block_t, 128, 4, 4)


def _rows_of_tile(weight: PackedWeight) -> int:
    """Of few rows, low tiles: as many programs with fewer parts. Small integers have too little to read."""
    return 64 if weight.is_whole and triton.cdiv(weight.shape[0], 128) < _ENOUGH else 128


def splits_of(weight: PackedWeight, shortest: int = _SHORTEST, enough: int = 0) -> int:
    """Parts K is cut into, for `enough` programs: a power of two."""
    (num_outputs, width), splits = weight.shape, 1
    enough = enough or (_MIDDLING if weight.is_whole else _ENOUGH)
    num_tiles = triton.cdiv(num_outputs, _rows_of_tile(weight))
    while num_tiles * splits < enough and 2 * splits * shortest <= width:
        splits *= 2
    return splits


def way_of(num_rows: int, weight: PackedWeight, dtype: torch.dtype, is_exact: bool) -> tuple[Tile, int]:
    """The tile, and how many parts K is cut into: in exact mode as many for any number of rows."""
    if num_rows <= 8 and not is_exact and weight.bits == 4 and dtype != torch.float32:
        # by the small tensor instruction, with other bits than the large one gives
        return _QUICK, splits_of(weight, 2 * _SHORTEST)
    has_many_sums = num_rows > _SOME_ROWS and weight.bits == 16 and not is_exact
    splits = splits_of(weight, enough=_FEW if has_many_sums else 0)
    return tile_of(num_rows, weight, dtype, splits), splits


def ahead_of(weight: PackedWeight) -> int:
    """Groups of weights asked for before the kernel that computes x has ended. After a product, as before a
    layer's last, which is wider than high, there is no time for it; small integers gain nothing."""
    return 2 if weight.bits == 16 and weight.shape[0] >= weight.shape[1] else 0


class Matrix(NamedTuple):
    """A product with W and what is added to it: y = x @ W.T + bias."""

    weight: PackedWeight  # [N, K]
    bias: torch.Tensor | None = None  # [N]
    is_exact: bool = False  # the same bits with any number of rows, prompts too

    @property
    def num_bytes(self) -> int:
        return self.weight.packed.nbytes + self.weight.scales.nbytes

    def __call__(self, x: torch.Tensor, activation: Activation | None = None) -> torch.Tensor:
        """x [T, K] -> y [T, N] of x's dtype; with `activation`: act(first half of y) * second half."""
        weight, bias, is_exact = self
        _check(x, weight, activation)
        size = weight.shape[0] if activation is None else weight.shape[0] // 2
        if len(x) > FUSED_ROWS and not is_exact:
            whole = torch.nn.functional.linear(x, dequantized(weight, x.dtype), bias)
            if activation is None:
                return whole
            gated = torch.empty((len(x), size), dtype=x.dtype, device=x.device)
            gate(whole, activation, gated)
            return gated
        out = torch.empty((len(x), size), dtype=x.dtype, device=x.device)
        for some, its_out in zip(x.split(FUSED_ROWS), out.split(FUSED_ROWS), strict=True):
            launch(some, weight, bias, its_out, *way_of(len(some), weight, x.dtype, is_exact), activation)
        return out

    def parts(self, x: torch.Tensor, *, is_early: bool = False) -> torch.Tensor:
        """x [T, K] -> [S, T, N]: y is their sum; float32 if there are several, else of x's dtype. `is_early`:
        the next kernel may start when this one has, and wait. It helps where many small ones follow; a large
        one takes the room that these programs need. One product in each layer must not: see `Attending`."""
        weight, bias, is_exact = self
        tile, splits = way_of(len(x), weight, x.dtype, is_exact)
        if splits == 1 or len(x) > FUSED_ROWS:
            return self(x)[None]
        _check(x, weight, None)
        sums = torch.empty((splits, len(x), weight.shape[0]), dtype=torch.float32, device=x.device)
        _multiply(x, weight, bias, sums, tile, splits, None, is_early=is_early)
        return sums


def _check(x: torch.Tensor, weight: PackedWeight, activation: str | None) -> None:
    assert len(x), "at least one row"
    assert x.is_contiguous(), "rows of x lie one after another"
    assert x.shape[1] == weight.shape[1], f"x is {tuple(x.shape)}, the weight {weight.shape}"
    fits = not weight.is_whole or x.dtype == weight.packed.dtype
    assert fits, f"x is {x.dtype}, the weight {weight.packed.dtype}"
    assert activation in (None, "silu", "gelu_tanh"), f"no activation {activation}"
    assert activation is None or weight.shape[0] % 2 == 0, "a gate and an up half"


def launch(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, out: torch.Tensor,
    tile: Tile, splits: int, activation: Activation | None = None,
) -> None:  # fmt: skip
    """A product with a tile and a cut of K of the caller's choice."""
    if splits == 1:
        _multiply(x, weight, bias, out, tile, 1, activation)
        return
    num_rows, num_outputs = len(x), weight.shape[0]
    sums = torch.empty((splits, num_rows, num_outputs), dtype=torch.float32, device=x.device)
    _multiply(x, weight, bias, sums, tile, splits, None)
    grid, options = (triton.cdiv(out.shape[1], 512), num_rows), {"num_warps": 4, **LAUNCH}
    add_parts[grid](sums, out, num_rows, num_outputs, splits, 512, activation, **options)


def _multiply(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, out: torch.Tensor,
    tile: Tile, splits: int, activation: Activation | None, is_early: bool = False,
) -> None:  # fmt: skip
    (num_rows, width), num_outputs = x.shape, weight.shape[0]
    if weight.is_whole:  # [N, K]
        groups, rows = triton.cdiv(width, weight.group), num_outputs
        row_step, group_step = width, weight.group
    else:  # [groups, rows, words]
        groups, rows, row_step = weight.packed.shape
        group_step = rows * row_step
    halves = 1 if activation is None else 2
    per_tile, size = tile.block_n // halves, num_outputs // halves
    grid = (triton.cdiv(num_rows, tile.block_t), triton.cdiv(size, per_tile), splits)
    is_filled = size % per_tile == 0
    can_ask = width % weight.group == 0 and (weight.is_whole or is_filled)  # for whole runs of bytes
    multiply[grid](
        x, weight.packed, weight.scales, bias, out, num_rows, num_outputs, width, rows, groups, splits,
        row_step, group_step,
        BITS=weight.bits, GROUP=weight.group, BLOCK_T=tile.block_t, BLOCK_N=tile.block_n, STAGES=tile.stages,
        WHOLE=width % weight.group == 0, FILLED=is_filled,
        ASSEMBLY=x.dtype == torch.bfloat16 and not INTERPRETED, ACTIVATION=activation, UNROLL=tile.unroll,
        AHEAD=ahead_of(weight) if can_ask else 0, THREADS=32 * tile.warps, IS_EARLY=is_early,
        num_warps=tile.warps, **LAUNCH,
    )  # fmt: skip


def dequantized(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """-> [N, K], the very weights a product multiplies with when x is of this dtype."""
    if weight.is_whole:
        return weight.packed.to(dtype)
    (groups, rows, _), (num_outputs, width) = weight.packed.shape, weight.shape
    out = torch.empty((num_outputs, width), dtype=dtype, device=weight.packed.device)
    sizes = (num_outputs, width, rows, weight.bits, weight.group, 64)
    expand[(rows // 64, groups)](weight.packed, weight.scales, out, *sizes)
    return out
