"""Medusa heads of other projects: as published, with an output layer a head, and in vLLM's form, which may
share one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline.heads.config import LIMITS, MedusaConfig, SeparateMedusaConfig
from paceline.heads.modules import tensor_shapes
from paceline.loaders.head_files import Head, HeadFiles, foreign_config

if TYPE_CHECKING:
    from paceline.loaders.checkpoint import Checkpoint

PREFIXES = ("", "medusa_head.", "medusa_heads.")


def matches(files: HeadFiles) -> bool:
    return "medusa_num_heads" in files.values or files.values.get("model_type") == "medusa"


def read(files: HeadFiles, target: Checkpoint) -> Head:
    return _vllm(files, target) if files.values.get("model_type") == "medusa" else _published(files, target)


def _published(files: HeadFiles, target: Checkpoint) -> Head:
    """`0.0.linear.weight` is the first block of the first head, `0.1.weight` its output layer."""
    blocks = files.fields.count("medusa_num_layers", 1)
    prefix = next((p for p in PREFIXES if files.has(f"{p}0.0.linear.weight")), "")
    found = sum(files.has(f"{prefix}{i}.0.linear.weight") for i in range(2 * LIMITS["num_heads_ahead"]))
    # configs were uploaded that name more heads than there are
    heads = min(files.fields.count("medusa_num_heads", found or None), found or 1)
    vocab, hidden = files.shape(f"{prefix}0.{blocks}.weight")
    config = foreign_config(
        SeparateMedusaConfig, files, target, vocab_size=vocab, hidden_size=hidden, draft_vocab_size=vocab,
        rms_eps=target.config.rms_eps, has_lm_head=False, num_heads_ahead=heads, num_blocks=blocks,
    )  # fmt: skip
    stored = {f"lm_heads.{i}.weight": f"{prefix}{i}.{blocks}.weight" for i in range(heads)}
    for i in range(heads):
        for b in range(blocks):
            for part in ("weight", "bias"):
                stored[f"blocks.{i}.layers.{b}.{part}"] = f"{prefix}{i}.{b}.linear.{part}"
    return Head(config, _read(files, config, stored), files.where, "medusa")


def _vllm(files: HeadFiles, target: Checkpoint) -> Head:
    fields = files.fields
    prefix = next((p for p in PREFIXES if files.has(f"{p}blocks.0.layers.0.weight")), "")
    is_shared, vocab = fields.flag("original_lm_head", False), fields.count("vocab_size")
    words = fields.count("truncated_vocab_size", vocab)
    config = foreign_config(
        MedusaConfig if is_shared else SeparateMedusaConfig, files, target, vocab_size=vocab,
        hidden_size=fields.count("hidden_size"), draft_vocab_size=words, rms_eps=target.config.rms_eps,
        has_lm_head=is_shared, num_heads_ahead=fields.count("num_heads"),
        num_blocks=fields.count("num_hidden_layers", 1),
    )  # fmt: skip
    stored = {name: prefix + name for name in tensor_shapes(config)}
    if is_shared and not files.has(f"{prefix}lm_head.weight"):
        stored["lm_head.weight"] = f"{prefix}lm_heads.0.weight"
    if words < vocab:
        stored["draft_ids"] = f"{prefix}token_map"
    return Head(config, _read(files, config, stored), files.where, "vllm")


def _read(files: HeadFiles, config: MedusaConfig, stored: dict[str, str]) -> dict[str, Any]:
    """Blocks without a bias are given one of zeros."""
    shapes = tensor_shapes(config)
    absent = [name for name in shapes if name.endswith(".bias") and not files.has(stored[name])]
    tensors = files.read({name: shape for name, shape in shapes.items() if name not in absent}, stored)
    return {**tensors, **{name: torch.zeros(shapes[name]) for name in absent}}
