"""Where a model runs, and how much memory is free there."""

from __future__ import annotations

import os
import platform

import torch

from paceline.core.errors import ConfigError
from paceline.models.config import ModelConfig

SPARE_ON_GPU = 2**31  # bytes left for activations and graphs


def resolve(name: str) -> torch.device:
    """ "auto" is the first GPU, or the CPU where there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name != "cpu" and not (name == "cuda" or (name.startswith("cuda:") and name[5:].isdigit())):
        raise ConfigError(f"device is {name!r}; choose auto, cpu, cuda or cuda:N")
    if name != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r} and no CUDA device can be used here; choose cpu")
    if name[5:] and int(name[5:]) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ConfigError(f"device is {name!r} and there are {count} CUDA devices; choose cuda:0 or another")
    return torch.device(name)


def free_memory(device: torch.device, model: ModelConfig, dtype: str) -> int:
    """Bytes that a KV cache can have: without swapping on a CPU, beside the weights on a GPU."""
    if device.type != "cpu":
        weights = sum(torch.Size(shape).numel() for shape in model.weight_names().values())
        width = {"int4": 0.57, "int8": 1.04, "float32": 4.0}.get(dtype, 2.0)  # bytes a weight, scales counted
        return max(0, int(torch.cuda.mem_get_info(device)[0] - weights * width - SPARE_ON_GPU))
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def device_name(device: torch.device) -> str:
    """What a person would call it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
