"""A training from text to a head on disk: what `paceline train` runs once the text is written.

Writes a head, provenance.json and curves.png into a folder; what is needed to go on lies in its state/.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline import __version__
from paceline.core.errors import ConfigError, ModelFileError
from paceline.heads import config as heads
from paceline.heads.config import HeadConfig
from paceline.heads.modules import tensor_shapes
from paceline.loaders.checkpoint import Checkpoint
from paceline.loaders.fields import read_json
from paceline.loaders.head_files import HeadFiles, Tensors, scales_of, write_tensors
from paceline.models.quantize import STORED, quantize
from paceline.runtime.backend import device_name
from paceline.train.lessons import Known, prepare
from paceline.train.recipes import RECIPES, Recipe
from paceline.train.students import Acceptance
from paceline.train.texts import Texts
from paceline.train.trainer import STATE, TrainConfig, Trainer

WEIGHTS, CONFIG, PROVENANCE = "model.safetensors", "config.json", "provenance.json"


def train(
    checkpoint: Checkpoint, texts: Texts, recipes: Mapping[Path, Recipe], config: TrainConfig
) -> list[Acceptance]:
    """One head a recipe, all on the same passes of the target, each into its folder."""
    states = [folder / "state" for folder in recipes]
    begun = next((state for state in states if (state / STATE).exists()), None)
    if begun is not None and not config.is_resumed:
        raise ConfigError(f"{begun} holds a training that was begun; resume it (--resume), or choose another")
    start, kinds = config.start, [recipe.kind for recipe in recipes.values()]
    starts = [start] * len(kinds)
    if start is not None and any((start / kind).is_dir() for kind in RECIPES):  # a head for some of the kinds
        starts = [start / kind if (start / kind).is_dir() else None for kind in kinds]
    lessons = prepare(checkpoint, texts, next(iter(recipes.values())), config.device, known=_known(starts))
    trainers = [Trainer(lessons, recipe, config) for recipe in recipes.values()]
    for trainer, state, first in zip(trainers, states, starts, strict=True):
        if config.is_resumed:
            trainer.load(state)
        elif first is not None:
            start_from(trainer, first)
    for trainer in trainers:
        weights = sum(weight.numel() for weight in trainer.weights.values())
        words = {"drafts": len(lessons.draft_ids), "covered": lessons.covered}
        config.report("begun", {"weights": weights, **words, **trainer.numbers()})
    run(trainers, states)
    return [_finish(*one) for one in zip(trainers, recipes, starts, strict=True)]


def run(trainers: Sequence[Trainer], folders: Sequence[Path]) -> None:
    """Train all on the same batches to their limit, or until `is_over`; checkpoints lie in their folders."""
    first, started, config = trainers[0], time.perf_counter(), trainers[0].asked
    assert all(t.place.batch == first.place.batch for t in trainers)
    before, taps = first.place.seconds, sorted({tap for t in trainers for tap in t.config.hidden_layers})
    next_measure = math.floor(first.share * config.num_measures + 1) / config.num_measures

    def measure_all(chosen: Iterable[Trainer]) -> None:
        for trainer in chosen:
            config.report("measured", trainer.measure())

    def save_all() -> None:
        for trainer, folder in zip(trainers, folders, strict=True):
            trainer.save(folder)

    measure_all(trainer for trainer in trainers if not trainer.place.curve)
    while first.share < 1 and not config.is_over():
        for batch in first.rest_of_round():
            there = batch.to(first.device)
            seen, teacher = first.lessons.target.observe(there, taps, first.head.draft_ids)
            for trainer in trainers:
                trainer.place.seconds = before + time.perf_counter() - started
                config.report("step", trainer.learn(there, seen, teacher))
            if first.share >= next_measure:
                next_measure += 1 / config.num_measures
                measure_all(trainers)
                save_all()
            if first.share >= 1 or config.is_over():
                break
        else:
            for trainer in trainers:
                trainer.place.round, trainer.place.batch = trainer.place.round + 1, 0
    save_all()
    measure_all(t for t in trainers if t.place.curve[-1]["step"] < t.place.step)


def _finish(trainer: Trainer, folder: Path, first: Path | None) -> Acceptance:
    """Measure on the other texts, save, draw."""
    last, config = trainer.place.curve[-1], trainer.asked
    held_out = Acceptance(last["tau"], tuple(last["by_position"]))
    apart = {name: trainer.accept(text, np.arange(len(text))) for name, text in config.others.items()}
    notes = provenance(trainer, {"held_out": held_out, **apart})
    if first is not None and (first / PROVENANCE).is_file():
        notes["before"] = {n: value for n, value in read_json(first / PROVENANCE).items() if n != "curve"}
    head = replace(trainer.config, first_accepted=round(held_out.by_position[0], 4))
    save_head(folder, head, trainer.head.tensors(), notes, config.bits)
    draw_curves(folder / "curves.png", trainer.place.curve, trainer.recipe.kind)
    config.report("saved", {"kind": trainer.recipe.kind, "acceptance": apart})
    return held_out


def _known(starts: Sequence[Path | None]) -> Known | None:
    """The tokens that heads draft and the blank are their own: other text does not change them."""
    read = [read_head(folder) for folder in starts if folder is not None]
    ids = next((tensors["draft_ids"].numpy() for _, tensors in read if "draft_ids" in tensors), None)
    blank = next((config.mask_token_id for config, _ in read if isinstance(config, heads.DflashConfig)), 0)
    return None if ids is None else (ids, blank)


def start_from(trainer: Trainer, folder: Path) -> None:
    """Weights of an earlier head of the same shape and target; or of an EAGLE head, which becomes a trunk."""
    (config, tensors), wanted = read_head(folder), trainer.config
    trunk = wanted.trunk if isinstance(wanted, heads.MedusaConfig) else None
    if isinstance(config, heads.EagleConfig) and trunk is not None:
        config, wanted = replace(config, has_lm_head=False), trunk
        shared = ("draft_ids", "lm_head.weight")
        tensors = {name if name in shared else heads.TRUNK + name: tensor for name, tensor in tensors.items()}
    # The hash says whose it is, not the name.
    config = replace(config, first_accepted=0.0, target_name=wanted.target_name)
    if isinstance(config, heads.MedusaConfig) and config.trunk is not None:
        config = replace(config, trunk=replace(config.trunk, target_name=wanted.target_name))
    if config != wanted:
        name = next(n for n in asdict(wanted) if getattr(config, n, None) != getattr(wanted, n))
        theirs, mine = getattr(config, name, None), getattr(wanted, name)
        what = f"{folder} has {name} {theirs!r:.60} where the recipe makes {mine!r:.60}"
        raise ConfigError(f"{what}; start from a head of the same shape")
    ids = tensors.pop("draft_ids", None)
    if ids is not None and not np.array_equal(ids.numpy(), trainer.lessons.draft_ids):
        raise ConfigError(f"{folder} drafts other tokens than the heads beside it; train it by itself")
    with torch.no_grad():
        for name, weight in trainer.weights.items():
            if name in tensors:  # a trunk's head has no blocks yet
                weight.copy_(tensors[name])
    trainer.is_fresh = False


def provenance(trainer: Trainer, found: Mapping[str, Acceptance]) -> dict[str, Any]:
    """How a head came to be."""
    place, lessons, texts = trainer.place, trainer.lessons, trainer.lessons.texts
    text = {"sha256": lessons.digest, "sequences": len(texts), "tokens": int(texts.starts[-1])}
    text |= {"answer_tokens": texts.num_answer_tokens, "held_out": len(lessons.held)}
    trained = {"steps": place.step, "rounds": place.round, "tokens": place.tokens}
    return {
        "version": __version__,
        "command": list(trainer.asked.command),
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "target": {"name": trainer.config.target_name, "hash": trainer.config.target_hash},
        "text": {**text, "covered_by_drafts": round(lessons.covered, 4)},
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
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    millions = [record["tokens"] / 1e6 for record in curve]
    left.plot(millions[1:], [record["loss"] for record in curve[1:]], color="#c2410c")
    left.set(xlabel="million tokens read", ylabel="loss", title=f"{kind}: loss")
    right.plot(millions, [record["tau"] for record in curve], color="#0f766e")
    right.plot(millions, [record["by_position"] for record in curve], color="#0f766e", alpha=0.4, linewidth=1)
    right.set(xlabel="million tokens read", title="held-out: tokens a step; below, chance of each position")
    right.set_ylim(bottom=0)
    figure.savefig(path, dpi=110)


def save_head(folder: Path, config: HeadConfig, tensors: Tensors, notes: dict[str, Any], bits: int) -> None:
    """bits: 16 for half precision, 8 for integers in groups of 64 with a scale each."""
    assert {name: tuple(t.shape) for name, t in tensors.items()} == tensor_shapes(config), "of another config"
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if bits == 8 and tensor.ndim == 2:
            values, scales, _ = quantize(tensor.float(), 8)
            stored |= {name: values.contiguous(), scales_of(name): (scales * STORED).half().contiguous()}
            continue
        stored[name] = (tensor if tensor.dtype == torch.int32 else tensor.half()).contiguous()
        if not bool(torch.isfinite(stored[name]).all()):
            raise ModelFileError(f"{name} holds values that half precision cannot; lower the training rate")
    write_tensors(folder / WEIGHTS, stored, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(heads.write_head_config(config), indent=1) + "\n")
    (folder / PROVENANCE).write_text(json.dumps(notes, indent=1) + "\n")


def read_head(folder: Path) -> tuple[HeadConfig, Tensors]:
    """A head of ours, float32, to train it further or to look at it."""
    files = HeadFiles(folder)
    config = heads.read_head_config(files.values, str(folder / CONFIG))
    return config, files.read(tensor_shapes(config))
