"""The decoders: compiled and in torch they say what transformers says, and a compiled row's bits never depend
on its company.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.cpu.backend import CpuBackend
from paceline.cpu.decoder import CpuDecoder
from paceline.loaders.checkpoint import open_checkpoint
from paceline.loaders.fields import ALL
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.decoder import Decoder
from paceline.models.layer import Layer, rms_norm
from paceline.models.rope import Angles, frequencies
from paceline.runtime.backend import backend_for
from tests.make_models import FAMILIES, OTHER_FAMILIES, tiny_hf
from tests.odd_models import DTYPES
from tests.passes import Rows, batch_of, new_kv, random_parents, shuffled_blocks

TOKENS = [(37 * i * i + 11 * i + 5) % 384 for i in range(60)]


class Loaded:
    """A checkpoint kept in memory after its folder is gone."""

    fingerprint, path = "none", Path()  # nothing of it is kept on disk

    def __init__(self, folder: Path) -> None:
        opened = open_checkpoint(str(folder), progress=False)
        self.config: ModelConfig = opened.config
        self.weights = {name: opened.tensor(name).clone() for name in self.config.weight_names()}

    def tensor(self, name: str, rows: slice = ALL) -> torch.Tensor:
        return self.weights[name][rows]


@cache
def tiny(family: str, **overrides: Any) -> tuple[Loaded, torch.Tensor]:
    """A random model and transformers' logits for TOKENS."""
    from transformers import AutoModelForCausalLM

    with TemporaryDirectory() as name:
        folder = tiny_hf(Path(name), family, **overrides)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            return Loaded(folder), model(torch.tensor([TOKENS])).logits[0]


@cache
def decoder(family: str, kernels: str = "exact", dtype: str = "float32") -> Any:
    if kernels == "torch":
        return Decoder.load(tiny(family)[0], dtype=dtype)
    return CpuDecoder.load(tiny(family)[0], dtype=dtype, use_cache=False)


def whole(model: Any, tokens: list[int], **options: Any) -> Any:
    return model.forward(batch_of([Rows(tokens, shuffled_blocks(1)[0])]), new_kv(model), **options)


@pytest.mark.parametrize("kernels", ["exact", "torch"])
@pytest.mark.parametrize("family", FAMILIES + OTHER_FAMILIES)
def test_agrees_with_transformers(family: str, kernels: str) -> None:
    expected = tiny(family)[1]
    assert expected.std() > 0.1  # not all alike
    logits = whole(decoder(family, kernels), TOKENS).logits
    assert logits.dtype is torch.float32
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("vocab", [390, 383])
@pytest.mark.parametrize("tied", [True, False])
def test_any_vocabulary_tied_or_not(vocab: int, tied: bool) -> None:
    loaded, expected = tiny("llama", vocab_size=vocab, tie_word_embeddings=tied)
    assert (
        whole(CpuDecoder.load(loaded, dtype="float32", use_cache=False), TOKENS[:20]).logits - expected[:20]
    ).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_agrees_with_its_reference(family: str, dtype: str) -> None:
    """Weights and activations rounded the same way; an activation on the border between two integers may fall
    on either side.
    """
    exact, reference, floats = (
        whole(decoder(family, kernels, its_dtype), TOKENS).logits
        for kernels, its_dtype in (("exact", dtype), ("torch", dtype), ("exact", "float32"))
    )
    spread = floats.std()
    assert (exact - reference).abs().mean() < 0.01 * spread
    assert (exact - reference).abs().max() < 0.15 * spread
    assert 1e-3 * spread < (exact - floats).abs().mean() < {"int8": 0.05, "int4": 0.4}[dtype] * spread


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES + OTHER_FAMILIES)
@settings(deadline=None, max_examples=8)
@given(chunks=st.lists(st.integers(1, 17), min_size=1, max_size=12))
def test_bits_do_not_depend_on_how_a_prompt_is_chunked(family: str, dtype: str, chunks: list[int]) -> None:
    model, blocks = decoder(family, dtype=dtype), shuffled_blocks(1)[0]
    kv = new_kv(model)
    parts, start = [], 0
    for size in chunks:
        tokens = TOKENS[start : start + size]
        if tokens:
            parts.append(model.forward(batch_of([Rows(tokens, blocks, start)]), kv).logits)
        start += size
    assert torch.equal(torch.cat(parts), whole(model, TOKENS[:start]).logits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@settings(deadline=None, max_examples=10)
@given(
    trees=st.lists(st.lists(st.integers(0, 99), max_size=8), min_size=1, max_size=4),
    prefix=st.integers(1, 30),
)
def test_bits_of_a_tree_node_are_those_of_its_path_alone(
    family: str, dtype: str, trees: list[list[int]], prefix: int
) -> None:
    model, tables = decoder(family, dtype=dtype), shuffled_blocks(len(trees), seed=prefix)
    kv = new_kv(model)
    prefixes = [(prefix * (r + 1)) % 31 for r in range(len(trees))]
    for r, length in enumerate(prefixes):
        if length:
            model.forward(batch_of([Rows(TOKENS[r : r + length], tables[r])], rows=[]), kv)
    requests = [
        Rows([(7 * n + r) % 384 for n in range(len(d) + 1)], tables[r], prefixes[r], random_parents(d))
        for r, d in enumerate(trees)
    ]
    logits = iter(model.forward(batch_of(requests), kv).logits)
    for r, request in enumerate(requests):
        for node in range(len(request.tokens)):
            path, above = [], node
            while above >= 0:
                path.append(request.tokens[above])
                above = request.parents[above]  # type: ignore[index]
            assert torch.equal(
                next(logits), whole(model, TOKENS[r : r + prefixes[r]] + path[::-1]).logits[-1]
            )


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize(("hidden", "inner"), [(48, 112), (80, 160), (96, 112)])
def test_widths_that_are_no_multiple_of_the_group_are_quantized_too(
    dtype: str, hidden: int, inner: int
) -> None:
    checkpoint = tiny("llama", hidden_size=hidden, intermediate_size=inner, head_dim=16)[0]
    exact = whole(CpuDecoder.load(checkpoint, dtype=dtype, use_cache=False), TOKENS).logits
    reference = whole(Decoder.load(checkpoint, dtype=dtype), TOKENS).logits
    assert (exact - reference).abs().mean() < 0.01 * reference.std()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", ["exact", "torch"])
def test_early_stop_and_hidden_states(kernels: str, dtype: str) -> None:
    model = decoder("gemma3", kernels, dtype)
    full = whole(model, TOKENS[:20], hidden_layers=(0, 2, 4))
    assert sorted(full.hidden) == [0, 2, 4]
    reference = decoder("gemma3", "torch", dtype)
    assert torch.equal(full.hidden[0], reference.embed(torch.tensor(TOKENS[:20])))
    early = whole(model, TOKENS[:20], num_layers=2, hidden_layers=(2,))
    assert torch.equal(early.hidden[2], full.hidden[2])
    assert not torch.equal(early.logits, full.logits)
    for logits, hidden in ((early.logits, full.hidden[2]), (full.logits, full.hidden[4])):
        torch.testing.assert_close(
            logits, reference.logits(hidden), rtol=1e-3, atol=1e-4 if dtype == "float32" else 0.1
        )


def test_an_early_stop_writes_the_layers_it_ran_and_no_others() -> None:
    model = decoder("llama")
    stopped, complete = new_kv(model), new_kv(model)
    batch = batch_of([Rows(TOKENS[:9], shuffled_blocks(1)[0])])
    model.forward(batch, stopped, num_layers=1)
    model.forward(batch, complete)
    assert torch.equal(stopped[0][0], complete[0][0])
    assert torch.equal(stopped[1][0], new_kv(model)[1][0])


def test_logits_only_where_they_are_wanted() -> None:
    model, blocks = decoder("qwen2"), shuffled_blocks(1)[0]
    every = whole(model, TOKENS[:12]).logits
    some = model.forward(batch_of([Rows(TOKENS[:12], blocks)], rows=[11, 3]), new_kv(model)).logits
    none = model.forward(batch_of([Rows(TOKENS[:12], blocks)], rows=[]), new_kv(model)).logits
    assert torch.equal(some, every[[11, 3]])
    assert none.shape == (0, model.config.vocab_size)


def test_a_pass_leaves_torch_threads_as_they_were() -> None:
    before = torch.get_num_threads()
    whole(decoder("llama"), TOKENS)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        (RopeConfig(theta=5e5), None),
        (RopeConfig(theta=1e4, kind="linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
        (
            RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_context=8192),
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        (
            RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_context=32768),
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        ),
    ],
    ids=["none", "linear", "llama3", "yarn"],
)
def test_rotary_frequencies_agree_with_transformers(rope: RopeConfig, scaling: dict[str, Any] | None) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": rope.theta}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=parameters
    )
    oracle = LlamaRotaryEmbedding(config)
    inverse, factor = frequencies(rope, 128)
    torch.testing.assert_close(inverse, oracle.inv_freq, atol=0, rtol=3e-7)
    assert factor == pytest.approx(oracle.attention_scaling)


def test_rotary_divisors_stand_for_a_scaling() -> None:
    scaled = frequencies(RopeConfig(kind="llama3", factor=8.0), 64)[0]
    divisors = tuple((frequencies(RopeConfig(), 64)[0] / scaled).tolist())
    torch.testing.assert_close(frequencies(RopeConfig(divisors=divisors), 64)[0], scaled)
    with pytest.raises(ConfigError, match="31"):
        frequencies(RopeConfig(divisors=divisors[1:]), 64)


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"kernels": "quick"}, "quick"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"kernels": "torch", "dtype": "q4"}, "q4"),
    ],
)
def test_impossible_options_are_named(option: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        backend_for(torch.device("cpu"), option.get("kernels", "exact")).check_dtype(
            option.get("dtype", "int8")
        )


def test_the_dtype_of_weights_is_chosen_by_the_kernels_when_nothing_is_said() -> None:
    compiled, reference = CpuBackend(use_cache=False), backend_for(torch.device("cpu"), "torch")
    source = tiny("llama")[0]
    assert (compiled.default_dtype(source), reference.default_dtype(source)) == ("int8", "float32")
    for backend, made in ((compiled, decoder("llama", dtype="int8")), (reference, decoder("llama", "torch"))):
        loaded: Any = backend.load(source, backend.default_dtype(source))
        assert torch.equal(whole(loaded, TOKENS[:9]).logits, whole(made, TOKENS[:9]).logits)


@pytest.mark.slow
def test_default_model_agrees_with_transformers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from paceline.loaders import hub

    opened = open_checkpoint(str(hub.resolve("default", progress=False)), progress=False)
    config = opened.config
    oracle = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=config.hidden_size, num_hidden_layers=config.num_layers,
            intermediate_size=config.intermediate_size, num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            rms_norm_eps=config.rms_eps, tie_word_embeddings=True, max_position_embeddings=config.max_context,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        )
    )  # fmt: skip
    names = {f"model.{name}": opened.tensor(name) for name in config.weight_names()}
    oracle.load_state_dict(names, strict=False)
    oracle.tie_weights()
    tokens = [(7919 * i + 13) % config.vocab_size for i in range(48)]
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens])).logits[0]
    logits = whole(CpuDecoder.load(opened, dtype="float32"), tokens).logits
    assert (logits - expected).abs().max() < 1e-3
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_the_default_model_do_not_depend_on_company(dtype: str) -> None:
    """One by one, in chunks over the borders of the kernels, beside another request, as a tree: the logits of
    one long pass.
    """
    from paceline.loaders import hub

    model = CpuDecoder.load(
        open_checkpoint(str(hub.resolve("default", progress=False)), progress=False), dtype=dtype, context=256
    )
    config, (blocks, others) = model.config, shuffled_blocks(2)
    tokens = [(7919 * i + 13) % config.vocab_size for i in range(100)]
    expected = whole(model, tokens).logits
    kv = new_kv(model)
    steps = [
        model.forward(batch_of([Rows([token], blocks, i)]), kv).logits for i, token in enumerate(tokens[:20])
    ]
    assert torch.equal(torch.cat(steps), expected[:20])
    start = 20
    for size in (1, 16, 17, 30, 9):
        requests = [Rows(tokens[:size], others), Rows(tokens[start : start + size], blocks, start)]
        found = model.forward(batch_of(requests), kv).logits
        assert torch.equal(found, torch.cat([expected[:size], expected[start : start + size]]))
        start += size
    tree = Rows([5, tokens[start], 6, *tokens[start + 1 : start + 3], 7], blocks, start, [-1, -1, 1, 1, 3, 3])
    assert torch.equal(
        model.forward(batch_of([tree], rows=[1, 3, 4]), kv).logits, expected[start : start + 3]
    )


@pytest.mark.parametrize("family", FAMILIES + OTHER_FAMILIES)
def test_parameters_of_the_torch_model_are_the_tensors_of_its_file(family: str) -> None:
    model = decoder(family, "torch")
    found = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert found == model.config.weight_names()


def test_another_module_can_follow_attention() -> None:
    """The seam for experts: here the ffn hands back what it is given."""
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
    config = ModelConfig("llama", 32, num_layers=1, max_context=8, rms_eps=1e-5, rope=RopeConfig(), **sizes)
    layer, x = Layer(config, ffn=torch.nn.Identity()), torch.randn(3, 8)
    assert not any("mlp" in name for name, _ in layer.named_parameters())
    for weight in (
        layer.self_attn.q_proj.weight,
        layer.self_attn.k_proj.weight,
        layer.self_attn.v_proj.weight,
    ):
        torch.nn.init.normal_(weight)
    torch.nn.init.zeros_(layer.self_attn.o_proj.weight)  # attention adds nothing
    with torch.no_grad():
        found = layer(x, Angles(torch.ones(3, 2), torch.zeros(3, 2)), lambda q, k, v: q)
    torch.testing.assert_close(found, x + rms_norm(x, torch.ones(8), 1e-5))
