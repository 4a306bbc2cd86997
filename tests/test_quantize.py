"""Quantizing: the error is at most half a step, a file that is on such a grid loses nothing, and packing
loses nothing.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError, ModelFileError
from paceline.cpu import matmul
from paceline.loaders import hub
from paceline.loaders.checkpoint import open_checkpoint
from paceline.models.quantize import (
    BITS,
    DOT_ROWS,
    FLOAT_ROWS,
    GROUP,
    STORED,
    Quantized,
    bits_of,
    dequantize,
    pack_linear,
    pack_quantized,
    quantize,
    round_activations,
)

bits_drawn = st.sampled_from([8, 4])


def weights(seed: int, num_rows: int, width: int, shift: float = 0.0) -> torch.Tensor:
    """Every row of another size, so that a scale in a wrong place shows."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(4 * torch.rand(num_rows, 1, generator=generator) - 6)
    return sizes * (torch.randn(num_rows, width, generator=generator) + shift)


def per_group(values: torch.Tensor, bits: int) -> torch.Tensor:
    return values.unflatten(1, (-1, GROUP[bits]))


@given(
    seed=st.integers(0, 1000),
    num_rows=st.integers(1, 40),
    groups=st.integers(1, 4),
    bits=bits_drawn,
    shift=st.sampled_from([0.0, 3.0, -3.0]),
)
def test_error_is_at_most_half_a_step(seed: int, num_rows: int, groups: int, bits: int, shift: float) -> None:
    """Half a step, and what the half-precision scale is off: 2**-11 of it for each of up to 127 steps, and of
    the minimum.
    """
    weight = weights(seed, num_rows, groups * GROUP[bits], shift)
    quantized = quantize(weight, bits)
    error = per_group((dequantize(quantized, weight.shape[1]) - weight).abs(), bits)
    top = per_group(weight.abs(), bits).amax(-1)
    assert (error.amax(-1) <= 0.5001 * quantized.scales + top * 2.0**-10).all()
    low, high = {8: (-127, 127), 4: (0, 15)}[bits]
    assert low <= int(quantized.values.min()) <= int(quantized.values.max()) <= high
    assert (quantized.minima is None) == (bits == 8)


def unpack_quantized(packed: torch.Tensor, bits: int) -> Quantized:
    """The inverse; rows filled up to whole tiles."""
    num_tiles, groups, _ = packed.shape
    size = DOT_ROWS * GROUP[bits] * bits // 8
    quads = packed[:, :, :size].reshape(num_tiles, groups, -1, DOT_ROWS, 4)
    if bits == 4:
        quads = torch.stack([quads & 15, quads >> 4], 3).flatten(2, 3)
    values = quads.permute(0, 3, 1, 2, 4).reshape(num_tiles * DOT_ROWS, -1).contiguous().view(torch.int8)
    halves = [
        packed[:, :, at : at + 2 * DOT_ROWS].contiguous().view(torch.float16)
        for at in range(size, packed.shape[2], 2 * DOT_ROWS)
    ]
    floats = [(half.float() / STORED).transpose(1, 2).reshape(-1, groups) for half in halves]
    return Quantized(values, floats[0], floats[1] if bits == 4 else None)


@given(seed=st.integers(0, 1000), num_rows=st.integers(1, 40), bits=bits_drawn)
def test_the_whole_range_is_used(seed: int, num_rows: int, bits: int) -> None:
    """The largest weight of a group has the largest integer (give or take the rounding of its scale): no bit
    is wasted.
    """
    values = per_group(quantize(weights(seed, num_rows, 2 * GROUP[bits]), bits).values.int(), bits)
    if bits == 8:
        assert (values.abs().amax(-1) >= 126).all()
    else:
        assert (values.amin(-1) == 0).all()
        assert (values.amax(-1) == 15).all()


@given(seed=st.integers(0, 1000), num_rows=st.integers(1, 20), groups=st.integers(1, 4))
def test_int4_loses_nothing_of_a_file_in_q4_1(seed: int, num_rows: int, groups: int) -> None:
    """Such a file has w = d * q + m with d and m in half precision, and every group reaches both 0 and 15."""
    generator = torch.Generator().manual_seed(seed)
    d = (torch.rand(num_rows, groups, 1, generator=generator) * 0.05 + 1e-3).half().float()
    m = -(torch.rand(num_rows, groups, 1, generator=generator) * 0.5).half().float()
    q = torch.randint(0, 16, (num_rows, groups, 32), generator=generator)
    q[:, :, 3], q[:, :, 17] = 0, 15
    weight = (d * q + m).flatten(1)
    quantized = quantize(weight, 4)
    assert torch.equal(quantized.values.view_as(q).long(), q)
    assert torch.equal(quantized.scales, d[:, :, 0])
    assert quantized.minima is not None
    assert torch.equal(quantized.minima, -m[:, :, 0])
    assert torch.equal(dequantize(quantized, weight.shape[1]), weight)


def test_nothing_that_is_stored_has_a_sign() -> None:
    """The minimum of a group that begins at zero is -0.0 on some processors, and kernels read no sign."""
    weight = torch.arange(64.0).repeat(3, 1) - torch.tensor([[0.0], [64.0], [31.0]])
    quantized = quantize(weight, 4)
    assert quantized.minima is not None
    assert not torch.signbit(torch.stack([quantized.scales, quantized.minima])).any()


def test_int4_loses_nothing_of_the_default_model() -> None:
    opened = open_checkpoint(str(hub.resolve("default", progress=False)), progress=False)
    for name in (
        "layers.0.self_attn.q_proj.weight",
        "layers.17.mlp.down_proj.weight",
        "layers.29.mlp.up_proj.weight",
    ):
        weight = opened.tensor(name)
        assert torch.equal(dequantize(quantize(weight, 4), weight.shape[1]), weight), name


@given(seed=st.integers(0, 1000), num_rows=st.integers(1, 40), width=st.integers(1, 200), bits=bits_drawn)
def test_packing_is_undone_by_unpacking(seed: int, num_rows: int, width: int, bits: int) -> None:
    quantized = quantize(weights(seed, num_rows, width), bits)
    packed = pack_quantized(quantized, bits)
    groups = -(-width // GROUP[bits])
    assert packed.dtype is torch.uint8
    assert packed.shape == (-(-num_rows // DOT_ROWS), groups, matmul.BLOCK[bits])
    unpacked = unpack_quantized(packed, bits)
    for before, after in zip(quantized, unpacked, strict=True):
        if before is None:
            assert after is None
            continue
        assert after is not None
        assert torch.equal(before, after[:num_rows])
        assert not after[num_rows:].any()  # rows that fill the last tile are zero
    assert torch.equal(dequantize(unpacked, width)[:num_rows], dequantize(quantized, width))


def test_the_kernels_and_the_packer_agree_on_the_layout() -> None:
    assert matmul.GROUP == GROUP
    assert matmul.ROWS == DOT_ROWS


@pytest.mark.parametrize("bits", BITS.values())
def test_a_linear_layer_is_filled_up_to_whole_tiles(bits: int) -> None:
    weight, bias = weights(1, 21, 48), torch.arange(21.0)
    tiles, filled = pack_linear(weight, bias, bits)
    rows = FLOAT_ROWS if bits == 32 else DOT_ROWS
    assert filled.tolist() == [*bias.tolist(), *[0.0] * (-21 % rows)]
    assert tiles.is_contiguous()
    assert len(tiles) * rows == len(filled)
    if bits == 32:
        assert torch.equal(tiles.transpose(1, 2).reshape(-1, 48)[:21], weight)
    assert not pack_linear(weight, None, bits)[1].any()


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_zeros_beside_others(bits: int) -> None:
    weight = weights(3, 5, 3 * GROUP[bits])
    weight[2] = 0  # a row
    weight[4, GROUP[bits] : 2 * GROUP[bits]] = 0  # a group
    restored = dequantize(quantize(weight, bits), weight.shape[1])
    assert not restored[2].any()
    assert not restored[4, GROUP[bits] : 2 * GROUP[bits]].any()
    assert restored[4, : GROUP[bits]].any()
    assert restored.isfinite().all()


@pytest.mark.parametrize("value", [0.37, -0.37, 1e-7])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_constant_group_is_one_value(bits: int, value: float) -> None:
    restored = dequantize(quantize(torch.full((1, GROUP[bits]), value), bits), GROUP[bits])
    assert (restored == restored[0, 0]).all()
    assert float(restored[0, 0]) == pytest.approx(value, rel=2e-3, abs=2.0**-24)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [1e6, -1e6, float("nan"), float("inf")])
def test_weights_that_do_not_fit_are_an_error_with_a_remedy(bits: int, value: float) -> None:
    weight = weights(1, 3, 64)
    weight[1, 5] = value
    with pytest.raises(ModelFileError, match="cannot be quantized; use dtype float32"):
        quantize(weight, bits)


def test_dequantize_multiplies_each_group_by_its_scale_and_takes_its_minimum_off() -> None:
    values = torch.tensor([[1, -2, 3, 4]], dtype=torch.int8)
    scales, minima = torch.tensor([[0.5, 10.0]]), torch.tensor([[1.0, 2.0]])
    assert dequantize(Quantized(values, scales, None), 4).tolist() == [[0.5, -1.0, 30.0, 40.0]]
    assert dequantize(Quantized(values, scales, minima), 3).tolist() == [[-0.5, -2.0, 28.0]]


@given(seed=st.integers(0, 1000), rows=st.integers(1, 5), width=st.integers(1, 200), bits=bits_drawn)
def test_activations_are_rounded_to_127_steps_of_their_group(
    seed: int, rows: int, width: int, bits: int
) -> None:
    x = weights(seed, rows, width)
    rounded = round_activations(x, bits)
    assert rounded.shape == x.shape
    for start in range(0, width, GROUP[bits]):
        part, its = x[:, start : start + GROUP[bits]], rounded[:, start : start + GROUP[bits]]
        step = part.abs().amax(1, keepdim=True) / 127
        assert ((part - its).abs() <= 0.5001 * step).all()
        whole = its / step
        assert ((whole - whole.round()).abs() < 1e-3).all()
    assert not round_activations(torch.zeros(2, width), bits).any()


@pytest.mark.parametrize("dtype", ["int3", "q4_1", "", "auto"])
def test_unknown_types_are_named(dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"dtype is '{dtype}'; choose .*float32, int8, int4"):
        bits_of(dtype)
