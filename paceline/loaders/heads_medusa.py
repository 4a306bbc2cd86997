"""Medusa heads of other projects: as published, with an output layer a head, and in vLLM's form, which may
share one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import ConfigError, ModelFileError
from paceline.heads.config import MedusaConfig
from paceline.heads.others import SeparateMedusaConfig
from paceline.loaders.head_files import Head, HeadFiles

if TYPE_CHECKING:
    from paceline.loaders.checkpoint import Checkpoint

PREFIXES = ("", "medusa_head.", "medusa_heads.")


def matches(files: HeadFiles) -> bool:
    return "medusa_num_heads" in files.values or files.values.get("model_type") == "medusa"


def read(files: HeadFiles, target: Checkpoint) -> Head:
    return _vllm(files, target) if files.values.get("model_type") == "medusa" else _published(files, target)


def _config(
    files: HeadFiles,
    target: Checkpoint,
    is_shared: bool,
    heads: int,
    blocks: int,
    hidden: int,
    vocab: int,
    words: int,
) -> MedusaConfig:
    kind = MedusaConfig if is_shared else SeparateMedusaConfig
    fields: dict[str, Any] = {
        "target_name": str(files.values.get("base_model_name_or_path") or "another project's target"),
        "target_hash": "",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "target_layers": target.config.num_layers,
        "rms_eps": target.config.rms_eps,
        "draft_vocab_size": words,
        "has_lm_head": is_shared,
        "num_heads_ahead": heads,
        "num_blocks": blocks,
    }
    try:
        return kind(**fields)
    except ConfigError as error:
        raise ModelFileError(f"{files.where}: {error}") from error


def _published(files: HeadFiles, target: Checkpoint) -> Head:
    """`0.0.linear.weight` is the first block of the first head, `0.1.weight` its output layer."""
    blocks = files.fields.count("medusa_num_layers", 1)
    prefix = next((p for p in PREFIXES if files.has(f"{p}0.0.linear.weight")), "")
    found = sum(files.has(f"{prefix}{i}.0.linear.weight") for i in range(64))
    heads = min(
        files.fields.count("medusa_num_heads", found or None), found or 1
    )  # configs were uploaded that name more than there are
    vocab, hidden = files.shape(f"{prefix}0.{blocks}.weight")
    config = _config(files, target, False, heads, blocks, hidden, vocab, vocab)
    stored = {f"lm_heads.{i}.weight": f"{prefix}{i}.{blocks}.weight" for i in range(heads)}
    for part in ("weight", "bias"):
        stored |= {
            f"blocks.{i}.layers.{b}.{part}": f"{prefix}{i}.{b}.linear.{part}"
            for i in range(heads)
            for b in range(blocks)
        }
    return Head(config, _read(files, config, stored), files.where, "medusa")


def _vllm(files: HeadFiles, target: Checkpoint) -> Head:
    fields, prefix = (
        files.fields,
        next((p for p in PREFIXES if files.has(f"{p}blocks.0.layers.0.weight")), ""),
    )
    is_shared = fields.flag("original_lm_head", False)
    vocab = fields.count("vocab_size")
    words = fields.count("truncated_vocab_size", vocab)
    heads, blocks, hidden = (
        fields.count("num_heads"),
        fields.count("num_hidden_layers", 1),
        fields.count("hidden_size"),
    )
    config = _config(files, target, is_shared, heads, blocks, hidden, vocab, words)
    stored = {name: prefix + name for name in config.tensor_shapes()}
    if is_shared:
        stored["lm_head.weight"] = prefix + (
            "lm_head.weight" if files.has(f"{prefix}lm_head.weight") else "lm_heads.0.weight"
        )
    if words < vocab:
        stored["draft_ids"] = f"{prefix}token_map"
    return Head(config, _read(files, config, stored), files.where, "vllm")


def _read(files: HeadFiles, config: MedusaConfig, stored: dict[str, str]) -> dict[str, torch.Tensor]:
    """Blocks without a bias are given one of zeros."""
    shapes = config.tensor_shapes()
    absent = [name for name in shapes if name.endswith(".bias") and not files.has(stored[name])]
    tensors = files.read({name: shape for name, shape in shapes.items() if name not in absent}, stored)
    return {**tensors, **{name: torch.zeros(shapes[name]) for name in absent}}
