"""Recurrent layers: what transformers says, bits that depend on a row's own text alone, states that go back to
the last accepted token, and the same texts with and without drafts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import LLM, SamplingParams
from paceline.core.errors import ConfigError
from paceline.core.types import BLOCK_SIZE, Cached, Segment
from paceline.loaders.checkpoint import open_checkpoint
from paceline.runtime.backend import backend_for
from paceline.runtime.executor import KvMemory, LocalExecutor
from paceline.runtime.kv_cache import KvCache
from paceline.train.lessons import check_teachable
from tests.make_models import HYBRID_FAMILIES, tiny_gguf, tiny_hf, tiny_tokenizer
from tests.odd_models import DTYPES
from tests.passes import random_parents
from tests.test_decoder import TOKENS, tiny

CPU, KERNELS, FAMILY = torch.device("cpu"), ("exact", "torch"), HYBRID_FAMILIES[0]
PROMPTS = [TOKENS[:12] * 2, TOKENS[20:57], TOKENS[3:8], [*TOKENS[:35], *TOKENS[:9]]]
LENGTH, PLACE = 40, TemporaryDirectory()
# Of logits up to 3.5: transformers takes a prompt in chunks, another order of float32 sums; processors differ.
CLOSE = 2e-4


@cache
def decoder(kernels: str, dtype: str, family: str) -> Any:
    from paceline.cpu.decoder import CpuDecoder

    backend = backend_for(CPU, kernels)
    if kernels == "torch":
        return backend, backend.load(tiny(family)[0], dtype)
    return backend, CpuDecoder.load(tiny(family)[0], dtype=dtype, use_cache=False)


def executor_of(kernels: str = "exact", dtype: str = "float32", family: str = FAMILY) -> LocalExecutor:
    backend, loaded = decoder(kernels, dtype, family)
    memory = KvMemory(loaded.config, 32, CPU, backend.kv_format(dtype, "auto"), num_states=64)
    return LocalExecutor(backend, loaded, memory)


def read(executor: LocalExecutor, cached: Cached, tokens: list[int], parents: Any = None) -> torch.Tensor:
    """Logits of all rows, of known tokens or of a tree; nothing is committed."""
    assert executor.kv.reserve(cached, cached.num_cached + len(tokens), len(tokens) - 1)
    return executor.forward([Segment(tokens, cached, parents, len(tokens))]).logits.clone()


def alone(executor: LocalExecutor, tokens: list[int]) -> torch.Tensor:
    cached = Cached()
    logits = read(executor, cached, tokens)
    executor.kv.free(cached)
    return logits


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_agrees_with_transformers(family: str, kernels: str) -> None:
    """A prompt, then token by token, and nodes of a tree after each of which another path was taken."""
    expected, executor = tiny(family)[1], executor_of(kernels, family=family)
    assert (alone(executor, TOKENS) - expected).abs().max() < CLOSE
    cached = Cached()
    first = read(executor, cached, TOKENS[:20])
    executor.kv.commit(cached, 0, range(20), TOKENS)
    assert (first - expected[:20]).abs().max() < CLOSE
    for at in range(20, 50):
        tree = [TOKENS[at], 7, TOKENS[at + 1], 9]  # the root, a wrong child, the right one, a wrong one
        logits = read(executor, cached, tree, [-1, 0, 0, 2])
        assert (logits[[0, 2]] - expected[at : at + 2]).abs().max() < CLOSE
        executor.kv.commit(cached, at, (0,), TOKENS)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_a_gguf_file_says_the_same_as_the_folder(family: str, is_fused: bool, tmp_path: Path) -> None:
    overrides = {"mlp_only_layers": []} if family == "qwen3_next" else {}  # its files know no dense layer
    folder = tiny_hf(tmp_path / "folder", family, **overrides)
    file = tiny_gguf(tmp_path / "m.gguf", folder, is_fused=is_fused)
    ours, theirs = (open_checkpoint(str(path)) for path in (folder, file))
    assert ours.config == theirs.config
    for name, shape in ours.config.weight_names().items():
        expected, found = ours.tensor(name), theirs.tensor(name)
        assert torch.allclose(expected, found, rtol=1e-5, atol=1e-6), name  # a logarithm rounds
        assert torch.equal(expected, found) or name.endswith("A_log"), name
        some = slice(shape[0] // 3, shape[0] - shape[0] // 4)
        assert torch.equal(theirs.tensor(name, some), found[some])


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantized_agrees_with_its_reference(dtype: str) -> None:
    """As tests/test_decoder.py has it for the other families; random keys of sixteen numbers are normed to
    unit length, which makes more of rounding."""
    exact, reference, floats = (
        alone(executor_of(kernels, its_dtype), TOKENS)
        for kernels, its_dtype in (("exact", dtype), ("torch", dtype), ("exact", "float32"))
    )
    spread = floats.std()
    assert (exact - reference).abs().mean() < 0.01 * spread
    assert (exact - reference).abs().max() < 0.15 * spread
    assert 1e-3 * spread < (exact - floats).abs().mean() < {"int8": 0.25, "int4": 0.7}[dtype] * spread


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=8)
@given(chunks=st.lists(st.integers(1, 17), min_size=1, max_size=8))
def test_bits_do_not_depend_on_how_a_prompt_is_chunked(dtype: str, chunks: list[int]) -> None:
    executor, cached, parts, start = executor_of("exact", dtype), Cached(), [], 0
    for size in chunks:
        tokens = TOKENS[start : start + size]
        if tokens:
            assert executor.kv.reserve(cached, start + len(tokens))
            parts.append(executor.forward([Segment(tokens, cached)]).logits.clone())
            executor.kv.commit(cached, start + len(tokens) - 1, (0,), TOKENS)
            executor.kv.check([cached])
        start += size
    ends = [min(sum(chunks[: i + 1]), len(TOKENS)) - 1 for i in range(len(parts))]
    assert torch.equal(torch.cat(parts), alone(executor, TOKENS[: ends[-1] + 1])[ends])


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=8)
@given(trees=st.lists(st.lists(st.integers(0, 99), max_size=6), min_size=1, max_size=3))
def test_bits_of_a_node_are_those_of_its_path_alone(dtype: str, trees: list[list[int]]) -> None:
    """Trees of several requests in one pass; then each goes on from one of its nodes."""
    executor, segments, texts = executor_of("exact", dtype), [], []
    for r, draws in enumerate(trees):
        cached, text, parents = Cached(), TOKENS[r : r + 7 * r + 3], random_parents(draws)
        read(executor, cached, text)
        executor.kv.commit(cached, 0, range(len(text)), text)
        tokens = [(7 * n + r) % 384 for n in range(len(parents))]
        assert executor.kv.reserve(cached, len(text) + len(tokens), len(tokens) - 1)
        segments.append(Segment(tokens, cached, parents, len(tokens)))
        texts.append(text)
    logits = iter(executor.forward(segments).logits.clone())
    for (tokens, cached, parents, *_), text in zip(segments, texts, strict=True):
        paths: list[list[int]] = []
        for node, parent in enumerate(parents or ()):
            paths.append([*(paths[parent] if parent >= 0 else []), node])
            said = [tokens[n] for n in paths[-1]]
            assert torch.equal(next(logits), alone(executor, text + said)[-1])
        path = max(paths, key=len)
        said = [*text, *(tokens[n] for n in path)]
        executor.kv.commit(cached, len(text), path, said)
        assert torch.equal(read(executor, cached, [5])[0], alone(executor, [*said, 5])[-1])
        executor.kv.check([segment.cache for segment in segments])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 99)), max_size=60))
def test_books_balance(actions: list[tuple[int, int, int]]) -> None:
    """Sequences that begin, draft, keep some of it and end, with too few slots for all; what is found again
    is a state after just these tokens."""
    kv, live, kept = KvCache(24, num_states=14), {}, dict[int, tuple[int, ...]]()

    for who, drafted, number in actions:
        if who in live and number % 5 == 0:
            kv.free(live.pop(who)[0])
        elif who not in live:
            cached, text = Cached(), [who % 2] * (20 + number % 30)
            kv.adopt_prefix(cached, text)
            if cached.num_cached:
                assert kept[cached.states[0]] == tuple(text[: cached.num_cached])
            if not kv.reserve(cached, len(text)):
                kv.free(cached)
                continue
            _note(kept, cached, text, len(text) - 1, (0,))
            kv.commit(cached, len(text) - 1, (0,), text)
            live[who] = cached, text
        else:
            cached, text = live[who]
            if kv.reserve(cached, len(text) + 1 + drafted, drafted):
                path = tuple(range(1 + number % (drafted + 1)))
                text += [who % 2] * len(path)
                _note(kept, cached, text, cached.num_cached, path)
                kv.commit(cached, cached.num_cached, path, text)
                assert kept[cached.states[0]] == tuple(text)
        kv.check([cached for cached, _ in live.values()])
    for cached, _ in live.values():
        kv.free(cached)
    kv.check([])


def _note(kept: dict[int, tuple[int, ...]], cached: Cached, text: list[int], first: int, path: Any) -> None:
    """What a pass would leave in the slots."""
    for i, node in enumerate(path):
        kept[cached.states[1 + node]] = tuple(text[: first + i + 1])
    if cached.snapshot is not None:
        kept[cached.snapshot[1]] = tuple(text[: cached.snapshot[0] + 1])


@cache
def folder(family: str = FAMILY) -> str:
    return str(tiny_tokenizer(tiny_hf(Path(PLACE.name) / family, family)))


def llm_of(speculative: Any, dtype: str = "int8", family: str = FAMILY, **options: Any) -> LLM:
    return LLM(folder(family), dtype=dtype, speculative_config=speculative, progress=False, **options)


def answers(llm: LLM, **params: Any) -> list[list[int]]:
    chosen = SamplingParams(max_tokens=LENGTH, ignore_eos=True, **params)
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], chosen)
    llm.engine.check()
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_texts_are_those_of_transformers(family: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder(family), dtype=torch.float32)
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=LENGTH, do_sample=False, eos_token_id=None)
        for prompt in PROMPTS
    ]
    said = answers(llm_of({"method": "suffix"}, "float32", family), temperature=0.0)
    assert said == [ids[0, len(prompt) :].tolist() for ids, prompt in zip(expected, PROMPTS, strict=True)]


WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "repetition_penalty": 1.2},
]


@cache
def plain(number: int, dtype: str) -> list[list[int]]:
    return answers(llm_of(None, dtype), **WAYS[number])


@pytest.mark.parametrize("number", range(len(WAYS)))
@pytest.mark.parametrize("method", ["ngram", "suffix", "lookahead", "recycle", "auto"])
def test_drafts_change_no_token(method: str, number: int) -> None:
    """Twice: the second time prompts begin from states that were kept, and matchers know the answers."""
    llm = llm_of("auto" if method == "auto" else {"method": method, "num_speculative_tokens": 4})
    assert answers(llm, **WAYS[number]) == plain(number, "int8")
    assert llm.engine.scheduler.num_prefix_hits < 2 * BLOCK_SIZE
    assert answers(llm, **WAYS[number]) == plain(number, "int8")
    hits = sum((len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in PROMPTS)
    assert llm.engine.scheduler.num_prefix_hits >= hits
    if method == "suffix" and number == 0:
        assert llm.engine.totals.num_accepted > LENGTH


@pytest.mark.parametrize("dtype", DTYPES)
def test_requests_that_lose_their_memory_say_the_same(dtype: str) -> None:
    """Blocks for little more than one of them: the others are computed again and again, in chunks."""
    memory = 90_000 if dtype == "float32" else 28_000
    small = {"max_model_len": 96, "kv_cache_memory": memory, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    llm = llm_of({"method": "suffix", "num_speculative_tokens": 4}, dtype, **small)
    assert answers(llm, temperature=0.0) == plain(0, dtype)
    assert llm.engine.scheduler.num_preemptions > 0


def test_heads_are_not_trained_for_them() -> None:
    with pytest.raises(ConfigError, match="recurrent layers cannot be trained"):
        check_teachable(tiny(FAMILY)[0].config)


def test_models_that_draft_are_refused() -> None:
    own = {"method": "draft_model", "model": folder(FAMILY)}
    for method in ({"method": "early_exit"}, {"method": "quantized"}, own):
        with pytest.raises(ConfigError, match="recurrent"):
            llm_of(method, "float32")
