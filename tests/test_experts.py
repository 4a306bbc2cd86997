"""Mixtures of experts: compiled and in torch they say what transformers says, from either kind of file, and a
compiled row's bits never depend on its company.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline import LLM, SamplingParams
from paceline.core.errors import ConfigError, ModelFileError
from paceline.cpu.decoder import CpuDecoder
from paceline.loaders.checkpoint import open_checkpoint
from paceline.loaders.fields import ALL
from paceline.loaders.packed import load_packed, pack_model, packed_parts
from paceline.models.config import ExpertsConfig
from paceline.models.decoder import Decoder
from paceline.models.experts import Router
from tests.laws.harness import RandomCheckpoint
from tests.make_models import EXPERT_FAMILIES, tiny_gguf, tiny_hf, tiny_tokenizer
from tests.odd_models import DTYPES, EXPERTS, odd_model
from tests.passes import Rows, batch_of, new_kv, shuffled_blocks
from tests.test_decoder import TOKENS, Loaded, decoder, tiny, whole

FIRST = 20  # tokens of a prompt


@pytest.mark.parametrize("kernels", ["exact", "torch"])
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_prompt_steps_tree_and_rollback_agree_with_transformers(family: str, kernels: str) -> None:
    model, blocks = decoder(family, kernels), shuffled_blocks(1)[0]
    expected, kv = tiny(family)[1], new_kv(model)
    assert expected.std() > 0.1  # not all alike

    def check(tokens: list[int], start: int, rows: list[int], parents: list[int] | None = None) -> None:
        """rows: those that follow TOKENS, in order."""
        found = model.forward(batch_of([Rows(tokens, blocks, start, parents)], rows=rows), kv).logits
        assert (found - expected[start : start + len(rows)]).abs().max() < 1e-4

    check(TOKENS[:FIRST], 0, list(range(FIRST)))
    for i in range(FIRST, FIRST + 3):
        check(TOKENS[i : i + 1], i, [0])
    at = FIRST + 3
    check([TOKENS[at], 5, TOKENS[at + 1], 6, TOKENS[at + 2]], at, [0, 2, 4], [-1, 0, 0, 1, 2])
    check(TOKENS[at + 1 :], at + 1, list(range(len(TOKENS) - at - 1)))  # what was rejected is written over


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen2_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 3}),
        ("qwen3_moe", {"mlp_only_layers": [0], "norm_topk_prob": False}),
        ("glm4_moe", {"use_qk_norm": False, "attention_bias": False, "n_group": 1, "topk_group": 1}),
        ("olmoe", {"norm_topk_prob": True, "num_key_value_heads": 4}),
        ("mixtral", {"sliding_window": 7}),
    ],
)
def test_what_configs_may_say(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_hf(tmp_path, family, **overrides)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = oracle(torch.tensor([TOKENS])).logits[0]
    for model in (Decoder.load(Loaded(folder)), CpuDecoder.load(Loaded(folder), "float32", use_cache=False)):
        assert (whole(model, TOKENS).logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_greedy_text_is_that_of_generate(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_tokenizer(tiny_hf(tmp_path, family))
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([TOKENS[:12]])
    made = oracle.generate(ids, do_sample=False, max_new_tokens=64, min_new_tokens=64, eos_token_id=None)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(str(folder), dtype="float32", speculative_config=None, progress=False) as llm:
        assert llm.generate([TOKENS[:12]], params)[0].token_ids == made[0, 12:].tolist()


def test_drafting_changes_nothing(tmp_path: Path) -> None:
    folder, texts = tiny_tokenizer(tiny_hf(tmp_path, "qwen3_moe")), []
    asked = [
        SamplingParams(temperature=0, max_tokens=48, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=3, max_tokens=48, ignore_eos=True),
    ]
    prompts = [TOKENS[:10] * 3, TOKENS[5:9] * 4]
    methods = (None, "auto", {"method": "ngram", "prompt_lookup_min": 1}, {"method": "suffix"})
    for method in methods:
        with LLM(str(folder), speculative_config=method, progress=False) as llm:
            texts.append([r.token_ids for params in asked for r in llm.generate(prompts, params)])
            if method is not None and method != "auto":
                assert llm.engine.totals.num_drafted > 0
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_a_gguf_file_says_the_same_as_the_folder(family: str, tmp_path: Path) -> None:
    folder = tiny_hf(tmp_path / "folder", family)
    ours, theirs = (open_checkpoint(str(p)) for p in (folder, tiny_gguf(tmp_path / "m.gguf", folder)))
    assert ours.config == theirs.config
    for name, shape in ours.config.weight_names().items():
        assert torch.equal(ours.tensor(name), theirs.tensor(name)), name
        assert tuple(ours.tensor(name).shape) == shape
        some = slice(shape[0] // 3, shape[0] - shape[0] // 4)  # from the middle of one expert into another
        for opened in (ours, theirs):
            assert torch.equal(opened.tensor(name, some), ours.tensor(name)[some])


def test_quantized_gguf_experts_are_read_expert_by_expert(tmp_path: Path) -> None:
    folder = tiny_hf(tmp_path / "folder", "olmoe")
    floats, quantized = open_checkpoint(str(folder)), tiny_gguf(tmp_path / "m.gguf", folder, "Q8_0")
    name, opened = "layers.1.mlp.experts.down_proj.weight", open_checkpoint(str(quantized))
    some = opened.tensor(name, slice(64, 192))
    assert torch.equal(some, opened.tensor(name)[64:192])
    assert 0 < (some - floats.tensor(name, slice(64, 192))).abs().max() < 0.01


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_stacked_files_are_read_too(family: str, tmp_path: Path) -> None:
    """As transformers 5 has experts in memory, and some write them."""
    folder = tiny_hf(tmp_path, family)
    before = Loaded(folder)
    weights = load_file(folder / "model.safetensors")
    names = {"mixtral": ("block_sparse_moe", ("w1", "w3", "w2"))}
    block, parts = names.get(family, ("mlp", ("gate_proj", "up_proj", "down_proj")))
    experts = before.config.experts
    assert experts is not None
    for i in range(before.config.num_layers):
        at = f"model.layers.{i}.{block}.experts."
        gate, up, down = (
            torch.stack([weights.pop(f"{at}{e}.{part}.weight") for e in range(experts.count)])
            for part in parts
        )
        to = f"model.layers.{i}.mlp.experts."
        weights |= {f"{to}gate_up_proj": torch.cat([gate, up], 1), f"{to}down_proj": down}
    save_file(weights, folder / "model.safetensors")
    opened = open_checkpoint(str(folder))
    for name, weight in before.weights.items():
        assert torch.equal(opened.tensor(name), weight)
    some = slice(30, 200)
    name = "layers.0.mlp.experts.up_proj.weight"
    assert torch.equal(opened.tensor(name, some), before.weights[name][some])


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_quantized_agrees_with_its_reference(family: str, dtype: str) -> None:
    """But where a router is undecided: an activation that is rounded to the other side wakes another expert."""
    exact, reference = (
        whole(decoder(family, kernels, dtype), TOKENS).logits for kernels in ("exact", "torch")
    )
    floats = whole(decoder(family), TOKENS).logits
    errors = (exact - reference).abs().mean(-1) / floats.std()
    assert errors.median() < 0.02
    assert (errors > 0.03).float().mean() < 0.2
    assert (
        1e-3 < ((exact - floats).abs().mean(-1) / floats.std()).median() < {"int8": 0.05, "int4": 0.4}[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_bits_do_not_depend_on_company(family: str, dtype: str) -> None:
    """One by one, in chunks, beside another request, as a tree: the logits of one long pass."""
    model, (blocks, others) = decoder(family, dtype=dtype), shuffled_blocks(2)
    expected, kv, start = whole(model, TOKENS).logits, new_kv(model), 0
    for size in (1, 1, 2, 5, 7, 17, 1):
        own = Rows(TOKENS[start : start + size], blocks, start)
        assert torch.equal(model.forward(batch_of([own]), kv).logits, expected[start : start + size])
        start += size
    beside = [Rows(TOKENS[:11], others), Rows(TOKENS[start : start + 3], blocks, start)]
    found = model.forward(batch_of(beside), kv).logits
    assert torch.equal(found, torch.cat([expected[:11], expected[start : start + 3]]))
    tree = Rows([TOKENS[start], 5, TOKENS[start + 1], 6, TOKENS[start + 2]], blocks, start, [-1, 0, 0, 1, 2])
    rows = model.forward(batch_of([tree], rows=[0, 2, 4]), kv).logits
    assert torch.equal(rows, expected[start : start + 3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_widths_agree_with_the_reference(dtype: str) -> None:
    reference = Decoder.load(RandomCheckpoint(EXPERTS), dtype)
    tokens = [token % EXPERTS.vocab_size for token in TOKENS]
    found, expected = (whole(model, tokens).logits for model in (odd_model(dtype, EXPERTS), reference))
    errors = (found - expected).abs().mean(-1) / expected.std()
    assert errors.median() < (1e-5 if dtype == "float32" else 0.01)


def test_routers_agree_with_transformers() -> None:
    """DeepSeek's, whose groups glm has, too."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    shape = {"n_routed_experts": 16, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
    config = DeepseekV3Config(hidden_size=32, routed_scaling_factor=2.5, **shape)
    theirs = DeepseekV3TopkRouter(config)
    ours = Router(ExpertsConfig(16, 3, 8, "sigmoid", True, 2.5, groups=4, top_groups=2), 32)
    weight, correction, x = torch.randn(16, 32), 0.3 * torch.randn(16), torch.randn(50, 32)
    with torch.no_grad():
        theirs.weight.copy_(weight), theirs.e_score_correction_bias.copy_(correction)
        ours.weight.copy_(weight), ours.e_score_correction_bias.copy_(correction)
        _, shares, chosen = theirs(x)
        own_chosen, own_shares = ours(x)
    order, own_order = chosen.argsort(-1), own_chosen.argsort(-1)
    assert torch.equal(chosen.gather(1, order), own_chosen.gather(1, own_order))
    torch.testing.assert_close(shares.gather(1, order), own_shares.gather(1, own_order))


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_of_equal_experts_the_first_are_chosen(family: str) -> None:
    """With a router of zeros, all experts but the first ones, and in glm but the first groups, may be anything."""
    plain = tiny(family)[0]
    loaded, experts = Loaded.__new__(Loaded), plain.config.experts
    assert experts is not None
    loaded.config, loaded.weights = plain.config, dict(plain.weights)
    for name, weight in plain.weights.items():
        if ".mlp.gate." in name:
            loaded.weights[name] = torch.zeros_like(weight)
        if ".mlp.experts." in name:  # those that must not be woken
            loaded.weights[name] = weight.clone()
            loaded.weights[name][experts.per_token * len(weight) // experts.count :] = float("nan")
    for model in (Decoder.load(loaded), CpuDecoder.load(loaded, "float32", use_cache=False)):
        assert whole(model, TOKENS[:9]).logits.isfinite().all()


def test_weights_that_are_no_numbers_reach_the_logits_and_nothing_else() -> None:
    plain = tiny("qwen2_moe")[0]
    loaded = Loaded.__new__(Loaded)
    spoilt = {n: torch.full_like(w, float("nan")) for n, w in plain.weights.items() if ".mlp.gate." in n}
    loaded.config, loaded.weights = plain.config, plain.weights | spoilt
    model = CpuDecoder.load(loaded, "int8", use_cache=False)
    assert whole(model, TOKENS[:5]).logits.isnan().all()


def test_a_pass_counts_the_experts_it_woke() -> None:
    model, reference = decoder("olmoe"), decoder("olmoe", "torch")
    woken: list[int] = []
    for layer in reference.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _x, found: woken.append(len(found[0].unique())))
    for count in (1, 2, 7, 40):
        woken.clear()
        whole(reference, TOKENS[:count])
        whole(model, TOKENS[:count])
        assert model.woken == sum(woken) / len(woken)
        assert (model.woken == 3) == (count == 1)


def test_experts_are_packed_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    opened = open_checkpoint(str(tiny_hf(tmp_path / "folder", "glm4_moe")), progress=False)
    experts, read = opened.config.experts, opened.tensor
    assert experts is not None
    largest = 0

    def watched(name: str, rows: slice = ALL) -> torch.Tensor:
        nonlocal largest
        weight = read(name, rows)
        largest = max(largest, weight.numel() if "experts." in name else 0)
        return weight

    monkeypatch.setattr(opened, "tensor", watched)
    for _, parts in packed_parts(opened, 8):
        list(parts)
    assert largest == experts.inner * opened.config.hidden_size
    first, again = load_packed(opened, 8), load_packed(opened, 8)
    for name, tensor in pack_model(opened, 8).items():
        assert torch.equal(tensor, first[name])
        assert torch.equal(tensor, again[name])


def refused(folder: Path, **changed: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    open_checkpoint(str(folder), progress=False)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_experts_per_tok": 9}, "9 experts a token of 8"),
        ({"n_routed_experts": 5_000}, "5000 experts"),
        ({"n_routed_experts": 9}, "9 experts do not fill 4 groups"),
        ({"topk_group": 5}, "5 of 4 groups"),
        ({"topk_group": 1}, "3 experts a token, and 2"),
        ({"n_routed_experts": 16}, "mlp.experts.8.gate_proj.weight"),
        ({"moe_intermediate_size": 32}, "mlp.experts.0.gate_proj.weight has shape"),
        ({"n_shared_experts": 0}, "mlp.shared_experts.down_proj.weight is not part"),
        ({"first_k_dense_replace": 0}, "layers.0.mlp.gate.weight"),
        ({"model_type": "deepseek_v3"}, "MLA"),
        ({"model_type": "llama", "attention_bias": False}, "n_routed_experts = 8"),
    ],
)
def test_configs_that_do_not_fit_are_refused_by_name(
    changed: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = tiny_hf(tmp_path, "glm4_moe")
    with pytest.raises(ModelFileError, match=named):
        refused(folder, **changed)


def test_layers_that_only_draft_are_left_alone(tmp_path: Path) -> None:
    folder = tiny_hf(tmp_path, "glm4_moe")
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    open_checkpoint(str(folder), progress=False)
    save_file(weights | {"model.layers.2.eh_proj.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"layers\.2\.eh_proj"):
        open_checkpoint(str(folder), progress=False)


def test_what_the_kernels_cannot_do_is_refused(tmp_path: Path) -> None:
    narrow = tiny("mixtral", intermediate_size=40)[0]
    assert (
        whole(Decoder.load(narrow), TOKENS).logits - tiny("mixtral", intermediate_size=40)[1]
    ).abs().max() < 1e-4
    with pytest.raises(ConfigError, match="multiple of 16, not 40; use kernels='torch'"):
        CpuDecoder.load(narrow, "int8", use_cache=False)


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_parameters_of_the_torch_model_are_the_weights_of_its_config(family: str) -> None:
    model = decoder(family, "torch")
    found = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert found == model.config.weight_names()
