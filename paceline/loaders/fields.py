"""What both file formats share: typed reads from metadata, the model config, checks of tensors, fingerprints.

Invariant: what a file says is never trusted. A value of the wrong type, not finite or out of range becomes a
ModelFileError that names the file, the key and the value, before anything is sized by it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ModelFileError
from paceline.models.config import Family, ModelConfig

MAX_JSON_BYTES = 64 << 20
MAX_COUNT = 1 << 40  # above any size or position of a real model, and products of two stay cheap
MAX_LAYERS = 1_024
MAX_DRAFTING = 4  # layers behind a decoder's that only draft
DRAFTING = ("glm4_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next")  # families that may have such
ALL = slice(None)  # rows of a tensor
NUM_SAMPLES, SAMPLE_BYTES = 64, 512
ROTARY = ("rotary_emb", "attn_rot")  # in the names of tensors that follow from the config
Shapes = Mapping[str, tuple[int, ...]]
DAMAGED = "the file is damaged or of an unknown kind"


def one_line(error: object, limit: int = 200) -> str:
    """An error's message, or its type where it has none, for use inside another message."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


def read_text(path: Path, max_bytes: int) -> str:
    """The text of a JSON file of sensible size."""
    try:
        if path.stat().st_size <= max_bytes:
            return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be read ({error}); fetch the model again") from error
    raise ModelFileError(f"{path} is over {max_bytes >> 20} MiB, too large for its kind; fetch it again")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of sensible size."""
    text = read_text(path, MAX_JSON_BYTES)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not JSON ({one_line(error)}); fetch the model again") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} holds a JSON {type(value).__name__}, no object; fetch the model again")
    return value


def read_fields(path: Path, is_optional: bool = False) -> Fields:
    """What a JSON file says; is_optional: nothing where there is none."""
    return Fields(str(path), {} if is_optional and not path.is_file() else read_json(path))


@dataclass(frozen=True, slots=True)
class Fields:
    """A mapping, and its file for errors. An absent or null key takes the default, or is an error without."""

    source: str
    values: Mapping[str, Any]

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def spelling(self, *keys: str) -> str:
        """Of several spellings of a key the first that is there, else the last."""
        return next((key for key in keys if self.values.get(key) is not None), keys[-1])

    def refuse(self, key: str, remedy: str) -> ModelFileError:
        return ModelFileError(f"{self.source}: {key} = {self.values.get(key)!r:.60} {remedy}")

    def refuse_any(self, keys: Iterable[str], remedy: str) -> None:
        """What a file asks for and nothing here does is refused by name."""
        for key in keys:
            if self.values.get(key):
                raise self.refuse(key, f"is not supported; {remedy}")

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self._typed(key, default, (int, float), "a number")
        if not 0 < value <= MAX_COUNT:
            raise self.refuse(key, f"is not a positive number of sensible size; {DAMAGED}")
        return float(value)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.number(key, default)
        if not value.is_integer():
            raise self.refuse(key, f"is not a whole number; {DAMAGED}")
        return int(value)

    def factors(self, key: str) -> tuple[float, ...]:
        """A list of positive finite numbers."""
        values = self._typed(key, None, list, "a list")
        if not all(type(value) in (int, float) and 0 < value <= MAX_COUNT for value in values):
            raise self.refuse(key, f"is not a list of positive numbers; {DAMAGED}")
        return tuple(map(float, values))

    def flag(self, key: str, default: bool | None = None) -> bool:
        return bool(self._typed(key, default, bool, "true or false"))

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._typed(key, default, str, "a string"))

    def section(self, key: str) -> Fields:
        """A nested object; absent or null is empty."""
        return Fields(f"{self.source}: {key}", self._typed(key, {}, Mapping, "an object"))

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or none."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise self.refuse(key, f"is not a token id or a list of them; {DAMAGED}")
        return tuple(ids)

    def _typed(self, key: str, default: Any, kind: type | tuple[type, ...], what: str) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelFileError(f"{self.source}: missing key {key}; {DAMAGED}")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.refuse(key, f"is not {what}; {DAMAGED}")
        return value


NORMED = {"qk_norm": True}
NORMED_OVER_HEADS = {"qk_norm": True, "qk_norm_over_heads": True}
FIXED: dict[Family, dict[str, Any]] = {  # by a family, unless its files say otherwise
    "gemma3": {"sandwich_norm": True, "activation": "gelu_tanh", **NORMED},
    "gemma4": {
        "sandwich_norm": True, "activation": "gelu_tanh", "attention_scale": 1.0, "value_norm": True,
        "layer_scalars": True, **NORMED,
    },
    "gpt_oss": {"activation": "clamped", "attention_sinks": True},
    "olmo2": {"post_norm": True, **NORMED_OVER_HEADS}, "olmo3": {"post_norm": True, **NORMED_OVER_HEADS},
    "olmoe": NORMED_OVER_HEADS, "qwen3": NORMED, "qwen3_moe": NORMED, "qwen3_next": NORMED,
    "qwen3_5": NORMED, "qwen3_5_moe": NORMED,
}  # fmt: skip


def family_config(source: str, family: Family, **values: Any) -> ModelConfig:
    """What the file says, and what its family fixes. What the decoder takes for granted is checked here."""
    values = FIXED.get(family, {}) | values
    if family in ("gemma3", "gemma4"):
        import numpy as np

        values["embed_scale"] = float(np.float32(values["hidden_size"] ** 0.5))
    config = ModelConfig(family=family, **values)
    heads, dims = config.num_heads, [kind.head_dim for kind in config.kinds]
    turned, even = config.rotary_width, all(heads % kind.num_kv_heads == 0 for kind in config.kinds)
    windows, sets = config.local_layers, (config.rope.divisors, config.rope.long_divisors)
    is_part = turned % 2 == 0 and turned <= config.head_dim
    recurrent = config.recurrent
    uneven = recurrent is not None and recurrent.value_heads % recurrent.key_heads
    checks = (
        (config.num_layers <= MAX_LAYERS, f"{config.num_layers} layers: more than {MAX_LAYERS}"),
        (even, f"{heads} heads are not a multiple of {config.num_kv_heads} KV heads"),
        (
            not any(dim % 2 for dim in dims),
            f"head size {dims[-1]} is odd, so rotary embedding cannot pair it",
        ),
        (is_part, f"rotary embedding cannot turn {turned} numbers of a head of {config.head_dim}"),
        (all(len(d or ()) in (0, turned // 2) for d in sets), "rotary divisors do not match the head size"),
        (all(0 < x < math.inf for d in sets for x in d or ()), "a rotary divisor is not a positive number"),
        (len(windows) in (0, config.num_layers), "the sliding window is given for some layers only"),
        (not any(windows) or config.sliding_window, "sliding-window layers have no window size"),
        (len(config.rope_layers) in (0, config.num_layers), "no_rope_layers is given for some layers only"),
        (recurrent is None or len(recurrent.layers) == config.num_layers, "layer_types are not one a layer"),
        (recurrent is None or not all(recurrent.layers), "no layer attends"),
        (not uneven, "the recurrent value heads are not a multiple of the key heads"),
    )
    for is_right, problem in checks:
        if not is_right:
            raise ModelFileError(f"{source}: {problem}; {DAMAGED}")
    return config


def place_rows(config: ModelConfig, names: Mapping[str, str]) -> tuple[dict[str, range], Shapes]:
    """The rows of the file's tensor that are each weight's, and the shapes of those tensors. Weights that
    share one (phi's q, k and v) are its rows one after another, in the order of `weight_names`."""
    rows: dict[str, range] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for weight, shape in config.weight_names().items():
        first = shapes.get(names[weight], (0,))[0]
        rows[weight] = range(first, first + shape[0])
        shapes[names[weight]] = (first + shape[0], *shape[1:])
    return rows, shapes


def check_weights(path: Path, config: ModelConfig, wanted: Shapes, found: Shapes, layers: str) -> None:
    """Every wanted tensor is in the file with its shape, and no layer has a tensor beyond those. layers:
    begins the names of all layers' tensors; some families have layers for drafting behind the last."""
    check_shapes(path, found, wanted)
    others = (name for name in found.keys() - wanted.keys() if name.startswith(layers))
    unused = [name for name in others if not any(part in name for part in ROTARY)]
    if config.family in DRAFTING:
        behind = tuple(f"{layers}{config.num_layers + i}." for i in range(MAX_DRAFTING))
        unused = [name for name in unused if not name.startswith(behind)]
    if unused:
        raise ModelFileError(f"{path}: tensor {min(unused)} is not part of a {config.family} decoder")


def check_shapes(path: Path, found: Shapes, wanted: Shapes) -> None:
    """Every wanted tensor is found with its shape, or one error names the first that is not."""
    missing = [name for name in wanted if name not in found]
    if missing:
        listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ModelFileError(f"{path}: missing tensor {listed}; the file is incomplete, fetch it again")
    for name, shape in wanted.items():
        if found[name] != shape:
            shapes = f"has shape {list(found[name])} where its config asks for {list(shape)}"
            raise ModelFileError(f"{path}: tensor {name} {shapes}; they are not of the same model")


def unique_ids(ids: Iterable[int | None], vocab_size: int) -> tuple[int, ...]:
    """Token ids in order, once each, without the unset and the impossible ones."""
    return tuple(dict.fromkeys(i for i in ids if i is not None and 0 <= i < vocab_size))


def fingerprint(paths: Sequence[Path], header_bytes: int) -> str:
    """A cheap hash of names, sizes, first bytes and spread samples: a fine-tune differs from its base."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(header_bytes))
            for i in range(NUM_SAMPLES):
                file.seek(size * i // NUM_SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
