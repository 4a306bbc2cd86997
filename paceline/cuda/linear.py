"""Products with weights of 4, 8, 16 or 32 bits (kernels: cuda/multiply.py).

K is split over programs where W has too few rows to fill the device. The parts are added in order by what
reads them next (`parts`: cuda/rows.py), or by a second kernel (a call). Invariant: up to FUSED_ROWS rows each
output is a sum over its own row of x, whatever the others hold; in exact mode how K is cut depends on W
alone, so that the bits of a row do not depend on how many rows there are either.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from paceline.cuda.multiply import add_parts, expand, multiply
from paceline.cuda.pack import PackedWeight
from paceline.cuda.rows import INTERPRETED, LAUNCH
from paceline.models.config import Activation

# With more rows of x a product is bound by arithmetic: whole weights are made and torch multiplies.
FUSED_ROWS = 256
# Programs that fill a device, well or just: of 132 multiprocessors, measured.
_ENOUGH, _MIDDLING, _FEW = 200, 150, 100
_WAVE = 132  # programs that run at the same time, one a multiprocessor
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
_FLOATS = Tile(16, 128, 4, 2)  # no tensor cores: correct, not quick, and larger tiles outgrow shared memory


class Grouped(NamedTuple):
    """Rows of a result by their experts; row t is of row t modulo the rows of x (cuda/route.py)."""

    num_rows: int  # of the result
    num_experts: int  # that W has
    tiles: Tensor | None  # [most, 3] int32: the expert, the first entry of `order`, how many; none: no tile
    order: Tensor | None  # int32: rows of the result
    shares: Tensor | None  # [num_rows] float32: what they are multiplied by


UNGROUPED = Grouped(0, 1, None, None, None)


def expert_tile(num_rows: int, weight: PackedWeight, dtype: torch.dtype) -> Tile:
    """As wide as few of these rows make an expert's part of them."""
    if dtype == torch.float32:
        return _FLOATS
    block_t = 16 if num_rows <= 64 else 32 if num_rows <= FUSED_ROWS else 64
    if block_t == 16:
        return Tile(16, 64, 4, 6 if weight.is_whole else 4)
    return Tile(block_t, 128, 4, 4 if weight.is_whole else 3)


def tile_of(num_rows: int, weight: PackedWeight, dtype: torch.dtype, splits: int) -> Tile:
    """Measured on an H200, whole steps in turns: of tiles that all give a row the same bits."""
    if dtype == torch.float32:
        return _FLOATS
    block_t = next((size for size in (16, 32, 64) if num_rows <= size), 128)
    if not weight.is_whole:
        return Tile(min(block_t, 64), 128, 4, 4 if block_t == 16 else 3)
    if _rows_of_tile(weight) == 128:  # high tiles read x less often: a device is bound by its power, too
        if 8 < num_rows <= 16:
            return Tile(16, 64, 4, 5)
        if block_t == 64 and triton.cdiv(weight.shape[0], 256) >= _FEW:
            return Tile(64, 256, 8, 4)
        return Tile(block_t, 128, 8, 3) if block_t == 128 else Tile(block_t, 128, 4, 4)
    num_tiles = triton.cdiv(weight.shape[0], 64) * splits
    while num_rows > 64 and block_t > 16 and 2 * num_tiles * triton.cdiv(num_rows, block_t) <= _WAVE:
        block_t //= 2  # a small matrix: more programs, each with fewer rows
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


class Matrix(NamedTuple):
    """A product with W and what is added to it: y = x @ W.T + bias."""

    weight: PackedWeight  # [N, K]
    bias: Tensor | None = None  # [N]
    is_exact: bool = False  # the same bits with any number of rows, prompts too
    num_outputs: int = 0  # of a matrix of which W has a rank's rows; 0: W is whole

    @property
    def num_bytes(self) -> int:
        return self.weight.packed.nbytes + self.weight.scales.nbytes

    def __call__(self, x: Tensor, activation: Activation | None = None) -> Tensor:
        """x [T, K] -> y [T, N] of x's dtype; with `activation`: act(first half of y) * second half."""
        assert activation in (None, "silu", "gelu_tanh", "clamped"), f"no activation {activation}"
        weight, bias, is_exact, _ = self
        if len(x) > FUSED_ROWS and is_exact:
            return torch.cat([self(some, activation) for some in x.split(FUSED_ROWS)])
        if len(x) > FUSED_ROWS:
            whole = torch.nn.functional.linear(x, dequantized(weight, x.dtype), bias)
            return whole if activation is None else add_up(whole[None], activation, x.dtype)
        tile, splits = self._way(x)
        if splits == 1:
            return self.multiply(x, tile, 1, activation)[0]
        return add_up(self.multiply(x, tile, splits), activation, x.dtype)

    def parts(self, x: Tensor, *, is_early: bool = False) -> Tensor:
        """x [T, K] -> [S, T, N]: y is their sum; float32 if there are several, else of x's dtype. `is_early`:
        the next kernel may start when this one has, and wait. It helps where many small ones follow; a large
        one takes the room that these programs need. One product in each layer must not: see `Attending`."""
        tile, splits = self._way(x)
        if splits == 1 or len(x) > FUSED_ROWS:
            return self(x)[None]
        return self.multiply(x, tile, splits, is_early=is_early)

    def _way(self, x: Tensor) -> tuple[Tile, int]:
        whole = self.num_outputs or self.weight.shape[0], self.weight.shape[1]
        return way_of(len(x), self.weight._replace(shape=whole), x.dtype, self.is_exact)

    def multiply(
        self, x: Tensor, tile: Tile, splits: int, gate: Activation | None = None, is_early: bool = False,
        grouped: Grouped = UNGROUPED,
    ) -> Tensor:  # fmt: skip
        """x [T, K] -> [splits, T, N], or [1, T, N / 2] with a gate; grouped: [1, its rows, N or N / 2]."""
        weight, bias = self.weight, self.bias
        (num_inputs, width), num_outputs = x.shape, weight.shape[0] // grouped.num_experts
        num_rows, tiles = grouped.num_rows or num_inputs, grouped.tiles
        assert x.is_contiguous(), "rows of x lie one after another"
        assert width == weight.shape[1], f"x is {tuple(x.shape)}, the weight {weight.shape}"
        fits = not weight.is_whole or x.dtype == weight.packed.dtype
        assert fits, f"x is {x.dtype}, the weight {weight.packed.dtype}"
        if weight.is_whole:  # [N, K]
            groups, rows = triton.cdiv(width, weight.group), num_outputs
            row_step, group_step = width, weight.group
        else:  # [groups, rows, words]
            groups, rows, row_step = weight.packed.shape
            group_step = rows * row_step
        halves = 1 if gate is None else 2
        per_tile, size = tile.block_n // halves, num_outputs // halves
        dtype = x.dtype if splits == 1 and grouped.shares is None else torch.float32
        out = torch.empty((splits, num_rows, size), dtype=dtype, device=x.device)
        is_filled, is_whole = size % per_tile == 0, width % weight.group == 0
        # Weights may be asked for before the kernel that computes x has ended. After a product, as before a
        # layer's last, which is wider than high, there is no time for it; small integers gain nothing.
        has_time = weight.bits == 16 and num_outputs >= width and tiles is None
        num_tiles = triton.cdiv(num_rows, tile.block_t) if tiles is None else len(tiles)
        multiply[num_tiles, triton.cdiv(size, per_tile), splits](
            x, weight.packed, weight.scales, bias, out, tiles, grouped.order, grouped.shares, num_rows,
            num_inputs, num_outputs, width, rows, groups, splits, row_step, group_step,
            BITS=weight.bits, GROUP=weight.group, BLOCK_T=tile.block_t, BLOCK_N=tile.block_n,
            STAGES=tile.stages, WHOLE=is_whole, FILLED=is_filled,
            ASSEMBLY=x.dtype == torch.bfloat16 and not INTERPRETED, ACTIVATION=gate, UNROLL=tile.unroll,
            AHEAD=2 if has_time and is_whole else 0, THREADS=32 * tile.warps, IS_EARLY=is_early,
            num_warps=tile.warps, **LAUNCH,
        )  # fmt: skip
        return out


def add_up(parts: Tensor, activation: Activation | None, dtype: torch.dtype) -> Tensor:
    """Parts [S, T, N] of a product -> [T, N] or, gated, [T, N / 2]."""
    (splits, num_rows, num_outputs), block = parts.shape, 1024 if len(parts) == 1 else 512
    size = num_outputs if activation is None else num_outputs // 2
    out = torch.empty((num_rows, size), dtype=dtype, device=parts.device)
    grid, options = (num_rows, triton.cdiv(size, block)), {"num_warps": 4, **LAUNCH}
    add_parts[grid](parts, out, num_rows, num_outputs, splits, block, activation, **options)
    return out


def dequantized(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """-> [N, K], the very weights a product multiplies with when x is of this dtype."""
    if weight.is_whole:
        return weight.packed.to(dtype)
    (groups, rows, _), (num_outputs, width) = weight.packed.shape, weight.shape
    out = torch.empty((num_outputs, width), dtype=dtype, device=weight.packed.device)
    sizes = (num_outputs, width, rows, weight.bits, weight.group, 64)
    expand[(rows // 64, groups)](weight.packed, weight.scales, out, *sizes)
    return out
