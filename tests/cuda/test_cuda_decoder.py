"""The decoder of GPUs says what the one in plain torch says, for prompts, plain steps and trees, and replays
what it has recorded.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.batch import build
from paceline.core.errors import ConfigError
from paceline.core.noise import Noise, Purpose
from paceline.core.types import Cached, Columns, Output, PassSizes, Pick, Segment
from paceline.cuda import attention
from paceline.cuda import decoder as decoder_module
from paceline.cuda.batch import (
    Bucket,
    DeviceBatch,
    ancestor_words,
    batch_values,
    bucket_for,
    bucket_of,
    target_buffer,
)
from paceline.cuda.decoder import CudaDecoder
from paceline.loaders.checkpoint import DummyCheckpoint
from paceline.models.config import ExpertsConfig, ModelConfig, RopeConfig
from paceline.models.decoder import Decoder
from paceline.runtime.backend import TorchBackend
from paceline.runtime.executor import KvMemory, LocalExecutor
from paceline.runtime.kv_cache import KvCache
from tests.cuda.recorders import CountingCapture, capture_on, executor_of
from tests.laws.harness import RandomCheckpoint

pytestmark = pytest.mark.slow  # interpreted where there is no GPU

SHAPE: dict[str, Any] = {
    "family": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2,
    "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "max_context": 256, "rms_eps": 1e-5,
    "rope": RopeConfig(),
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    "family": "gemma4", "sandwich_norm": True, "activation": "gelu_tanh", "embed_scale": 5.5, "sliding_window": 9,
    "local_layers": (True, False), "rope": RopeConfig(1e6, "proportional", 0.25), "rope_local": RopeConfig(),
    "tie_embeddings": True, "qk_norm": True, "attention_scale": 1.0, "value_norm": True, "layer_scalars": True,
    "logits_cap": 3.0, "global_kv_heads": 1,
}  # fmt: skip
MODELS = {
    "llama": {},
    "qwen3": {"qk_norm": True, "tie_embeddings": True},
    "qwen2": {"qkv_bias": True, "num_heads": 6},
    "gemma": {
        "sandwich_norm": True, "activation": "gelu_tanh", "embed_scale": 5.5, "sliding_window": 9,
        "local_layers": (True, False), "rope_local": RopeConfig(theta=500.0),
        "tie_embeddings": True, "qk_norm": True,
    },
    "smollm3": {"rope_layers": (True, False)},
    # what olmoe, granitemoe, glm4_moe and gpt_oss have beside their experts
    "experts": {
        "experts": ExpertsConfig(4, 2, 16, has_bias=True), "activation": "clamped", "num_layers": 1,
        "qk_norm": True, "qk_norm_over_heads": True, "rotary_dim": 8, "qkv_bias": True, "out_bias": True,
        "residual_scale": 0.3, "logits_scale": 0.2, "attention_sinks": True,
        "sliding_window": 9, "local_layers": (True,),
    },
    # heads of two sizes, and experts beside an MLP
    "gemma4": {
        **GEMMA4, "head_dim": 128, "num_heads": 2, "num_kv_heads": 1, "global_head_dim": 256,
        "attention_scale": 0.1,
    },
    "gemma4_moe": {
        **GEMMA4, "head_dim": 16, "global_head_dim": 32,
        "experts": ExpertsConfig(6, 2, 16, shared_inner=48, has_norms=True),
    },
    "phi3": {
        "rope": RopeConfig(
            kind="longrope", original_context=32, attention_factor=1.2, divisors=(1.5,) * 8, long_divisors=(4.0,) * 8
        )
    },
}  # fmt: skip
TREE = [-1, 0, 0, 1, 1, 2, 3]  # a root and six nodes
GREEDY = Pick(0.0, 0)
CPU = torch.device("cpu")


@cache
def config_of(name: str) -> ModelConfig:
    return ModelConfig(**{**SHAPE, **MODELS[name]})


class Pair:
    """The decoder under test and the oracle, each with a cache of its own, fed with the same segments."""

    def __init__(self, name: str, device: torch.device, **options: Any) -> None:
        config = config_of(name)
        # what a dummy has in some rows depends on which are read, and experts are read one by one
        is_random = config.experts or config.family == "gemma4"
        source: Any = RandomCheckpoint(config) if is_random else DummyCheckpoint(config)
        ours = CudaDecoder.load(
            source, dtype="float32", device=str(device), capture=capture_on(device), **options
        )
        theirs = Decoder.load(source)
        oracle = LocalExecutor(TorchBackend(CPU), theirs, KvMemory(config, 32))
        self.executors = [executor_of(ours, 32), oracle]
        self.caches: list[list[Cached]] = [[], []]

    def forward(
        self, *parts: tuple[int, list[int], list[int] | None, int], pick: Pick | None = None, **options: Any
    ) -> list[Output]:
        """parts: (request, tokens, parents, wanted logits)."""
        outputs = []
        for executor, caches in zip(self.executors, self.caches, strict=True):
            while len(caches) <= max(part[0] for part in parts):
                caches.append(Cached())
            for request, tokens, _, _ in parts:
                assert executor.kv.reserve(caches[request], caches[request].num_cached + len(tokens))
            segments = [
                Segment(tokens, caches[request], parents, wanted, pick)
                for request, tokens, parents, wanted in parts
            ]
            outputs.append(executor.forward(segments, **options))
        return outputs

    def keep(self, request: int, count: int) -> None:
        for caches in self.caches:
            caches[request].num_cached += count


def agree(ours: Output, theirs: Output) -> None:
    assert ours.logits.dtype is torch.float32
    torch.testing.assert_close(
        ours.logits.cpu(), theirs.logits, atol=2e-5, rtol=2e-5
    )  # float32 sums in another order


def words(count: int, start: int = 3) -> list[int]:
    return [(start + 7 * i * i) % 96 for i in range(count)]


@pytest.mark.parametrize("name", MODELS)
def test_it_says_what_torch_says(name: str, device: torch.device) -> None:
    pair = Pair(name, device)
    agree(*pair.forward((0, words(21), None, 1), (1, words(5, 9), None, 5)))
    pair.keep(0, 21), pair.keep(1, 5)
    agree(*pair.forward((0, words(1), None, 1), (1, words(1), None, 1)))
    pair.keep(0, 1)
    agree(*pair.forward((0, words(7), TREE, 7), (1, words(3), None, 3)))
    agree(*pair.forward((1, words(7, 2), TREE, 7)))  # nothing was committed: the tree's K/V are overwritten


def test_hidden_states_and_an_early_end(device: torch.device) -> None:
    pair = Pair("llama", device)
    ours, theirs = pair.forward((0, words(6), None, 6), hidden_layers=(0, 1, 2))
    for layer in (0, 1, 2):
        torch.testing.assert_close(ours.hidden[layer].cpu(), theirs.hidden[layer], atol=2e-5, rtol=2e-5)
    ours, theirs = pair.forward((0, words(6), None, 6), num_layers=1, hidden_layers=(1,))
    agree(ours, theirs)
    torch.testing.assert_close(ours.hidden[1].cpu(), theirs.hidden[1], atol=2e-5, rtol=2e-5)


def test_tokens_are_chosen_on_the_device(device: torch.device) -> None:
    pair = Pair("llama", device)
    ours, theirs = pair.forward((0, words(7), TREE, 7), pick=GREEDY)
    assert ours.picked is not None
    assert list(ours.picked) == theirs.logits.argmax(-1).tolist()
    assert theirs.picked is None
    ours, theirs = pair.forward((0, words(7), TREE, 7), pick=Pick(0.7, 2**63 + 5))
    positions = [depth + 1 for depth in (0, 1, 1, 2, 2, 2, 3)]
    rows = [row.double().numpy() / 0.7 for row in ours.logits.cpu()]
    assert ours.picked is not None
    assert list(ours.picked) == [
        Noise(2**63 + 5).draw(row, at, Purpose.TARGET) for row, at in zip(rows, positions, strict=True)
    ]


def test_a_pass_reads_what_the_one_before_picked(device: torch.device) -> None:
    """It was not seen here before; in another order, and the second time in a bucket that is recorded
    first.
    """
    pair = Pair("llama", device, exact=True)
    pair.forward((0, words(21), None, 1), (1, words(5, 9), None, 1))
    pair.keep(0, 21), pair.keep(1, 5)
    executor, caches = pair.executors[0], pair.caches[0]
    assert all(executor.kv.reserve(cache, cache.num_cached + 3) for cache in caches)

    def later(cache: Cached, count: int) -> Cached:
        return Cached(cache.blocks, cache.num_cached + count)

    def plain(*rows: tuple[int, Cached]) -> Output:
        return executor.forward([Segment([token], cache, None, 1, GREEDY) for token, cache in rows])

    first = plain((7, caches[0]), (8, caches[1]))
    second = plain((-2, later(caches[1], 1)), (-1, later(caches[0], 1)))
    third = plain((-2, later(caches[0], 2)))
    assert first.picked is not None
    assert second.picked is not None
    assert third.picked is not None
    assert list(second.picked) == list(
        plain((first.picked[1], later(caches[1], 1)), (first.picked[0], later(caches[0], 1))).picked or ()
    )
    assert list(third.picked) == list(plain((second.picked[1], later(caches[0], 2))).picked or ())


def test_picks_of_more_rows_than_a_graph_has_are_not_the_next_passs_to_read(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_module, "MAX_GRAPH_ROWS", 4)
    pair = Pair("llama", device)
    decoder = pair.executors[0].decoder
    few = pair.forward((0, words(4), None, 4), pick=GREEDY)[0]
    assert few.picked is decoder.latest
    many, theirs = pair.forward((0, words(5), None, 5), pick=GREEDY)
    assert many.picked is not None
    assert list(many.picked) == theirs.logits.argmax(-1).tolist()
    assert decoder.latest is None


@pytest.mark.parametrize("num_requests", [3, 5])
def test_padding_widens_nobodys_rows(num_requests: int, device: torch.device) -> None:
    """A drafted node beside plain rows: the rows that fill up the bucket are more than any request has."""
    pair = Pair("llama", device)
    parts = [(i, words(10 + i, i), None, 1) for i in range(num_requests)]
    pair.forward(*parts)
    for i, (_, tokens, _, _) in enumerate(parts):
        pair.keep(i, len(tokens))
    drafted = [(i, words(2 if i == 1 else 1, 2 * i), None, 2 if i == 1 else 1) for i in range(num_requests)]
    agree(*pair.forward(*drafted))
    assert bucket_of(33, 32, 2, 100) == (64, 64, 16, 100)
    assert bucket_of(33, 1, 33, 100) == (64, 1, 256, 100)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_broken_row_is_not_chosen_from(device: torch.device) -> None:
    pair = Pair("llama", device)
    weights = pair.executors[0].decoder.weights
    weights.embedding[5] = float("nan")
    (ours, _) = pair.forward((0, [5, 6], None, 2), (1, [7], None, 1), pick=GREEDY)
    assert ours.picked is not None
    assert (ours.picked[0], ours.picked[1]) == (-1, -1)
    assert ours.picked[2] >= 0


def test_a_row_keeps_its_bits_in_company(device: torch.device) -> None:
    """In exact mode, whatever the bucket and the other rows are."""
    pair = Pair("llama", device, exact=True)
    pair.forward((0, words(21), None, 1), (1, words(40, 9), None, 1))
    pair.keep(0, 21), pair.keep(1, 40)
    alone = pair.forward((0, words(1), None, 1))[0].logits[0]
    as_root = pair.forward((0, words(7), TREE, 7))[0].logits[0]
    with_others = pair.forward((1, words(5), None, 5), (0, words(4), None, 4))[0].logits[5]
    assert torch.equal(alone, as_root)
    assert torch.equal(alone, with_others)


def test_a_node_has_the_bits_of_its_path(device: torch.device) -> None:
    """In exact mode, as a chain of its own; the tree has company, and its branches cross a block."""
    pair = Pair("llama", device, exact=True)
    pair.forward((0, words(14), None, 1), (1, words(40, 9), None, 1))
    pair.keep(0, 14), pair.keep(1, 40)
    tokens = words(7)
    tree = pair.forward((1, words(5), None, 5), (0, tokens, TREE, 7))[0].logits[5:]
    for node in range(7):
        path = [node]
        while path[0]:
            path.insert(0, TREE[path[0]])
        alone = pair.forward((0, [tokens[each] for each in path], None, len(path)))[0].logits
        assert torch.equal(alone[-1], tree[node]), node


def test_attention_that_adds_splits_has_the_same_bits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of two tiles and two splits, and what they leave in the cache."""
    found = []
    for by_last in (0, 4):
        tiling = attention.FEW_ROWS._replace(by_last=by_last, is_late=by_last > 0)
        monkeypatch.setattr(attention, "FEW_ROWS", tiling)
        pair = Pair("llama", device)
        pair.forward((0, words(59), None, 1))
        pair.keep(0, 59)
        found.append(pair.forward((0, words(10), None, 10))[0].logits)
        assert not pair.executors[0].decoder._counters.any()
    assert torch.equal(*found)


def test_all_is_recorded_before_and_nothing_after(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("counts captures, which a GPU's capture does not")
    for name, sizes in (("ROWS", (1, 2, 4)), ("PROMPT_ROWS", (6,)), ("PROMPTS", ())):
        monkeypatch.setattr(decoder_module, name, sizes)
    config, capture = config_of("llama"), CountingCapture()
    decoder = CudaDecoder.load(DummyCheckpoint(config), dtype="float32", device="cpu", capture=capture)
    executor = executor_of(decoder, 8)
    cache = Cached()
    executor.kv.reserve(cache, 64)
    decoder.record(executor.memory.layers, PassSizes(1, 4))  # one row; drafts of one request; a prompt
    assert capture.num_recordings == 1 + 2 + 1
    found = []
    for count in (3, 4, 3, 4, 9):  # for the last there is no recording
        found.append(executor.forward([Segment(words(count), cache, None, count)]).logits[2].clone())
    found.append(executor.forward([Segment(words(3), cache, None, 1)]).logits[0])  # a prompt
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])
    assert capture.num_recordings == 4


def columns_of(*segments: Segment) -> Columns:
    cache = KvCache(32)
    for segment in segments:
        assert cache.reserve(segment.cache, segment.cache.num_cached + len(segment.tokens))
    return build(segments, CPU).columns


def test_padding_rows_see_themselves_and_write_nowhere() -> None:
    columns = columns_of(Segment(words(7), Cached(), TREE, 7), Segment(words(3), Cached(), None, 3))
    bucket = bucket_for(columns, 3)
    assert bucket == Bucket(16, 16, 16, 3)
    buffer = target_buffer(bucket, 16, 999, torch.device("cpu"))
    buffer.fill(batch_values(bucket, columns, None))
    batch = DeviceBatch.of(buffer.on_device)
    assert batch.slots[10:].tolist() == [999] * 6
    assert batch.starts.tolist() == [0, 7, *[10] * 15, 16]
    assert batch.positions[10:].tolist() == [0] * 6
    assert batch.masks[:, 0].tolist() == [1, 3, 5, 11, 19, 37, 75, 1, 3, 7, 1, 2, 4, 8, 16, 32]


def test_ancestors_beyond_a_word() -> None:
    found = ancestor_words(list(range(-1, 129)), [0, 130], 3).view(np.uint64)
    assert [int(word) for word in found[129]] == [2**64 - 1, 2**64 - 1, 3]


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ConfigError, match="bfloat15"):
        CudaDecoder.load(
            DummyCheckpoint(config_of("llama")), dtype="bfloat15", device="cpu", capture=CountingCapture()
        )
