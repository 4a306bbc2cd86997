"""What the engine needs from a model file, whichever format it has.

Invariant: opening reads and checks headers only; `tensor` then reads one weight at a time, so memory stays
bounded by the largest tensor. gguf.py and safetensors.py are the two formats; tokenizer.py reads
`TokenizerSource`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.core.errors import ConfigError, ModelFileError

if TYPE_CHECKING:
    import torch

    from paceline.models.config import ModelConfig

NUM_SAMPLES, SAMPLE_BYTES = 64, 512
ROTARY = ("rotary_emb", "attn_rot")  # in the names of tensors that follow from the config
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Where a tokenizer is described. At most one of `json_path` and `gguf_metadata` is set."""

    json_path: Path | None = None
    gguf_metadata: Mapping[str, Any] | None = None  # full keys, such as "tokenizer.ggml.tokens"
    config: Mapping[str, Any] = field(default_factory=dict)  # tokenizer_config.json
    chat_template: str | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()


class Checkpoint(Protocol):
    """An opened model: its description, and its weights on demand."""

    name: str
    path: Path
    config: ModelConfig
    eos_ids: tuple[int, ...]  # every token that ends an answer, chat end tokens included
    bos_id: int | None
    fingerprint: str  # of file names, sizes, headers and a sample of the weights

    def tensor(self, name: str) -> torch.Tensor: ...  # float32, a name and shape of `config.weight_names()`
    def tokenizer_source(self) -> TokenizerSource: ...


def open_checkpoint(
    model: str, progress: bool = True, load_format: str = "auto", device: str = "cpu"
) -> Checkpoint:
    """Find `model` (a path, the default model's name or a Hugging Face name), fetch it if need be, open it.

    With load_format "dummy" only its config is read (a shape's name is enough); weights are random, made on
    `device`.
    """
    from paceline.loaders import hub

    if load_format == "dummy":
        from paceline.loaders.dummy import DummyCheckpoint, describe

        name, config = describe(model)
        return DummyCheckpoint(config, device, name=name)
    if load_format != "auto":
        raise ConfigError(f"load_format is {load_format!r}; use auto, or dummy for random weights")
    path, name = hub.resolve(model, progress=progress), hub.display_name(model)
    if path.is_file():
        from paceline.loaders.gguf import GgufCheckpoint

        return GgufCheckpoint(path, name)
    from paceline.loaders.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(path, name)


def check_weights(path: Path, config: ModelConfig, names: dict[str, str], found: Shapes, layers: str) -> None:
    """Every weight of the config is in the file with its shape, and no layer has a tensor beyond those.

    `names` maps the config's weights to the file's tensors, `layers` begins the name of each layer's tensors.
    """
    check_shapes(path, found, {names[name]: shape for name, shape in config.weight_names().items()})
    others = (name for name in found.keys() - set(names.values()) if name.startswith(layers))
    unused = [name for name in others if not any(part in name for part in ROTARY)]
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
