"""MLP speculators as IBM writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError, ModelFileError
from paceline.heads.others import MlpSpeculatorConfig
from paceline.loaders.head_files import Head, HeadFiles

if TYPE_CHECKING:
    from paceline.loaders.checkpoint import Checkpoint


def matches(files: HeadFiles) -> bool:
    return files.values.get("model_type") == "mlp_speculator"


def read(files: HeadFiles, target: Checkpoint) -> Head:
    fields = files.fields
    vocab, width = fields.count("vocab_size"), fields.count("emb_dim")
    steps = fields.count("n_predict")
    if steps > 16:
        raise fields.refuse("n_predict", "is more than 16 steps; the config is damaged")
    inner = fields.get("inner_dim") or width  # 0 means the same
    prefix = "speculator." if files.has("speculator.emb.0.weight") else ""
    try:
        config = MlpSpeculatorConfig(
            target_name="another project's target", target_hash="", vocab_size=vocab, hidden_size=width,
            target_layers=target.config.num_layers, rms_eps=1e-6, draft_vocab_size=vocab, has_lm_head=False, inner_dim=int(inner),
            num_predict=steps, is_tied=fields.flag("tie_weights", False), is_scaled=fields.flag("scale_input", False),
        )  # fmt: skip
    except (ConfigError, TypeError, ValueError) as error:
        raise ModelFileError(f"{files.where}: {error}") from error
    shapes = config.tensor_shapes()
    return Head(
        config, files.read(shapes, {name: prefix + name for name in shapes}), files.where, "mlp speculator"
    )
