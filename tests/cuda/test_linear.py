"""Products with weights of 4 and 8 bits against float64 products with the same weights.

Tolerance: a weight is rounded to the dtype once (eps / 2, or eps where Triton's interpreter cuts bfloat16 instead), the result once
more, and float32 sums of K terms err by at most K * 2**-24 of the sum of |x| |w|, which the tests compute.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cuda import linear
from paceline.cuda.linear import QuantizedWeight, dequantized, pack, product, splits_of, workspace_size
from paceline.cuda.pack import GROUPS, pack_values, quantize, unpack, weights
from paceline.errors import ModelFileError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = (4, 8)


def noise(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def kept(weight: QuantizedWeight) -> torch.Tensor:
    return weights(unpack(weight), weight.bits, weight.shape[1]).double()


def check(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, got: torch.Tensor) -> None:
    exact, eps = kept(weight), torch.finfo(x.dtype).eps
    wanted = x.double() @ exact.T + (0 if bias is None else bias.double())
    bound = (2 * eps + x.shape[1] * 2**-24) * (x.double().abs() @ exact.abs().T) + 2 * eps * wanted.abs() + 1e-7
    assert (got.dtype, got.shape) == (x.dtype, wanted.shape)
    excess = (got.double() - wanted).abs() - bound
    assert bool((excess <= 0).all()), f"{excess.max()} beyond the bound"


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(BITS), st.sampled_from(GROUPS), st.integers(1, 9), st.integers(1, 300), st.integers(0, 2**31))
def test_unpack_is_the_inverse_of_pack(bits: int, group: int, num_rows: int, width: int, seed: int) -> None:
    weight = noise(num_rows, width, seed=seed)
    integers = quantize(weight, bits, group)
    for got, wanted in zip(unpack(pack(weight, bits, group=group)), integers, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("bits", BITS)
def test_every_integer_survives_in_every_place(bits: int) -> None:
    first, last = (0, 15) if bits == 4 else (-127, 127)
    every = torch.arange(first, last + 1, dtype=torch.int8)
    values = torch.stack([every.roll(i).repeat(128)[:128] for i in range(len(every))])
    scales = torch.ones((1, len(values)), dtype=torch.int32)
    weight = QuantizedWeight(pack_values(values, bits, 128), scales, bits, 128, (len(values), 128))
    assert torch.equal(unpack(weight).values, values)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(BITS), st.sampled_from(GROUPS), st.integers(0, 2**31), st.floats(-3, 3))
def test_the_error_is_half_a_step(bits: int, group: int, seed: int, shift: float) -> None:
    """And the rounding of s and c to bfloat16, 2**-9 of what they stand for, where it moves the ends of the range."""
    weight = noise(4, 2 * group, seed=seed) + shift
    integers = quantize(weight, bits, group)
    error = (weights(integers, bits, weight.shape[1]) - weight).abs().unflatten(1, (2, group)).amax(-1)
    top = weight.abs().unflatten(1, (2, group)).amax(-1)
    reach = 127 if bits == 8 else 31
    assert bool((error <= integers.scales.float() * (0.5 + reach * 2**-9) + top * 2**-8).all())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, 0.5, -2.0])
def test_constant_weights_are_exact(bits: int, value: float) -> None:
    integers = quantize(torch.full((2, 128), value), bits, 128)
    assert (weights(integers, bits, 128) - value).abs().max() <= abs(value) * 2**-8


def test_weights_without_a_scale_are_refused() -> None:
    with pytest.raises(ModelFileError, match="use dtype bfloat16"):
        quantize(torch.tensor([[float("inf")] * 64]), 8, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", GROUPS)
def test_dequantized_weights_are_those_kept(device: torch.device, dtype: torch.dtype, bits: int, group: int) -> None:
    weight = pack(noise(67, 200, device=device), bits, group=group)
    got = dequantized(weight, dtype)
    assert got.dtype == dtype
    error = (got.double() - kept(weight)).abs()
    assert bool((error <= torch.finfo(dtype).eps * kept(weight).abs()).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "width", "group"), [(1, 128, 256, 128), (3, 67, 200, 64), (17, 130, 72, 128), (70, 256, 1152, 64)]
)
def test_product(device: torch.device, dtype: torch.dtype, bits: int, num_rows: int, num_outputs: int, width: int, group: int) -> None:
    weight = pack(noise(num_outputs, width, device=device), bits, group=group)
    x, bias = noise(num_rows, width, dtype=dtype, device=device, seed=1), noise(num_outputs, dtype=dtype, device=device, seed=2)
    check(x, weight, None, product(x, weight))
    check(x, weight, bias, product(x, weight, bias))


@pytest.mark.parametrize("bits", BITS)
def test_parts_of_k_are_added(device: torch.device, bits: int) -> None:
    """Eleven groups over two programs: five and six."""
    weight = pack(noise(40, 11 * 64, device=device), bits, group=64)
    assert splits_of(weight) == 2
    x, bias = noise(5, 11 * 64, device=device, seed=1), noise(40, device=device, seed=2)
    check(x, weight, bias, product(x, weight, bias))


@pytest.mark.parametrize("bits", BITS)
def test_memory_given_is_used_and_no_more(device: torch.device, bits: int) -> None:
    weight = pack(noise(40, 512, device=device), bits, group=64)
    x, out = noise(3, 512, device=device, seed=1), torch.full((3, 40), float("nan"), device=device)
    size = workspace_size(3, weight)
    assert size == 2 * 3 * 40
    workspace = torch.full((size + 8,), float("nan"), device=device)
    assert product(x, weight, None, out, workspace) is out
    check(x, weight, None, out)
    assert workspace.isnan().tolist() == [False] * size + [True] * 8
    with pytest.raises(AssertionError, match="too small"):
        product(x, weight, None, out, workspace[: size - 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_a_row_does_not_see_the_others(device: torch.device, dtype: torch.dtype, bits: int) -> None:
    weight = pack(noise(130, 512, device=device), bits, group=64)
    x = noise(20, 512, dtype=dtype, device=device, seed=1)
    others = torch.full_like(x, float("nan"))
    others[7] = x[7]
    assert torch.equal(product(x, weight)[7], product(others, weight)[7])


@pytest.mark.parametrize("bits", BITS)
def test_many_rows_take_the_same_weights(device: torch.device, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = pack(noise(40, 200, device=device), bits)
    x, bias = noise(5, 200, device=device, seed=1), noise(40, device=device, seed=2)
    monkeypatch.setattr(linear, "FUSED_ROWS", 4)
    assert workspace_size(5, weight) == 0
    check(x, weight, bias, product(x, weight, bias))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", BITS)
def test_assembly_makes_the_same_weights(bits: int) -> None:
    """x picks single weights, so a product is the weights themselves, every integer in every place among them."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    weight = pack(noise(256, 512, device="cuda"), bits)
    x = torch.eye(512, dtype=torch.bfloat16, device="cuda")
    got = torch.cat([product(rows.contiguous(), weight) for rows in x.split(16)]).T
    assert torch.equal(got, dequantized(weight, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", BITS)
def test_a_row_is_the_same_in_every_bucket(bits: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    weight, x = pack(noise(1024, 2048, device="cuda"), bits), noise(200, 2048, dtype=torch.bfloat16, device="cuda", seed=1)
    whole = product(x, weight)
    for count in (1, 8, 16, 17, 32, 33, 64, 65):
        assert torch.equal(product(x[:count].contiguous(), weight), whole[:count]), count
