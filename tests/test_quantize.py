"""Quantizing: the error is at most half a step, and packing loses nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.loaders.quantize import Quantized, dequantize, pack, pack_integers, quantize, unpack_integer_rows, unpack_rows


def weights(seed: int, num_rows: int, width: int) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))


@given(
    seed=st.integers(0, 1000),
    num_rows=st.integers(1, 40),
    groups=st.integers(1, 3),
    group=st.sampled_from([4, 32, 64]),
    bits=st.sampled_from([4, 8]),
)
def test_error_is_at_most_half_a_step(seed: int, num_rows: int, groups: int, group: int, bits: int) -> None:
    weight = weights(seed, num_rows, groups * group)
    quantized = quantize(weight, bits, group)
    error = (dequantize(quantized) - weight).abs().view(num_rows, groups, group)
    assert (error <= quantized.scales[..., None] * 0.5001).all()
    assert quantized.values.abs().max() == 2 ** (bits - 1) - 1  # the largest weight of a group uses the whole range


@given(seed=st.integers(0, 1000), num_rows=st.integers(1, 40), bits=st.sampled_from([4, 8]))
def test_packing_is_undone_by_unpacking(seed: int, num_rows: int, bits: int) -> None:
    values, scales = quantize(weights(seed, num_rows, 64), bits, 32)
    ids = torch.arange(num_rows).flip(0)
    tiles = pack_integers(values, bits)
    assert tiles.numel() == -(-num_rows // 16) * 16 * 64 * bits // 8
    assert torch.equal(unpack_integer_rows(tiles, ids, bits), values[ids])
    assert torch.equal(unpack_rows(pack(scales), ids), scales[ids])


def test_a_group_of_zeros_stays_zero() -> None:
    quantized = quantize(torch.zeros(2, 64), 8, 32)
    assert torch.equal(dequantize(quantized), torch.zeros(2, 64))


def test_dequantize_multiplies_each_group_by_its_scale() -> None:
    quantized = Quantized(torch.tensor([[1, -2, 3, 4]], dtype=torch.int8), torch.tensor([[0.5, 10.0]]))
    assert dequantize(quantized).tolist() == [[0.5, -1.0, 30.0, 40.0]]


@pytest.mark.parametrize(("bits", "group", "named"), [(3, 64, "3 bits"), (8, 48, "48"), (8, 0, "0")])
def test_impossible_settings_are_named(bits: int, group: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        quantize(torch.ones(2, 64), bits, group)
