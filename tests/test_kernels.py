"""The compiled pass: right, and for one row bitwise the same whatever the other rows are, for models of
random sizes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.core.types import BLOCK_SIZE, SCALE_BYTES, Batch, Output
from paceline.cpu.attend import FEW_ROWS
from paceline.cpu.decoder import CpuDecoder
from paceline.cpu.lanes import address
from paceline.cpu.rows import ACTIVATIONS, gate, normalize
from paceline.cpu.value_tiles import CHUNK
from paceline.loaders.packed import pack_model
from paceline.models import layer
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.quantize import DOT_ROWS, bits_of
from tests.laws.harness import RandomCheckpoint
from tests.odd_models import DTYPES, ODD, config_of, odd_model
from tests.passes import NUM_BLOCKS, Rows, batch_of, new_kv, random_parents, shuffled_blocks

TOLERANCE = {
    "float32": 2e-5,
    "int8": 0.015,
    "int4": 0.015,
}  # mean error, in units of the spread of the logits
# times that, for a single logit: a rounding of an activation, a query or a key may go the other way now and
# then
WORST = 12

configs = st.builds(
    config_of,
    hidden=st.sampled_from([16, 48, 80, 96, 128, 160]),
    inner=st.sampled_from([16, 64, 112, 208]),
    heads=st.sampled_from(
        [(9, 3, 16), (4, 4, 16), (8, 1, 32), (7, 1, 16), (2, 1, 64), (1, 1, 48), (5, 5, 16)]
    ),
    vocab=st.sampled_from([1, 7, 16, 61, 200]),
    window=st.sampled_from([None, 1, 3, 16, 64, 65, 100]),
    is_gemma=st.booleans(),
    tied=st.booleans(),
)


def random_tokens(count: int, vocab: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


@cache
def both(config: ModelConfig, dtype: str) -> tuple[CpuDecoder, Decoder]:
    checkpoint = RandomCheckpoint(config)
    return CpuDecoder.load(checkpoint, dtype=dtype, use_cache=False), Decoder.load(checkpoint, dtype=dtype)


def is_close(found: torch.Tensor, expected: torch.Tensor, dtype: str) -> bool:
    # at least what logits of such models usually are: the only one of a tiny vocabulary may be next to
    # nothing, its terms are not
    scale = max(float(expected.std(correction=0)), float(expected.abs().mean()), 0.5)
    error = (found - expected).abs() / scale
    # among few logits a rounding that goes the other way is not averaged out, and may move a handful by much;
    # the caches, which are compared as well, hold many numbers
    is_few = dtype != "float32" and expected.numel() < 64
    worst = 0.5 if dtype != "float32" and expected.numel() < 8 else WORST * TOLERANCE[dtype]
    return bool((is_few or error.mean() < TOLERANCE[dtype]) and error.max() < worst)


def fill(model: Any, kv: Any, requests: list[Rows]) -> None:
    """The prefixes of the requests, made of their own first tokens, into the cache."""
    for r, request in enumerate(requests):
        if request.prefix:
            model.forward(batch_of([Rows(prefix_of(model.config, request, r), request.blocks)], rows=[]), kv)


def prefix_of(config: ModelConfig, request: Rows, r: int) -> list[int]:
    return random_tokens(request.prefix, config.vocab_size, seed=1000 + r)


@st.composite
def passes(draw: Any, max_rows: int = 14, max_prefix: int = 110) -> list[Rows]:
    """One to four requests, each a chain or a tree of rows over a cached prefix; tokens are below 1, models
    have them all.
    """
    count = draw(st.integers(1, 4))
    tables = shuffled_blocks(count, seed=draw(st.integers(0, 9)))
    requests = []
    for blocks in tables:
        size = draw(st.integers(1, max_rows))
        parents = (
            random_parents(draw(st.lists(st.integers(0, 99), min_size=size - 1, max_size=size - 1)))
            if draw(st.booleans())
            else None
        )
        requests.append(Rows([0] * size, blocks, draw(st.integers(0, max_prefix)), parents))
    return requests


def with_tokens(requests: list[Rows], vocab: int) -> list[Rows]:
    return [
        request._replace(tokens=random_tokens(len(request.tokens), vocab, seed=r))
        for r, request in enumerate(requests)
    ]


def path_to(request: Rows, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(request.tokens[node])
        node = node - 1 if request.parents is None else request.parents[node]
    return path[::-1]


def as_floats(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[2, slots, KV heads, dim] of keys and values as they are, or as integers with their scales; what was
    never written is 1e3.
    """
    if keys.dtype != torch.int8:
        return torch.stack([keys, values])
    dim = keys.shape[-1] - SCALE_BYTES
    first, scales = -(-dim // 32) * 16, keys[..., dim : dim + 12].contiguous().view(torch.float32)
    widths = torch.tensor([first, dim - first])
    both = [keys[..., :dim] * scales[..., :2].repeat_interleave(widths, -1), values * scales[..., 2:]]
    return torch.where(scales[..., :1] > 1e30, 1e3, torch.stack(both))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=50)
@given(config=configs, requests=passes())
def test_agrees_with_torch(dtype: str, config: ModelConfig, requests: list[Rows]) -> None:
    """Random models, requests, trees and contexts; the same rounding of weights and activations. The cache
    agrees as well.
    """
    requests = with_tokens(requests, config.vocab_size)
    results, caches = [], []
    for model in both(config, dtype):
        kv = new_kv(model)
        fill(model, kv, requests)
        results.append(model.forward(batch_of(requests), kv).logits)
        caches.append(torch.stack([as_floats(keys, values) for keys, values in kv]))
    assert results[0].shape == (sum(len(r.tokens) for r in requests), config.vocab_size)
    assert is_close(results[0], results[1], dtype)
    assert ((caches[0] - caches[1]).abs() < WORST * TOLERANCE[dtype] * caches[1].abs().clamp(min=3)).all()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize(
    "name", ["layers.0.qkv", "layers.1.out", "layers.0.gate_up", "layers.1.down", "head"]
)
def test_one_wrong_scale_would_be_seen(dtype: str, name: str) -> None:
    """What the tolerance above is worth: the scale of one row in one group of one matrix is lost."""
    tensors = pack_model(RandomCheckpoint(ODD), bits_of(dtype))
    batch = batch_of([Rows(random_tokens(40, ODD.vocab_size, 3), shuffled_blocks(1)[0])])
    reference, model = both(ODD, dtype)[1], CpuDecoder(ODD, dtype, tensors)
    expected = reference.forward(batch, new_kv(reference)).logits
    assert is_close(model.forward(batch, new_kv(model)).logits, expected, dtype)
    tensors[f"{name}.weight"][0, 0, -2 * DOT_ROWS :][:2] = 0
    assert not is_close(model.forward(batch, new_kv(model)).logits, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=40)
@given(config=configs, requests=passes())
def test_bits_of_a_row_are_those_of_its_path_alone(
    dtype: str, config: ModelConfig, requests: list[Rows]
) -> None:
    """Rows of many requests and trees in one pass, against each row's own sequence as one chain in an empty
    cache.
    """
    model = both(config, dtype)[0]
    kv = new_kv(model)
    requests = with_tokens(requests, config.vocab_size)
    fill(model, kv, requests)
    together = iter(model.forward(batch_of(requests), kv).logits)
    for r, request in enumerate(requests):
        for node in range(len(request.tokens)):
            sequence = prefix_of(config, request, r) + path_to(request, node)
            alone = model.forward(
                batch_of([Rows(sequence, shuffled_blocks(1)[0])], rows=[len(sequence) - 1]), new_kv(model)
            ).logits[0]
            assert torch.equal(next(together), alone)


def in_chunks(model: CpuDecoder, tokens: list[int], sizes: list[int], seed: int = 0) -> Output:
    """All tokens, `sizes` of them at a time and then the rest."""
    kv, blocks = new_kv(model), shuffled_blocks(1, seed)[0]
    logits, hidden, start = [], [], 0
    for size in [*sizes, len(tokens)]:
        part = tokens[start : start + size]
        if part:
            output = model.forward(batch_of([Rows(part, blocks, start)]), kv, hidden_layers=(1,))
            logits.append(output.logits)
            hidden.append(output.hidden[1])
        start += size
    return Output(torch.cat(logits), {1: torch.cat(hidden)})


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=40)
@given(
    config=configs,
    length=st.integers(1, 3 * CHUNK + 5),
    sizes=st.lists(
        st.sampled_from([1, 2, 3, 5, FEW_ROWS - 1, FEW_ROWS, FEW_ROWS + 1, 40, CHUNK - 1, CHUNK, CHUNK + 1]),
        max_size=12,
    ),
    seed=st.integers(0, 99),
)
def test_bits_do_not_depend_on_how_a_prompt_is_chunked(
    dtype: str, config: ModelConfig, length: int, sizes: list[int], seed: int
) -> None:
    model, tokens = both(config, dtype)[0], random_tokens(length, config.vocab_size, seed)
    whole, parts = in_chunks(model, tokens, []), in_chunks(model, tokens, sizes, seed)
    assert torch.equal(whole.logits, parts.logits)
    assert torch.equal(whole.hidden[1], parts.hidden[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_to_sixty_four_rows_at_the_borders_of_chunks(dtype: str) -> None:
    """Every number of rows over a context that ends just before, at and after a border, one by one as the
    reference.
    """
    model, tokens = odd_model(dtype), random_tokens(2 * CHUNK + 66, ODD.vocab_size, 1)
    alone = in_chunks(model, tokens, [1] * len(tokens)).logits
    for start in (0, CHUNK - 1, CHUNK, 2 * CHUNK - 5):
        for rows in (1, 2, 3, 4, 5, 7, 8, FEW_ROWS - 1, FEW_ROWS, FEW_ROWS + 1, 33, 40, 64):
            found = in_chunks(model, tokens[: start + rows], [start] if start else []).logits[start:]
            assert torch.equal(found, alone[start : start + rows]), (start, rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pass_does_not_remember_a_larger_one(dtype: str) -> None:
    """Memory is kept from pass to pass: what a long one left in it must not show."""
    fresh = CpuDecoder.load(RandomCheckpoint(ODD), dtype=dtype, use_cache=False)
    tokens = random_tokens(150, ODD.vocab_size, 2)
    first = in_chunks(fresh, tokens[:3], []).logits
    in_chunks(fresh, tokens, [100])
    assert torch.equal(in_chunks(fresh, tokens[:3], []).logits, first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_states_and_early_stop(dtype: str) -> None:
    model, reference = both(ODD, dtype)
    tokens = random_tokens(30, ODD.vocab_size, 3)
    batch = batch_of([Rows(tokens, shuffled_blocks(1)[0])])
    full = model.forward(batch, new_kv(model), hidden_layers=(0, 1, 2))
    expected = reference.forward(batch, new_kv(reference), hidden_layers=(0, 1, 2))
    assert torch.equal(full.hidden[0], expected.hidden[0])  # an embedding is looked up, not computed
    for depth in (0, 1, 2):
        assert is_close(full.hidden[depth], expected.hidden[depth], dtype)
        early = model.forward(batch, new_kv(model), num_layers=depth, hidden_layers=(depth,))
        assert torch.equal(early.hidden[depth], full.hidden[depth])
        assert is_close(
            early.logits, reference.forward(batch, new_kv(reference), num_layers=depth).logits, dtype
        )
    assert torch.equal(early.logits, full.logits)


def test_quantized_models_are_smaller_and_differ_from_each_other() -> None:
    config = config_of(128, 256, (4, 2, 32), 160)
    batch = batch_of([Rows(random_tokens(20, 160, 4), shuffled_blocks(1)[0])])
    models = {dtype: both(config, dtype)[0] for dtype in DTYPES}
    floats, bytes_, nibbles = (models[dtype].num_bytes for dtype in DTYPES)
    assert floats > 3.5 * bytes_ > 4.5 * nibbles
    logits = {dtype: model.forward(batch, new_kv(model)).logits for dtype, model in models.items()}
    errors = [
        float((logits[dtype] - logits["float32"]).abs().mean() / logits["float32"].std())
        for dtype in ("int8", "int4")
    ]
    assert 1e-3 < errors[0] < 0.05 < errors[1] < 0.5


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (replace(ODD, head_dim=24), 24),
        (replace(ODD, hidden_size=40), 40),
        (replace(ODD, intermediate_size=100), 100),
    ],
)
def test_a_width_the_kernels_cannot_do_is_named(config: ModelConfig, size: int) -> None:
    with pytest.raises(ConfigError, match=rf"{size}; use kernels='torch'"):
        CpuDecoder.load(RandomCheckpoint(config), use_cache=False)


def test_what_lies_outside_the_tables_is_refused() -> None:
    model, blocks = odd_model("int8"), list(range(NUM_BLOCKS))
    short = CpuDecoder.load(RandomCheckpoint(ODD), context=8, use_cache=False)
    kv = new_kv(model)
    with pytest.raises(AssertionError, match="rotary"):
        short.forward(batch_of([Rows([1], blocks, 8)]), kv)
    with pytest.raises(AssertionError, match="vocabulary"):
        model.forward(batch_of([Rows([ODD.vocab_size], blocks)]), kv)
    with pytest.raises(AssertionError, match="slot"):
        model.forward(batch_of([Rows([1], [NUM_BLOCKS])]), kv)
    with pytest.raises(AssertionError, match="another model"):
        model.forward(batch_of([Rows([1], blocks)]), new_kv(model, replace(ODD, head_dim=32)))
    for wrong in ([(k.float(), v) for k, v in kv], [(k, v.half()) for k, v in kv]):
        with pytest.raises(AssertionError, match="keys and values are"):
            model.forward(batch_of([Rows([1], blocks)]), wrong)
    with pytest.raises(AssertionError, match="no such layer"):
        model.forward(batch_of([Rows([1], blocks)]), kv, num_layers=3)
    for rows in ([1], [0, 0]):  # beyond the pass, and more than there is memory for
        with pytest.raises(AssertionError, match="row that is not there"):
            model.forward(batch_of([Rows([1], blocks)], rows=rows), kv)
    columns = batch_of([Rows([1], blocks[:1])]).columns._replace(prefix_lens=[BLOCK_SIZE + 1])
    with pytest.raises(AssertionError, match="longer than its blocks"):
        model.forward(Batch(columns), kv)
    last = short.forward(
        batch_of([Rows([1], blocks, 7)]), [(k.zero_(), v.zero_()) for k, v in kv]
    )  # the last position there is
    assert last.logits.isfinite().all()


@numba.njit
def gated(kind, gates, ups, out):  # type: ignore[no-untyped-def]
    gate(kind, address(gates), address(ups), address(out), len(gates))


@numba.njit
def normalized(x, weight, out):  # type: ignore[no-untyped-def]
    normalize(address(x), address(weight), address(out), len(x), 1e-5)


def test_gate_over_the_whole_range() -> None:
    ends = torch.tensor(
        [-1e4, -88.0, -87.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 88.0, 1e4, 0.5, -0.5, 3.0, -3.0, 7.0, -7.0]
    )
    gates = torch.cat([ends, torch.linspace(-30, 30, 16 * 99)])
    ups, out = torch.linspace(-20, 20, len(gates)), torch.empty_like(gates)
    for activation, kind in ACTIVATIONS.items():
        gated(kind, gates.numpy(), ups.numpy(), out.numpy())
        torch.testing.assert_close(out, layer.gate(gates, ups, activation), atol=1e-5, rtol=2e-6)


@settings(deadline=None, max_examples=30)
@given(
    width=st.sampled_from([16, 48, 80, 144]), seed=st.integers(0, 99), size=st.sampled_from([1e-6, 1.0, 1e6])
)
def test_norm_agrees_with_torch(width: int, seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = size * torch.randn(width, generator=generator), torch.randn(width, generator=generator)
    out = torch.empty_like(x)
    normalized(x.numpy(), weight.numpy(), out.numpy())
    torch.testing.assert_close(out, layer.rms_norm(x, weight, 1e-5), atol=1e-6, rtol=1e-5)
