"""Gemma 4 on a GPU: the bits of a row in exact mode, narrow weights, an engine's prefix hits and preemptions,
and drafts of a head. That it says what torch says: test_cuda_decoder.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.core.options import EngineConfig
from paceline.core.params import SamplingParams
from paceline.core.types import Cached, Request, Segment
from paceline.cuda import experts
from paceline.cuda.backend import CudaBackend
from paceline.cuda.experts import BesideExperts
from paceline.cuda.norms import add_normed, cap_logits, norm_each
from paceline.cuda.weights import load_weights
from paceline.drafters import registry
from paceline.drafters.base import DrafterContext
from paceline.engine.engine import Engine
from paceline.models.decoder import Decoder
from paceline.models.layer import rms_norm
from paceline.runtime.backend import TorchBackend
from paceline.runtime.executor import LocalExecutor
from tests.calm import bursts_of
from tests.cuda.recorders import capture_on
from tests.cuda.test_cuda_decoder import TREE, config_of, words
from tests.heads import random_head
from tests.laws.harness import RandomCheckpoint, request_of, run

pytestmark = pytest.mark.slow  # interpreted where there is no GPU


@cache
def checkpoint(name: str) -> RandomCheckpoint:
    """wide: heads of the sizes that released models have; dense: the least there is to run."""
    if name == "wide":
        return RandomCheckpoint(replace(config_of("gemma4"), head_dim=256, global_head_dim=512))
    return RandomCheckpoint(
        replace(config_of("gemma4_moe"), experts=None) if name == "dense" else config_of(name)
    )


def executor_on(
    device: torch.device, name: str, dtype: str = "float32", kv: str = "auto", num_blocks: int = 32
) -> LocalExecutor:
    backend = CudaBackend(device, True, capture_on(device))
    return LocalExecutor.load(backend, checkpoint(name), num_blocks, dtype=dtype, kv=kv)


def said(executor: LocalExecutor, *parts: tuple[Cached, list[int], list[int] | None, int]) -> torch.Tensor:
    """Logits of the wanted rows of each part."""
    for cached, tokens, _, _ in parts:
        assert executor.kv.reserve(cached, cached.num_cached + len(tokens))
    segments = [Segment(tokens, cached, parents, wanted) for cached, tokens, parents, wanted in parts]
    return executor.forward(segments).logits


ON_A_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="a minute interpreted, and others are alike"
)


@pytest.mark.parametrize(
    ("name", "dtype", "kv"),
    [
        ("gemma4", "float32", "auto"),
        pytest.param("wide", "bfloat16", "auto", marks=ON_A_GPU),
        ("gemma4", "float32", "int8"),
        ("wide", "int4", "auto"),
        ("gemma4_moe", "bfloat16", "auto"),
        pytest.param("gemma4_moe", "int8", "auto", marks=ON_A_GPU),
        pytest.param("gemma4_moe", "int4", "auto", marks=ON_A_GPU),
    ],
)
def test_a_row_keeps_its_bits_in_company(name: str, dtype: str, kv: str, device: torch.device) -> None:
    """However its context was read; of the first case this has several splits."""
    executor, length = executor_on(device, name, dtype, kv), 135 if (dtype, kv) == ("float32", "auto") else 21
    one, other, apart = Cached(), Cached(), Cached()
    said(executor, (one, words(length), None, 1), (other, words(19, 9), None, 1))
    said(executor, (apart, words(7), None, 0))
    one.num_cached, other.num_cached, apart.num_cached = length, 19, 7
    said(executor, (apart, words(length)[7:], None, 1))
    apart.num_cached = length
    alone = said(executor, (one, words(1), None, 1))[0]
    assert torch.isfinite(alone).all()
    assert torch.equal(said(executor, (one, words(7), TREE, 7))[0], alone)
    assert torch.equal(said(executor, (other, words(5), None, 5), (one, words(4), None, 4))[5], alone)
    assert torch.equal(said(executor, (apart, words(3), None, 3))[0], alone)


def test_wide_heads_in_float32_are_refused_by_name(device: torch.device) -> None:
    """A tile of them has no room on a multiprocessor."""
    with pytest.raises(ConfigError, match="float32 with heads of 512"):
        executor_on(device, "wide", "float32")


CLOSE = {"bfloat16": 0.03, "float16": 0.01, "fp8": 0.15, "int8": 0.05, "int4": 0.4}  # of their mean size


@pytest.mark.parametrize(("name", "dtype"), [("wide", "bfloat16"), *(("gemma4_moe", each) for each in CLOSE)])
def test_narrow_weights_say_nearly_the_same(name: str, dtype: str, device: torch.device) -> None:
    executor = executor_on(device, name, dtype)
    oracle = LocalExecutor.load(TorchBackend(torch.device("cpu")), checkpoint(name), 16, dtype="float32")
    parts = (words(6), None, 6)
    ours, theirs = (said(each, (Cached(), *parts)).float().cpu() for each in (executor, oracle))
    assert (ours - theirs).abs().mean() / theirs.abs().mean() < CLOSE[dtype]


def test_experts_beside_an_mlp_say_what_torch_says(device: torch.device) -> None:
    """Each of the norms and the scales of experts counts: in a whole model some would hardly show."""
    source = checkpoint("gemma4_moe")
    ffn = load_weights(source, source.config, "float32", device, True).layers[1].ffn
    assert isinstance(ffn, BesideExperts)
    stream = torch.randn((5, source.config.hidden_size), generator=torch.Generator().manual_seed(3))
    weight = source.tensor("layers.1.mlp.experts_norm.weight")
    x = rms_norm(stream, weight, source.config.rms_eps)
    with torch.no_grad():
        expected = Decoder.load(source).layers[1].mlp(stream)
    found = ffn(x.to(device), stream.to(device))
    torch.testing.assert_close(found.sum(0).cpu(), expected, atol=1e-4, rtol=1e-5)
    assert not ffn.experts.counts.any()


def test_rows_beyond_what_experts_take_at_a_time_have_the_same_bits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint("gemma4_moe")
    ffn = load_weights(source, source.config, "bfloat16", device, True).layers[1].ffn
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn((2, 9, source.config.hidden_size), generator=generator).bfloat16().to(device)
    whole = ffn(*rows)
    monkeypatch.setattr(experts, "MOST_ROWS", 4)
    assert torch.equal(ffn(*rows), whole)


def test_several_norms_of_one_row(device: torch.device) -> None:
    x = torch.randn((3, 24), generator=torch.Generator().manual_seed(1))
    weights = torch.randn((2, 24), generator=torch.Generator().manual_seed(2))
    for weight, found in zip(weights, norm_each(x.to(device), weights.to(device), 1e-5), strict=True):
        torch.testing.assert_close(found.cpu(), rms_norm(x, weight, 1e-5), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_added_in_parts_is_rounded_before_its_norm(dtype: torch.dtype, device: torch.device) -> None:
    """A product in one part has been rounded: whole or in parts, a row says the same."""
    parts = torch.randn((3, 2, 24), generator=torch.Generator().manual_seed(1))
    weights = torch.randn((2, 24), generator=torch.Generator().manual_seed(2))
    whole = (parts[0] + parts[1] + parts[2]).to(dtype)[None]
    outs = []
    for left, right in ((parts, whole), (whole, parts)):
        outs.append(torch.full((2, 24), float("nan"), dtype=dtype, device=device))
        add_normed(left.to(device), right.to(device), weights.to(device), 1e-5, outs[-1])
    expected = sum(rms_norm(whole[0].float(), weight, 1e-5) for weight in weights)
    assert torch.equal(*outs)
    close = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(outs[0].float().cpu(), expected, atol=close, rtol=close)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_logits_stay_below_their_cap(device: torch.device) -> None:
    """Also those that are infinite, and what is no number stays none."""
    given = torch.cat([torch.linspace(-90, 90, 1501), torch.tensor([1e30, -1e30, torch.inf, torch.nan])])
    logits = given.repeat(2, 1).to(device)
    cap_logits(logits, 30.0)
    expected = 30.0 * (given / 30.0).tanh()
    torch.testing.assert_close(logits.cpu(), expected.repeat(2, 1), atol=1e-5, rtol=1e-5, equal_nan=True)


GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
DRAWN: dict[str, Any] = {"temperature": 0.8, "seed": 7, "ignore_eos": True}
SHARED = words(33)
TEXTS = [[*SHARED, 1], [*SHARED, 2], words(14, 5)]


def requests_of(count: int) -> list[Request]:
    ways = (GREEDY, DRAWN, GREEDY)
    both = zip(TEXTS, ways, strict=True)
    return [request_of(text, SamplingParams(**how, max_tokens=count)) for text, how in both]


def test_prefix_hits_and_preemptions_change_nothing(device: torch.device) -> None:
    """Blocks of both kinds of layers are found, lost and read again."""
    count = 5
    alone = requests_of(count)
    for request in alone:
        whole = executor_on(device, "dense")
        run(Engine(whole, None, EngineConfig(max_model_len=64, enable_prefix_caching=False)), [request])
    engine = Engine(
        executor_on(device, "dense", num_blocks=4), None,
        EngineConfig(max_model_len=64, max_num_batched_tokens=20),
    )  # fmt: skip
    together = requests_of(count)
    run(engine, together)
    assert engine.scheduler.num_prefix_hits > 0
    assert engine.scheduler.num_preemptions > 0
    assert [each.output for each in together] == [each.output for each in alone]


@pytest.mark.parametrize("name", ["gemma4", "gemma4_moe"])
def test_drafts_of_a_head_change_nothing(name: str, device: torch.device) -> None:
    """In bursts, too: a round's pass is the recorded one, with its capped logits."""
    source, count = checkpoint(name), 7
    plain, drafted = requests_of(count)[2:], requests_of(count)[2:]
    run(Engine(executor_on(device, name), None, EngineConfig(max_model_len=64)), plain)
    executor = executor_on(device, name)
    options = {"method": "eagle", "model": random_head("eagle", source), "num_speculative_tokens": 2}
    context = DrafterContext(executor, source, None, lambda *_: None)  # type: ignore[arg-type]
    drafter = registry.create(*registry.parse(options), context)
    engine = Engine(executor, drafter, EngineConfig(max_model_len=64, num_speculative_tokens=2))
    launched = bursts_of(engine)
    run(engine, drafted)
    assert engine.totals.num_drafted > 0
    assert launched
    assert [each.output for each in drafted] == [each.output for each in plain]
