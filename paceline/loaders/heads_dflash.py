"""DFlash heads of other projects: z-lab's, whose layer numbers name layers that put out what is read, and
those of `speculators`, which count hidden states as we do and may have a vocabulary and a Markov head of
their own."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.heads.config import DflashConfig
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
REFUSED = ("use_swa", "causal", "attention_sink_bias", "attention_bias", "sliding_window_non_causal")
MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")


def matches(files: HeadFiles) -> bool:
    kind = files.values.get("speculators_model_type")
    return "dflash_config" in files.values or kind in ("dflash", "dspark")


def read(files: HeadFiles, target: Checkpoint) -> Head:
    is_speculators = "speculators_model_type" in files.values
    keys = files.fields.section("transformer_layer_config") if is_speculators else files.fields
    own = files.fields if is_speculators else files.fields.section("dflash_config")
    _refuse(files, keys, own)
    config: DflashConfig = foreign_config(
        DflashConfig, files, target, **layer_fields(keys), num_layers=keys.count("num_hidden_layers"),
        draft_vocab_size=own.count("draft_vocab_size", keys.count("vocab_size")),
        has_lm_head=files.has("lm_head.weight"), taps=_taps(files, own, is_speculators),
        block_size=own.count("block_size", files.fields.count("block_size", 16)),
        mask_token_id=own.get("mask_token_id"), sample_from_anchor=own.flag("sample_from_anchor", False),
        markov_rank=own.count("markov_rank") if own.get("markov_rank") else 0,
    )  # fmt: skip
    shapes = {name: shape for name, shape in tensor_shapes(config).items() if not name.startswith("markov")}
    tensors = files.read(shapes, {"draft_ids": "d2t"})
    if "draft_ids" in tensors:
        tensors["draft_ids"] = tensors["draft_ids"] + torch.arange(config.draft_vocab_size)
    if config.markov_rank:
        tensors |= _markov(files, config, tensors.get("draft_ids"))
    return Head(config, tensors, files.where, "speculators" if is_speculators else "z-lab")


def _refuse(files: HeadFiles, keys: Fields, own: Fields) -> None:
    refuse_any(REFUSED, files.fields, keys, own)
    types, mask = keys.get("layer_types"), own.get("mask_token_id")
    if isinstance(types, list) and any(kind != "full_attention" for kind in types):
        raise keys.refuse("layer_types", "holds other kinds than full_attention, which are not supported")
    if isinstance(mask, bool) or not isinstance(mask, int):
        raise own.refuse("mask_token_id", "is not a token; the config is damaged")
    if own.get("markov_rank") and own.text("markov_head_type", "vanilla") != "vanilla":
        raise own.refuse("markov_head_type", "is not supported; use a head with a vanilla Markov head")
    if (files.folder / "mask_embedding.pt").exists():
        raise files.error(
            "mask_embedding.pt is pickled and is not read; use a head whose mask is a token of the target"
        )


def _taps(files: HeadFiles, own: Fields, is_speculators: bool) -> tuple[int, ...]:
    name, shift = ("aux_hidden_state_layer_ids", 0) if is_speculators else ("target_layer_ids", 1)
    ids: Any = own.get(name)
    if not is_list_of_layers(ids):
        raise own.refuse(name, "is not a list of layers; the config is damaged")
    taps = tuple(i + shift for i in ids)
    log.info("%s: %s %s are the residual stream after %s layers", files.where, name, ids, taps)
    return taps


def _markov(files: HeadFiles, config: DflashConfig, ids: Tensor | None) -> dict[str, Tensor]:
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
