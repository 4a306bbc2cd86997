"""A training's checkpoint: weights, averages, moments and the place in the data in one safetensors file,
whole or absent.

Invariant: what is loaded belongs to the same recipe, target and text, or it is an error that says which
differs.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.errors import ConfigError, ModelFileError

if TYPE_CHECKING:
    from paceline.train.trainer import Trainer

MOMENTS = ("exp_avg", "exp_avg_sq")
STATE = "state.safetensors"


def identity(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint must share with the training that goes on from it."""
    return {
        "recipe": json.loads(json.dumps(asdict(trainer.recipe))),
        "target": f"{trainer.config.target_name} ({trainer.config.target_hash[:12]})",
        "text": trainer.lessons.digest,
        "seed": trainer.seed,
    }


def save_state(trainer: Trainer, folder: Path) -> None:
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, weight in trainer.weights.items():
        tensors[f"weight:{name}"] = weight.detach()
        moments = trainer.optimizer.state.get(weight, {})
        tensors.update({f"{moment}:{name}": moments[moment] for moment in MOMENTS if moment in moments})
    tensors.update({f"average:{name}": weight for name, weight in trainer.average.items()})
    place = {name: getattr(trainer.place, name) for name in trainer.place.__slots__}
    numbers = json.dumps({"identity": identity(trainer), "place": place})
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{STATE}.part"
    save_file({n: t.contiguous().cpu() for n, t in tensors.items()}, partial, metadata={"numbers": numbers})
    partial.replace(folder / STATE)


def load_state(trainer: Trainer, folder: Path) -> None:
    """Go on from a checkpoint."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    if not (folder / STATE).is_file():
        raise ConfigError(f"{folder} holds no checkpoint of a training ({STATE}); start without resuming")
    try:
        with safe_open(folder / STATE, framework="pt") as opened:
            numbers = json.loads(opened.metadata()["numbers"])
        tensors = load_file(folder / STATE)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ModelFileError(f"{folder / STATE} is not a whole checkpoint ({error}); start anew") from error
    theirs = numbers.get("identity", {})
    for name, value in identity(trainer).items():
        if theirs.get(name) != value:
            raise ConfigError(
                f"{folder} was trained with {name} {theirs.get(name)!r:.90}, not {value!r:.90}; "
                "resume with the same, or start anew"
            )
    trainer.place = type(trainer.place)(**numbers["place"])
    steps = torch.tensor(float(trainer.place.step))
    with torch.no_grad():
        for name, weight in trainer.weights.items():
            weight.copy_(tensors[f"weight:{name}"])
            if f"{MOMENTS[0]}:{name}" in tensors:
                state = {moment: tensors[f"{moment}:{name}"].to(weight.device) for moment in MOMENTS}
                state["step"] = steps.to(weight.device).clone()
                trainer.optimizer.state[weight] = state
        for name in trainer.average:
            trainer.average[name].copy_(tensors[f"average:{name}"])
