"""What a training leaves on disk: a head (config.json, model.safetensors and provenance.json in a folder),
and on the way its checkpoint (weights, averages, moments and the place in the data in one safetensors file).

Invariant: weights are written beside their file and moved into place when they are whole. A checkpoint has
the recipe, target and text of the training that goes on from it, or it is an error that says which differs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.errors import ConfigError, ModelFileError
from paceline.heads.config import HeadConfig, read_head_config, write_head_config
from paceline.heads.modules import tensor_shapes
from paceline.loaders.head_files import HeadFiles, scales_of
from paceline.models.quantize import STORED, quantize

if TYPE_CHECKING:
    from paceline.train.trainer import Trainer

WEIGHTS, CONFIG, PROVENANCE = "model.safetensors", "config.json", "provenance.json"
STATE = "state.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")
LARGEST_HALF = 65504
Tensors = Mapping[str, Tensor]


def save_head(
    folder: Path, config: HeadConfig, tensors: Tensors, provenance: Mapping[str, Any], bits: int
) -> None:
    """bits: 16 for half precision, 8 for integers in groups of 64 with a scale each, as the CPU kernels read
    them."""
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    assert shapes == tensor_shapes(config), "the tensors are not those of the config"
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if bits == 8 and tensor.ndim == 2:
            values, scales, _ = quantize(tensor.float(), 8)
            stored |= {name: values.contiguous(), scales_of(name): (scales * STORED).half().contiguous()}
        else:
            stored[name] = _halves(name, tensor)
    _write(folder / WEIGHTS, stored, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(write_head_config(config), indent=1) + "\n")
    (folder / PROVENANCE).write_text(json.dumps(provenance, indent=1) + "\n")


def _halves(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.int32:
        return tensor.contiguous()
    if not bool(torch.isfinite(tensor).all()) or bool((tensor.abs() > LARGEST_HALF).any()):
        what = f"{name} holds values that half precision cannot"
        raise ModelFileError(f"{what}; the training went astray, lower the rate")
    return tensor.half().contiguous()


def read_head(folder: Path) -> tuple[HeadConfig, dict[str, Tensor]]:
    """A head of ours, float32, to train it further or to look at it."""
    files = HeadFiles(folder)
    config = read_head_config(files.values, str(folder / CONFIG))
    return config, files.read(tensor_shapes(config))


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.part")
    save_file(tensors, partial, metadata=metadata)
    partial.chmod(0o644)  # the library makes files that only their owner can read
    partial.replace(path)


def _identity(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint must share with the training that goes on from it."""
    return {
        "recipe": json.loads(json.dumps(asdict(trainer.recipe))),
        "target": f"{trainer.config.target_name} ({trainer.config.target_hash[:12]})",
        "text": trainer.lessons.digest,
        "seed": trainer.seed,
    }


def save_state(trainer: Trainer, folder: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for name, weight in trainer.weights.items():
        tensors[f"weight:{name}"] = weight.detach()
        moments = trainer.optimizer.state.get(weight, {})
        tensors.update({f"{moment}:{name}": moments[moment] for moment in MOMENTS if moment in moments})
    tensors.update({f"average:{name}": weight for name, weight in trainer.average.items()})
    place = {name: getattr(trainer.place, name) for name in trainer.place.__slots__}
    numbers = json.dumps({"identity": _identity(trainer), "place": place})
    _write(folder / STATE, {n: t.contiguous().cpu() for n, t in tensors.items()}, {"numbers": numbers})


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
    for name, value in _identity(trainer).items():
        if theirs.get(name) != value:
            what = f"{folder} was trained with {name} {theirs.get(name)!r:.90}, not {value!r:.90}"
            raise ConfigError(f"{what}; resume with the same, or start anew")
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
