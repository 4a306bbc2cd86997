"""The CPU kernels: right, and for one row bitwise the same whatever the other rows are."""

from __future__ import annotations

import threading

import numba
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from paceline.cpu.paged import Attention
from paceline.cpu.rows import gate_rows, norm_rows
from paceline.errors import ConfigError
from paceline.models.attention import Heads, TorchAttention, rms_norm
from paceline.models.config import RopeConfig
from paceline.models.linear import ExactLinear, TorchLinear
from paceline.models.rope import rotary_tables
from tests.passes import BLOCK_SIZE, NUM_BLOCKS, Rows, batch_of, random_parents, shuffled_blocks

BITS = (None, 8, 4)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("has_bias", [False, True])
@settings(deadline=None, max_examples=25)
@given(num_tokens=st.integers(0, 30), out=st.integers(1, 70), groups=st.integers(1, 6), seed=st.integers(0, 99))
def test_linear_agrees_with_torch(bits: int | None, has_bias: bool, num_tokens: int, out: int, groups: int, seed: int) -> None:
    weight, x = random(out, 32 * groups, seed=seed), random(num_tokens, 32 * groups, seed=seed + 1)
    bias = random(out, seed=seed + 2) if has_bias else None
    exact, reference = (kind(weight, bias, bits=bits, group=32) for kind in (ExactLinear, TorchLinear))
    torch.testing.assert_close(exact(x), reference(x), atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("bits", BITS)
@settings(deadline=None, max_examples=25)
@given(sizes=st.lists(st.integers(1, 14), min_size=1, max_size=4), out=st.sampled_from([16, 40, 129]), seed=st.integers(0, 99))
def test_linear_of_a_row_does_not_depend_on_the_others(bits: int | None, sizes: list[int], out: int, seed: int) -> None:
    linear = ExactLinear(random(out, 192, seed=seed), random(out, seed=seed + 1), bits=bits)
    x = random(sum(sizes), 192, seed=seed + 2)
    together = linear(x)
    assert torch.equal(together, torch.cat([linear(part) for part in x.split(sizes)]))
    assert torch.equal(together, torch.cat([linear(row[None]) for row in x]))


def test_linear_over_several_blocks_of_rows_is_the_same() -> None:
    linear, x = ExactLinear(random(32, 1024)), random(200, 1024, seed=1)  # 64 rows of x to a block
    assert torch.equal(linear(x), torch.cat([linear(part) for part in x.split(1)]))


@pytest.mark.parametrize("bits", BITS)
def test_linear_gives_back_its_rows(bits: int | None) -> None:
    weight, ids = random(37, 64), torch.tensor([36, 0, 17, 17])
    exact, reference = (kind(weight, bits=bits, group=32).rows(ids) for kind in (ExactLinear, TorchLinear))
    assert torch.equal(exact, reference)


def test_quantized_layers_are_smaller() -> None:
    floats, bytes_, nibbles = (ExactLinear(random(64, 256), bits=bits).num_bytes for bits in BITS)
    assert floats > 3.5 * bytes_ > 6 * nibbles


def test_a_width_the_kernels_cannot_do_is_named() -> None:
    with pytest.raises(ConfigError, match="40"):
        ExactLinear(random(16, 40))


@given(num_tokens=st.integers(1, 40), width=st.sampled_from([16, 64, 144]), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_norm_and_gate_are_right_and_row_by_row(num_tokens: int, width: int, seed: int) -> None:
    x, weight = 4 * random(num_tokens, 2 * width, seed=seed), random(2 * width, seed=seed + 1)
    normed = norm_rows(x, weight, 1e-5)
    torch.testing.assert_close(normed, rms_norm(x, weight, 1e-5), atol=1e-5, rtol=1e-5)
    assert torch.equal(normed, torch.cat([norm_rows(row[None], weight, 1e-5) for row in x]))
    gate, up = x.chunk(2, 1)
    for name, activation in (("silu", functional.silu(gate)), ("gelu_tanh", functional.gelu(gate, approximate="tanh"))):
        gated = gate_rows(x, name)
        torch.testing.assert_close(gated, activation * up, atol=1e-5, rtol=2e-6)
        assert torch.equal(gated, torch.cat([gate_rows(row[None], name) for row in x]))


def test_gate_at_the_ends_of_the_range() -> None:
    gate = torch.tensor([[-1e4, -88.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 1e4] * 2])
    torch.testing.assert_close(gate_rows(torch.cat([gate, torch.ones(1, 16)], 1), "silu"), functional.silu(gate), atol=1e-30, rtol=1e-6)


def attention_of(requests: list[Rows], heads: int, kv_heads: int, dim: int, window: int | None, norms: bool) -> list[torch.Tensor]:
    """(exact, reference) outputs, then the caches each wrote."""
    batch = batch_of(requests)
    tables = rotary_tables(RopeConfig(), dim, 256)
    settings_ = Heads(tables, (random(dim, seed=8), random(dim, seed=9)) if norms else None, 1e-6, dim**-0.5, window)
    results: list[torch.Tensor] = []
    caches = []
    for kind in (Attention, TorchAttention):
        cache = (random(NUM_BLOCKS * BLOCK_SIZE, kv_heads, dim, seed=5), random(NUM_BLOCKS * BLOCK_SIZE, kv_heads, dim, seed=6))
        results.append(kind(batch)(random(len(batch.slots), (heads + 2 * kv_heads) * dim, seed=7), cache, settings_))
        caches.append(torch.cat(cache))
    return results + caches


@settings(deadline=None, max_examples=60)
@given(
    shape=st.sampled_from([(9, 3, 64), (4, 4, 16), (8, 1, 32), (7, 1, 16), (2, 1, 128)]),
    trees=st.lists(st.lists(st.integers(0, 99), max_size=9), min_size=1, max_size=3),
    prefix=st.integers(0, 40),
    window=st.sampled_from([None, 1, 3, 16]),
    norms=st.booleans(),
)
def test_attention_agrees_with_torch(
    shape: tuple[int, int, int], trees: list[list[int]], prefix: int, window: int | None, norms: bool
) -> None:
    tables = shuffled_blocks(len(trees))
    requests = [
        Rows([0] * (len(draws) + 1), blocks, prefix + i, random_parents(draws))
        for i, (draws, blocks) in enumerate(zip(trees, tables, strict=True))
    ]
    exact, reference, exact_cache, reference_cache = attention_of(requests, *shape, window, norms)
    torch.testing.assert_close(exact, reference, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(exact_cache, reference_cache, atol=1e-5, rtol=1e-5)


def test_results_do_not_depend_on_the_number_of_threads_or_the_thread() -> None:
    weight, x = random(80, 128), random(7, 128, seed=1)
    whole = ExactLinear(weight)(x)
    results: list[torch.Tensor] = []

    def work() -> None:
        numba.set_num_threads(1)
        results.append(ExactLinear(weight)(x))
        results.append(attention_of([Rows([0] * 5, shuffled_blocks(1)[0], 9)], 9, 3, 64, None, False)[0])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert torch.equal(whole, results[0])
    assert torch.equal(attention_of([Rows([0] * 5, shuffled_blocks(1)[0], 9)], 9, 3, 64, None, False)[0], results[1])
    assert numba.threading_layer() in ("omp", "tbb")  # the third, workqueue, must not be entered from two threads
