"""Mixtures of experts on a GPU say what the torch decoder says, and a row's bits do not depend on its company."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from paceline.core.types import Cached, Segment
from paceline.cuda.decoder import CudaDecoder
from paceline.cuda.experts import Experts
from paceline.cuda.route import num_tiles, route
from paceline.cuda.weights import load_weights
from paceline.models.config import ExpertsConfig, ModelConfig
from paceline.models.decoder import Decoder
from paceline.runtime.backend import TorchBackend
from paceline.runtime.executor import KvMemory, LocalExecutor
from tests.cuda.recorders import capture_on, executor_of
from tests.cuda.test_cuda_decoder import SHAPE
from tests.laws.harness import RandomCheckpoint

# The first layer of glm4_moe is dense; qwen2_moe has a shared expert two and a half times as wide as others.
EXPERTS = {
    "mixtral": ExpertsConfig(4, 2, 48),
    "olmoe": ExpertsConfig(8, 3, 32, normalizes=False),
    "qwen2_moe": ExpertsConfig(8, 2, 16, normalizes=False, shared_inner=40, has_shared_gate=True),
    "glm4_moe": ExpertsConfig(
        12, 3, 16, "sigmoid", scale=1.5, groups=4, top_groups=2, shared_inner=16, dense_layers=(0,)
    ),
    "one": ExpertsConfig(5, 1, 16, normalizes=False),
    "wide": ExpertsConfig(16, 4, 384),
}
CLOSE = {
    "float32": 1e-5,
    "bfloat16": 0.02,
    "float16": 0.003,
    "fp8": 0.06,
    "int8": 0.03,
    "int4": 0.3,
}  # of their mean size


@cache
def checkpoint(name: str) -> RandomCheckpoint:
    hidden = 512 if name == "wide" else SHAPE["hidden_size"]
    return RandomCheckpoint(ModelConfig(**{**SHAPE, "hidden_size": hidden, "experts": EXPERTS[name]}))


def experts_of(name: str, device: torch.device, dtype: str = "float32", is_exact: bool = False) -> Experts:
    source = checkpoint(name)
    ffn = load_weights(source, source.config, dtype, device, is_exact).layers[1].ffn
    assert isinstance(ffn, Experts)
    return ffn


def inputs(
    count: int, device: torch.device, dtype: torch.dtype = torch.float32, width: int = SHAPE["hidden_size"]
) -> torch.Tensor:
    x = torch.randn((count, width), generator=torch.Generator().manual_seed(3))
    return x.to(dtype).to(device)


def said(ffn: Experts, x: torch.Tensor) -> torch.Tensor:
    """Every part, [parts, T, hidden]."""
    found = ffn(x)
    assert not ffn.counts.any()
    return found


@pytest.mark.parametrize("name", [name for name in EXPERTS if name != "wide"])
def test_a_block_says_what_torch_says(name: str, device: torch.device) -> None:
    ffn, x = experts_of(name, device), inputs(19, device)
    with torch.no_grad():
        expected = Decoder.load(checkpoint(name)).layers[1].mlp(x.cpu())
    for rows in (slice(0, 1), slice(0, 19)):
        found = said(ffn, x[rows]).sum(0).cpu()
        torch.testing.assert_close(found, expected[rows], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "fp8", "int8", "int4"])
def test_narrow_weights_say_nearly_the_same(dtype: str, device: torch.device) -> None:
    ffn = experts_of("qwen2_moe", device, dtype)
    x = inputs(6, device, torch.float16 if dtype == "float16" else torch.bfloat16)
    with torch.no_grad():
        expected = Decoder.load(checkpoint("qwen2_moe")).layers[1].mlp(x.cpu().float())
    error = (said(ffn, x).float().sum(0).cpu() - expected).abs().mean() / expected.abs().mean()
    assert error < CLOSE[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8", "int8", "int4"])
def test_a_row_keeps_its_bits_in_company(dtype: str, device: torch.device) -> None:
    """On a device also where tiles are wider and sums longer."""
    counts, name = ((2, 40, 70, 300, 2048), "wide") if device.type == "cuda" else ((18,), "mixtral")
    ffn, width = experts_of(name, device, dtype, is_exact=True), checkpoint(name).config.hidden_size
    x = inputs(counts[-1], device, torch.float32 if dtype == "float32" else torch.bfloat16, width)
    alone = said(ffn, x[1:2])
    for count in counts:
        assert torch.equal(said(ffn, x[:count])[:, 1:2], alone)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_that_is_no_number_spoils_no_other(device: torch.device) -> None:
    ffn, x = experts_of("mixtral", device), inputs(5, device)
    expected = said(ffn, x)
    x[2] = float("nan")
    found = said(ffn, x)
    others = [0, 1, 3, 4]
    assert torch.equal(found[:, others], expected[:, others])
    assert found[:, 2].isnan().all()


def test_of_equal_experts_the_first_are_chosen(device: torch.device) -> None:
    config = EXPERTS["glm4_moe"]
    counts = torch.zeros(config.count + 1, dtype=torch.int32, device=device)
    logits = torch.zeros((2, 3, config.count), device=device)
    grouped = route(logits, logits[0, 0], None, counts, config, 1, 16, counts.new_zeros(1))
    woken = [tile[0] for tile in grouped.tiles.tolist() if tile[2]]  # type: ignore[union-attr]
    assert woken == [0, 1, 2, config.count]


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("is_one", [False, True])
def test_every_row_is_in_one_tile_of_each_of_its_experts(
    count: int, is_one: bool, device: torch.device
) -> None:
    """Also where all rows wake the same experts."""
    config = EXPERTS["olmoe"]
    counts = torch.zeros(config.count + 1, dtype=torch.int32, device=device)
    logits = torch.randn((2, count, config.count), generator=torch.Generator().manual_seed(count)).to(device)
    logits = logits[:, :1].expand_as(logits).contiguous() if is_one else logits
    number = counts.new_zeros(1)
    grouped = route(logits, None, None, counts, config, 0, 16, number)
    chosen = logits.sum(0).sort(-1, descending=True).indices[:, : config.per_token]
    assert number.item() == len(chosen.unique())
    tiles, order = grouped.tiles, grouped.order
    assert tiles is not None
    assert order is not None
    assert len(tiles) == num_tiles(count * config.per_token, config.count, 16)
    found: dict[int, int] = {}
    for expert, first, rows in tiles.tolist():
        if rows:
            found |= dict.fromkeys(order[first : first + rows].tolist(), expert)
    assert sum(tile[2] for tile in tiles.tolist()) == len(found) == count * config.per_token
    assert [found[i] for i in range(len(found))] == chosen.T.flatten().tolist()


def test_a_pass_counts_the_experts_it_woke(device: torch.device) -> None:
    """In layers that have some; three rows are filled up to four, and the fourth wakes some, too."""
    reference, source = Decoder.load(checkpoint("glm4_moe")), checkpoint("glm4_moe")
    ours = CudaDecoder.load(source, "float32", device, capture=capture_on(device))
    woken, per_token = list[int](), EXPERTS["glm4_moe"].per_token
    reference.layers[1].mlp.gate.register_forward_hook(
        lambda _module, _x, found: woken.append(len(found[0].unique()))
    )
    executors = (
        executor_of(ours, 8),
        LocalExecutor(TorchBackend(torch.device("cpu")), reference, KvMemory(reference.config, 8)),
    )
    for count in (4, 1, 3):
        for executor in executors:
            cached = Cached()
            assert executor.kv.reserve(cached, count)
            executor.forward([Segment([7, 40, 5, 61][:count], cached, None, count)])
            executor.kv.free(cached)
        extra = per_token if count == 3 else 0
        assert woken[-1] <= ours.woken <= woken[-1] + extra
    dense = CudaDecoder.load(RandomCheckpoint(ModelConfig(**SHAPE)), "float32", device)
    assert dense.woken == 0.0
