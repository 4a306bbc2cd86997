"""What a kind of device offers: the decoder, learned heads, top-k, and bursts. One class a kind, chosen once:
cpu/backend.py (compiled kernels), cuda/backend.py (Triton, CUDA graphs), torch_backend.py (the reference).

Invariant: nothing else asks which kind of device it runs on in order to choose an implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from paceline.core.errors import ConfigError
from paceline.core.types import Batch, Output
from paceline.heads.rows import BlockBackend, BurstBackend, ChainHead, SideBackend
from paceline.models.attention import KvFormat
from paceline.models.config import ModelConfig

if TYPE_CHECKING:
    from paceline.loaders.head_files import HeadInput

LayerCache = tuple[torch.Tensor, torch.Tensor]  # keys and values of a layer, [slots, KV heads, width]
KERNELS = ("exact", "torch")


class Decoder(Protocol):
    """What runs a pass."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def is_exact(self) -> bool: ...  # a row's bits depend on its own context alone
    @property
    def checks_trees(self) -> bool: ...  # a node has the same bits wherever in a tree it is
    @property
    def latest(self) -> Sequence[int] | None: ...  # picks that the next pass may read by ids below zero
    def forward(
        self, batch: Batch, kv: Any, *, num_layers: int | None = None, hidden_layers: Sequence[int] = ()
    ) -> Output: ...


class Backend(Protocol):
    @property
    def device(self) -> torch.device: ...
    @property
    def is_async(self) -> bool: ...  # a pass goes on after `forward` has returned; reading its output waits
    @property
    def default_dtype(self) -> str: ...  # of the weights, where none is asked for
    @property
    def most_drafted(self) -> int: ...  # requests of a batch beyond which drafting costs more than it brings
    @property
    def num_recordings(self) -> int: ...  # of graphs so far: a step that recorded took longer than usual
    def check_dtype(self, dtype: str) -> None: ...  # a ConfigError for weights that it cannot run
    def kv_format(self, dtype: str, asked: str) -> KvFormat: ...
    def load(self, source: Any, dtype: str, context: int | None = None) -> Decoder: ...
    def chain_head(self, given: HeadInput) -> ChainHead: ...
    def block_head(self, given: HeadInput) -> BlockBackend: ...
    def side_heads(self, given: HeadInput) -> SideBackend: ...
    def top(self, logits: torch.Tensor, k: int) -> torch.Tensor: ...  # [L, k] int64, best first
    # Passes without the host, with chains of up to `length` tokens drafted by a head and, where the device
    # can, a matcher; None: it has none for these.
    def burst(
        self, decoder: Any, kv: Sequence[LayerCache], head: ChainHead | None, length: int
    ) -> BurstBackend | None: ...


def backend_for(device: torch.device, kernels: str = "exact", exact: bool = False) -> Backend:
    """exact: of a GPU, a row has the same bits in every pass; the CPU's kernels are exact as they are."""
    if kernels not in KERNELS:
        raise ConfigError(f"unknown kernels {kernels!r}; choose 'exact' or 'torch'")
    if kernels == "torch":
        from paceline.runtime.torch_backend import TorchBackend

        return TorchBackend(device)
    if device.type == "cuda":
        from paceline.cuda.backend import CudaBackend

        return CudaBackend(device, exact)
    from paceline.cpu.backend import CpuBackend

    return CpuBackend()
