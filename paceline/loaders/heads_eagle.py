"""EAGLE heads of other projects: EAGLE-1 and -3 as published, SpecForge's, vLLM's and those of `speculators`.

They differ in tensor names, and in what a layer's number means: in `speculators` and vLLM's own files it
counts hidden states (the residual stream after n layers, as we do), in SpecForge's nested `eagle_config` it
is a layer whose output is read, one less. Invariant: what a config asks for and the drafter does not do is
refused by name.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ModelFileError
from paceline.heads.config import Eagle1Config, EagleConfig, default_taps
from paceline.heads.modules import tensor_shapes
from paceline.loaders.fields import Fields
from paceline.loaders.head_files import (
    Head,
    HeadFiles,
    foreign_config,
    is_list_of_layers,
    layer_fields,
    refuse_any,
)  # fmt: skip

if TYPE_CHECKING:
    from paceline.loaders.checkpoint import Checkpoint

log = logging.getLogger("paceline")
SPECFORGE = "LlamaForCausalLMEagle3"
REFUSED = ("fc_norm", "norm_before_fc", "use_aux_norm", "attention_bias", "mlp_bias")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
LOSSLESS = {"verifier_accept_k": 1, "accept_tolerance": 0.0}
QUERIES = "self_attn.q_proj.weight"


def matches(files: HeadFiles) -> bool:
    kind = files.values.get("speculators_model_type")
    if kind is not None:
        return kind == "eagle3"
    has_parts = files.has(_prefix(files) + "fc.weight") and _layer(files) is not None
    return has_parts and "dflash_config" not in files.values


def read(files: HeadFiles, target: Checkpoint) -> Head:
    prefix, layer, outer = _prefix(files), _layer(files), files.fields
    if layer is None:
        raise files.error(
            "no layer 'midlayer' or 'layers.0'; the file is incomplete or of another kind of head"
        )
    keys = outer.section("transformer_layer_config") if "transformer_layer_config" in files.values else outer
    _refuse(outer, keys)
    fields = layer_fields(keys) | {"qk_norm": files.has(f"{prefix}{layer}self_attn.q_norm.weight")}
    width, has_output = fields["hidden_size"], files.has(f"{prefix}lm_head.weight")
    if outer.count("target_hidden_size", width) != width:
        raise outer.refuse(
            "target_hidden_size", f"differs from the head's own {width}, which is not supported"
        )
    is_first = files.shape(f"{prefix}fc.weight")[1:] == (2 * width,) and not has_output
    if is_first:
        own = {"draft_vocab_size": fields["vocab_size"], "has_fc_bias": files.has(f"{prefix}fc.bias")}
        config = foreign_config(Eagle1Config, files, target, **fields, **own, has_lm_head=False)
    else:
        own = _eagle_3(files, keys, prefix, target)
        config = foreign_config(EagleConfig, files, target, **fields, **own, has_lm_head=has_output)
    shapes = tensor_shapes(config)
    stored = {name: prefix + name.replace("midlayer.", layer) for name in shapes} | {
        "draft_ids": f"{prefix}d2t"
    }
    tensors = files.read(shapes, stored)
    if "draft_ids" in tensors:  # theirs are offsets
        tensors["draft_ids"] += tensors["draft_ids"].new_ones(config.draft_vocab_size).cumsum(0) - 1
    return Head(config, tensors, files.where, "eagle 1" if is_first else _dialect(files))


def _prefix(files: HeadFiles) -> str:
    return "model." if files.has("model.fc.weight") else ""


def _layer(files: HeadFiles) -> str | None:
    parts = ("midlayer.", "layers.0.")
    return next((part for part in parts if files.has(_prefix(files) + part + QUERIES)), None)


def _refuse(outer: Fields, keys: Fields) -> None:
    refuse_any(REFUSED, outer, keys, outer.section("eagle_config"))
    if keys.count("num_hidden_layers", 1) != 1:
        raise keys.refuse("num_hidden_layers", "is not supported; an EAGLE head has one layer")
    for method in outer.section("speculators_config").get("proposal_methods") or ():
        if isinstance(method, dict) and {**LOSSLESS, **method} != {**method, **LOSSLESS}:
            what = f"proposal {method} accepts what the target would not say"
            raise ModelFileError(f"{outer.source}: {what}; use a lossless proposal")


def _eagle_3(files: HeadFiles, keys: Fields, prefix: str, target: Checkpoint) -> dict[str, Any]:
    """What EAGLE-3's config has beside its layer."""
    outer, vocab = files.fields, keys.count("vocab_size")
    size = outer.count("draft_vocab_size", keys.count("draft_vocab_size", vocab))
    if size < vocab and not files.has(f"{prefix}d2t"):
        raise files.error(
            f"missing tensor d2t, which says what the {size} draft tokens are; fetch the head again"
        )
    flags = {name: outer.flag(name, False) for name in ("norm_before_residual", "norm_output")}
    return {"draft_vocab_size": size, "taps": _taps(files, target), **flags}


def _dialect(files: HeadFiles) -> str:
    if "speculators_model_type" in files.values:
        return "speculators"
    return "specforge" if SPECFORGE in (files.values.get("architectures") or ()) else "eagle 3"


def _taps(files: HeadFiles, target: Checkpoint) -> tuple[int, ...]:
    """The target's layers that are read, as we count them; how they were understood is logged."""
    nested, dialect = files.fields.section("eagle_config").get(LAYER_IDS), _dialect(files)
    ids: Any = files.values.get(LAYER_IDS)
    shift = 1 if ids is None and nested is not None and dialect == "specforge" else 0
    ids = nested if ids is None else ids
    if ids is None:
        taps = default_taps(target.config.num_layers)
        log.info("%s: no layers are named; taking the usual %s", files.where, taps)
        return taps
    if not is_list_of_layers(ids):
        raise files.error(f"{LAYER_IDS} = {ids!r} is not a list of layers; the config is damaged")
    taps = tuple(i + shift for i in ids)
    said = "outputs of layers" if shift else "hidden states"
    message = "%s: layers %s are %s in the %s format: the residual stream after %s layers"
    log.info(message, files.where, ids, said, dialect, taps)
    return taps
