"""DFlash heads of other projects: z-lab's, whose layer numbers name layers that put out what is read, and
those of `speculators`, which count hidden states as we do and may have a vocabulary and a Markov head of
their own."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import ConfigError, ModelFileError
from paceline.heads.config import DflashConfig
from paceline.loaders.fields import Fields
from paceline.loaders.head_files import Head, HeadFiles
from paceline.loaders.hf_config import rope_of

if TYPE_CHECKING:
    from paceline.loaders.checkpoint import Checkpoint

log = logging.getLogger("paceline")
REFUSED = ("use_swa", "causal", "attention_sink_bias", "attention_bias", "sliding_window_non_causal")
MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")


def matches(files: HeadFiles) -> bool:
    return "dflash_config" in files.values or files.values.get("speculators_model_type") in (
        "dflash",
        "dspark",
    )


def read(files: HeadFiles, target: Checkpoint) -> Head:
    is_speculators = "speculators_model_type" in files.values
    keys = files.fields.section("transformer_layer_config") if is_speculators else files.fields
    own = files.fields if is_speculators else files.fields.section("dflash_config")
    _refuse(files, keys, own)
    rank = own.count("markov_rank") if own.get("markov_rank") else 0
    if rank and own.text("markov_head_type", "vanilla") != "vanilla":
        raise own.refuse("markov_head_type", "is not supported; use a head with a vanilla Markov head")
    vocab = keys.count("vocab_size")
    size = own.count("draft_vocab_size", vocab)
    config = _config(files, keys, own, target, vocab, size, rank, is_speculators)
    shapes = {name: shape for name, shape in config.tensor_shapes().items() if not name.startswith("markov")}
    tensors = files.read(shapes, {"draft_ids": "d2t"})
    if "draft_ids" in tensors:
        tensors["draft_ids"] = tensors["draft_ids"] + torch.arange(size)
    if rank:
        tensors |= _markov(files, config, tensors.get("draft_ids"))
    return Head(config, tensors, files.where, "speculators" if is_speculators else "z-lab")


def _refuse(files: HeadFiles, keys: Fields, own: Fields) -> None:
    for fields in (files.fields, keys, own):
        for name in REFUSED:
            if fields.get(name):
                raise fields.refuse(name, "is not supported; use a head without it")
    types = keys.get("layer_types")
    if isinstance(types, list) and any(kind != "full_attention" for kind in types):
        raise keys.refuse("layer_types", "holds other kinds than full_attention, which are not supported")
    if (files.folder / "mask_embedding.pt").exists():
        raise ModelFileError(
            f"{files.where}: mask_embedding.pt is pickled and is not read; use a head whose mask is a token of the target"
        )


def _config(
    files: HeadFiles,
    keys: Fields,
    own: Fields,
    target: Checkpoint,
    vocab: int,
    size: int,
    rank: int,
    is_speculators: bool,
) -> DflashConfig:
    heads, hidden = keys.count("num_attention_heads"), keys.count("hidden_size")
    mask = own.get("mask_token_id")
    if isinstance(mask, bool) or not isinstance(mask, int):
        raise own.refuse("mask_token_id", "is not a token; the config is damaged")
    block = own.count("block_size", files.fields.count("block_size", 16))
    verifier = files.fields.section("speculators_config").section("verifier").get("name_or_path")
    try:
        return DflashConfig(
            target_name=str(verifier or "another project's target"), target_hash="", vocab_size=vocab, hidden_size=hidden,
            target_layers=target.config.num_layers, rms_eps=keys.number("rms_norm_eps", 1e-6), draft_vocab_size=size,
            has_lm_head=files.has("lm_head.weight"), num_heads=heads, num_kv_heads=keys.count("num_key_value_heads", heads),
            head_dim=keys.count("head_dim", hidden // heads or None), intermediate_size=keys.count("intermediate_size"), rope=rope_of(keys),
            taps=_taps(files, own, is_speculators), num_layers=keys.count("num_hidden_layers"), block_size=block, mask_token_id=mask,
            sample_from_anchor=own.flag("sample_from_anchor", False), markov_rank=rank,
        )  # fmt: skip
    except ConfigError as error:
        raise ModelFileError(f"{files.where}: {error}") from error


def _taps(files: HeadFiles, own: Fields, is_speculators: bool) -> tuple[int, ...]:
    name, shift = ("aux_hidden_state_layer_ids", 0) if is_speculators else ("target_layer_ids", 1)
    ids = own.get(name)
    if (
        not isinstance(ids, list)
        or not ids
        or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    ):
        raise own.refuse(name, "is not a list of layers; the config is damaged")
    taps = tuple(i + shift for i in ids)
    log.info("%s: %s %s are the residual stream after %s layers", files.where, name, ids, taps)
    return taps


def _markov(files: HeadFiles, config: DflashConfig, ids: torch.Tensor | None) -> dict[str, Any]:
    """Their first matrix has a row for every token of the target; ours for every draft token, and one for all
    others.
    """
    shapes = {
        "first": (config.vocab_size, config.markov_rank),
        "second": (config.draft_vocab_size, config.markov_rank),
    }
    found = files.read(shapes, dict(zip(shapes, MARKOV, strict=True)))
    first = found["first"]
    rows = first if ids is None else first[ids]
    return {
        "markov_w1.weight": torch.cat([rows, _other_row(first, ids)]),
        "markov_w2.weight": found["second"],
    }


def _other_row(first: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """[1, rank]: what the tokens that cannot be drafted have in common; zero where they differ, or where
    there are none.
    """
    is_other = torch.ones(len(first), dtype=torch.bool)
    is_other[slice(None) if ids is None else ids] = False
    others = first[is_other]
    return others[:1] if len(others) and bool((others == others[:1]).all()) else torch.zeros_like(first[:1])
