"""Opens a model: a file or folder with its weights, a description alone, or random weights of its shape.

Invariant: opening reads and checks headers only; `tensor` then reads one weight or some of its rows, so
memory stays bounded by what is asked for. A description reads or fetches at most a config.json or a GGUF
header.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tokenizers.pre_tokenizers import ByteLevel

from paceline.core.errors import ConfigError, ModelFileError, ModelNotFound
from paceline.loaders import gguf_header, hf_config, hub
from paceline.loaders.fields import ALL, read_json
from paceline.loaders.gguf_parts import read_parts
from paceline.loaders.tokenizer import TokenizerSource
from paceline.models.config import ExpertsConfig, ModelConfig, RopeConfig

if TYPE_CHECKING:
    import torch

    from paceline.models.kept import Kept

CONFIG = "config.json"
LLAMA_8B = ModelConfig(
    family="llama", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32,
    num_heads=32, num_kv_heads=8, head_dim=128, max_context=16_384, rms_eps=1e-5,
    rope=RopeConfig(theta=500_000.0),
)  # fmt: skip
LLAMA_70B = replace(LLAMA_8B, hidden_size=8192, intermediate_size=28_672, num_layers=80, num_heads=64)
SMOLLM2_135M = ModelConfig(
    family="llama", vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=30,
    num_heads=9, num_kv_heads=3, head_dim=64, max_context=8192, rms_eps=1e-5,
    rope=RopeConfig(theta=100_000.0), tie_embeddings=True,
)  # fmt: skip
QWEN3_30B_A3B = ModelConfig(
    family="qwen3_moe", vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_layers=48,
    num_heads=32, num_kv_heads=4, head_dim=128, max_context=40_960, rms_eps=1e-6,
    rope=RopeConfig(theta=1_000_000.0), qk_norm=True, experts=ExpertsConfig(128, 8, 768),
)  # fmt: skip
SHAPES = {"llama-8b": LLAMA_8B, "llama-70b": LLAMA_70B, "smollm2-135m": SMOLLM2_135M}
SHAPES["qwen3-30b-a3b"] = QWEN3_30B_A3B


class Checkpoint(Protocol):
    """An opened model: its description, and its weights on demand."""

    name: str
    path: Path
    config: ModelConfig
    eos_ids: tuple[int, ...]  # every token that ends an answer, chat end tokens included
    bos_id: int | None
    fingerprint: str  # of file names, sizes, headers and a sample of the weights

    def tensor(self, name: str, rows: slice = ALL) -> torch.Tensor: ...  # float32; `config.weight_names()`
    def kept(self, name: str, rows: slice = ALL) -> Kept | None: ...  # FP8 or MXFP4, where files have that
    def tokenizer_source(self) -> TokenizerSource: ...


def open_checkpoint(
    model: str, progress: bool = True, load_format: str = "auto", device: str = "cpu"
) -> Checkpoint:
    """Find `model` (a path, the default's name or a Hugging Face name), fetch it if need be, open it. With
    load_format "dummy" only its config is read (a shape's name is enough); `device` makes random weights."""
    if load_format == "dummy":
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


@dataclass(slots=True)
class DummyCheckpoint:
    """A `Checkpoint` whose tensors are made on the device that will hold them. Each byte is a token."""

    config: ModelConfig
    device: str = "cpu"
    name: str = "dummy"
    path: Path = Path()
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    fingerprint: str = ""

    def __post_init__(self) -> None:
        """What is kept on disk of a model is found by its path's name and its fingerprint's beginning."""
        self.path = Path(f"dummy-{self.name}")
        self.fingerprint = hashlib.sha256(f"dummy {self.config}".encode()).hexdigest()

    def tensor(self, name: str, rows: slice = ALL) -> torch.Tensor:
        """float32, as large as trained weights are: rows of unit length, norms of one."""
        import torch

        shape = self.config.weight_names()[name]
        shape = (len(range(*rows.indices(shape[0]))), *shape[1:])
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self.device)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{name}{rows}".encode()))
        return torch.randn(shape, generator=generator, device=self.device) * shape[-1] ** -0.5

    def kept(self, name: str, rows: slice = ALL) -> None:
        return None

    def tokenizer_source(self) -> TokenizerSource:
        section = {"model": "gpt2", "pre": "default", "tokens": sorted(ByteLevel.alphabet()), "merges": []}
        return TokenizerSource(gguf_metadata={f"tokenizer.ggml.{key}": v for key, v in section.items()})


class Described(NamedTuple):
    name: str
    config: ModelConfig


def describe(model: str) -> Described:
    """A local folder, config.json or .gguf file, `default`, a shape's name, or a Hugging Face name."""
    is_default, known = model.lower() in hub.DEFAULT_ALIASES, hub.HF_NAME.fullmatch(model)
    default = hub.local_models()[0] if is_default else None
    path = hub.existing(model) or (default.path if default and default.is_here else None)
    if path is None and known is not None:  # a config is fetched if need be, a GGUF file is not
        repo, file = known["repo"], known["file"]
        path = hub.from_hub(repo, CONFIG) if file is None else hub.cached_file(repo, file)
    shape = "smollm2-135m" if is_default else model
    if path is None and shape not in SHAPES:
        forms = f"a {CONFIG}, its folder, a .gguf file, 'default', a Hugging Face name"
        named = model[: hub.MAX_NAME]
        raise ModelNotFound(f"no model {named!r} here; give {forms}, or one of {', '.join(SHAPES)}")
    if path is None:
        return Described(shape, SHAPES[shape])
    name, path = hub.display_name(model), path / CONFIG if (path / CONFIG).is_file() else path
    if path.suffix == ".json":
        return Described(name, hf_config.read_config(str(path), read_json(path)))
    file = hub.weights_at(path)
    if file.is_dir():
        raise ModelFileError(f"{path} has no {CONFIG} and no GGUF file; name one of either kind")
    return Described(name, gguf_header.read_config(file, read_parts(file).header))
