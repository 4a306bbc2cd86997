"""The products of a model, alone: y = x Wᵀ for every layer's matrix of one kind, one after the other, as a
pass reads them.

Invariant: a run goes over all layers of the model, so that weights come from memory and not from a cache; all
threads are inside one compiled region, each on its share of every matrix, as in cpu/forward.py. Inputs are
made up: what they hold changes no time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import carray, prange

from paceline.cpu.dots import SCALE_SHIFT
from paceline.cpu.lanes import int_pointer
from paceline.cpu.matmul import Activations, Matrix, product_4, product_8, product_32
from paceline.cpu.sync import num_threads
from paceline.loaders.packed import LINEARS, Tensors
from paceline.measure.roofline import Work
from paceline.models.config import ModelConfig
from paceline.models.quantize import DOT_ROWS, FLOAT_ROWS, GROUP, head_bits


def _over_all(product: Any) -> Any:
    """A kernel that multiplies with one matrix after another, all threads in one region."""

    @numba.njit(nogil=True, error_model="numpy", parallel=True)
    def run(matrices_at, count, x, y, rows, threads):  # type: ignore[no-untyped-def]
        for part in prange(threads):
            f = carray(int_pointer(matrices_at), (count, 4))
            for i in range(count):
                product(np.int64(part), threads, Matrix(f[i, 0], f[i, 1], f[i, 2], f[i, 3]), x, y, rows)

    return run


RUN = {bits: _over_all(product) for bits, product in ((32, product_32), (8, product_8), (4, product_4))}


class Kind(NamedTuple):
    """All layers' matrices of one kind, and what one token's product with them is."""

    name: str  # qkv, out, gate_up, down or head
    bits: int
    table: np.ndarray  # [layers, 4] int64: fields of a Matrix each
    num_bytes: int

    @property
    def shape(self) -> str:
        """Outputs x inputs, as they lie in memory."""
        return f"{self.table[0, 3]}x{self.table[0, 2]}"

    @property
    def macs(self) -> int:
        return int((self.table[:, 2] * self.table[:, 3]).sum())

    def work(self, tokens: int) -> Work:
        flops = 2.0 * self.macs * tokens
        kind = {"float_flops": flops} if self.bits == 32 else {"int8_flops": flops}
        return Work(num_bytes=float(self.num_bytes), **kind)


def kinds_of(config: ModelConfig, tensors: Tensors, bits: int) -> Iterator[Kind]:
    """The products of a packed model; `tensors` must outlive them."""
    for name in LINEARS:
        yield _kind(name, bits, tensors, [f"layers.{i}.{name}" for i in range(config.num_layers)])
    yield _kind("head", head_bits(bits), tensors, ["embedding" if config.tie_embeddings else "head"])


def _kind(name: str, bits: int, tensors: Tensors, names: list[str]) -> Kind:
    weights, biases = ([tensors[f"{each}.{part}"] for each in names] for part in ("weight", "bias"))
    tiles, across, _ = weights[0].shape
    k, n = (across, tiles * FLOAT_ROWS) if bits == 32 else (across * GROUP[bits], tiles * DOT_ROWS)
    rows = [[weight.data_ptr(), bias.data_ptr(), k, n] for weight, bias in zip(weights, biases, strict=True)]
    return Kind(name, bits, np.array(rows, np.int64), sum(w.numel() * w.element_size() for w in weights))


class Product:
    """One kind, ready to be run with up to `widest` tokens."""

    def __init__(self, kind: Kind, widest: int) -> None:
        self.kind = kind
        k, n = (int(size) for size in kind.table[0, 2:])
        generator = torch.Generator().manual_seed(0)
        if kind.bits == 32:
            self._values = torch.randn(widest * k, generator=generator)
        else:
            self._values = torch.randint(-127, 128, (widest * k,), dtype=torch.int8, generator=generator)
        groups = k // GROUP.get(kind.bits, k)
        # Scales of a usual size: tiny results would be slow ones.
        self._scales = torch.full((groups * widest,), 2.0 ** (SCALE_SHIFT - 7))
        self._sums = torch.ones(groups * widest, dtype=torch.int32)
        self._y = torch.empty(widest * n)

    def seconds(self, tokens: int) -> float:
        x = Activations(self._values.data_ptr(), self._scales.data_ptr(), self._sums.data_ptr())
        run, table = RUN[self.kind.bits], self.kind.table
        started = time.perf_counter()
        run(table.ctypes.data, len(table), x, self._y.data_ptr(), tokens, num_threads())
        return time.perf_counter() - started
