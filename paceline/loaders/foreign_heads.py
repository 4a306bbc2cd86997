"""Heads that other projects made: EAGLE-1 and -3 (as published, SpecForge's, vLLM's, those of `speculators`),
DFlash (z-lab's, those of `speculators`), Medusa (as published, vLLM's) and IBM's MLP speculators.

A layer's number counts hidden states in `speculators` and vLLM's own files (the residual stream after n
layers, as we do); in z-lab's files and SpecForge's nested `eagle_config` it is a layer whose output is read,
one less. Invariant: what a config asks for and no drafter does is refused by name.
"""

from __future__ import annotations

import logging
from itertools import product
from typing import Any

import torch

from paceline.core.errors import ConfigError, ModelFileError
from paceline.heads import config as kinds
from paceline.heads.modules import tensor_shapes
from paceline.loaders.checkpoint import Checkpoint
from paceline.loaders.fields import Fields
from paceline.loaders.head_files import Head, HeadFiles, Tensors
from paceline.loaders.hf_config import layer_sizes

log = logging.getLogger("paceline")
NOT_IN_EAGLE = ("fc_norm", "norm_before_fc", "use_aux_norm", "attention_bias", "mlp_bias")
NOT_IN_DFLASH = ("use_swa", "causal", "attention_sink_bias", "attention_bias", "sliding_window_non_causal")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
LOSSLESS = {"verifier_accept_k": 1, "accept_tolerance": 0.0}
MEDUSA_PREFIXES = ("", "medusa_head.", "medusa_heads.")
MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")


def read_foreign(files: HeadFiles, target: Checkpoint) -> Head:
    """The head in our names and shapes, or an error that names what the folder holds instead."""
    values, kind = files.values, files.values.get("speculators_model_type")
    model_type = values.get("model_type")
    if "dflash_config" in values or kind in ("dflash", "dspark"):
        return _dflash(files, target)
    if model_type == "medusa" or "medusa_num_heads" in values:
        return _medusa(files, target)
    if model_type == "mlp_speculator":
        return _mlp_speculator(files, target)
    prefix = "model." if files.has("model.fc.weight") else ""
    layers = ("midlayer.", "layers.0.")
    layer = next((p for p in layers if files.has(f"{prefix}{p}self_attn.q_proj.weight")), None)
    if kind == "eagle3" or (kind is None and layer is not None and files.has(f"{prefix}fc.weight")):
        if layer is None:
            raise files.error("no layer 'midlayer' or 'layers.0'; the file is incomplete or of another kind")
        return _eagle(files, target, prefix, layer)
    shown = values.get("architectures") or model_type
    known = "use one of paceline train, EAGLE, Medusa, DFlash or an MLP speculator"
    raise ModelFileError(f"{files.where} is not a head that is known (architectures {shown!r}); {known}")


def _config(kind: type[kinds.HeadConfig], files: HeadFiles, target: Checkpoint, **fields: Any) -> Any:
    """The config of a head that another project made: it names its target, if at all, and has no hash."""
    named = files.fields.section("speculators_config").section("verifier").get("name_or_path")
    name = str(named or files.values.get("base_model_name_or_path") or "another project's target")
    try:
        return kind(target_name=name, target_hash="", target_layers=target.config.num_layers, **fields)
    except (ConfigError, TypeError, ValueError) as error:
        raise files.error(str(error)) from error


def _taps(fields: Fields, key: str, shift: int) -> tuple[int, ...]:
    """The target's layers that are read, as we count them; how they were understood is logged."""
    ids = fields.get(key)
    if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
        raise fields.refuse(key, "is not a list of layers; the config is damaged")
    taps = tuple(i + shift for i in ids)
    log.info("%s: %s %s are the residual stream after %s layers", fields.source, key, ids, taps)
    return taps


def _eagle(files: HeadFiles, target: Checkpoint, prefix: str, layer: str) -> Head:
    outer, nested = files.fields, files.fields.section("eagle_config")
    keys = outer.section("transformer_layer_config") if "transformer_layer_config" in files.values else outer
    for section in (outer, keys, nested):
        section.refuse_any(NOT_IN_EAGLE, "use a head without it")
    if keys.count("num_hidden_layers", 1) != 1:
        raise keys.refuse("num_hidden_layers", "is not supported; an EAGLE head has one layer")
    for method in outer.section("speculators_config").get("proposal_methods") or ():
        if isinstance(method, dict) and {**LOSSLESS, **method} != {**method, **LOSSLESS}:
            raise files.error(f"proposal {method} accepts what the target would not say; use a lossless one")
    fields = layer_sizes(keys) | {"has_lm_head": files.has(f"{prefix}lm_head.weight")}
    fields["qk_norm"] = files.has(f"{prefix}{layer}self_attn.q_norm.weight")
    width, vocab = fields["hidden_size"], fields["vocab_size"]
    if outer.count("target_hidden_size", width) != width:
        raise outer.refuse("target_hidden_size", f"is not the head's own {width}, which is not supported")
    kind: type[kinds.HeadConfig] = kinds.EagleConfig
    if files.shape(f"{prefix}fc.weight")[1:] == (2 * width,) and not fields["has_lm_head"]:
        kind, dialect = kinds.Eagle1Config, "eagle 1"
        fields |= {"draft_vocab_size": vocab, "has_fc_bias": files.has(f"{prefix}fc.bias")}
    else:
        is_specforge = "LlamaForCausalLMEagle3" in (files.values.get("architectures") or ())
        dialect = "specforge" if is_specforge else "eagle 3"
        dialect = "speculators" if "speculators_model_type" in files.values else dialect
        size = outer.count("draft_vocab_size", keys.count("draft_vocab_size", vocab))
        if size < vocab and not files.has(f"{prefix}d2t"):
            raise files.error(f"missing tensor d2t: what the {size} draft tokens are; fetch the head again")
        taps = kinds.default_taps(target.config.num_layers)
        if outer.get(LAYER_IDS) is not None:
            taps = _taps(outer, LAYER_IDS, 0)
        elif nested.get(LAYER_IDS) is not None:
            taps = _taps(nested, LAYER_IDS, int(dialect == "specforge"))
        else:
            log.info("%s: no layers are named; taking the usual %s", files.where, taps)
        flags = {name: outer.flag(name, False) for name in ("norm_before_residual", "norm_output")}
        fields |= {"draft_vocab_size": size, "taps": taps, **flags}
    config = _config(kind, files, target, **fields)
    stored = {name: prefix + name.replace("midlayer.", layer) for name in tensor_shapes(config)}
    return Head(config, _tensors(files, config, stored, f"{prefix}d2t"), files.where, dialect)


def _tensors(files: HeadFiles, config: kinds.HeadConfig, stored: dict[str, str], offsets: str) -> Tensors:
    """By our names. Their draft vocabulary is stored as offsets: how far a token's id is beyond its row."""
    shapes = {name: shape for name, shape in tensor_shapes(config).items() if not name.startswith("markov")}
    tensors = files.read(shapes, stored | {"draft_ids": offsets})
    if "draft_ids" in tensors:
        tensors["draft_ids"] += torch.arange(config.draft_vocab_size)
    return tensors


def _dflash(files: HeadFiles, target: Checkpoint) -> Head:
    outer, is_speculators = files.fields, "speculators_model_type" in files.values
    keys = outer.section("transformer_layer_config") if is_speculators else outer
    own = outer if is_speculators else outer.section("dflash_config")
    for section in (outer, keys, own):
        section.refuse_any(NOT_IN_DFLASH, "use a head without it")
    types, mask, rank = keys.get("layer_types"), own.get("mask_token_id"), own.get("markov_rank")
    if isinstance(types, list) and any(kind != "full_attention" for kind in types):
        raise keys.refuse("layer_types", "holds other kinds than full_attention, which are not supported")
    if isinstance(mask, bool) or not isinstance(mask, int):
        raise own.refuse("mask_token_id", "is not a token; the config is damaged")
    if rank and own.text("markov_head_type", "vanilla") != "vanilla":
        raise own.refuse("markov_head_type", "is not supported; use a head with a vanilla Markov head")
    if (files.folder / "mask_embedding.pt").exists():
        raise files.error("mask_embedding.pt is pickled, so not read; use a head whose mask is a token")
    layers = ("aux_hidden_state_layer_ids", 0) if is_speculators else ("target_layer_ids", 1)
    fields = layer_sizes(keys) | {"num_layers": keys.count("num_hidden_layers"), "mask_token_id": mask}
    fields |= {"has_lm_head": files.has("lm_head.weight"), "taps": _taps(own, *layers)}
    fields["draft_vocab_size"] = own.count("draft_vocab_size", fields["vocab_size"])
    fields["block_size"] = own.count("block_size", outer.count("block_size", 16))
    fields["sample_from_anchor"] = own.flag("sample_from_anchor", False)
    fields["markov_rank"] = own.count("markov_rank") if rank else 0
    config: kinds.DflashConfig = _config(kinds.DflashConfig, files, target, **fields)
    tensors = _tensors(files, config, {}, "d2t")
    if config.markov_rank:
        tensors |= _markov(files, config, tensors.get("draft_ids"))
    return Head(config, tensors, files.where, "speculators" if is_speculators else "z-lab")


def _markov(files: HeadFiles, config: kinds.DflashConfig, ids: torch.Tensor | None) -> Tensors:
    """Their first matrix has a row for every token of the target; ours for every draft token, and one for all
    others: what those have in common, or zeros where they differ or where there are none."""
    rank = config.markov_rank
    found = files.read({MARKOV[0]: (config.vocab_size, rank), MARKOV[1]: (config.draft_vocab_size, rank)})
    first, drafted = found[MARKOV[0]], slice(None) if ids is None else ids
    is_other = torch.ones(len(first), dtype=torch.bool)
    is_other[drafted] = False
    others = first[is_other]
    is_one = len(others) > 0 and bool((others == others[:1]).all())
    rows = torch.cat([first[drafted], others[:1] if is_one else torch.zeros_like(first[:1])])
    return {"markov_w1.weight": rows, "markov_w2.weight": found[MARKOV[1]]}


def _medusa(files: HeadFiles, target: Checkpoint) -> Head:
    """In vLLM's names or as published: `0.0.linear.weight` is the first block of the first head and
    `0.1.weight` its output layer. Blocks without a bias are given one of zeros."""
    fields, is_vllm = files.fields, files.values.get("model_type") == "medusa"
    first = "blocks.0.layers.0.weight" if is_vllm else "0.0.linear.weight"
    prefix = next((p for p in MEDUSA_PREFIXES if files.has(p + first)), "")
    stored, is_shared = dict[str, str](), is_vllm and fields.flag("original_lm_head", False)
    if is_vllm:
        vocab, hidden, heads = (fields.count(name) for name in ("vocab_size", "hidden_size", "num_heads"))
        blocks, drafted = fields.count("num_hidden_layers", 1), fields.count("truncated_vocab_size", vocab)
        if is_shared and not files.has(f"{prefix}lm_head.weight"):
            stored["lm_head.weight"] = f"{prefix}lm_heads.0.weight"
    else:
        blocks, most = fields.count("medusa_num_layers", 1), 2 * kinds.LIMITS["num_heads_ahead"]
        found = sum(files.has(f"{prefix}{i}.0.linear.weight") for i in range(most))
        # configs were uploaded that name more heads than there are
        heads = min(fields.count("medusa_num_heads", found or None), found or 1)
        vocab, hidden = files.shape(f"{prefix}0.{blocks}.weight")
        drafted = vocab
        stored |= {f"lm_heads.{i}.weight": f"{prefix}{i}.{blocks}.weight" for i in range(heads)}
        for i, b, part in product(range(heads), range(blocks), ("weight", "bias")):
            stored[f"blocks.{i}.layers.{b}.{part}"] = f"{prefix}{i}.{b}.linear.{part}"
    kind = kinds.MedusaConfig if is_shared else kinds.SeparateMedusaConfig
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "draft_vocab_size": drafted, "num_blocks": blocks}
    sizes |= {"num_heads_ahead": heads, "has_lm_head": is_shared}
    config = _config(kind, files, target, rms_eps=target.config.rms_eps, **sizes)
    shapes = tensor_shapes(config)
    stored = {name: prefix + name for name in shapes} | {"draft_ids": f"{prefix}token_map"} | stored
    absent = [name for name in shapes if name.endswith(".bias") and not files.has(stored[name])]
    tensors = files.read({name: shape for name, shape in shapes.items() if name not in absent}, stored)
    tensors |= {name: torch.zeros(shapes[name]) for name in absent}
    return Head(config, tensors, files.where, "vllm" if is_vllm else "medusa")


def _mlp_speculator(files: HeadFiles, target: Checkpoint) -> Head:
    fields, prefix = files.fields, "speculator." if files.has("speculator.emb.0.weight") else ""
    vocab, width = fields.count("vocab_size"), fields.count("emb_dim")
    inner = fields.get("inner_dim") or width  # 0 means the same
    sizes = {"vocab_size": vocab, "hidden_size": width, "draft_vocab_size": vocab, "has_lm_head": False}
    sizes |= {"num_predict": fields.count("n_predict"), "inner_dim": inner}
    flags = {"is_tied": fields.flag("tie_weights", False), "is_scaled": fields.flag("scale_input", False)}
    config = _config(kinds.MlpSpeculatorConfig, files, target, rms_eps=1e-6, **sizes, **flags)
    shapes = tensor_shapes(config)
    tensors = files.read(shapes, {name: prefix + name for name in shapes})
    return Head(config, tensors, files.where, "mlp speculator")
