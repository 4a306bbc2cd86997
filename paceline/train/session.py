"""A training from text to a head on disk: what `paceline train` and scripts/train_heads.py share.

Writes DIR/model.safetensors, config.json, provenance.json and curves.png; what is needed to go on lies in
DIR/state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline import __version__
from paceline.core.errors import ConfigError
from paceline.heads.config import TRUNK, DflashConfig, EagleConfig, HeadConfig, MedusaConfig
from paceline.loaders.checkpoint import Checkpoint
from paceline.loaders.fields import read_json
from paceline.runtime.device import device_name
from paceline.train.acceptance import Acceptance
from paceline.train.curves import draw_curves
from paceline.train.lessons import Known, prepare
from paceline.train.recipes import RECIPES, Recipe
from paceline.train.resume import STATE, load_state
from paceline.train.save import PROVENANCE, read_head, save_head
from paceline.train.shards import Texts
from paceline.train.trainer import Limit, Report, Trainer, run


def train(
    checkpoint: Checkpoint,
    texts: Texts,
    recipes: Sequence[Recipe],
    limit: Limit,
    folders: Sequence[Path],
    *,
    device: torch.device,
    seed: int,
    command: Sequence[str],
    report: Report,
    states: Sequence[Path] | None = None,
    is_resumed: bool = False,
    start: Path | None = None,
    others: Mapping[str, Texts] | None = None,
    bits: int = 16,
    is_over: Callable[[], bool] = lambda: False,
    num_measures: int = 20,
) -> list[Acceptance]:
    """One head a recipe, all on the same passes of the target, each into its folder.

    states: where checkpoints lie. start: a head whose weights are the first ones, or a folder of one for each
    kind. others: more texts to measure acceptance on at the end.
    """
    states = states or [folder / "state" for folder in folders]
    begun = next((state for state in states if (state / STATE).exists()), None)
    if begun is not None and not is_resumed:
        raise ConfigError(
            f"{begun} holds a training that was begun; resume it (--resume), or choose another folder"
        )
    starts = [_start_of(recipe, start) for recipe in recipes]
    lessons = prepare(checkpoint, texts, recipes[0], device, known=_known(starts))
    trainers = [Trainer(lessons, recipe, limit, seed) for recipe in recipes]
    for trainer, state, first in zip(trainers, states, starts, strict=True):
        if is_resumed:
            load_state(trainer, state)
        elif first is not None:
            start_from(trainer, first)
    run(trainers, states, report, is_over, num_measures)
    return [
        _finish(trainer, folder, first, command, others or {}, bits, report)
        for trainer, folder, first in zip(trainers, folders, starts, strict=True)
    ]


def _finish(
    trainer: Trainer,
    folder: Path,
    first: Path | None,
    command: Sequence[str],
    others: Mapping[str, Texts],
    bits: int,
    report: Report,
) -> Acceptance:
    """Measure once more, save, draw."""
    last = trainer.place.curve[-1]
    found = Acceptance(last["tau"], tuple(last["by_position"]))
    apart = {name: trainer.accept(text, np.arange(len(text))) for name, text in others.items()}
    notes = provenance(trainer, command, found, apart)
    if first is not None and (first / PROVENANCE).is_file():
        notes["before"] = {
            name: value for name, value in read_json(first / PROVENANCE).items() if name != "curve"
        }
    config = replace(trainer.config, first_accepted=round(found.by_position[0], 4))
    save_head(folder, config, trainer.tensors(), notes, bits)
    draw_curves(folder / "curves.png", trainer.place.curve, trainer.recipe.kind)
    report("saved", {"folder": str(folder), "kind": trainer.recipe.kind, "acceptance": notes["acceptance"]})
    return found


def _start_of(recipe: Recipe, start: Path | None) -> Path | None:
    """The head that a recipe's training starts from; none where a folder has heads of other kinds only."""
    if start is None or not any((start / kind).is_dir() for kind in RECIPES):
        return start
    return start / recipe.kind if (start / recipe.kind).is_dir() else None


def _known(starts: Sequence[Path | None]) -> Known | None:
    """The tokens that heads draft, and the one that stands for a blank, are their own: other text does not
    change them.
    """
    read = [read_head(folder) for folder in starts if folder is not None]
    ids = next(
        (tensors["draft_ids"].numpy().astype(np.int64) for _, tensors in read if "draft_ids" in tensors), None
    )
    blank = next((config.mask_token_id for config, _ in read if isinstance(config, DflashConfig)), 0)
    return None if ids is None else Known(ids, blank)


def start_from(trainer: Trainer, folder: Path) -> None:
    """Weights of an earlier head of the same shape and target; or of an EAGLE head, which becomes a trunk."""
    config, tensors = read_head(folder)
    wanted = trainer.config
    if isinstance(config, EagleConfig) and isinstance(wanted, MedusaConfig) and wanted.trunk is not None:
        config, wanted = replace(config, has_lm_head=False), wanted.trunk
        tensors = {
            name if name in ("draft_ids", "lm_head.weight") else TRUNK + name: tensor
            for name, tensor in tensors.items()
        }
    config = _renamed(config, wanted.target_name)  # the hash says whose it is, not the name
    if config != wanted:
        differs = next(n for n in asdict(wanted) if getattr(config, n, None) != getattr(wanted, n))
        theirs, mine = getattr(config, differs, None), getattr(wanted, differs)
        raise ConfigError(
            f"{folder} has {differs} {theirs!r:.60} where the recipe makes {mine!r:.60}; start from a head of the same shape"
        )
    ids = tensors.pop("draft_ids", None)
    if ids is not None and not np.array_equal(ids.numpy(), trainer.lessons.draft_ids):
        raise ConfigError(f"{folder} drafts other tokens than the heads beside it; train it by itself")
    with torch.no_grad():
        for name, weight in trainer.head.named_parameters():
            if name in tensors:  # a trunk's head has no blocks yet
                weight.copy_(tensors[name])
            if name in trainer.average:
                trainer.average[name].copy_(weight)
    trainer.is_fresh = False


def _renamed(config: HeadConfig, name: str) -> HeadConfig:
    config = replace(config, first_accepted=0.0, target_name=name)
    if isinstance(config, MedusaConfig) and config.trunk is not None:
        config = replace(config, trunk=replace(config.trunk, target_name=name))
    return config


def provenance(
    trainer: Trainer, command: Sequence[str], found: Acceptance, apart: Mapping[str, Acceptance]
) -> dict[str, Any]:
    """How a head came to be."""
    place, device = trainer.place, trainer.device
    return {
        "version": __version__,
        "command": list(command),
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "target": {"name": trainer.config.target_name, "hash": trainer.config.target_hash},
        "text": {
            "sha256": trainer.lessons.digest,
            "sequences": len(trainer.lessons.texts),
            "tokens": int(trainer.lessons.texts.starts[-1]),
            "answer_tokens": trainer.lessons.texts.num_answer_tokens,
            "held_out": len(trainer.lessons.held),
        },
        "seed": trainer.seed,
        "recipe": asdict(trainer.recipe),
        "trained": {
            "steps": place.step,
            "rounds": place.round,
            "tokens": place.tokens,
            "seconds": round(place.seconds, 1),
        },
        "torch": torch.__version__,
        "device": device_name(device),
        "acceptance": {
            name: {"tau": a.tau, "by_position": list(a.by_position)}
            for name, a in {"held_out": found, **apart}.items()
        },
        "curve": place.curve,
    }
