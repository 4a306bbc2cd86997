"""Opens a learned head for a target, ours or another project's (foreign_heads.py); and writes one of ours as
other projects read it: EAGLE-3 for `speculators`, vLLM and SGLang, Medusa for vLLM, DFlash for both.

Invariant: an opened head fits the target, or an error names both (ours has a hash of the target's weights,
others are known by their sizes); what the other format cannot say is an error, never left out.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.core.errors import ConfigError, ModelFileError
from paceline.heads.config import CONFIGS, HeadConfig, LayeredConfig, default_taps, read_head_config
from paceline.heads.modules import tensor_shapes
from paceline.loaders import hub
from paceline.loaders.checkpoint import Checkpoint
from paceline.loaders.foreign_heads import LAYER_IDS, LOSSLESS, MARKOV, read_foreign
from paceline.loaders.head_files import EXPECTED, Head, HeadFiles, Tensors, write_tensors

log = logging.getLogger("paceline")
FORMATS = {"eagle": ("speculators", "vllm", "eagle"), "medusa": ("vllm",), "dflash": ("speculators", "vllm")}
ARCHITECTURES = {family: f"{family.title()}ForCausalLM" for family in ("llama", "mistral", "qwen2", "qwen3")}
Values = dict[str, Any]


def open_head(model: str, target: Checkpoint, kinds: Sequence[str]) -> Head:
    """The head in a folder (or of a Hugging Face name), of one of these kinds, for this target."""
    folder = hub.resolve(model)
    if not folder.is_dir():
        raise ModelFileError(f"{folder} is a model file where a head is expected; {EXPECTED}")
    files = HeadFiles(folder)
    if "paceline_head" in files.values:
        config = read_head_config(files.values, files.fields.source)
        check_target(config, target, files.where)
        head = Head(config, files.read(tensor_shapes(config)), files.where, "paceline")
    else:
        head = read_foreign(files, target)
    if head.config.kind not in kinds:
        found, wanted = repr(head.config.kind), " or ".join(map(repr, kinds))
        raise ModelFileError(f"{folder} holds a head of kind {found}, not {wanted}; use that method")
    _check(head, target)
    if not head.config.has_lm_head and head.config.kind in ("eagle", "dflash", "draft"):
        weight = target.tensor("embed_tokens.weight" if target.config.tie_embeddings else "lm_head.weight")
        ids = head.tensors.get("draft_ids")
        head.tensors["lm_head.weight"] = weight if ids is None else weight[ids]
    config = head.config
    log.info("%s: %s head (%s) of layers %s", folder, config.kind, head.dialect, config.hidden_layers)
    return head


def _check(head: Head, target: Checkpoint) -> None:
    """The head's sizes are the target's, and its draft vocabulary lies inside the target's."""
    config, model, ids = head.config, target.config, head.tensors.get("draft_ids")
    sizes = {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size}
    for name, size in (sizes | {"target_layers": model.num_layers}).items():
        if getattr(config, name) != size:
            made = f"this {config.kind} head was made for {config.target_name} with {name}"
            differs = f"{getattr(config, name)}, and {target.name} has {size}"
            raise ModelFileError(f"{head.where}: {made} {differs}; use a head of this target")
    is_ascending = ids is None or bool((ids[1:] > ids[:-1]).all())
    if ids is not None and not (is_ascending and ids[0] >= 0 and ids[-1] < config.vocab_size):
        raise ModelFileError(f"{head.where}: draft tokens are not an ascending list; the file is damaged")


def target_hash(checkpoint: Checkpoint) -> str:
    """Which weights a head belongs to: sizes, the last norm, and keys of the first and last that attend."""
    config = checkpoint.config
    layers = (config.num_layers, config.num_heads, config.num_kv_heads)
    sizes = (config.family, config.vocab_size, config.hidden_size, *layers)
    digest = hashlib.sha256(repr(sizes).encode())
    attending = [i for i in range(config.num_layers) if not config.is_recurrent(i)]
    ends = attending[0], attending[-1]
    for name in ("norm.weight", *(f"layers.{i}.self_attn.k_proj.weight" for i in ends)):
        digest.update(checkpoint.tensor(name).to(torch.float16).contiguous().numpy().tobytes())
    return digest.hexdigest()


def check_target(config: HeadConfig, checkpoint: Checkpoint, where: str) -> None:
    """A head only runs on the target it was trained for."""
    wanted, found = config.target_hash, target_hash(checkpoint)
    if found != wanted:
        ours, theirs = f"{checkpoint.name} ({found[:12]})", f"{config.target_name} ({wanted[:12]})"
        made = f"this {config.kind} head was trained for {theirs}, not for {ours}"
        remedy = f"use a head of that target, or train one: paceline train {config.kind}"
        raise ModelFileError(f"{where}: {made}; {remedy}")


def export_head(head: Head, target: Checkpoint, form: str, folder: Path, verifier: str) -> None:
    """Write into the folder; verifier: the name by which the other engine will know the target."""
    kind = head.config.kind
    if form not in FORMATS.get(kind, ()):
        known = ", ".join(FORMATS.get(kind, ())) or "no format"
        raise ConfigError(f"format is {form!r}, which has no {kind} heads; use one of {known}")
    is_ours = type(head.config) is CONFIGS[kind]
    _refuse(not is_ours, f"{head.where} is of another project's kind; only heads of ours are written")
    write = {"eagle": _eagle, "medusa": _medusa, "dflash": _dflash}[kind]
    values, tensors = write(head, target, form)
    if "speculators_config" in values:
        theirs = ARCHITECTURES.get(target.config.family, "LlamaForCausalLM")
        values["speculators_config"]["verifier"] = {"name_or_path": verifier, "architectures": [theirs]}
    halves = {name: (t.half() if t.is_floating_point() else t).contiguous() for name, t in tensors.items()}
    write_tensors(folder / "model.safetensors", halves, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(values, indent=1) + "\n")


def _refuse(is_refused: Any, what: str) -> None:
    if is_refused:
        raise ConfigError(what)


def _layer_config(config: LayeredConfig, target: Checkpoint, model_type: str, num_layers: int) -> Values:
    rope = config.rope
    is_odd = rope.divisors is not None or rope.kind == "yarn"
    _refuse(is_odd, f"rope kind {rope.kind!r} with divisors or yarn cannot be written for other engines")
    scaling = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        scaling["original_max_position_embeddings"] = rope.original_context
    return {
        "model_type": model_type, "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "rms_norm_eps": config.rms_eps, "hidden_act": "silu",
        "max_position_embeddings": target.config.max_context, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, "torch_dtype": "float16", "rope_theta": config.rope.theta,
        "rope_scaling": None if rope.kind == "none" else scaling,
    }  # fmt: skip


def _for_speculators(config: HeadConfig, algorithm: str, architecture: str, num_tokens: int) -> Values:
    """What all configs of `speculators` hold."""
    method = {"proposal_type": "greedy", "speculative_tokens": num_tokens, **LOSSLESS}
    proposals = {"default_proposal_method": "greedy", "proposal_methods": [method]}
    return {
        "architectures": [architecture], "speculators_model_type": algorithm, "speculators_version": "0.1.0",
        "target_hidden_size": None, "torch_dtype": "float16", "draft_vocab_size": config.draft_vocab_size,
        "speculators_config": {"algorithm": algorithm, **proposals},
    }  # fmt: skip


def _with_offsets(tensors: Tensors, vocab_size: int) -> Tensors:
    """With the draft vocabulary as offsets, and as a mask of the target's."""
    tensors = dict(tensors)
    ids = tensors.pop("draft_ids", None)
    if ids is not None:
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids.long(), True)
        tensors["d2t"] = ids.long() - torch.arange(len(ids))
    return tensors


def _eagle(head: Head, target: Checkpoint, form: str) -> tuple[Values, Tensors]:
    """Format eagle, the authors' and SpecForge's, names layers by their output: one less than we count."""
    config: Any = head.config
    problem = "norm_output is true, which this format does not have; use format vllm"
    _refuse(config.norm_output and form != "vllm", problem)
    problem = "norm_before_residual is true, which format eagle does not have; use format speculators"
    _refuse(config.norm_before_residual and form == "eagle", problem)
    layer = _layer_config(config, target, "llama", 1)
    if form == "speculators":
        values = _for_speculators(config, "eagle3", "Eagle3Speculator", 5)
        values |= {"transformer_layer_config": layer, "tie_word_embeddings": False}
    else:
        values = {"architectures": ["LlamaForCausalLMEagle3"], **layer}
        values["draft_vocab_size"] = config.draft_vocab_size
    values["norm_before_residual"] = config.norm_before_residual
    if form == "vllm":
        values["norm_output"] = config.norm_output
    if form != "eagle":
        values[LAYER_IDS] = list(config.taps)
    elif config.taps != default_taps(config.target_layers):
        values["eagle_config"] = {"use_aux_hidden_state": True, LAYER_IDS: [tap - 1 for tap in config.taps]}
    name = "layers.0." if form == "speculators" else "midlayer."
    own = {n.replace("midlayer.", name): tensor for n, tensor in head.tensors.items()}
    return values, _with_offsets(own, config.vocab_size)


def _medusa(head: Head, target: Checkpoint, form: str) -> tuple[Values, Tensors]:
    """With an output layer of the whole vocabulary: vLLM has a map of a reduced one but refuses files that
    use it (0.32: `token_map` "not initialized"). Tokens that cannot be drafted get the mean of all rows,
    which is never above the best, and vLLM drafts the best."""
    config: Any = head.config
    remedy = "use Paceline itself, or train without a trunk"
    _refuse(config.trunk is not None, f"the head has a trunk, which vLLM's Medusa heads have not; {remedy}")
    values = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size, "num_heads": config.num_heads_ahead, "original_lm_head": True,
        "num_hidden_layers": config.num_blocks, "medusa_fc_bias": True, "max_paths": 64, "topk": 10,
        "torch_dtype": "float16",
    }  # fmt: skip
    words, ids = head.tensors["lm_head.weight"], head.tensors.get("draft_ids")
    if ids is not None:
        rows, words = words, words.mean(0, keepdim=True).repeat(config.vocab_size, 1)
        words[ids] = rows
    blocks = {name: tensor for name, tensor in head.tensors.items() if name.startswith("blocks.")}
    return values, {**blocks, "lm_heads.0.weight": words}


def _dflash(head: Head, target: Checkpoint, form: str) -> tuple[Values, Tensors]:
    """As `speculators` has it, DSpark where there is a Markov head; or as z-lab writes it (format vllm):
    layers are named by their output, and the target's own output layer is used."""
    config: Any = head.config
    layers = _layer_config(config, target, "qwen3", config.num_layers)
    if form == "vllm":
        has_own = config.has_lm_head or config.draft_vocab_size < config.vocab_size
        remedy = "which format vllm does not have; use format speculators"
        _refuse(has_own, f"this DFlash head has an output layer of its own, {remedy}")
        is_more = config.markov_rank or config.sample_from_anchor
        _refuse(is_more, f"this DFlash head drafts from the root's row or has a Markov head, {remedy}")
        own = {"mask_token_id": config.mask_token_id, "target_layer_ids": [tap - 1 for tap in config.taps]}
        values = {"architectures": ["DFlashDraftModel"], **layers, "block_size": config.block_size}
        values |= {"num_target_layers": config.target_layers, "dflash_config": own}
        return values, {name: tensor for name, tensor in head.tensors.items() if name != "lm_head.weight"}
    names = ("dspark", "Qwen3DSparkModel") if config.markov_rank else ("dflash", "DFlashSpeculator")
    values = _for_speculators(config, *names, config.num_drafts) | {
        "block_size": config.block_size, "aux_hidden_state_layer_ids": list(config.taps),
        "mask_token_id": config.mask_token_id, "sample_from_anchor": config.sample_from_anchor,
        "transformer_layer_config": layers,
    }  # fmt: skip
    tensors = _with_offsets(head.tensors, config.vocab_size)
    if config.markov_rank:
        values |= {"markov_rank": config.markov_rank, "markov_head_type": "vanilla"}
        values["enable_confidence_head"] = False
        # theirs has a row for every token of the target: what cannot be drafted gets our one row for it
        first, ids = tensors.pop("markov_w1.weight"), head.tensors.get("draft_ids")
        rows = first[-1:].repeat(config.vocab_size, 1)
        rows[slice(None) if ids is None else ids] = first[:-1]
        tensors |= {MARKOV[0]: rows, MARKOV[1]: tensors.pop("markov_w2.weight")}
    return values, tensors
