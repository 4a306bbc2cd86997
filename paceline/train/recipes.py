"""How each kind is trained: one frozen recipe a kind, and the head's sizes for a given target.

Losses and weights are the papers' (EAGLE-3: soft cross-entropy, 0.8 a step; Medusa: 0.8 a head; DFlash:
exp(-k / 4); distillation: KL and total variation); rates and batches are ours, for small heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError
from paceline.core.options import require
from paceline.heads import config as heads
from paceline.models.config import ModelConfig

WIDTH = 576  # of the model that the rates were found on
LAYER_SIZES = ("num_heads", "num_kv_heads", "head_dim", "rope")  # the target's own
COUNTS = (
    "num_steps", "batch_tokens", "max_length", "num_layers", "num_taps", "num_blocks", "num_held_out",
)  # fmt: skip


class Mix(NamedTuple):
    """How much of which loss."""

    soft: float = 1.0  # cross-entropy with the teacher's distribution: KL divergence up to a constant
    hard: float = 0.0  # with the teacher's first choice
    variation: float = 0.0  # half the sum of |p - q|: the chance of rejection


@dataclass(frozen=True, slots=True)
class Recipe:
    kind: str
    mix: Mix
    decay: float  # weight of a step, of the one before
    num_steps: int = 5  # of a draft that are trained and measured
    rate: float = 1e-3  # of learning, at its highest, for a width of WIDTH
    warm_up: float = 0.03  # of the training
    batch_tokens: int = 32_768
    max_length: int = 1536
    draft_vocab_size: int = 0  # 0: as many tokens as cover most of the answers
    num_layers: int = 3  # of a block drafter or a draft model
    intermediate_size: int = 0  # 0: the target's
    num_taps: int = 3
    num_blocks: int = 2  # residual blocks of a Medusa head
    has_trunk: bool = False  # a layer that reads the text before Medusa's heads
    markov_rank: int = 128
    has_lm_head: bool = True
    clip: float = 1.0
    weight_decay: float = 0.0
    num_held_out: int = 512  # greedy answers that acceptance is measured on

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, name, value, "use a whole number, 1 or more")
        size, remedy = self.draft_vocab_size, "use a whole number, or 0 to choose it by the text"
        require(isinstance(size, int) and size >= 0, "draft_vocab_size", size, remedy)
        require(0 < self.rate <= 0.1, "rate", self.rate, "use a number up to 0.1, such as 1e-3")


RECIPES: dict[str, Recipe] = {
    "eagle": Recipe("eagle", Mix(soft=1.0), decay=0.8),
    "medusa": Recipe("medusa", Mix(soft=0.5, hard=0.5), decay=0.8),
    "dflash": Recipe("dflash", Mix(soft=0.5, hard=0.5), decay=0.78, num_taps=5, has_lm_head=False),
    "draft": Recipe("draft", Mix(soft=1.0, variation=0.5), decay=1.0, rate=6e-4, has_lm_head=False),
}


def recipe_for(kind: str, **changes: Any) -> Recipe:
    if kind not in RECIPES:
        raise ConfigError(f"{kind!r} cannot be trained; choose {', '.join(RECIPES)}")
    return replace(RECIPES[kind], **changes)


def shared_fields(target: ModelConfig, name: str, digest: str, draft_vocab: int) -> dict[str, Any]:
    """What every head of this target has in its config."""
    sizes = {name: getattr(target, name) for name in ("vocab_size", "hidden_size", "rms_eps")}
    sizes |= {"target_layers": target.num_layers, "draft_vocab_size": min(draft_vocab, target.vocab_size)}
    return {"target_name": name, "target_hash": digest, **sizes}


def head_config(recipe: Recipe, target: ModelConfig, name: str, digest: str, blank: int) -> heads.HeadConfig:
    """The head that a recipe makes for a target; kinds that attend have the target's sizes."""
    shared = shared_fields(target, name, digest, recipe.draft_vocab_size)
    shared["has_lm_head"] = recipe.has_lm_head
    layered = shared | {name: getattr(target, name) for name in LAYER_SIZES}
    layered["intermediate_size"] = recipe.intermediate_size or target.intermediate_size
    taps, depth = heads.default_taps(target.num_layers, recipe.num_taps), recipe.num_layers
    if recipe.kind == "medusa":
        layered["has_lm_head"] = False
        trunk = heads.EagleConfig(**layered, taps=taps) if recipe.has_trunk else None
        count, blocks = recipe.num_steps, recipe.num_blocks
        return heads.MedusaConfig(**shared, num_heads_ahead=count, num_blocks=blocks, trunk=trunk)
    if recipe.kind == "eagle":
        return heads.EagleConfig(**layered, taps=taps)
    if recipe.kind == "dflash":
        layered |= {"block_size": recipe.num_steps, "mask_token_id": blank}
        return heads.DflashConfig(**layered, taps=taps, num_layers=depth, markov_rank=recipe.markov_rank)
    return heads.DraftConfig(**layered, num_layers=depth)
