"""Writes and reads the heads we train: config.json, model.safetensors and provenance.json in a folder.

Invariant: weights are written beside their file and moved into place when they are whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import ConfigError, ModelFileError
from paceline.heads.config import HeadConfig, read_head_config, write_head_config
from paceline.heads.modules import tensor_shapes
from paceline.loaders.head_files import HeadFiles, scales_of
from paceline.models.quantize import STORED, quantize

WEIGHTS, CONFIG, PROVENANCE = "model.safetensors", "config.json", "provenance.json"
LARGEST_HALF = 65504


def save_head(
    folder: Path,
    config: HeadConfig,
    tensors: Mapping[str, Tensor],
    provenance: Mapping[str, Any],
    bits: int = 16,
) -> None:
    """bits: 16 for half precision, 8 for integers in groups of 64 with a scale each, as the CPU kernels read
    them.
    """
    from safetensors.torch import save_file

    if bits not in (8, 16):
        raise ConfigError(f"bits is {bits}; a head is stored with 16 or 8 bits a weight")
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    assert shapes == tensor_shapes(config), "the tensors are not those of the config"
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if bits == 8 and tensor.ndim == 2:
            values, scales, _ = quantize(tensor.float(), 8)
            stored |= {name: values.contiguous(), scales_of(name): (scales * STORED).half().contiguous()}
        else:
            stored[name] = _halves(name, tensor)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{WEIGHTS}.part"
    save_file(stored, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # the library makes files that only their owner can read
    partial.replace(folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(write_head_config(config), indent=1) + "\n")
    (folder / PROVENANCE).write_text(json.dumps(provenance, indent=1) + "\n")


def _halves(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.int32:
        return tensor.contiguous()
    if not bool(torch.isfinite(tensor).all()) or bool((tensor.abs() > LARGEST_HALF).any()):
        raise ModelFileError(
            f"{name} holds values that half precision cannot; the training went astray, lower the rate"
        )
    return tensor.half().contiguous()


def read_head(folder: Path) -> tuple[HeadConfig, dict[str, Tensor]]:
    """A head of ours, float32, to train it further or to look at it."""
    files = HeadFiles(folder)
    config = read_head_config(files.values, str(folder / CONFIG))
    return config, files.read(tensor_shapes(config))
