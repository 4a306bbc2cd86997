"""A model and its KV cache: the one thing that runs forward passes. Target and draft models are both
Runners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from paceline.core.errors import ConfigError
from paceline.core.types import Batch, Cached, Output, Segment
from paceline.models.config import ModelConfig
from paceline.models.quantize import bits_of
from paceline.runtime.batch import build
from paceline.runtime.kv_cache import KvCache

CPU = torch.device("cpu")


class Decoder(Protocol):
    """What runs a pass: models/decoder.py in torch, cpu/decoder.py compiled, cuda/decoder.py as CUDA
    graphs.
    """

    @property
    def config(self) -> ModelConfig: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def is_exact(self) -> bool: ...  # a row's bits depend on its own context alone
    @property
    def checks_trees(self) -> bool: ...  # a node has the same bits wherever in a tree it is
    @property
    def runs_by_itself(
        self,
    ) -> bool: ...  # `forward` returns before the pass has ended; whoever looks at its output waits
    @property
    def latest(
        self,
    ) -> (
        Sequence[int] | None
    ): ...  # the picks that the next pass may read by ids below zero (see types.Columns)
    def forward(
        self, batch: Batch, kv: Any, *, num_layers: int | None = None, hidden_layers: Sequence[int] = ()
    ) -> Output: ...


def default_dtype(device: torch.device, kernels: str) -> str:
    """What "auto" means: int8 with the compiled kernels of the CPU, bfloat16 on a GPU, float32 with
    torch's.
    """
    if kernels == "torch":
        return "float32"
    return "int8" if device.type == "cpu" else "bfloat16"


def check_dtype(device: torch.device, dtype: str) -> None:
    if device.type == "cpu":
        bits_of(dtype)
    else:
        from paceline.cuda.weights import dtype_of

        dtype_of(dtype)


def load_decoder(
    source: Any, *, kernels: str = "exact", dtype: str = "auto", context: int | None = None, device: torch.device = CPU,
    exact: bool = False, **options: Any,
) -> Decoder:  # fmt: skip
    """`dtype` is of the weights; `exact` is for GPUs, the CPU's kernels are exact as they are."""
    if kernels not in ("exact", "torch"):
        raise ConfigError(f"unknown kernels {kernels!r}; choose 'exact' or 'torch'")
    dtype = default_dtype(device, kernels) if dtype == "auto" else dtype
    if kernels == "torch":
        from paceline.models.decoder import Decoder as TorchDecoder

        return TorchDecoder.load(source, dtype=dtype, device=str(device), context=context)
    if device.type == "cuda":
        from paceline.cuda.decoder import CudaDecoder

        return CudaDecoder.load(
            source, dtype=dtype, device=str(device), context=context, exact=exact, **options
        )
    from paceline.cpu.decoder import CpuDecoder

    return CpuDecoder.load(source, dtype=dtype, context=context, **options)


@dataclass(frozen=True, slots=True)
class Runner:
    decoder: Decoder
    kv: KvCache

    @property
    def num_recordings(self) -> int:
        """CUDA graphs recorded and kernels compiled so far, by whoever shares the device: what went on
        meanwhile took longer than usual.
        """
        return getattr(getattr(self.decoder, "capture", None), "num_recordings", 0)

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    def forward(
        self,
        segments: Sequence[Segment],
        *,
        num_layers: int | None = None,
        hidden_layers: Sequence[int] = (),
        top_tokens: int = 0,
    ) -> Output:
        """Logits of the rows each segment asks for, in order. Stops after `num_layers` layers if given."""
        batch = build(segments, self.kv)
        output = self.decoder.forward(
            batch, self.kv.layers, num_layers=num_layers, hidden_layers=hidden_layers
        )
        return output._replace(top=_top(output.logits, top_tokens)) if top_tokens else output

    def warm_up(self, top_tokens: int = 0) -> None:
        """One token through all layers: what is compiled or read lazily is done before anybody waits for an
        answer.
        """
        cached = Cached()
        if self.kv.reserve(cached, 1):
            self.forward([Segment([0], cached, num_logits=1)], top_tokens=top_tokens)
            self.kv.free(cached)


def _top(logits: torch.Tensor, k: int) -> torch.Tensor:
    """The k most likely tokens of each row, best first: [L, k] int64."""
    if logits.device.type != "cpu":
        return logits.topk(k).indices
    from paceline.cpu.top import top

    return top(logits, k)
