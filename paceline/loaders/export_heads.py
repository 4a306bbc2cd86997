"""Writes a head of ours as other projects read it: EAGLE-3 for `speculators`, vLLM and SGLang, Medusa for
vLLM, DFlash for both, and DFlash with a Markov head as DSpark.

Invariant: what the other format cannot say is an error, never left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.heads.config import LayeredConfig, default_taps
from paceline.loaders.head_files import Head

if TYPE_CHECKING:
    from paceline.loaders.checkpoint import Checkpoint

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
Tensors = dict[str, Tensor]
Written = tuple[dict[str, Any], Tensors]


def export_head(head: Head, target: Checkpoint, form: str, folder: Path, verifier: str) -> None:
    """verifier: the name by which the other engine will know the target."""
    write = _WRITERS.get((head.config.kind, form))
    if write is None:
        known = ", ".join(name for kind, name in _WRITERS if kind == head.config.kind) or "no format"
        raise ConfigError(f"format is {form!r}, which has no {head.config.kind} heads; use one of {known}")
    values, tensors = write(head, target, verifier)
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    halves = {name: (t.half() if t.is_floating_point() else t).contiguous() for name, t in tensors.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # the library makes files that only their owner can read
    (folder / "config.json").write_text(json.dumps(values, indent=1) + "\n")


def _refuse(is_refused: bool, what: str) -> None:
    if is_refused:
        raise ConfigError(what)


def _rope(config: LayeredConfig) -> dict[str, Any]:
    rope = config.rope
    is_odd = rope.divisors is not None or rope.kind == "yarn"
    _refuse(is_odd, f"rope kind {rope.kind!r} with divisors or yarn cannot be written for other engines")
    scaling: dict[str, Any] | None = None
    if rope.kind in ("linear", "llama3"):
        scaling = {"rope_type": rope.kind, "factor": rope.factor}
    if scaling is not None and rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_context,
        }
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _layer_config(config: Any, target: Checkpoint, model_type: str, num_layers: int) -> dict[str, Any]:
    return {
        "model_type": model_type, "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "rms_norm_eps": config.rms_eps, "hidden_act": "silu",
        "max_position_embeddings": target.config.max_context, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, "torch_dtype": "float16", **_rope(config),
    }  # fmt: skip


def _words(head: Head) -> Tensors:
    """The draft vocabulary as offsets, and as a mask of the target's."""
    ids = head.tensors.get("draft_ids")
    if ids is None:
        return {}
    mask = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids.to(torch.int64) - torch.arange(len(ids)), "t2d": mask}


def _weights(head: Head, layer: str = "") -> Tensors:
    """All but the draft vocabulary; the one layer of an EAGLE head under another name."""
    own = {name: tensor for name, tensor in head.tensors.items() if name != "draft_ids"}
    return {name.replace("midlayer.", layer): tensor for name, tensor in own.items()}


def _for_speculators(
    algorithm: str, architecture: str, num_tokens: int, verifier: str, target: Checkpoint
) -> dict[str, Any]:
    """What all configs of `speculators` hold."""
    method = {"proposal_type": "greedy", "speculative_tokens": num_tokens}
    method |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    theirs = ARCHITECTURES.get(target.config.family, "LlamaForCausalLM")
    return {
        "architectures": [architecture], "speculators_model_type": algorithm, "speculators_version": "0.1.0",
        "target_hidden_size": None, "torch_dtype": "float16",
        "speculators_config": {
            "algorithm": algorithm, "default_proposal_method": "greedy", "proposal_methods": [method],
            "verifier": {"name_or_path": verifier, "architectures": [theirs]},
        },
    }  # fmt: skip


def _eagle_for_speculators(head: Head, target: Checkpoint, verifier: str) -> Written:
    config: Any = head.config
    _refuse_normed_output(config)
    values = _for_speculators("eagle3", "Eagle3Speculator", 5, verifier, target) | {
        "draft_vocab_size": config.draft_vocab_size, "norm_before_residual": config.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(config.taps), "tie_word_embeddings": False,
        "transformer_layer_config": _layer_config(config, target, "llama", 1),
    }  # fmt: skip
    return values, {**_weights(head, "layers.0."), **_words(head)}


def _refuse_normed_output(config: Any) -> None:
    _refuse(config.norm_output, "norm_output is true, which this format does not have; use format vllm")


def _eagle_plain(head: Head, target: Checkpoint, verifier: str) -> Written:
    """As vLLM's own EAGLE-3 files: hidden states are counted as we do."""
    config: Any = head.config
    values = {
        "architectures": ["LlamaForCausalLMEagle3"], **_layer_config(config, target, "llama", 1),
        "draft_vocab_size": config.draft_vocab_size, "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "norm_before_residual": config.norm_before_residual, "norm_output": config.norm_output,
    }  # fmt: skip
    return values, {**_weights(head, "midlayer."), **_words(head)}


def _eagle_published(head: Head, target: Checkpoint, verifier: str) -> Written:
    """As the authors and SpecForge write it; layers are named by their output, one less than we count."""
    config: Any = head.config
    _refuse_normed_output(config)
    remedy = "which format eagle does not have; use format speculators"
    _refuse(config.norm_before_residual, f"norm_before_residual is true, {remedy}")
    values, tensors = _eagle_plain(head, target, verifier)
    del values["eagle_aux_hidden_state_layer_ids"], values["norm_output"]
    if config.taps != default_taps(config.target_layers):
        ids = [tap - 1 for tap in config.taps]
        values["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
    return values, tensors


def _medusa_for_vllm(head: Head, target: Checkpoint, verifier: str) -> Written:
    config: Any = head.config
    remedy = "use Paceline itself, or train without a trunk"
    _refuse(config.trunk is not None, f"the head has a trunk, which vLLM's Medusa heads have not; {remedy}")
    values = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size, "num_heads": config.num_heads_ahead, "original_lm_head": True,
        "num_hidden_layers": config.num_blocks, "medusa_fc_bias": True, "max_paths": 64, "topk": 10,
        "torch_dtype": "float16",
    }  # fmt: skip
    tensors = {name: tensor for name, tensor in head.tensors.items() if name.startswith("blocks.")}
    return values, {**tensors, "lm_heads.0.weight": _all_words(head)}


def _all_words(head: Head) -> Tensor:
    """An output layer of the whole vocabulary, since vLLM has a map of a reduced one but refuses files that
    use it (0.32: `token_map` "not initialized"). Tokens that cannot be drafted get the mean of all rows: a
    mean is never above the best, and vLLM drafts the best."""
    rows, ids = head.tensors["lm_head.weight"], head.tensors.get("draft_ids")
    if ids is None:
        return rows
    every = rows.mean(0, keepdim=True).repeat(head.config.vocab_size, 1)
    every[ids] = rows
    return every


def _dflash_plain(head: Head, target: Checkpoint, verifier: str) -> Written:
    """As z-lab writes it; layers are named by their output, and the target's own output layer is used."""
    config: Any = head.config
    has_own = config.has_lm_head or config.draft_vocab_size < config.vocab_size
    remedy = "which format vllm does not have; use format speculators"
    _refuse(has_own, f"this DFlash head has an output layer of its own, {remedy}")
    is_more = config.markov_rank or config.sample_from_anchor
    _refuse(is_more, f"this DFlash head drafts from the root's row or has a Markov head, {remedy}")
    own = {"mask_token_id": config.mask_token_id, "target_layer_ids": [tap - 1 for tap in config.taps]}
    values = {
        "architectures": ["DFlashDraftModel"], **_layer_config(config, target, "qwen3", config.num_layers),
        "block_size": config.block_size, "num_target_layers": config.target_layers, "dflash_config": own,
    }  # fmt: skip
    return values, {name: tensor for name, tensor in head.tensors.items() if name != "lm_head.weight"}


def _dflash_for_speculators(head: Head, target: Checkpoint, verifier: str) -> Written:
    config: Any = head.config
    names = ("dspark", "Qwen3DSparkModel") if config.markov_rank else ("dflash", "DFlashSpeculator")
    values = _for_speculators(*names, config.num_drafts, verifier, target) | {
        "draft_vocab_size": config.draft_vocab_size, "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(config.taps), "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "transformer_layer_config": _layer_config(config, target, "qwen3", config.num_layers),
    }  # fmt: skip
    tensors = {**_weights(head), **_words(head)}
    if config.markov_rank:
        rank = {"markov_rank": config.markov_rank, "markov_head_type": "vanilla"}
        values |= {**rank, "enable_confidence_head": False}
        tensors = {name: t for name, t in tensors.items() if not name.startswith("markov")} | _markov(head)
    return values, tensors


def _markov(head: Head) -> Tensors:
    """Theirs has a row for every token of the target; all that cannot be drafted get our one row for them."""
    first, ids = head.tensors["markov_w1.weight"], head.tensors.get("draft_ids")
    rows = first[-1:].repeat(head.config.vocab_size, 1)
    rows[slice(None) if ids is None else ids] = first[:-1]
    second = head.tensors["markov_w2.weight"]
    return {"markov_head.markov_w1.weight": rows, "markov_head.markov_w2.weight": second}


_WRITERS: dict[tuple[str, str], Callable[[Head, Any, str], Written]] = {
    ("eagle", "speculators"): _eagle_for_speculators,
    ("eagle", "vllm"): _eagle_plain,
    ("eagle", "eagle"): _eagle_published,
    ("medusa", "vllm"): _medusa_for_vllm,
    ("dflash", "speculators"): _dflash_for_speculators,
    ("dflash", "vllm"): _dflash_plain,
}
