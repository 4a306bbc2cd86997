"""A tiny real decoder, engines over it, and the reference it is held to.

The laws hold for every architecture: PACELINE_LAWS_MODEL names another of MODELS than the default.
"""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import torch

from paceline.core.options import EngineConfig
from paceline.core.params import SamplingParams
from paceline.core.types import BLOCK_SIZE, Cached, Request, Segment
from paceline.cpu.backend import CpuBackend
from paceline.drafters import registry
from paceline.drafters.base import Drafter, DrafterContext
from paceline.engine.commit import Emission
from paceline.engine.engine import Engine
from paceline.engine.policy.auto import AutoPolicy
from paceline.engine.policy.cost import CostTable
from paceline.loaders.fields import ALL
from paceline.loaders.tokenizer import Tokenizer, TokenizerSource
from paceline.models.config import ExpertsConfig, ModelConfig, RecurrentConfig, RopeConfig
from paceline.models.stage import without_layers
from paceline.runtime.backend import Decoder, backend_for, resolve
from paceline.runtime.executor import KvMemory, LocalExecutor
from paceline.runtime.record import StepRecord

VOCAB = 48
END = 7
LLAMA = ModelConfig(
    family="llama",
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_context=1024,
    rms_eps=1e-5,
    rope=RopeConfig(),
    tie_embeddings=True,
)
MODELS = {
    "llama": LLAMA,
    "qwen3_moe": replace(LLAMA, family="qwen3_moe", qk_norm=True, experts=ExpertsConfig(8, 2, 32)),
    "gpt_oss": replace(
        LLAMA, family="gpt_oss", qkv_bias=True, out_bias=True, attention_sinks=True, activation="clamped",
        sliding_window=20, local_layers=(True, False, True),
        rope=RopeConfig(15_000.0, "yarn", 32.0, original_context=64, truncate=False),
        experts=ExpertsConfig(6, 3, 32, has_bias=True),
    ),
    "gemma4": replace(
        LLAMA, family="gemma4", qk_norm=True, sandwich_norm=True, attention_scale=1.0, value_norm=True,
        layer_scalars=True, logits_cap=8.0, activation="gelu_tanh", sliding_window=20,
        local_layers=(True, True, False), global_head_dim=32, global_kv_heads=1,
        rope=RopeConfig(1e6, "proportional", 0.25), rope_local=RopeConfig(),
        experts=ExpertsConfig(6, 2, 32, shared_inner=64, has_norms=True),
    ),
    "qwen3_5": replace(
        LLAMA, family="qwen3_5", qk_norm=True, gated_attention=True, rotary_dim=8,
        recurrent=RecurrentConfig((True, True, False), key_heads=2, value_heads=4, key_dim=16, value_dim=16),
    ),
}  # fmt: skip
CONFIG = MODELS[os.environ.get("PACELINE_LAWS_MODEL", "llama")]
# A draft model cannot have recurrent layers.
DRAFT = CONFIG if CONFIG.recurrent is None else LLAMA
NUM_STATES = 96 if CONFIG.recurrent else 0


class RandomCheckpoint:
    """An untrained model: every weight random, from a seed."""

    name = "random"
    path = Path()
    fingerprint = "random"
    eos_ids = (END,)
    bos_id = None

    def __init__(self, config: ModelConfig = CONFIG, seed: int = 0) -> None:
        self.config, self.seed = config, seed

    def tensor(self, name: str, rows: slice = ALL) -> torch.Tensor:
        shape = self.config.weight_names()[name]
        generator = torch.Generator().manual_seed(hash((self.seed, len(name), *name.encode())) % 2**31)
        if len(shape) == 1:
            return 1 + 0.1 * torch.randn(shape, generator=generator)
        return (torch.randn(shape, generator=generator) * (1.0 if "embed" in name else 0.2))[rows]

    def kept(self, name: str, rows: slice = ALL) -> None:
        return None


@functools.cache
def vocabularies() -> tuple[Tokenizer, Tokenizer]:
    """Two for the sizes of these models: the same characters by other ids, and other pairs of them."""
    made = []
    with tempfile.TemporaryDirectory() as folder:
        for step in (1, -1):
            singles = [chr(0x21 + i) for i in range(CONFIG.vocab_size - 8)][::step]
            pairs = [(singles[i], singles[i + 1]) for i in range(0, 16, 2)]
            ids = {text: i for i, text in enumerate([*singles, *(a + b for a, b in pairs)])}
            words = tokenizers.Tokenizer(tokenizers.models.BPE(ids, pairs))
            words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
            words.decoder = tokenizers.decoders.ByteLevel()
            words.save(f"{folder}/tokenizer.json")
            made.append(Tokenizer(TokenizerSource(json_path=Path(folder, "tokenizer.json"))))
    return made[0], made[1]


TARGET = RandomCheckpoint()
DEVICE = resolve(os.environ.get("PACELINE_LAWS_DEVICE", "cpu"))
EXACT = os.environ.get("PACELINE_LAWS_EXACT", "1") == "1"  # of a GPU; without it trees are checked too
BACKEND = CpuBackend(use_cache=False) if DEVICE.type == "cpu" else backend_for(DEVICE, exact=EXACT)
# What the engine uses when nothing is said; but where bits may differ by the number of rows, a type in which
# nothing is nearly a tie.
DTYPE = BACKEND.default_dtype(TARGET) if EXACT else "float32"

# Families pad their vocabularies differently: model 2 has more ids than the target, model 3 fewer.
VOCABULARIES = {2: VOCAB + 16, 3: VOCAB - 16}
CONTEXTS = {4: 32}  # model 4 reads no further than this


@functools.cache
def decoder(seed: int = 0, dtype: str = DTYPE) -> Decoder:
    return BACKEND.load(RandomCheckpoint(config_of(seed), seed), dtype, CONTEXTS.get(seed))


def config_of(seed: int) -> ModelConfig:
    return replace(DRAFT if seed else CONFIG, vocab_size=VOCABULARIES.get(seed, VOCAB))


def can_draft(options: dict[str, Any]) -> bool:
    """A part of the target, or the target itself, drafts for no target with recurrent layers."""
    parts = ("early_exit", "quantized", "'model': '0'")
    return CONFIG.recurrent is None or not any(part in repr(options) for part in parts)


def executor(num_blocks: int = 64, seed: int = 0, dtype: str = DTYPE, role: str = "target") -> LocalExecutor:
    make = memory.__wrapped__ if DEVICE.type == "cpu" else memory
    return LocalExecutor(BACKEND, decoder(seed, dtype), make(num_blocks, seed, dtype, role))


@functools.cache
def memory(num_blocks: int, seed: int, dtype: str, role: str) -> KvMemory:
    """On a GPU used again, since graphs are recorded for a cache."""
    kept, states = BACKEND.kv_format(dtype, "auto"), 0 if seed else NUM_STATES
    return KvMemory(config_of(seed), num_blocks, DEVICE, kept, states)


@functools.cache
def _logits(tokens: tuple[int, ...], seed: int, dtype: str) -> np.ndarray:
    """The whole sequence in one pass, from nothing: no cache survives."""
    fresh = executor(len(tokens) // BLOCK_SIZE + 1, seed, dtype, "reference")
    cached = Cached()
    assert fresh.kv.reserve(cached, len(tokens))
    logits = fresh.forward([Segment(tokens, cached)]).logits[0].float().cpu().numpy()
    fresh.kv.free(cached)
    return logits


def model(tokens: Sequence[int], seed: int = 0, dtype: str = DTYPE) -> np.ndarray:
    return _logits(tuple(tokens), seed, dtype)


class Untimed(AutoPolicy):
    """Never looks at the clock, so that what it chooses is the same every time: whatever is drafted, a step
    takes as long as a plain pass.
    """

    def observe(self, record: StepRecord) -> None:
        record.seconds, record.pass_seconds = self._load.seconds, None
        record.drafting = {}
        super().observe(record)


def engine_with(
    drafter: Drafter | dict[str, Any] | None,
    num_blocks: int = 64,
    target_dtype: str = DTYPE,
    is_auto: bool = False,
    is_timed: bool = True,
    **limits: Any,
) -> Engine:
    """An engine over the tiny model. A dict is a speculative_config for a drafter of the registry. is_auto:
    the policy chooses what is drafted and checked, as if checking cost almost nothing; not is_timed: and goes
    on believing so."""
    target = executor(num_blocks, dtype=target_dtype)
    num_draft = limits.pop("num_speculative_tokens", 4)
    if isinstance(drafter, dict):
        numbers = itertools.count()  # a cache of its own for each
        kind, config = registry.parse({"num_speculative_tokens": num_draft, **drafter})
        words = vocabularies() if kind.name == "universal" else (None, None)

        def load(
            source: Any, dtype: str = target_dtype, skipped: Sequence[int] = ()
        ) -> tuple[Any, Any, LocalExecutor]:
            seed = int(source) if isinstance(source, str) else 0
            if skipped:
                less = without_layers(RandomCheckpoint(config_of(seed), seed), skipped)
                kept = KvMemory(less.config, num_blocks, DEVICE, BACKEND.kv_format(dtype, "auto"))
                return less, words[1], LocalExecutor(BACKEND, BACKEND.load(less, dtype), kept)
            made = executor(num_blocks, seed=seed, dtype=dtype, role=f"draft {next(numbers)}")
            return RandomCheckpoint(seed=seed) if isinstance(source, str) else source, words[1], made

        drafter = registry.create(kind, config, DrafterContext(target, TARGET, words[0], load))
    limits.setdefault("max_model_len", min(CONFIG.max_context, num_blocks * BLOCK_SIZE))
    config_of_engine = EngineConfig(num_speculative_tokens=num_draft if drafter else 0, **limits)
    policy = None
    if is_auto and drafter is not None:
        drafters = drafter.members
        known = {drafter.name: (1e-6, ()) for drafter in drafters}  # nor does drafting
        policy_kind = AutoPolicy if is_timed else Untimed
        policy = policy_kind(drafters, CostTable({1: 1.0, 64: 1.1}), known=known)
    return Engine(target, drafter, config_of_engine, policy)


_numbers = itertools.count()


def request_of(prompt: Sequence[int], params: SamplingParams, **fields: Any) -> Request:
    ends = frozenset() if params.ignore_eos else frozenset({END})
    return Request(
        id=f"q{next(_numbers)}",
        params=params,
        tokens=list(prompt),
        num_prompt=len(prompt),
        seed=fields.pop("seed", params.seed or 0),
        stop_ids=ends | frozenset(params.stop_token_ids),
        banned_until_min=frozenset({END}) | frozenset(params.stop_token_ids),
        **fields,
    )


def run(engine: Engine, requests: Sequence[Request], max_steps: int = 3000) -> list[Emission]:
    """To the end, checking the books and the sums after every step."""
    for request in requests:
        engine.add(request)
    emissions: list[Emission] = []
    try:
        for _ in range(max_steps):
            if not engine.has_work:
                break
            emissions += engine.step()
            engine.check()
    except BaseException:
        memory.cache_clear()  # what it holds now must not fail the tests after this one
        raise
    assert not engine.has_work, "the engine did not finish"
    assert engine.executor.kv.num_used == 0, "blocks were left behind"
    for request in requests:
        check_sums(engine, request, [e for e in emissions if e.request is request])
    return emissions


def check_sums(engine: Engine, request: Request, said: list[Emission]) -> None:
    stats = engine.stats[request.id]
    assert [t for e in said for t in e.tokens] == request.output
    assert stats.num_tokens == request.num_output == stats.num_accepted + stats.num_own
    assert stats.num_steps - stats.num_own in (0, 1), "only a last step may end inside its draft"
    assert (
        stats.num_accepted == sum(e.num_accepted for e in said) == sum(stats.accepted_at) <= stats.num_drafted
    )
    assert stats.num_steps == sum(bool(e.tokens) for e in said)


def prompts(count: int, low: int = 3, high: int = 40, seed: int = 0) -> list[list[int]]:
    """Random prompts of low to high tokens that repeat themselves, so that lookup has something to find."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        phrase = rng.integers(8, VOCAB, rng.integers(3, 12)).tolist()
        made.append((phrase * high)[: int(rng.integers(low, high + 1))])
    return made
