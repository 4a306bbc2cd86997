"""In which numbers a KV cache keeps keys and values, and how many bytes a token takes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from paceline.core.types import SCALE_BYTES
from paceline.models.config import ModelConfig


class KvFormat(NamedTuple):
    """How keys and values are kept. Integers have scales behind them; how many, their writers and readers
    agree.
    """

    keys: torch.dtype
    values: torch.dtype
    has_value_scales: bool = True  # if values are integers; else theirs lie behind the keys too


FLOATS = KvFormat(torch.float32, torch.float32)


def row_widths(config: ModelConfig, kept: KvFormat) -> tuple[int, int]:
    """Elements a head of one token takes, of its key and its value."""
    keys, values = (SCALE_BYTES if dtype == torch.int8 else 0 for dtype in (kept.keys, kept.values))
    return config.head_dim + keys, config.head_dim + values * kept.has_value_scales


def bytes_per_token(config: ModelConfig, kept: KvFormat) -> int:
    keys, values = row_widths(config, kept)
    return (
        config.num_layers * config.num_kv_heads * (keys * kept.keys.itemsize + values * kept.values.itemsize)
    )
