"""Products with MXFP4 weights: the bits are those of products with the same weights in bfloat16."""

from __future__ import annotations

import pytest
import torch

from paceline.core.errors import ModelFileError
from paceline.cuda import linear
from paceline.cuda.linear import Matrix, dequantized
from paceline.cuda.pack import PackedWeight, pack, pack_float4
from paceline.models.config import Activation
from paceline.models.kept import FLOAT4_GROUP, Float4
from tests.cuda.test_linear import noise
from tests.quantized_models import E2M1

NUMBERS = torch.tensor(E2M1)
# Exponents of scales, 127 more than they are; with smaller ones not all numbers are normal, and such become
# zero in the interpreter.
LOWEST, HIGHEST = 2, 252
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
interpreted = pytest.mark.slow  # where there is no GPU


def made(codes: torch.Tensor, powers: torch.Tensor) -> Float4:
    """codes [N, K], powers [N, K / 32]: integers."""
    values = codes[:, 0::2] | codes[:, 1::2] << 4
    return Float4(values.to(torch.uint8), powers.to(torch.uint8))


def drawn(num_outputs: int, width: int, seed: int = 0) -> Float4:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (num_outputs, width), generator=generator)
    shape = (num_outputs, -(-width // FLOAT4_GROUP))
    return made(codes, torch.randint(118, 124, shape, generator=generator))


def meant(weight: Float4) -> torch.Tensor:
    """[N, K] float64, on the CPU."""
    values = weight.values.cpu().int()
    codes = torch.stack([values & 15, values >> 4], -1).flatten(1)
    powers = 2.0 ** (weight.scales.cpu().double() - 127)
    return NUMBERS[codes].double() * powers.repeat_interleave(FLOAT4_GROUP, 1)[:, : codes.shape[1]]


def on(device: torch.device, weight: Float4) -> PackedWeight:
    return pack_float4(Float4(*(each.to(device) for each in weight)))


def whole(device: torch.device, weight: Float4) -> PackedWeight:
    """The same in bfloat16. The interpreter adds up one step of K after the other, and steps of MXFP4 have 32
    inputs; on a device either is steps of 16."""
    made = pack(meant(weight).bfloat16().to(device), 16)
    return made._replace(group=FLOAT4_GROUP) if device.type == "cpu" else made


def every_number(lowest: int = LOWEST, highest: int = HIGHEST) -> Float4:
    """Row i has all of them, turned by i, in groups with all scales: each comes to each place."""
    codes = torch.stack([torch.arange(16).roll(i).repeat(16) for i in range(16)])
    powers = torch.arange(16 * 8) * (highest - lowest) // 127 + lowest
    return made(codes, powers.view(16, 8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_exact(device: torch.device, dtype: torch.dtype) -> None:
    """Whole, and as a product with rows that pick single weights."""
    weight = every_number() if dtype == torch.bfloat16 else every_number(115, 135)
    exact = meant(weight).to(dtype)
    assert torch.equal(exact.double(), meant(weight))
    assert torch.equal(dequantized(on(device, weight), dtype).cpu(), exact)
    picks = torch.eye(256, dtype=dtype, device=device)[::37].contiguous()
    assert torch.equal(Matrix(on(device, weight))(picks).cpu(), exact.T[::37])


def test_bits_moved_are_numbers_times_a_power_of_two() -> None:
    """What the assembly does, on the CPU: a bfloat16 made of the bits, and two exact multiplications."""
    every = torch.arange(16, dtype=torch.int32)
    for place in range(4):
        word = every << 4 * place
        up, down = max(6 - 4 * place, 0), max(4 * place - 6, 0)
        bits = (word << up >> down) & 0x01C0 | (word << (12 - 4 * place)) & 0x8000
        halves = bits.to(torch.int16).view(torch.bfloat16) * bfloat16_of(0x7E00)
        assert torch.equal(halves, NUMBERS.bfloat16() / 2)
        for power in (0, 1, 2, 120, 127, HIGHEST):
            found = halves * bfloat16_of(power + 1 << 7)
            assert torch.equal(found.double(), NUMBERS.double() * 2.0 ** (power - 127))


def bfloat16_of(bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16)


@interpreted
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("num_rows", "num_outputs", "width"), [(1, 130, 192), (9, 66, 96), (40, 128, 1024)])
def test_a_product_has_the_bits_of_bfloat16(
    num_rows: int, num_outputs: int, width: int, activation: Activation | None, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In tiles of one shape, K cut alike; 1024 inputs are cut in two."""
    weight, tile = drawn(num_outputs, width), linear.Tile(16 if num_rows <= 16 else 32, 64, 4, 3)
    monkeypatch.setattr(linear, "way_of", lambda *_, **__: (tile, 2 if width == 1024 else 1))
    x = noise(num_rows, width, dtype=torch.bfloat16, device=device, seed=1)
    bias = noise(num_outputs, dtype=torch.bfloat16, device=device, seed=2)
    ours, theirs = (Matrix(each, bias)(x, activation) for each in (on(device, weight), whole(device, weight)))
    assert torch.equal(ours, theirs)


@interpreted
@pytest.mark.parametrize("num_rows", [1, 8, 16, 64, 200, 300])
def test_product(device: torch.device, num_rows: int) -> None:
    """No weight is rounded, also where torch multiplies."""
    weight, x = drawn(130, 224), noise(num_rows, 224, dtype=torch.bfloat16, device=device, seed=1)
    exact = meant(weight)
    wanted = x.cpu().double() @ exact.T
    bound = 224 * 2**-24 * (x.cpu().double().abs() @ exact.abs().T) + 2**-7 * wanted.abs() + 1e-7
    for is_exact in (False, True):
        got = Matrix(on(device, weight), is_exact=is_exact)(x).cpu().double()
        assert bool(((got - wanted).abs() <= bound).all())


@interpreted
def test_a_row_keeps_its_bits_in_company(device: torch.device) -> None:
    weight = on(device, drawn(130, 512))
    x = noise(300, 512, dtype=torch.bfloat16, device=device, seed=1)
    together = Matrix(weight, is_exact=True)(x)
    for count in (1, 8, 17, 65):
        assert torch.equal(Matrix(weight, is_exact=True)(x[:count].contiguous()), together[:count]), count


def test_a_weight_takes_four_bits_and_a_quarter() -> None:
    """And the bytes of the file can be read back."""
    weight = drawn(256, 512)
    packed = pack_float4(weight)
    assert Matrix(packed).num_bytes == 256 * 512 * 4.25 / 8
    words = packed.packed.int()  # [groups, N, words]
    codes = torch.stack([(words >> 4 * i) & 15 for i in range(4)], 2)  # [groups, N, parts, words]
    codes = codes.flatten(2).transpose(0, 1).flatten(1)
    powers = packed.scales.T.contiguous().view(torch.uint8).int() - 1
    for found, stored in zip(made(codes, powers), weight, strict=True):
        assert torch.equal(found, stored)


def test_groups_that_are_filled_up_weigh_nothing() -> None:
    """2,880 inputs, as gpt-oss has, are 22 groups of 128 and a half."""
    weight = drawn(3, 2880)
    packed = pack_float4(weight)
    assert packed.packed.shape == (23, 128, 32)
    assert not packed.packed[-1, :3].view(torch.int16).bitwise_and(-256).any()  # its last two parts
    assert not packed.packed[:, 3:].any()


@pytest.mark.parametrize("power", [HIGHEST + 1, 255])
def test_a_scale_that_no_bfloat16_holds_is_refused(power: int) -> None:
    weight = drawn(3, 128)
    weight.scales[1, 2] = power
    with pytest.raises(ModelFileError, match="no number or too large"):
        pack_float4(weight)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [8, 16, 64, 200])
def test_assembly_makes_the_same_weights(num_rows: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    weight, x = every_number(), torch.eye(256, dtype=torch.bfloat16, device="cuda")
    packed = on(x.device, weight)
    got = torch.cat([Matrix(packed)(rows.contiguous()) for rows in x.split(num_rows)]).T
    assert torch.equal(got, dequantized(packed, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 40, 64, 200])
@pytest.mark.parametrize("block_n", [64, 128])
def test_long_sums_have_the_bits_of_bfloat16(num_rows: int, block_n: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device, weight = torch.device("cuda"), drawn(5760, 2880)
    x = noise(num_rows, 2880, dtype=torch.bfloat16, device=device, seed=1)
    tile = linear.Tile(16 if num_rows <= 16 else 32 if num_rows <= 40 else 64, block_n, 4, 3)
    ours, theirs = (Matrix(make(device, weight)).multiply(x, tile, 1, "silu") for make in (on, whole))
    assert torch.equal(ours, theirs)
