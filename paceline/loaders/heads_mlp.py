"""MLP speculators as IBM writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.heads.config import MlpSpeculatorConfig
from paceline.heads.modules import tensor_shapes
from paceline.loaders.head_files import Head, HeadFiles, foreign_config

if TYPE_CHECKING:
    from paceline.loaders.checkpoint import Checkpoint


def matches(files: HeadFiles) -> bool:
    return files.values.get("model_type") == "mlp_speculator"


def read(files: HeadFiles, target: Checkpoint) -> Head:
    fields, prefix = files.fields, "speculator." if files.has("speculator.emb.0.weight") else ""
    vocab, width = fields.count("vocab_size"), fields.count("emb_dim")
    config = foreign_config(
        MlpSpeculatorConfig, files, target, vocab_size=vocab, hidden_size=width, rms_eps=1e-6,
        draft_vocab_size=vocab, has_lm_head=False, num_predict=fields.count("n_predict"),
        inner_dim=fields.get("inner_dim") or width,  # 0 means the same
        is_tied=fields.flag("tie_weights", False), is_scaled=fields.flag("scale_input", False),
    )  # fmt: skip
    shapes = tensor_shapes(config)
    tensors = files.read(shapes, {name: prefix + name for name in shapes})
    return Head(config, tensors, files.where, "mlp speculator")
