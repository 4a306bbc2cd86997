"""The row kernels against the torch decoder's own functions.

Tolerances: two units in the last place of the dtype. Kernel and oracle round float32 results that differ by a
few of float32's own, which can be one unit apart, and Triton's interpreter cuts bfloat16 where the device
rounds, which is another.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cuda import rows
from paceline.cuda.linear import add_up
from paceline.models.config import RopeConfig
from paceline.models.layer import gate as torch_gate
from paceline.models.rope import rotary_tables, rotate

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-5


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In the order that the kernels keep: each number times 1 / rms, then times its weight, and rounded once.
    torch's own norm may multiply in another order, which is a unit or two of float32 off."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight).to(x.dtype)


@pytest.fixture(autouse=True)
def _infinity_is_a_number() -> Iterator[None]:
    """Triton's interpreter is numpy, which warns of what a device does without a word."""
    with np.errstate(over="ignore", invalid="ignore"):
        yield


def close(dtype: torch.dtype) -> dict[str, float]:
    """Float32 gets more: its sums of a few hundred terms are a few units off themselves."""
    step = 8 * torch.finfo(dtype).eps if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    return {"rtol": step, "atol": step / 8}


def noise(
    *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 24, 576])
@pytest.mark.parametrize("kind", ["norm", "add", "sandwich"])
def test_add_norm_is_the_decoders(device: torch.device, dtype: torch.dtype, hidden: int, kind: str) -> None:
    x, added = (
        noise(3, hidden, dtype=dtype, device=device),
        3 * noise(3, hidden, dtype=dtype, device=device, seed=1),
    )
    weight, after = noise(hidden, device=device, seed=2), noise(hidden, device=device, seed=3)
    before, addend = (
        x.clone(),
        {"norm": torch.zeros_like(x), "add": added, "sandwich": rms_norm(added, after, EPS)}[kind],
    )
    out = torch.full_like(x, float("nan"))
    rows.add_norm(
        x, None if kind == "norm" else added[None], after if kind == "sandwich" else None, weight, EPS, out
    )
    slack = close(dtype)["rtol"] * (
        before.float().abs() + addend.float().abs()
    )  # what is added and the sum are rounded, each for itself
    assert bool(((x.float() - (before + addend).float()).abs() <= slack).all())
    torch.testing.assert_close(
        out, rms_norm(x, weight, EPS), **close(dtype)
    )  # of x as it was rounded and written


def test_the_sum_is_rounded_before_its_norm(device: torch.device) -> None:
    """2048 + 1 is 2048 in float16: the norm must see that, or the stream and its norm tell different
    stories.
    """
    x = torch.full((1, 2), 2048.0, dtype=torch.float16, device=device)
    added = torch.tensor([[1.0, 0.0]], dtype=torch.float16, device=device)
    out = torch.empty(1, 2, device=device)  # float32, which would show what float16 hides
    rows.add_norm(x, added[None], None, torch.ones(2, device=device), EPS, out)
    assert x.tolist() == [[2048.0, 2048.0]]
    assert out[0, 0] == out[0, 1]


def test_what_is_added_is_rounded_before_the_sum(device: torch.device) -> None:
    """A norm a little above 2**-11 is 2**-11 in float16, and 1 + 2**-11 is a tie that goes to 1; without
    rounding it would go up.
    """
    x, added = (torch.ones(1, 4, dtype=torch.float16, device=device) for _ in range(2))
    after = torch.full((4,), 2.0**-11 * (1 + 2.0**-12), device=device)
    assert torch.equal(x + rms_norm(added, after, EPS), x)
    rows.add_norm(x, added[None], after, torch.ones(4, device=device), EPS, torch.empty_like(x))
    assert x.tolist() == [[1.0] * 4]


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_a_product_are_added_up_and_rounded_first(device: torch.device, dtype: torch.dtype) -> None:
    x, parts, weight = (
        noise(2, 24, dtype=dtype, device=device),
        noise(3, 2, 24, device=device, seed=1),
        noise(24, device=device, seed=2),
    )
    whole, streams, outs = (
        (parts[0] + parts[1] + parts[2]).to(dtype),
        [x.clone(), x.clone()],
        [torch.empty_like(x) for _ in range(2)],
    )
    for added, stream, out in zip((parts, whole[None]), streams, outs, strict=True):
        rows.add_norm(stream, added, None, weight, EPS, out)
    slack = {torch.bfloat16: 2**-6, torch.float16: 0, torch.float32: 0}[
        dtype
    ]  # the interpreter cuts where torch rounds
    torch.testing.assert_close(streams[0], streams[1], atol=slack, rtol=slack)
    torch.testing.assert_close(outs[0], outs[1], atol=slack, rtol=slack)


def placed(
    device: torch.device,
    dtype: torch.dtype,
    dim: int,
    num_q: int,
    num_kv: int,
    normed: bool,
    slots: list[int],
) -> None:
    """Place some rows and check queries, keys, values, and that no other slot was touched."""
    num_rows, context = len(slots), 40
    qkv = noise(num_rows, (num_q + 2 * num_kv) * dim, dtype=dtype, device=device)
    positions = torch.arange(num_rows, dtype=torch.int32, device=device) * 13 % context
    tables = [table.to(device) for table in rotary_tables(RopeConfig(), dim, context)]
    norms = (noise(dim, device=device, seed=1), noise(dim, device=device, seed=2)) if normed else (None, None)
    keys, values = (
        torch.full((max(slots) + 2, num_kv, dim), 7.0, dtype=dtype, device=device) for _ in range(2)
    )
    q_out = torch.full((num_rows, num_q, dim), float("nan"), dtype=dtype, device=device)
    at = torch.tensor(slots, dtype=torch.int32, device=device)
    cos_table, sin_table = tables
    rows.place(qkv[None], (positions, at), (cos_table, sin_table), (keys, values), norms, EPS, q_out)

    q, k, v = qkv.view(num_rows, -1, dim).float().tensor_split((-2 * num_kv, -num_kv), 1)
    if norms[0] is not None and norms[1] is not None:
        q, k = rms_norm(q, norms[0], EPS), rms_norm(k, norms[1], EPS)
    cos, sin = (table[positions.long()] for table in tables)
    torch.testing.assert_close(q_out, rotate(q, cos, sin).to(dtype), **close(dtype))
    torch.testing.assert_close(keys[at.long()], rotate(k, cos, sin).to(dtype), **close(dtype))
    assert torch.equal(values[at.long()], v.to(dtype))
    others = torch.ones(len(keys), dtype=torch.bool, device=device)
    others[at.long()] = False
    assert bool((keys[others] == 7).all())
    assert bool((values[others] == 7).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("dim", "num_q", "num_kv"), [(64, 9, 3), (16, 1, 1), (6, 4, 2), (80, 3, 3)])
def test_place_norms_rotates_and_stores(
    device: torch.device, dtype: torch.dtype, normed: bool, dim: int, num_q: int, num_kv: int
) -> None:
    placed(device, dtype, dim, num_q, num_kv, normed, [5, 0, 17])


def test_place_keeps_integers_and_their_scales(device: torch.device) -> None:
    dim, num_q, num_kv = 24, 4, 2
    qkv, at = (
        noise(1, 3, (num_q + 2 * num_kv) * dim, device=device),
        torch.tensor([2, 0, 5], dtype=torch.int32, device=device),
    )
    cos, sin = (table.to(device) for table in rotary_tables(RopeConfig(), dim, 8))
    q = torch.empty(3, num_q, dim, device=device)
    whole, small = (
        [torch.zeros(7, num_kv, width, dtype=dtype, device=device) for _ in range(2)]
        for width, dtype in ((dim, torch.float32), (dim + 16, torch.int8))
    )
    for keys, values in (whole, small):
        rows.place(qkv, (at, at), (cos, sin), (keys, values), (None, None), EPS, q)
    for numbers, kept in zip(whole, small, strict=True):
        scales = kept[..., dim : dim + 4].contiguous().view(torch.float32)
        assert torch.allclose(scales[at.long()], numbers[at.long()].abs().amax(-1, keepdim=True) / 127)
        assert bool(((kept[..., :dim] * scales - numbers).abs() <= 0.501 * scales).all())
        assert bool((kept[[1, 3, 4, 6]] == 0).all())


def test_place_leaves_values_as_they_are(device: torch.device) -> None:
    """Half a value that is infinite must not reach the other half, as it would if values were turned by no
    angle.
    """
    qkv = torch.zeros(1, 3 * 4, device=device)
    qkv[0, 8] = float("inf")
    cos, sin = torch.ones(1, 2, device=device), torch.zeros(1, 2, device=device)
    keys, values = torch.zeros(1, 1, 4, device=device), torch.zeros(1, 1, 4, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    q_out = torch.empty(1, 1, 4, device=device)
    rows.place(qkv[None], (zero, zero), (cos, sin), (keys, values), (None, None), EPS, q_out)
    assert values.flatten().tolist() == [float("inf"), 0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped"])
@pytest.mark.parametrize("width", [5, 1024, 1500])
def test_gate_is_the_decoders(device: torch.device, dtype: torch.dtype, activation: str, width: int) -> None:
    gate_up = 3 * noise(2, 2 * width, dtype=dtype, device=device)
    out = add_up(gate_up[None], activation, dtype)  # type: ignore[arg-type]
    torch.testing.assert_close(
        out, torch_gate(*gate_up.double().chunk(2, -1), activation).to(dtype), **close(dtype)
    )


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_is_flat_far_out(device: torch.device, activation: str) -> None:
    far = torch.tensor([[[-80.0, 80.0, 1.0, 1.0]]], device=device)
    out = add_up(far, activation, torch.float32)  # type: ignore[arg-type]
    torch.testing.assert_close(out.cpu(), torch.tensor([[0.0, 80.0]]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "scale"), [(7, 1.0), (1100, 24.0)])
def test_embed_takes_rows_of_the_table(
    device: torch.device, dtype: torch.dtype, hidden: int, scale: float
) -> None:
    table, ids = (
        noise(10, hidden, dtype=dtype, device=device),
        torch.tensor([3, 9, 0, 3], dtype=torch.int32, device=device),
    )
    out = rows.embed(ids, table, scale)
    torch.testing.assert_close(
        out, table[ids.long()] * scale, **(close(dtype) if scale != 1 else {"rtol": 0, "atol": 0})
    )


@settings(max_examples=15, deadline=None)
@given(num_rows=st.integers(1, 6), row=st.integers(0, 5), seed=st.integers(0, 1000))
def test_a_row_has_the_same_bits_in_any_company(num_rows: int, row: int, seed: int) -> None:
    """All launchers but embed, which computes nothing: a row alone, and the same row among others."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    row, dim = row % num_rows, 16
    x, added = (
        noise(num_rows, 6 * dim, device=device, seed=seed),
        noise(num_rows, 6 * dim, device=device, seed=seed + 1),
    )
    weight = noise(6 * dim, device=device)
    cos, sin = (table.to(device) for table in rotary_tables(RopeConfig(), dim, 8))
    norm = weight[:dim].contiguous()

    def run(chosen: slice) -> list[torch.Tensor]:
        stream, what = x[chosen].clone(), added[chosen].contiguous()
        count = torch.arange(len(stream), dtype=torch.int32, device=device)
        normed = torch.empty_like(stream)
        keys, values = (torch.zeros(len(stream), 1, dim, device=device) for _ in range(2))
        q = torch.empty(len(stream), 4, dim, device=device)
        rows.add_norm(stream, what[None], weight, weight, EPS, normed)
        gated = add_up(normed[None], "gelu_tanh", torch.float32)
        where, cache = (torch.full_like(count, 5), count), (keys, values)
        rows.place(normed[None], where, (cos, sin), cache, (norm, norm), EPS, q)
        return [stream, normed, gated, keys, values, q]

    for alone, among in zip(run(slice(row, row + 1)), run(slice(None)), strict=True):
        assert torch.equal(alone[0], among[row])
