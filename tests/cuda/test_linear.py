"""Products with weights of 4, 8 and 16 bits against float64 products with the same weights.

Tolerance: a weight is rounded to the dtype once (eps / 2, or eps where Triton's interpreter cuts bfloat16
instead), the result once more, and float32 sums of K terms err by at most K * 2**-24 of the sum of |x| |w|,
which the tests compute.
"""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ModelFileError
from paceline.cuda import linear
from paceline.cuda.linear import Matrix, add_up, dequantized, splits_of
from paceline.cuda.pack import GROUPS, Integers, PackedWeight, pack, pack_values, quantize
from paceline.models.config import Activation

pytestmark = pytest.mark.slow  # interpreted where there is no GPU

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = (4, 8)
ALL_BITS = (4, 8, 16)


def product(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    is_exact: bool = False,
) -> torch.Tensor:
    return Matrix(weight, bias, is_exact)(x, activation)


def parts(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None, is_exact: bool = False
) -> torch.Tensor:
    return Matrix(weight, bias, is_exact).parts(x)


def weights(integers: Integers, bits: int, width: int) -> torch.Tensor:
    """-> [N, width] float32, before they are rounded to the dtype of the product."""
    grouped = integers.values.float().unflatten(1, (integers.scales.shape[1], -1)) + (16 if bits == 4 else 0)
    scaled = grouped * integers.scales.float()[..., None] - integers.offsets.float()[..., None]
    return scaled.flatten(1)[:, :width]


def unpack(weight: PackedWeight) -> Integers:
    """The inverse of `pack`: what it kept of each weight."""
    num_rows, bits = weight.shape[0], weight.bits
    words = weight.packed[:, :num_rows].transpose(0, 1).int()  # [N, groups, words]
    shifted = [(words >> (i * bits)) & (2**bits - 1) for i in range(16 // bits)]
    values = torch.stack(shifted, 2).to(torch.int8)  # [N, groups, parts, words]: above 127 wraps around
    pairs = weight.scales[:, :num_rows].T  # a bfloat16 is the upper half of the float32 of its value
    scales, offsets = (half.view(torch.float32).bfloat16() for half in (pairs << 16, pairs & -65536))
    return Integers(values.flatten(1), scales, -offsets)


def noise(
    *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def packed(weight: torch.Tensor, bits: int, dtype: torch.dtype, group: int = 128) -> PackedWeight:
    return pack(weight.to(dtype), 16) if bits == 16 else pack(weight, bits, group=group)


def kept(weight: PackedWeight) -> torch.Tensor:
    if weight.is_whole:
        return weight.packed.double()
    return weights(unpack(weight), weight.bits, weight.shape[1]).double()


def check(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, got: torch.Tensor) -> None:
    exact, eps = kept(weight), torch.finfo(x.dtype).eps
    wanted = x.double() @ exact.T + (0 if bias is None else bias.double())
    bound = (
        (2 * eps + x.shape[1] * 2**-24) * (x.double().abs() @ exact.abs().T) + 2 * eps * wanted.abs() + 1e-7
    )
    assert (got.dtype, got.shape) == (x.dtype, wanted.shape)
    excess = (got.double() - wanted).abs() - bound
    assert bool((excess <= 0).all()), f"{excess.max()} beyond the bound"


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(BITS),
    st.sampled_from(GROUPS),
    st.integers(1, 9),
    st.integers(1, 300),
    st.integers(0, 2**31),
)
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
    weight = PackedWeight(pack_values(values, bits, 128), scales, bits, 128, (len(values), 128))
    assert torch.equal(unpack(weight).values, values)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(BITS), st.sampled_from(GROUPS), st.integers(0, 2**31), st.floats(-3, 3))
def test_the_error_is_half_a_step(bits: int, group: int, seed: int, shift: float) -> None:
    """And the rounding of s and c to bfloat16, 2**-9 of what they stand for, where it moves the ends of the
    range.
    """
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
def test_dequantized_weights_are_those_kept(
    device: torch.device, dtype: torch.dtype, bits: int, group: int
) -> None:
    weight = pack(noise(67, 200, device=device), bits, group=group)
    got = dequantized(weight, dtype)
    assert got.dtype == dtype
    error = (got.double() - kept(weight)).abs()
    assert bool((error <= torch.finfo(dtype).eps * kept(weight).abs()).all())


SHAPES = [(1, 128, 256, 128), (3, 67, 200, 64), (17, 130, 72, 128), (70, 256, 1152, 64)]
WAYS = [(dtype, bits) for dtype in DTYPES for bits in ALL_BITS]


@pytest.mark.parametrize(("dtype", "bits"), WAYS)
@pytest.mark.parametrize(("num_rows", "num_outputs", "width", "group"), SHAPES)
def test_product(
    device: torch.device,
    dtype: torch.dtype,
    bits: int,
    num_rows: int,
    num_outputs: int,
    width: int,
    group: int,
) -> None:
    weight = packed(noise(num_outputs, width, device=device), bits, dtype, group)
    x, bias = (
        noise(num_rows, width, dtype=dtype, device=device, seed=1),
        noise(num_outputs, dtype=dtype, device=device, seed=2),
    )
    check(x, weight, None, product(x, weight))
    check(x, weight, bias, product(x, weight, bias))


@pytest.mark.parametrize(("dtype", "bits"), WAYS)
@pytest.mark.parametrize(("num_rows", "num_outputs", "width"), [(3, 66, 200), (2, 256, 2112)])
def test_parts_add_up_to_the_product(
    device: torch.device, dtype: torch.dtype, bits: int, num_rows: int, num_outputs: int, width: int
) -> None:
    """2112 inputs are cut in four; of few rows and four bits in two."""
    weight = packed(noise(num_outputs, width, device=device), bits, dtype, 64)
    x, bias = (
        noise(num_rows, width, dtype=dtype, device=device, seed=1),
        noise(num_outputs, dtype=dtype, device=device, seed=2),
    )
    apart = parts(x, weight, bias)
    many = 2 if bits == 4 and dtype != torch.float32 else 4
    assert (len(apart), apart.dtype) == ((many, torch.float32) if width == 2112 else (1, dtype))
    whole = apart.sum(0).to(dtype)
    if device.type == "cpu" and dtype == torch.bfloat16:  # the interpreter cuts where torch rounds
        assert torch.allclose(whole, product(x, weight, bias), rtol=2**-7, atol=0)
    else:
        assert torch.equal(whole, product(x, weight, bias))


@pytest.mark.parametrize(("dtype", "bits"), WAYS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(3, 66, 200), (17, 256, 128), (2, 300, 1088)])
def test_a_gate_has_the_bits_of_two_kernels(
    device: torch.device,
    dtype: torch.dtype,
    bits: int,
    activation: Literal["silu", "gelu_tanh"],
    shape: tuple[int, int, int],
) -> None:
    num_rows, num_outputs, width = shape
    weight = packed(noise(num_outputs, width, device=device) / 32, bits, dtype, 64)
    assert splits_of(weight) == (2 if width == 1088 else 1)
    x, bias = (
        noise(num_rows, width, dtype=dtype, device=device, seed=1),
        noise(num_outputs, dtype=dtype, device=device, seed=2),
    )
    wanted = add_up(product(x, weight, bias)[None], activation, dtype)
    assert torch.equal(product(x, weight, bias, activation=activation), wanted)


def test_what_follows_a_product_fits_it(device: torch.device) -> None:
    weight, x = pack(noise(66, 64, device=device), 8), noise(2, 64, device=device)
    with pytest.raises(AssertionError, match="no activation"):
        product(x, weight, activation="relu")  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"the weight torch\.bfloat16"):
        product(x, pack(noise(66, 64, dtype=torch.bfloat16, device=device), 16))


def test_weights_of_16_bits_are_not_copied(device: torch.device) -> None:
    weight = noise(5, 70, dtype=torch.float16, device=device)
    assert pack(weight, 16).packed.data_ptr() == weight.data_ptr()
    assert dequantized(pack(weight, 16), torch.float16) is weight
    with pytest.raises(AssertionError, match="no numbers"):
        pack(weight.int(), 16)


@pytest.mark.parametrize(
    "shape",
    [(6144, 4096, 2, 8), (4096, 4096, 4, 8), (28672, 4096, 1, 1), (4096, 14336, 4, 8), (128256, 4096, 1, 1)],
)
@pytest.mark.parametrize("bits", ALL_BITS)
def test_large_products_fill_a_device(shape: tuple[int, int, int, int], bits: int) -> None:
    num_outputs, width, *splits = shape
    weight = PackedWeight(
        torch.empty(0), torch.empty(0), bits, 64 if bits == 16 else 128, (num_outputs, width)
    )
    assert splits_of(weight) == splits[bits < 16]
    exact = [
        linear.way_of(count, weight, torch.bfloat16, is_exact=True) for count in (1, 16, 17, 64, 65, 256)
    ]
    assert {(tile.warps % 4, cut) for tile, cut in exact} == {(0, splits[bits < 16])}
    if bits == 16:  # many rows have many sums: fewer parts of them
        assert {
            linear.way_of(count, weight, torch.bfloat16, is_exact=False)[1] for count in (17, 64, 256)
        } == {min(splits[0], 2)}
    if bits == 4:  # alone, and where bits may differ, parts are no shorter than 1024
        assert linear.way_of(1, weight, torch.bfloat16, is_exact=False)[1] == {
            6144: 4,
            28672: 1,
            128256: 1,
        }.get(num_outputs, 4 if width == 4096 else 8)


@pytest.mark.parametrize("bits", BITS)
def test_parts_of_k_are_added(device: torch.device, bits: int) -> None:
    """Seventeen groups over two programs: eight and nine."""
    weight = pack(noise(40, 17 * 64, device=device), bits, group=64)
    assert splits_of(weight) == 2
    x, bias = noise(5, 17 * 64, device=device, seed=1), noise(40, device=device, seed=2)
    check(x, weight, bias, product(x, weight, bias))


@pytest.mark.parametrize(("dtype", "bits"), WAYS)
def test_a_row_does_not_see_the_others(device: torch.device, dtype: torch.dtype, bits: int) -> None:
    weight = packed(noise(130, 512, device=device), bits, dtype, 64)
    x = noise(20, 512, dtype=dtype, device=device, seed=1)
    others = torch.full_like(x, float("nan"))
    others[7] = x[7]
    assert torch.equal(product(x, weight)[7], product(others, weight)[7])


@pytest.mark.parametrize("bits", ALL_BITS)
def test_many_rows_take_the_same_weights(
    device: torch.device, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that may follow a product included."""
    dtype = torch.float16 if bits == 16 else torch.float32
    weight = packed(noise(40, 200, device=device) / 16, bits, dtype)
    x, bias = (noise(*shape, dtype=dtype, device=device, seed=len(shape)) for shape in ((5, 200), (40,)))
    few = [parts(x, weight, bias)[0], product(x, weight, bias, activation="silu")]
    monkeypatch.setattr(linear, "FUSED_ROWS", 4)
    check(x, weight, bias, product(x, weight, bias))
    assert torch.equal(product(x, weight, bias, activation="silu", is_exact=True), few[1])
    assert torch.equal(parts(x, weight, bias, is_exact=True)[0], few[0])
    many = [parts(x, weight, bias)[0], product(x, weight, bias, activation="silu")]
    for one, other in zip(few, many, strict=True):
        assert torch.allclose(one, other, rtol=8 * torch.finfo(dtype).eps, atol=64 * torch.finfo(dtype).eps)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [8, 16])
@pytest.mark.parametrize("bits", BITS)
def test_assembly_makes_the_same_weights(bits: int, num_rows: int) -> None:
    """x picks single weights, so a product is the weights themselves, every integer in every place among
    them.
    """
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    weight = pack(noise(256, 512, device="cuda"), bits)
    x = torch.eye(512, dtype=torch.bfloat16, device="cuda")
    got = torch.cat([product(rows.contiguous(), weight) for rows in x.split(num_rows)]).T
    assert torch.equal(got, dequantized(weight, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("num_outputs", [1024, 25600])
def test_a_row_is_the_same_in_every_bucket(bits: int, num_outputs: int) -> None:
    """K cut in parts and not, and each of the things that may follow."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    weight = packed(noise(num_outputs, 2048, device="cuda"), bits, torch.bfloat16)
    assert (splits_of(weight) > 1) == (num_outputs == 1024)
    x = noise(600, 2048, dtype=torch.bfloat16, device="cuda", seed=1)
    whole, apart = product(x, weight, is_exact=True), parts(x[:256], weight, is_exact=True)
    gated = product(x, weight, activation="silu", is_exact=True)
    for count in (1, 8, 16, 17, 32, 33, 64, 65, 128, 129, 200, 256, 300):
        some = x[:count].contiguous()
        assert torch.equal(product(some, weight, is_exact=True), whole[:count]), count
        assert torch.equal(product(some, weight, activation="silu", is_exact=True), gated[:count]), count
        if count <= 256:
            assert torch.equal(parts(some, weight, is_exact=True), apart[:, :count]), count
