"""A model of random weights with a given shape, for measuring without a download.

Invariant: a tensor depends on its name, its shape and the seed alone, so two loads are the same model.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.loaders.checkpoint import TokenizerSource
from paceline.models.config import ModelConfig, RopeConfig

if TYPE_CHECKING:
    import torch

LLAMA_8B = ModelConfig(
    family="llama", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32,
    num_heads=32, num_kv_heads=8, head_dim=128, max_context=16_384, rms_eps=1e-5,
    rope=RopeConfig(theta=500_000.0),
)  # fmt: skip
SMOLLM2_135M = ModelConfig(
    family="llama", vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=30,
    num_heads=9, num_kv_heads=3, head_dim=64, max_context=8192, rms_eps=1e-5,
    rope=RopeConfig(theta=100_000.0), tie_embeddings=True,
)  # fmt: skip
SHAPES = {"llama-8b": LLAMA_8B, "smollm2-135m": SMOLLM2_135M}


@dataclass(slots=True)
class DummyCheckpoint:
    """A `Checkpoint` whose tensors are made on the device that will hold them. Each byte is a token."""

    config: ModelConfig
    device: str = "cpu"
    seed: int = 0
    name: str = "dummy"
    path: Path = Path()
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    fingerprint: str = ""

    def __post_init__(self) -> None:
        self.fingerprint = f"dummy {self.seed} {self.config}"

    def tensor(self, name: str) -> torch.Tensor:
        """float32, as large as trained weights are: rows of unit length, norms of one."""
        import torch

        shape = self.config.weight_names()[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self.device)
        generator = torch.Generator(self.device).manual_seed(self.seed + zlib.crc32(name.encode()))
        return torch.randn(shape, generator=generator, device=self.device) * shape[-1] ** -0.5

    def tokenizer_source(self) -> TokenizerSource:
        from tokenizers.pre_tokenizers import ByteLevel

        section = {"model": "gpt2", "pre": "default", "tokens": sorted(ByteLevel.alphabet()), "merges": []}
        return TokenizerSource(
            gguf_metadata={f"tokenizer.ggml.{key}": value for key, value in section.items()}
        )
