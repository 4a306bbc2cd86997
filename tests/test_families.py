"""Families beyond llama: prompts, single steps, trees and what follows a rollback are transformers' own, and so
is a greedy text; quantized, they round as the torch reference does.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from paceline.api.llm import LLM
from paceline.core.errors import ConfigError, ModelFileError
from paceline.core.params import SamplingParams
from paceline.cpu.decoder import CpuDecoder
from paceline.loaders.hf_config import read_config
from paceline.models.attention import FLOATS, bytes_per_token
from paceline.models.config import NO_ROPE, ExpertsConfig, ModelConfig, RopeConfig
from paceline.models.decoder import Decoder
from paceline.models.rope import frequencies, query_scales, rotary_tables
from paceline.models.shard import Shard
from tests.laws.harness import RandomCheckpoint
from tests.make_models import OTHER_FAMILIES, SIZES, tiny_gguf, tiny_hf, tiny_tokenizer
from tests.odd_models import DTYPES, EXTRA, HEADS, odd_model
from tests.passes import Rows, ancestors, batch_of, new_kv, shuffled_blocks
from tests.test_decoder import Loaded, whole

GEMMA4 = ("gemma4", "gemma4_moe")
# Beyond the original context of phi3_long, so that transformers takes the long factors from the first pass on.
TOKENS = [(29 * i * i + 17 * i + 3) % 384 for i in range(36)]
TREE, PARENTS = [7, 70, 170, 8, 80, 180, 9], [-1, 0, 0, 1, 1, 2, 5]


@cache
def oracle(family: str, seed: int = 0) -> tuple[Any, Any]:
    """A random model of transformers, and the same as a checkpoint."""
    from transformers import AutoModelForCausalLM

    with TemporaryDirectory() as name:
        folder = tiny_hf(Path(name), family, seed=seed)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        return model, Loaded(folder)


def said_by(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@cache
def decoder(family: str, kernels: str, dtype: str = "float32", seed: int = 0) -> Any:
    source = oracle(family, seed)[1]
    if kernels == "torch":
        return Decoder.load(source, dtype=dtype)
    return CpuDecoder.load(source, dtype=dtype, use_cache=False)


@pytest.mark.parametrize("kernels", ["exact", "torch"])
@pytest.mark.parametrize("family", [*OTHER_FAMILIES, "gpt_oss", *GEMMA4])
def test_prompt_steps_tree_and_rollback_are_those_of_transformers(family: str, kernels: str) -> None:
    theirs, ours = oracle(family)[0], decoder(family, kernels)
    kv, blocks, end = new_kv(ours), shuffled_blocks(1)[0], len(TOKENS) + 3

    def check(rows: Rows, expected: torch.Tensor) -> None:
        assert (ours.forward(batch_of([rows]), kv).logits - expected).abs().max() < 1e-4

    text = [*TOKENS, 5, 6, 300]
    expected = said_by(theirs, text)
    assert expected.std() > 0.1
    check(Rows(TOKENS, blocks), expected[: len(TOKENS)])
    for at in range(len(TOKENS), end):
        check(Rows(text[at : at + 1], blocks, at), expected[at : at + 1])
    paths = [[TREE[node] for node in ancestors(PARENTS, i)] for i in range(len(TREE))]
    check(Rows(TREE, blocks, end, PARENTS), torch.stack([said_by(theirs, text + path)[-1] for path in paths]))
    other = [*text[:-2], 11, 12, 13]  # two tokens were taken back
    check(Rows(other[-3:], blocks, end - 2), said_by(theirs, other)[-3:])


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("family", [*OTHER_FAMILIES, GEMMA4[0]])
def test_quantized_rounds_as_the_reference_does(family: str, dtype: str) -> None:
    """An activation on the border between two integers may fall on either side, and rows after it then differ
    a little: in the best of a few random models not before the 17th row, until which both agree as floats do.
    """
    agreeing = []
    for seed in range(6):
        exact, reference, floats = (
            whole(decoder(family, kernels, its_dtype, seed), TOKENS).logits
            for kernels, its_dtype in (("exact", dtype), ("torch", dtype), ("exact", "float32"))
        )
        errors = (exact - reference).abs().mean(-1) / floats.std()  # [rows]
        agreeing.append(((errors > 1e-4).cumsum(0) == 0).sum().item())
        assert errors.mean() < 0.03
        assert 1e-3 < (exact - floats).abs().mean() / floats.std() < {"int8": 0.05, "int4": 0.4}[dtype]
    assert max(agreeing) > 16


@pytest.mark.parametrize("config", [EXTRA, HEADS], ids=["extra", "heads"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_with_every_extra_do_not_depend_on_company(dtype: str, config: ModelConfig) -> None:
    """One by one, in chunks over the borders of the kernels, beside another request, as a tree."""
    model, (blocks, others) = odd_model(dtype, config), shuffled_blocks(2)
    tokens = [(31 * i * i + 7 * i + 3) % config.vocab_size for i in range(90)]
    expected, kv, start = whole(model, tokens).logits, new_kv(model), 0
    for size in (1, 1, 14, 16, 17, 30):
        requests = [Rows(tokens[:size], others), Rows(tokens[start : start + size], blocks, start)]
        found = model.forward(batch_of(requests), kv).logits
        assert torch.equal(found, torch.cat([expected[:size], expected[start : start + size]]))
        start += size
    tree = Rows([5, tokens[start], 6, *tokens[start + 1 : start + 3], 7], blocks, start, [-1, -1, 1, 1, 3, 3])
    found = model.forward(batch_of([tree], rows=[1, 3, 4]), kv).logits
    assert torch.equal(found, expected[start : start + 3])
    reference = whole(Decoder.load(RandomCheckpoint(config), dtype=dtype), tokens).logits
    limit = 1e-4 if dtype == "float32" else 0.03
    assert (expected - reference).abs().mean() < limit * reference.std()


@pytest.mark.parametrize("family", [*OTHER_FAMILIES, "gpt_oss", *GEMMA4])
def test_greedy_text_is_that_of_generate(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_tokenizer(tiny_hf(tmp_path / "hf", family))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=64, eos_token_id=383
        )[0, len(TOKENS) :].tolist()
    greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    files = [folder] if family in GEMMA4 else [folder, tiny_gguf(tmp_path / "m.gguf", folder)]
    for file in files:
        drafts = {"method": "ngram", "num_speculative_tokens": 3}
        with LLM(str(file), dtype="float32", speculative_config=drafts, progress=False) as llm:
            (result,) = llm.generate([TOKENS], greedy)
        assert list(result.token_ids)[: len(text)] == text


def test_long_rope_is_chosen_by_the_longest_text_served() -> None:
    theirs, source = oracle("phi3_long")
    rope, tokens = source.config.rope, TOKENS[:30]
    short, long = (frequencies(rope, 16, positions)[0] for positions in (32, 33))
    plain = frequencies(RopeConfig(), 16)[0]
    torch.testing.assert_close(plain / short, torch.tensor(rope.divisors))
    torch.testing.assert_close(plain / long, torch.tensor(rope.long_divisors))
    found = whole(Decoder.load(source, context=32), tokens).logits
    assert (found - said_by(theirs, tokens)).abs().max() < 1e-4
    assert (whole(Decoder.load(source), tokens).logits - found).abs().max() > 1e-2


ROPES: dict[str, dict[str, Any]] = {
    "not truncated": {"rope_type": "yarn", "factor": 32.0, "truncate": False},
    "scaled": {"rope_type": "yarn", "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    "half scaled": {"rope_type": "yarn", "factor": 16.0, "mscale": 1.0},
    "stated": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "attention_factor": 1.5},
    "long": {"rope_type": "longrope", "short_factor": [1.5] * 16, "long_factor": [9.0] * 16},
    "long by a factor": {
        "rope_type": "longrope",
        "factor": 5.0,
        "short_factor": [1.5] * 16,
        "long_factor": [9.0] * 16,
    },
}


@pytest.mark.parametrize("name", ROPES)
def test_rotary_frequencies_are_those_of_transformers(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_theta": 50_000.0, "original_max_position_embeddings": 256, **ROPES[name]}
    sizes = {**SIZES, "max_position_embeddings": 4096, "head_dim": 32}
    oracle = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(rope)))
    config = read_config("c", {"model_type": "llama", **sizes, "rope_parameters": rope})
    inverse, factor = frequencies(config.rope, 32, 256)
    torch.testing.assert_close(inverse, oracle.inv_freq, atol=0, rtol=3e-7)
    assert factor == pytest.approx(oracle.attention_scaling)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "smollm3", "olmo2", "olmo3", "granite"])
def test_biases_of_attention_in_every_family_that_has_the_key(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_hf(tmp_path, family, attention_bias=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    found = whole(Decoder.load(Loaded(folder)), TOKENS).logits
    assert (found - said_by(model, TOKENS)).abs().max() < 1e-4


def test_queries_are_scaled_by_position_and_layers_may_not_turn() -> None:
    from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

    rope = RopeConfig(original_context=16, query_beta=0.3)
    scales = query_scales(rope, 100)
    assert scales is not None
    torch.testing.assert_close(scales, get_llama_4_attn_scale(torch.arange(100)[None], 0.3, 16)[0, 0, :, 0])
    assert query_scales(rope, 16) is None
    cos, sin = rotary_tables(NO_ROPE, 16, 40)
    assert torch.equal(cos, torch.ones(40, 8))
    assert torch.equal(sin, torch.zeros(40, 8))


def test_released_configs() -> None:
    """What the files on the hub say, as far as it is unusual."""
    sizes = {"vocab_size": 100, "intermediate_size": 256, "max_position_embeddings": 4096}
    sizes |= {"hidden_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 24}
    smollm = read_config("c", {"model_type": "smollm3", **sizes, "rope_theta": 5e6})
    assert smollm.rope_layers == (True, True, True, False) * 2
    assert (smollm.rope.theta, smollm.tie_embeddings, smollm.rope_of(3)) == (5e6, True, (NO_ROPE, 128))
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    phi = read_config(
        "c",
        {"model_type": "phi3", **sizes, "max_position_embeddings": 131_072, "partial_rotary_factor": 0.75,
         "original_max_position_embeddings": 4096, "rope_scaling": {"type": "longrope", **factors}},
    )  # fmt: skip
    assert (phi.rotary_dim, phi.rope.kind, phi.rope.original_context) == (96, "longrope", 4096)
    assert phi.rope.attention_factor == pytest.approx(1.1902, abs=1e-4)
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    olmo = read_config("c", {"model_type": "olmo3", **sizes, "rope_scaling": scaling, "rope_theta": 5e5})
    assert [olmo.is_local(i) for i in range(8)] == [True, True, True, False] * 2
    assert (olmo.rope.kind, olmo.rope_local, olmo.sliding_window) == ("yarn", RopeConfig(theta=5e5), 4096)
    text = {"model_type": "ministral3", **sizes}
    ministral = read_config("c", {"model_type": "mistral3", "text_config": text, "vision_config": {}})
    assert (ministral.head_dim, ministral.rope.query_beta, ministral.rope.attention_factor) == (128, 0.1, 1.0)
    assert read_config("c", {"model_type": "mistral3", "text_config": text | {"model_type": "mistral"}})
    scaling = {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    }
    experts = {"num_local_experts": 32, "num_experts_per_tok": 4, "attention_bias": True, "swiglu_limit": 7.0}
    gpt = read_config("c", {"model_type": "gpt_oss", **sizes, **experts, "rope_scaling": scaling})
    assert [gpt.is_local(i) for i in range(4)] == [True, False] * 2
    assert (gpt.head_dim, gpt.rope.theta, gpt.rope.truncate, gpt.activation) == (64, 15e4, False, "clamped")
    granite = read_config("c", {"model_type": "granite", **sizes, "logits_scaling": 8.0})
    assert (granite.logits_scale, granite.scale) == (0.125, 1.0)


GEMMA_26B = {
    "model_type": "gemma4_text", "vocab_size": 262_144, "hidden_size": 2816, "intermediate_size": 2112,
    "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
    "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
    "max_position_embeddings": 262_144, "sliding_window": 1024, "final_logit_softcapping": 30.0,
    "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
    "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision",
}  # fmt: skip


def test_gemma_4_has_two_kinds_of_layers() -> None:
    """As the released files say it, which newer ones spell layer by layer."""
    config = read_config("c", {"model_type": "gemma4", "text_config": GEMMA_26B})
    local, whole_context = config.kinds
    assert [config.kind_of(i) for i in range(12)] == [0, 0, 0, 0, 0, 1] * 2
    assert (local.num_kv_heads, local.head_dim, local.scale) == (8, 256, 1.0)
    assert (whole_context.num_kv_heads, whole_context.head_dim) == (2, 512)
    assert config.rope_of(0) == (RopeConfig(), 256)
    assert config.rope_of(5) == (RopeConfig(1e6, "proportional", 0.25), 512)
    assert config.experts == ExpertsConfig(128, 8, 704, shared_inner=2112, has_norms=True)
    assert bytes_per_token(config, FLOATS) == 4 * (25 * 8 * 2 * 256 + 5 * 2 * 2 * 512)
    each = {str(i): {"head_dim": 512, "num_key_value_heads": 2} for i in range(5, 30, 6)}
    spelled = {key: value for key, value in GEMMA_26B.items() if "global" not in key}
    assert read_config("c", spelled | {"per_layer_config": each}) == config
    with pytest.raises(ConfigError, match="two sizes of heads"):
        Shard(0, 2).check(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size_per_layer_input", 256),
        ("num_kv_shared_layers", 20),
        ("use_bidirectional_attention", "all"),
        ("attention_bias", True),
        ("per_layer_config", {"5": {"head_dim": 512}}),
        ("per_layer_config", {"5": {"head_dim": 512, "sliding_window": 3}}),
    ],
)
def test_what_gemma_4_is_not_run_with_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ModelFileError, match=key):
        read_config("c", GEMMA_26B | {key: value})


def test_the_gpu_refuses_in_one_error_what_its_kernels_do_not_do() -> None:
    pytest.importorskip("triton")
    from paceline.cuda.weights import check_config

    with pytest.raises(ConfigError, match=r"post_norm = True, .*query_beta = 0.2 .*'cpu'"):
        check_config(EXTRA)
    for family in ("smollm3", "phi3", "phi3_long", "granite", "llama_biased", "gpt_oss", *GEMMA4):
        check_config(oracle(family)[1].config)
    for family in ("olmo2", "olmo3", "ministral3"):
        with pytest.raises(ConfigError, match="the GPU kernels do not do"):
            check_config(oracle(family)[1].config)
