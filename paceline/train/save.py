"""Writes and reads the heads we train: config.json, model.safetensors, provenance.json, and the drafter's own
int8 form.

Invariant: a folder is complete or absent: everything is written beside it and moved into place at the end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.core.errors import ConfigError, ModelFileError
from paceline.heads.config import HeadConfig, read_head_config, write_head_config
from paceline.loaders.fields import read_json
from paceline.models.quantize import GROUP, STORED, quantize

WEIGHTS, CONFIG, PROVENANCE = "model.safetensors", "config.json", "provenance.json"


def save_head(
    folder: Path,
    config: HeadConfig,
    tensors: Mapping[str, torch.Tensor],
    provenance: Mapping[str, Any],
    bits: int = 16,
) -> None:
    """bits: 16 for half precision, 8 for integers in groups of 64 with a scale each, as the CPU kernels read
    them.
    """
    from safetensors.torch import save_file

    if bits not in (8, 16):
        raise ConfigError(f"bits is {bits}; a head is stored with 16 or 8 bits a weight")
    wanted = config.tensor_shapes()
    assert {name: tuple(t.shape) for name, t in tensors.items()} == wanted, (
        "the tensors are not those of the config"
    )
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stored.update(
            _integers(name, tensor) if bits == 8 and tensor.ndim == 2 else {name: _halves(name, tensor)}
        )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / f"{WEIGHTS}.part", metadata={"format": "pt"})
    (folder / f"{WEIGHTS}.part").chmod(0o644)  # the library makes files that only their owner can read
    (folder / f"{WEIGHTS}.part").replace(folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(write_head_config(config), indent=1) + "\n")
    (folder / PROVENANCE).write_text(json.dumps(provenance, indent=1) + "\n")


def _halves(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.int32:
        return tensor.contiguous()
    if not bool(torch.isfinite(tensor).all()) or bool((tensor.abs() > 65504).any()):
        raise ModelFileError(
            f"{name} holds values that half precision cannot; the training went astray, lower the learning rate"
        )
    return tensor.half().contiguous()


def _integers(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    values, scales, _ = quantize(tensor.float(), 8)
    return {
        name: values.contiguous(),
        name.removesuffix(".weight") + ".scales": (scales * STORED).half().contiguous(),
    }


def read_head(folder: Path) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    """A head of ours, float32, to train it further or to look at it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = read_head_config(read_json(folder / CONFIG), str(folder / CONFIG))
    try:
        stored = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ModelFileError(
            f"{folder / WEIGHTS} is not a whole safetensors file ({error}); fetch or train it again"
        ) from error
    tensors = {}
    for name, shape in config.tensor_shapes().items():
        tensor = stored.get(name)
        scales = stored.get(name.removesuffix(".weight") + ".scales")
        if tensor is not None and tensor.dtype == torch.int8 and scales is not None:
            grouped = tensor.float().unflatten(1, (-1, GROUP[8])) * (scales.float() / STORED)[..., None]
            tensor = grouped.flatten(1)[:, : shape[-1]]
        if tensor is None or tuple(tensor.shape) != shape:
            found = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
            raise ModelFileError(
                f"{folder / WEIGHTS}: tensor {name} is {found} where the config asks for {list(shape)}"
            )
        tensors[name] = tensor if tensor.dtype == torch.int32 else tensor.float()
    return config, tensors
