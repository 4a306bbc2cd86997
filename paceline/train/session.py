"""A training from text to a head on disk: what `paceline train` runs once the text is written.

Writes DIR/model.safetensors, config.json, provenance.json and curves.png; what is needed to go on lies in
DIR/state.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline import __version__
from paceline.core.errors import ConfigError
from paceline.heads.config import TRUNK, DflashConfig, EagleConfig, MedusaConfig
from paceline.loaders.checkpoint import Checkpoint
from paceline.loaders.fields import read_json
from paceline.runtime.device import device_name
from paceline.train.acceptance import Acceptance
from paceline.train.lessons import Known, prepare
from paceline.train.recipes import RECIPES, Recipe
from paceline.train.save import PROVENANCE, STATE, load_state, read_head, save_head
from paceline.train.texts import Texts
from paceline.train.trainer import TrainConfig, Trainer, run


def train(
    checkpoint: Checkpoint, texts: Texts, recipes: Mapping[Path, Recipe], config: TrainConfig
) -> list[Acceptance]:
    """One head a recipe, all on the same passes of the target, each into its folder."""
    states = [folder / "state" for folder in recipes]
    begun = next((state for state in states if (state / STATE).exists()), None)
    if begun is not None and not config.is_resumed:
        remedy = "resume it (--resume), or choose another folder"
        raise ConfigError(f"{begun} holds a training that was begun; {remedy}")
    start, kinds = config.start, [recipe.kind for recipe in recipes.values()]
    starts = [start] * len(kinds)
    if start is not None and any((start / kind).is_dir() for kind in RECIPES):  # a head for some of the kinds
        starts = [start / kind if (start / kind).is_dir() else None for kind in kinds]
    lessons = prepare(checkpoint, texts, next(iter(recipes.values())), config.device, known=_known(starts))
    trainers = [Trainer(lessons, recipe, config.limit, config.seed) for recipe in recipes.values()]
    for trainer, state, first in zip(trainers, states, starts, strict=True):
        if config.is_resumed:
            load_state(trainer, state)
        elif first is not None:
            start_from(trainer, first)
    run(trainers, states, config)
    return [_finish(*one, config) for one in zip(trainers, recipes, starts, strict=True)]


def _finish(trainer: Trainer, folder: Path, first: Path | None, config: TrainConfig) -> Acceptance:
    """Measure on the other texts, save, draw."""
    last = trainer.place.curve[-1]
    held_out = Acceptance(last["tau"], tuple(last["by_position"]))
    apart = {name: trainer.accept(text, np.arange(len(text))) for name, text in config.others.items()}
    notes = provenance(trainer, config.command, {"held_out": held_out, **apart})
    if first is not None and (first / PROVENANCE).is_file():
        notes["before"] = {n: value for n, value in read_json(first / PROVENANCE).items() if n != "curve"}
    head = replace(trainer.config, first_accepted=round(held_out.by_position[0], 4))
    save_head(folder, head, trainer.tensors(), notes, config.bits)
    draw_curves(folder / "curves.png", trainer.place.curve, trainer.recipe.kind)
    config.report("saved", {"kind": trainer.recipe.kind, "acceptance": apart})
    return held_out


def _known(starts: Sequence[Path | None]) -> Known | None:
    """The tokens that heads draft, and the one that stands for a blank, are their own: other text does not
    change them."""
    read = [read_head(folder) for folder in starts if folder is not None]
    ids = next((tensors["draft_ids"].numpy() for _, tensors in read if "draft_ids" in tensors), None)
    blank = next((config.mask_token_id for config, _ in read if isinstance(config, DflashConfig)), 0)
    return None if ids is None else Known(ids, blank)


def start_from(trainer: Trainer, folder: Path) -> None:
    """Weights of an earlier head of the same shape and target; or of an EAGLE head, which becomes a trunk."""
    config, tensors = read_head(folder)
    wanted = trainer.config
    if isinstance(config, EagleConfig) and isinstance(wanted, MedusaConfig) and wanted.trunk is not None:
        config, wanted = replace(config, has_lm_head=False), wanted.trunk
        shared = ("draft_ids", "lm_head.weight")
        tensors = {name if name in shared else TRUNK + name: tensor for name, tensor in tensors.items()}
    # The hash says whose it is, not the name.
    config = replace(config, first_accepted=0.0, target_name=wanted.target_name)
    if isinstance(config, MedusaConfig) and config.trunk is not None:
        config = replace(config, trunk=replace(config.trunk, target_name=wanted.target_name))
    if config != wanted:
        differs = next(n for n in asdict(wanted) if getattr(config, n, None) != getattr(wanted, n))
        theirs, mine = getattr(config, differs, None), getattr(wanted, differs)
        what = f"{folder} has {differs} {theirs!r:.60} where the recipe makes {mine!r:.60}"
        raise ConfigError(f"{what}; start from a head of the same shape")
    ids = tensors.pop("draft_ids", None)
    if ids is not None and not np.array_equal(ids.numpy(), trainer.lessons.draft_ids):
        raise ConfigError(f"{folder} drafts other tokens than the heads beside it; train it by itself")
    with torch.no_grad():
        for name, weight in trainer.weights.items():
            if name in tensors:  # a trunk's head has no blocks yet
                weight.copy_(tensors[name])
            if name in trainer.average:
                trainer.average[name].copy_(weight)
    trainer.is_fresh = False


def provenance(trainer: Trainer, command: Sequence[str], found: Mapping[str, Acceptance]) -> dict[str, Any]:
    """How a head came to be."""
    place, lessons = trainer.place, trainer.lessons
    trained = {"steps": place.step, "rounds": place.round, "tokens": place.tokens}
    return {
        "version": __version__,
        "command": list(command),
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "target": {"name": trainer.config.target_name, "hash": trainer.config.target_hash},
        "text": {
            "sha256": lessons.digest,
            "sequences": len(lessons.texts),
            "tokens": int(lessons.texts.starts[-1]),
            "answer_tokens": lessons.texts.num_answer_tokens,
            "held_out": len(lessons.held),
        },
        "seed": trainer.seed,
        "recipe": asdict(trainer.recipe),
        "trained": {**trained, "seconds": round(place.seconds, 1)},
        "torch": torch.__version__,
        "device": device_name(trainer.device),
        "acceptance": {name: acceptance._asdict() for name, acceptance in found.items()},
        "curve": place.curve,
    }


def draw_curves(path: Path, curve: Sequence[dict[str, Any]], kind: str) -> None:
    """Loss and held-out tokens a step over the tokens read; nothing where there is no matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    millions = [record["tokens"] / 1e6 for record in curve]
    left.plot(millions[1:], [record["loss"] for record in curve[1:]], color="#c2410c")
    left.set(xlabel="million tokens read", ylabel="loss", title=f"{kind}: loss")
    right.plot(millions, [record["tau"] for record in curve], color="#0f766e", label="tokens a step")
    for k in range(len(curve[0]["by_position"])):
        chances = [record["by_position"][k] for record in curve]
        right.plot(millions, chances, color="#0f766e", alpha=0.5 / (k + 1) + 0.1, linewidth=1)
    right.set(xlabel="million tokens read", title="held-out: tokens a step; below, chance of each position")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
