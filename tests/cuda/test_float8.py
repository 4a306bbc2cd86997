"""Products with FP8 weights against float64 products with the same weights; bounds as in test_linear.py, but
no weight is rounded where torch does not multiply.
"""

from __future__ import annotations

import pytest
import torch

from paceline.core.errors import ModelFileError
from paceline.cuda.linear import Matrix, dequantized, splits_of
from paceline.cuda.pack import PackedWeight, pack, pack_float8
from paceline.models.float8 import GROUP, LARGEST, Float8, to_float8
from tests.cuda.test_linear import noise

pytestmark = pytest.mark.slow  # interpreted where there is no GPU

NUMBERS = [byte for byte in range(256) if byte & 127 != 127]  # 127 and 255 are none
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def made(num_outputs: int, width: int, kind: str = "groups", seed: int = 0) -> Float8:
    """kind: a scale of its own for each tensor, channel, group of 128 inputs, or block of 128 x 128."""
    generator, groups = torch.Generator().manual_seed(seed), -(-width // GROUP)
    values = (torch.randn(num_outputs, width, generator=generator) * 64).to(torch.float8_e4m3fn)
    high = {"tensor": num_outputs, "blocks": 128}.get(kind, 1)  # rows of a scale
    each = groups if kind in ("groups", "blocks") else 1
    scales = (torch.rand(-(-num_outputs // high), each, generator=generator) + 0.5) / 500
    of_rows = scales[torch.arange(num_outputs) // high].expand(num_outputs, groups)
    return Float8(values.view(torch.uint8), of_rows.contiguous())


def kept(weight: Float8) -> torch.Tensor:
    """[N, K] float64, on the CPU."""
    values = weight.values.cpu().view(torch.float8_e4m3fn).double()
    return values * weight.scales.cpu().double().repeat_interleave(GROUP, 1)[:, : values.shape[1]]


def on(device: torch.device, weight: Float8) -> PackedWeight:
    return pack_float8(Float8(*(each.to(device) for each in weight)))


def check(
    x: torch.Tensor, weight: Float8, bias: torch.Tensor | None, got: torch.Tensor, eps: float = 0.0
) -> None:
    """eps: what a weight may have been rounded by."""
    x, exact, own = x.cpu(), kept(weight), torch.finfo(x.dtype).eps
    wanted = x.double() @ exact.T + (0 if bias is None else bias.cpu().double())
    bound = (eps + x.shape[1] * 2**-24) * (x.double().abs() @ exact.abs().T) + own * wanted.abs() + 1e-7
    assert (got.dtype, got.shape) == (x.dtype, wanted.shape)
    excess = (got.cpu().double() - wanted).abs() - bound
    assert bool((excess <= 0).all()), f"{excess.max()} beyond the bound"


def every_number() -> Float8:
    """Row i has all of them, turned by i: each comes to each place."""
    every = torch.tensor(NUMBERS, dtype=torch.uint8)
    rows = torch.stack([every.roll(i).repeat(2)[:256] for i in range(len(every))])
    return Float8(rows, torch.ones(len(rows), 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_exact(device: torch.device, dtype: torch.dtype) -> None:
    """Whole, and as a product with rows that pick single weights."""
    weight = every_number()
    exact = weight.values.view(torch.float8_e4m3fn).to(dtype)
    assert torch.equal(dequantized(on(device, weight), dtype).cpu(), exact)
    picks = torch.eye(256, dtype=dtype, device=device)[::37].contiguous()
    assert torch.equal(Matrix(on(device, weight))(picks).cpu(), exact.T[::37])


def test_bits_moved_are_numbers_times_a_power_of_two() -> None:
    """What the assembly does, on the CPU: a bfloat16 made of the bits, then one exact multiplication."""
    every = torch.tensor(NUMBERS, dtype=torch.int32)
    for word in (every, every << 8):
        low = ((word << 4) & 0x07F0) | ((word << 8) & 0x8000)
        high = ((word >> 4) & 0x07F0) | (word & 0x8000)
        moved = (low if word is every else high).to(torch.int16).view(torch.bfloat16)
        found = moved * torch.tensor(0x7B80, dtype=torch.int16).view(torch.bfloat16)
        assert torch.equal(found, every.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16))


@pytest.mark.parametrize("kind", ["tensor", "channels", "groups", "blocks"])
@pytest.mark.parametrize("num_rows", [1, 8, 16, 64, 200, 300])
def test_product(device: torch.device, kind: str, num_rows: int) -> None:
    """Of more than 256 rows torch multiplies with weights that were rounded once."""
    weight = made(130, 200, kind)
    matrix, bias = on(device, weight), noise(130, dtype=torch.bfloat16, device=device, seed=2)
    x = noise(num_rows, 200, dtype=torch.bfloat16, device=device, seed=1)
    eps = 2**-7 if num_rows > 256 else 0.0
    check(x, weight, None, Matrix(matrix)(x), eps)
    check(x, weight, bias, Matrix(matrix, bias)(x), eps)
    check(x, weight, bias, Matrix(matrix, bias, is_exact=True)(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "width"), [(2, 256, 2112), (17, 66, 72), (70, 256, 1152)]
)
def test_product_of_any_shape(
    device: torch.device, dtype: torch.dtype, num_rows: int, num_outputs: int, width: int
) -> None:
    """2112 inputs are cut in four."""
    weight = made(num_outputs, width)
    assert splits_of(on(device, weight)) == {2112: 4, 72: 1, 1152: 2}[width]
    x = noise(num_rows, width, dtype=dtype, device=device, seed=1)
    check(x, weight, None, Matrix(on(device, weight))(x))


@pytest.mark.parametrize("num_rows", [3, 70])
def test_a_gate_has_the_bits_of_two_kernels(device: torch.device, num_rows: int) -> None:
    weight, x = on(device, made(256, 200)), noise(num_rows, 200, dtype=torch.bfloat16, device=device, seed=1)
    whole = Matrix(weight)(x)
    gate, up = whole.float().chunk(2, 1)
    found = Matrix(weight)(x, "silu")
    torch.testing.assert_close(found.float(), torch.nn.functional.silu(gate) * up, rtol=2**-6, atol=1e-6)


def test_a_row_keeps_its_bits_in_company(device: torch.device) -> None:
    weight = on(device, made(130, 512))
    x = noise(300, 512, dtype=torch.bfloat16, device=device, seed=1)
    whole = Matrix(weight, is_exact=True)(x)
    for count in (1, 8, 16, 17, 64, 65, 200):
        assert torch.equal(Matrix(weight, is_exact=True)(x[:count].contiguous()), whole[:count]), count


def test_packing_keeps_every_byte(device: torch.device) -> None:
    """A weight takes one, and its group's scale four for 128."""
    weight = made(256, 512)
    packed = on(device, weight)
    assert Matrix(packed).num_bytes == 256 * 512 * (1 + 4 / 128)
    assert torch.equal(packed.scales.cpu(), weight.scales.T)
    words = packed.packed.cpu().view(torch.uint8).view(4, 256, 64, 2)  # [groups, N, words, parts]
    assert torch.equal(words.transpose(2, 3).flatten(2).transpose(0, 1).flatten(1), weight.values)


def test_rounding_keeps_the_largest_of_a_group() -> None:
    weight = noise(5, 300) * torch.tensor([1e-6, 0.0, 1.0, 30.0, 1e6])[:, None]
    rounded = to_float8(weight)
    assert rounded.values.shape == weight.shape
    assert rounded.scales.shape == (5, 3)
    tops = torch.nn.functional.pad(weight, (0, 84)).unflatten(1, (3, 128)).abs().amax(-1)
    error = (kept(rounded) - weight.double()).abs()
    each = tops.repeat_interleave(GROUP, 1)[:, :300].double()
    assert bool((error <= weight.abs().double() * 2**-4 + each * 2**-9 / LARGEST).all())
    with pytest.raises(ModelFileError, match="use dtype bfloat16"):
        to_float8(torch.tensor([[float("inf")] * 64]))


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
@pytest.mark.parametrize("num_outputs", [1024, 25600])
def test_a_row_is_the_same_in_every_bucket(num_outputs: int) -> None:
    """K cut in parts and not."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    weight = pack_float8(to_float8(noise(num_outputs, 2048, device="cuda")))
    x = noise(600, 2048, dtype=torch.bfloat16, device="cuda", seed=1)
    matrix = Matrix(weight, is_exact=True)
    whole, gated = matrix(x), matrix(x, "silu")
    for count in (1, 8, 16, 17, 32, 33, 64, 65, 128, 129, 200, 256, 300):
        some = x[:count].contiguous()
        assert torch.equal(matrix(some), whole[:count]), count
        assert torch.equal(matrix(some, "silu"), gated[:count]), count


def test_small_integers_are_what_they_were(device: torch.device) -> None:
    """Scales of float32 alone mean FP8."""
    assert pack(noise(5, 70, device=device), 8).scales.dtype == torch.int32
    assert on(device, made(5, 70)).scales.dtype == torch.float32


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_what_is_no_number_is_refused(byte: int) -> None:
    values = torch.zeros((3, 128), dtype=torch.uint8)
    values[1, 7] = byte
    with pytest.raises(ModelFileError, match="not a number"):
        pack_float8(Float8(values, torch.ones((3, 1))))
