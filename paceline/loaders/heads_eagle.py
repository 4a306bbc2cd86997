"""EAGLE heads of other projects: EAGLE-1 and -3 as published, SpecForge's, vLLM's and those of `speculators`.

They differ in tensor names, and in what a layer's number means: in `speculators` and vLLM's own files it
counts hidden states (the residual stream after n layers, as we do), in SpecForge's nested `eagle_config` it
is a layer whose output is read, one less. Invariant: what a config asks for and the drafter does not do is
refused by name.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError, ModelFileError
from paceline.heads.config import EagleConfig, default_taps
from paceline.heads.others import Eagle1Config
from paceline.loaders.fields import Fields
from paceline.loaders.head_files import Head, HeadFiles
from paceline.loaders.hf_config import rope_of

if TYPE_CHECKING:
    from paceline.loaders.checkpoint import Checkpoint

log = logging.getLogger("paceline")
SPECFORGE = "LlamaForCausalLMEagle3"
REFUSED = ("fc_norm", "norm_before_fc", "use_aux_norm", "attention_bias", "mlp_bias")
NORMS = ("q_norm", "k_norm")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def matches(files: HeadFiles) -> bool:
    kind = files.values.get("speculators_model_type")
    if kind is not None:
        return kind == "eagle3"
    return (
        _prefix(files) + "fc.weight" in files.names
        and _layer(files) is not None
        and "dflash_config" not in files.values
    )


def read(files: HeadFiles, target: Checkpoint) -> Head:
    prefix, layer = _prefix(files), _layer(files)
    if layer is None:
        raise ModelFileError(
            f"{files.where}: no layer 'midlayer' or 'layers.0'; the file is incomplete or of another kind of head"
        )
    keys = (
        files.fields.section("transformer_layer_config")
        if "transformer_layer_config" in files.values
        else files.fields
    )
    _refuse(files.fields, keys)
    is_first = files.shape(f"{prefix}fc.weight")[1:] == (2 * keys.count("hidden_size"),) and not files.has(
        f"{prefix}lm_head.weight"
    )
    config = (_eagle_1 if is_first else _eagle_3)(files, keys, prefix, target)
    stored = {name: prefix + name.replace("midlayer.", layer) for name in config.tensor_shapes()}
    shapes = dict(config.tensor_shapes())
    for name in NORMS:
        if files.has(f"{prefix}{layer}self_attn.{name}.weight"):
            shapes[f"midlayer.self_attn.{name}.weight"] = (config.head_dim,)
            stored[f"midlayer.self_attn.{name}.weight"] = f"{prefix}{layer}self_attn.{name}.weight"
    if "draft_ids" in shapes:
        stored["draft_ids"] = f"{prefix}d2t"
    tensors = files.read(shapes, stored)
    if "draft_ids" in tensors:
        tensors["draft_ids"] = (
            tensors["draft_ids"] + tensors["draft_ids"].new_ones(config.draft_vocab_size).cumsum(0) - 1
        )
    return Head(config, tensors, files.where, "eagle 1" if is_first else _dialect(files))


def _prefix(files: HeadFiles) -> str:
    return "model." if files.has("model.fc.weight") else ""


def _layer(files: HeadFiles) -> str | None:
    names = (f"{part}self_attn.q_proj.weight" for part in ("midlayer.", "layers.0."))
    return next(
        (n.removesuffix("self_attn.q_proj.weight") for n in names if files.has(_prefix(files) + n)), None
    )


def _refuse(outer: Fields, keys: Fields) -> None:
    for fields in (outer, keys, outer.section("eagle_config")):
        for name in REFUSED:
            if fields.get(name):
                raise fields.refuse(name, "is not supported; use a head without it")
    if keys.count("num_hidden_layers", 1) != 1:
        raise keys.refuse("num_hidden_layers", "is not supported; an EAGLE head has one layer")
    for method in outer.section("speculators_config").get("proposal_methods") or ():
        if isinstance(method, dict) and (
            method.get("verifier_accept_k", 1) != 1 or method.get("accept_tolerance", 0.0) != 0.0
        ):
            raise ModelFileError(
                f"{outer.source}: proposal {method} accepts what the target would not say; use a lossless proposal"
            )


def _shared(files: HeadFiles, keys: Fields, target: Checkpoint) -> dict[str, Any]:
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    outer = files.fields.count("target_hidden_size", hidden)
    if outer != hidden:
        raise files.fields.refuse(
            "target_hidden_size", f"differs from the head's own {hidden}, which is not supported"
        )
    verifier = files.fields.section("speculators_config").section("verifier").get("name_or_path")
    return {
        "target_name": str(verifier or "another project's target"),
        "target_hash": "",
        "vocab_size": keys.count("vocab_size"),
        "hidden_size": hidden,
        "target_layers": target.config.num_layers,
        "rms_eps": keys.number("rms_norm_eps", 1e-6),
        "num_heads": heads,
        "num_kv_heads": keys.count("num_key_value_heads", heads),
        "head_dim": keys.count("head_dim", hidden // heads or None),
        "intermediate_size": keys.count("intermediate_size"),
        "rope": rope_of(keys),
    }


def _made(kind: Any, files: HeadFiles, **fields: Any) -> Any:
    try:
        return kind(**fields)
    except ConfigError as error:
        raise ModelFileError(f"{files.where}: {error}") from error


def _eagle_1(files: HeadFiles, keys: Fields, prefix: str, target: Checkpoint) -> Eagle1Config:
    shared = _shared(files, keys, target)
    has_bias = files.has(f"{prefix}fc.bias")
    config: Eagle1Config = _made(
        Eagle1Config,
        files,
        **shared,
        draft_vocab_size=shared["vocab_size"],
        has_lm_head=False,
        has_fc_bias=has_bias,
    )
    return config


def _eagle_3(files: HeadFiles, keys: Fields, prefix: str, target: Checkpoint) -> EagleConfig:
    shared, outer = _shared(files, keys, target), files.fields
    size = outer.count("draft_vocab_size", keys.count("draft_vocab_size", shared["vocab_size"]))
    if size < shared["vocab_size"] and not files.has(f"{prefix}d2t"):
        raise ModelFileError(
            f"{files.where}: missing tensor d2t, which says what the {size} draft tokens are; fetch the head again"
        )
    config: EagleConfig = _made(
        EagleConfig, files, **shared, draft_vocab_size=size, has_lm_head=files.has(f"{prefix}lm_head.weight"), taps=_taps(files, target),
        norm_before_residual=outer.flag("norm_before_residual", False), norm_output=outer.flag("norm_output", False),
    )  # fmt: skip
    return config


def _dialect(files: HeadFiles) -> str:
    if "speculators_model_type" in files.values:
        return "speculators"
    return "specforge" if SPECFORGE in (files.values.get("architectures") or ()) else "eagle 3"


def _taps(files: HeadFiles, target: Checkpoint) -> tuple[int, ...]:
    """The target's layers that are read, as we count them; how they were understood is logged."""
    nested, dialect = files.fields.section("eagle_config").get(LAYER_IDS), _dialect(files)
    ids = files.values.get(LAYER_IDS)
    shift = 0
    if ids is None and nested is not None:
        ids, shift = nested, 1 if dialect == "specforge" else 0
    if ids is None:
        taps = default_taps(target.config.num_layers)
        log.info("%s: no layers are named; taking the usual %s", files.where, taps)
        return taps
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ModelFileError(
            f"{files.where}: {LAYER_IDS} = {ids!r} is not a list of layers; the config is damaged"
        )
    taps = tuple(i + shift for i in ids)
    said = "outputs of layers" if shift else "hidden states"
    log.info(
        "%s: layers %s are %s in the %s format: the residual stream after %s layers",
        files.where,
        ids,
        said,
        dialect,
        taps,
    )
    return taps
