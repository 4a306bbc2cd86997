"""Drafts by the module that a target's checkpoint holds (MTP): they are what transformers' own layers make of
the same weights, `auto` finds the module by itself, and no text changes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline import LLM, SamplingParams
from paceline.core.errors import ConfigError
from paceline.core.types import Draft
from tests.make_models import HYBRID_FAMILIES, tiny_hf, tiny_tokenizer
from tests.test_decoder import TOKENS

PLACE, LENGTH = TemporaryDirectory(), 40
PROMPTS = [TOKENS[:12] * 2, TOKENS[20:57]]
# family -> in its files: the prefix, the layer's, then names of fc and of the norms of tokens, states, outputs
FILES = {
    "glm4_moe": ("model.layers.3.", "", "eh_proj", "enorm", "hnorm", "shared_head.norm"),
    "qwen3_next": ("mtp.", "layers.0.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
    "qwen3_5": ("mtp.", "layers.0.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
    "qwen2": (
        "model.mtp_layers.0.", "", "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm",
    ),
}  # fmt: skip


@cache
def folder(family: str) -> Path:
    """A tiny model with a module beside it, whose layer's weights are those of the model's last layer,
    changed a little: it attends."""
    place = tiny_tokenizer(tiny_hf(Path(PLACE.name) / family, family))
    tensors = load_file(place / "model.safetensors")
    numbers = {int(name.split(".")[2]) for name in tensors if name.startswith("model.layers.")}
    source, (prefix, layer, fc, *norms) = f"model.layers.{max(numbers)}.", FILES[family]
    generator = torch.Generator().manual_seed(3)
    own = {name.removeprefix(source): t for name, t in tensors.items() if name.startswith(source)}
    for name, weight in own.items():
        tensors[prefix + layer + name] = weight + 0.05 * torch.randn(weight.shape, generator=generator)
    width = tensors["model.norm.weight"].shape[0]
    tensors[f"{prefix}{fc}.weight"] = torch.randn(width, 2 * width, generator=generator) / width**0.5
    for name in norms:
        offset = 0.0 if family in HYBRID_FAMILIES else 1.0
        tensors[f"{prefix}{name}.weight"] = offset + 0.1 * torch.randn(width, generator=generator)
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    return place


@torch.no_grad()
def expected(family: str, text: list[int], steps: int) -> list[int]:
    """What the module guesses after a text, by transformers' classes, all of it computed anew each step."""
    from transformers import AutoConfig, AutoModelForCausalLM

    place, (prefix, layer_at, fc_at, *norm_at) = folder(family), FILES[family]
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, attn_implementation="eager")
    config, tensors = AutoConfig.from_pretrained(place), load_file(place / "model.safetensors")
    config._attn_implementation = "eager"
    kind, last = type(model.model.layers[-1]), config.num_hidden_layers - 1
    layer, norm_kind = kind(config, last).eval(), type(model.model.norm)
    begins = prefix + layer_at
    own = {n.removeprefix(begins): t for n, t in tensors.items() if n.startswith(begins)}
    layer.load_state_dict(own | joined(own), False)
    norms = []
    for name in norm_at:
        norms.append(norm_kind(config.hidden_size, config.rms_norm_eps))
        norms[-1].weight.copy_(tensors[f"{prefix}{name}.weight"])
    fc, embed = tensors[f"{prefix}{fc_at}.weight"], model.model.embed_tokens
    sources = model.model(torch.tensor([text[:-1]])).last_hidden_state[0]
    tokens, found = text[1:], list[int]()
    for _ in range(steps):
        parts = [norms[0](embed(torch.tensor(tokens))), norms[1](sources)]
        x = torch.cat(parts[::-1] if family == "qwen2" else parts, -1) @ fc.T
        count = len(tokens)
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        turned = model.model.rotary_emb(x[None], positions)
        out = layer(x[None], position_embeddings=turned, attention_mask=mask, position_ids=positions)
        out = (out if isinstance(out, torch.Tensor) else out[0])[0]
        normed = norms[2](out)
        found.append(int(model.lm_head(normed[-1]).argmax()))
        sources = torch.cat([sources, (out if family == "glm4_moe" else normed)[-1:]])
        tokens = [*tokens, found[-1]]
    return found


def joined(own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts of a layer's file as transformers' classes have them in memory."""
    count = len([name for name in own if name.endswith("down_proj.weight") and ".experts." in name])
    if not count:
        return {}
    gate, up, down = (
        torch.stack([own[f"mlp.experts.{e}.{part}_proj.weight"] for e in range(count)])
        for part in ("gate", "up", "down")
    )
    return {"mlp.experts.gate_up_proj": torch.cat([gate, up], 1), "mlp.experts.down_proj": down}


def llm_of(family: str, speculative: Any, dtype: str = "float32", **options: Any) -> LLM:
    return LLM(str(folder(family)), dtype=dtype, speculative_config=speculative, progress=False, **options)


@pytest.mark.parametrize("kernels", ["exact", "torch"])
@pytest.mark.parametrize("family", FILES)
def test_drafts_are_those_of_transformers(family: str, kernels: str) -> None:
    """Compiled heads are in int8: a chain may leave theirs where two tokens are nearly as likely."""
    llm = llm_of(family, {"method": "mtp", "num_speculative_tokens": 3}, kernels=kernels)
    drafter = llm.engine.drafter
    assert drafter is not None
    propose, drafted = drafter.propose, list[tuple[list[int], list[int]]]()

    def noted(requests: Any, budgets: Any) -> list[Draft]:
        drafts = propose(requests, budgets)
        drafted.extend(
            (list(r.tokens), list(d.tree.tokens[1:])) for r, d in zip(requests, drafts, strict=True)
        )
        return drafts

    drafter.propose = noted  # type: ignore[method-assign]
    drafter.burst_backend = None  # so that the host drafts
    llm.generate(
        {"prompt_token_ids": PROMPTS[0]}, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    )
    assert len(drafted) > 2
    wanted = [expected(family, text, len(tokens)) for text, tokens in drafted]
    guessed = [tokens for _, tokens in drafted]
    if kernels == "torch":
        assert guessed == wanted
    assert [tokens[0] for tokens in guessed] == [tokens[0] for tokens in wanted]
    assert any(len(tokens) > 1 and tokens == other for tokens, other in zip(guessed, wanted, strict=True))


def answers(llm: LLM, **params: Any) -> list[list[int]]:
    chosen = SamplingParams(max_tokens=LENGTH, ignore_eos=True, **params)
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], chosen)
    llm.engine.check()
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.mark.parametrize(
    "ways", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 4}], ids=["greedy", "seeded"]
)
@pytest.mark.parametrize(
    "method",
    [
        "auto",
        {"method": "mtp", "num_speculative_tokens": 3},
        {"method": "mtp", "num_speculative_tokens": 4, "tree_width": 2},
    ],
)
@pytest.mark.parametrize("family", FILES)
def test_drafts_change_no_token(family: str, method: Any, ways: dict[str, Any]) -> None:
    llm = llm_of(family, method, "int8")
    assert answers(llm, **ways) == answers(llm_of(family, None, "int8"), **ways)
    names = [drafter.name for drafter in llm.engine.policy.drafters]
    assert "mtp" in names
    if method != "auto":
        assert llm.engine.totals.num_drafted > 0


def test_a_target_without_a_module_says_so(tmp_path: Path) -> None:
    place = tiny_tokenizer(tiny_hf(tmp_path, "qwen2"))
    with pytest.raises(ConfigError, match="no module for multi-token prediction"):
        LLM(str(place), speculative_config={"method": "mtp"}, progress=False)
