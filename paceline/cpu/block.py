"""A whole layer in one compiled call: the same kernels in the same order as calling them one by one, without Python between them.

Invariant: bit for bit what models/decoder.py computes with the single kernels. Calling the kernels one by one adds some 70
microseconds a layer, which a small model feels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from numba import carray

from paceline.cpu.compile import kernel, piece, unrolled
from paceline.cpu.lanes import LANES, float_pointer
from paceline.cpu.matmul import Tiles, product_4, product_8, product_32
from paceline.cpu.paged import Attention, HeadSpec, head_spec, place_and_attend
from paceline.cpu.rows import gate, norm

if TYPE_CHECKING:
    import torch

    from paceline.models.config import ModelConfig
    from paceline.models.decoder import Layer

    FusedBlock = Callable[[torch.Tensor, Attention, tuple[torch.Tensor, torch.Tensor]], torch.Tensor]


class BlockSpec(NamedTuple):
    """A layer as the kernels read it: addresses, 0 for a norm that is not there."""

    attention_norm: int
    qkv: Tiles
    heads: HeadSpec
    out: Tiles
    after_attention: int
    mlp_norm: int
    gate_up: Tiles
    down: Tiles
    after_mlp: int
    is_gelu: bool


@piece
def _add(x_at, added_at, y_at, weight, rows, width, eps, threads):  # type: ignore[no-untyped-def]
    """y = x + added, or x + norm(added) where there is a weight. y may be x."""
    if weight != 0:
        norm(rows, added_at, weight, added_at, width, eps, threads)
    x, y, added = (
        carray(float_pointer(x_at), rows * width),
        carray(float_pointer(y_at), rows * width),
        carray(float_pointer(added_at), rows * width),
    )
    for i in range(rows * width):
        y[i] = x[i] + added[i]


@unrolled
def _run(product, b, layer, keys, values, num_slots, work, x, y):  # type: ignore[no-untyped-def]
    """x [T, hidden] -> y [T, hidden]; b is a Pass, layer a BlockSpec, `product` the kernel for its number of bits.

    The workspace comes from the caller: numba frees an array after its last mention, and an address is no mention.
    """
    rows, threads, eps, hidden = b.rows, b.threads, layer.heads.eps, layer.qkv.k
    narrow = work
    middle = narrow + rows * hidden * 4
    wide = middle + rows * max(layer.out.k, layer.down.k) * 4
    norm(rows, x, layer.attention_norm, narrow, hidden, eps, threads)
    product(layer.qkv, narrow, wide, rows, threads)
    place_and_attend(b, layer.heads, wide, keys, values, num_slots, middle)
    product(layer.out, middle, narrow, rows, threads)
    _add(x, narrow, y, layer.after_attention, rows, hidden, eps, threads)
    norm(rows, y, layer.mlp_norm, narrow, hidden, eps, threads)
    product(layer.gate_up, narrow, wide, rows, threads)
    gate(rows, wide, middle, layer.down.k, layer.is_gelu, threads)
    product(layer.down, middle, narrow, rows, threads)
    _add(y, narrow, y, layer.after_mlp, rows, hidden, eps, threads)


@kernel
def _block_32(b, layer, keys, values, num_slots, work, x, y):  # type: ignore[no-untyped-def]
    _run(product_32, b, layer, keys, values, num_slots, work, x, y)


@kernel
def _block_8(b, layer, keys, values, num_slots, work, x, y):  # type: ignore[no-untyped-def]
    _run(product_8, b, layer, keys, values, num_slots, work, x, y)


@kernel
def _block_4(b, layer, keys, values, num_slots, work, x, y):  # type: ignore[no-untyped-def]
    _run(product_4, b, layer, keys, values, num_slots, work, x, y)


def fuse(layer: Layer, config: ModelConfig) -> FusedBlock:
    """A function from x [T, hidden], the pass and the layer's cache to x after the layer, in new memory."""
    import torch

    from paceline.models.linear import ExactLinear

    def at(weight: torch.Tensor | None) -> int:
        assert weight is None or weight.is_contiguous()
        return 0 if weight is None else weight.data_ptr()

    linears = [linear for linear in (layer.qkv, layer.out, layer.gate_up, layer.down) if isinstance(linear, ExactLinear)]
    assert len(linears) == 4, "only layers of our own kernels can be fused"
    assert all(linear.out_features % LANES == 0 for linear in linears), "whole tiles only"
    qkv, out, gate_up, down = (linear.tiles for linear in linears)
    heads = head_spec(layer.heads, config.num_heads, config.num_kv_heads, config.head_dim)
    spec = BlockSpec(
        at(layer.attention_norm), qkv, heads, out, at(layer.after_attention), at(layer.mlp_norm), gate_up, down, at(layer.after_mlp),
        config.activation == "gelu_tanh",
    )  # fmt: skip
    floats_a_row = qkv.k + max(out.k, down.k) + LANES * max(qkv.tiles, gate_up.tiles)
    run = {32: _block_32, 8: _block_8, 4: _block_4}[linears[0].bits]

    def block(x: torch.Tensor, attention: Attention, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        attention.check(cache, heads)
        keys, values = cache
        assert x.is_contiguous(), "the kernels read contiguous float32"
        y, work = torch.empty_like(x), attention.workspace(floats_a_row)
        run(attention.spec, spec, keys.data_ptr(), values.data_ptr(), keys.shape[0], work.data_ptr(), x.data_ptr(), y.data_ptr())
        return y

    return block
