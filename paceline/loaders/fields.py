"""Typed reads from metadata that came with a model file.

Invariant: what a file says is never trusted. A value of the wrong type, not finite or out of range becomes a
ModelFileError that names the file, the key and the value, before anything is sized by it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ModelFileError
from paceline.models.config import ModelConfig

MAX_JSON_BYTES = 64 << 20
MAX_COUNT = (
    1 << 40
)  # larger than any size or position a real model has, small enough that products stay cheap
MAX_LAYERS = 1_024


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of sensible size."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelFileError(
                f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB, which no such file should be; fetch the model again"
            )
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(
            f"{path} cannot be read as JSON ({error or type(error).__name__}); fetch the model again"
        ) from error
    if not isinstance(value, dict):
        raise ModelFileError(
            f"{path} holds a JSON {type(value).__name__} where an object is expected; fetch the model again"
        )
    return value


@dataclass(frozen=True, slots=True)
class Fields:
    """A mapping and the name to blame in errors. A key that is absent or null takes the default; without one
    it is an error.
    """

    source: str
    values: Mapping[str, Any]

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def refuse(self, key: str, remedy: str) -> ModelFileError:
        return ModelFileError(f"{self.source}: {key} = {self._shown(key)} {remedy}")

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._value(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_COUNT:
            raise self.refuse(
                key,
                "is not a positive whole number of sensible size; the file is damaged or of an unknown kind",
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_COUNT:
            raise self.refuse(
                key, "is not a positive finite number; the file is damaged or of an unknown kind"
            )
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "is not true or false; the file is damaged or of an unknown kind")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, "is not a string; the file is damaged or of an unknown kind")
        return value

    def section(self, key: str) -> Fields:
        """A nested object; absent or null is empty."""
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.refuse(key, "is not an object; the file is damaged or of an unknown kind")
        return Fields(f"{self.source}: {key}", value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or none."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise self.refuse(
                key, "is not a token id or a list of them; the file is damaged or of an unknown kind"
            )
        return tuple(ids)

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelFileError(
                f"{self.source}: missing key {key}; the file is incomplete or of an unknown kind"
            )
        return value

    def _shown(self, key: str) -> str:
        shown = repr(self.values.get(key))
        return shown if len(shown) <= 60 else shown[:57] + "..."


def check_config(source: str, config: ModelConfig) -> None:
    """What the decoder takes for granted about a config, refused by name before `weight_names` is ever
    asked.
    """
    rope = config.rope
    problems = {
        f"{config.num_layers} layers: more than {MAX_LAYERS}": config.num_layers > MAX_LAYERS,
        f"{config.num_heads} heads are not a multiple of {config.num_kv_heads} KV heads": config.num_heads
        % config.num_kv_heads
        != 0,
        f"head size {config.head_dim} is odd, so rotary embedding cannot pair it": config.head_dim % 2 != 0,
        "rotary divisors do not match the head size": rope.divisors is not None
        and len(rope.divisors) != config.head_dim // 2,
        "a rotary divisor is not a positive number": any(
            not (math.isfinite(d) and d > 0) for d in rope.divisors or ()
        ),
        "the sliding window is given for some layers only": len(config.local_layers)
        not in (0, config.num_layers),
        "sliding-window layers have no window size": any(config.local_layers)
        and config.sliding_window is None,
    }
    for problem, is_found in problems.items():
        if is_found:
            raise ModelFileError(f"{source}: {problem}; the file is damaged or of an unknown kind")
