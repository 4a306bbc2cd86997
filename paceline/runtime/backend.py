"""What a kind of device offers: the decoder, learned heads, top-k, and bursts. One class a kind, chosen once:
cpu/backend.py (compiled kernels), cuda/backend.py (Triton, CUDA graphs), and here the reference in torch.

Invariant: nothing else asks which kind of device it runs on in order to choose an implementation.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from paceline.core.errors import ConfigError
from paceline.core.types import Batch, Output, PassSizes
from paceline.heads.attending import TorchBlockHead, TorchChainHead
from paceline.heads.config import DflashConfig, LayeredConfig, MedusaConfig
from paceline.heads.rows import BlockBackend, BurstBackend, ChainHead, SideBackend, TreeShape
from paceline.heads.torch_heads import TorchMedusaHead
from paceline.models.attention import FLOATS, KvFormat
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder as TorchDecoder
from paceline.models.quantize import bits_of
from paceline.models.shard import Group, Slices, gather_products

if TYPE_CHECKING:
    from paceline.loaders.head_files import HeadInput

LayerCache = tuple[torch.Tensor, torch.Tensor]  # keys and values of a layer, [slots, KV heads, width]
KERNELS = ("exact", "torch")
SPARE_ON_GPU = 2**31  # bytes left for activations and graphs


class Decoder(Protocol):
    """What runs a pass."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def is_exact(self) -> bool: ...  # a row's bits depend on its own context alone, wherever in a tree it is
    @property
    def picks_cuts(self) -> bool: ...  # chooses tokens under top-k, top-p and min-p, too
    @property
    def latest(self) -> Sequence[int] | None: ...  # picks that the next pass may read by ids below zero
    @property
    def woken(self) -> float: ...  # distinct experts of a layer in the last pass, on average; 0: not counted
    def forward(
        self, batch: Batch, kv: Any, *, num_layers: int | None = None, hidden_layers: Sequence[int] = ()
    ) -> Output: ...


class Backend(Protocol):
    @property
    def device(self) -> torch.device: ...
    @property
    def is_async(self) -> bool: ...  # a pass goes on after `forward` has returned; reading its output waits
    @property
    def most_drafted(self) -> int: ...  # requests of a batch beyond which drafting costs more than it brings,
    @property
    def most_matched(self) -> int: ...  # and drafts that are made on the host do
    @property
    def num_recordings(self) -> int: ...  # of graphs so far: a step that recorded took longer than usual
    def check_dtype(self, dtype: str) -> None: ...  # a ConfigError for weights that it cannot run
    def default_dtype(self, source: Any) -> str: ...  # of a checkpoint's weights, where none is asked for
    def kv_format(self, dtype: str, asked: str) -> KvFormat: ...
    def load(self, source: Any, dtype: str, context: int | None = None) -> Decoder: ...
    # Before the first request: passes of these sizes that keep these layers' hidden states, or stop at one.
    def record(
        self, decoder: Any, kv: Any, sizes: PassSizes, layers: Sequence[int], depth: int | None
    ) -> None: ...
    def chain_head(self, given: HeadInput) -> ChainHead: ...
    def block_head(self, given: HeadInput) -> BlockBackend: ...
    def side_heads(self, given: HeadInput) -> SideBackend: ...
    def top(self, logits: torch.Tensor, k: int) -> torch.Tensor: ...  # [L, k] int64, best first
    # Passes without the host, with chains of up to `length` tokens drafted by a head and, where the device
    # can, a matcher; None: it has none for these.
    def burst(
        self, decoder: Any, kv: Sequence[LayerCache], head: ChainHead | None, length: int,
        trees: Sequence[TreeShape] = (),
    ) -> BurstBackend | None: ...  # fmt: skip


class TorchBackend:
    """The reference: every pass and head in plain torch on any device. Slow and readable: for tests."""

    is_async, num_recordings = False, 0
    most_drafted = most_matched = 1 << 30

    def __init__(self, device: torch.device, group: Group | None = None) -> None:
        """group: the ranks that have a part each of what it loads."""
        self.device, self.group = device, group

    def check_dtype(self, dtype: str) -> None:
        bits_of(dtype)

    def default_dtype(self, source: Any) -> str:
        return "float32"

    def kv_format(self, dtype: str, asked: str) -> KvFormat:
        if asked != "auto":
            raise ConfigError(f"kv_cache_dtype is {asked!r}; the torch kernels keep float32, leave it out")
        return FLOATS

    def load(self, source: Any, dtype: str, context: int | None = None) -> TorchDecoder:
        given: dict[str, Any] = {"dtype": dtype, "device": str(self.device), "context": context}
        if self.group is None:
            return TorchDecoder.load(source, **given)
        decoder = TorchDecoder.load(Slices(source, self.group.shard), **given)
        gather_products(decoder, self.group)
        return decoder

    def record(self, *_: Any) -> None:
        """There is nothing to record."""

    def chain_head(self, given: HeadInput) -> ChainHead:
        head, norm = given.head, given.norm
        assert isinstance(head.config, LayeredConfig)
        return TorchChainHead(head.config, dict(head.tensors), given.decoder, norm, self.device)

    def block_head(self, given: HeadInput) -> BlockBackend:
        assert isinstance(given.head.config, DflashConfig)
        return TorchBlockHead(given.head.config, given.head.tensors, given.decoder, self.device)

    def side_heads(self, given: HeadInput) -> SideBackend:
        assert isinstance(given.head.config, MedusaConfig)
        assert given.norm is not None
        return TorchMedusaHead(given.head.config, given.head.tensors, given.norm, self.device)

    def top(self, logits: torch.Tensor, k: int) -> torch.Tensor:
        return logits.argsort(dim=-1, descending=True, stable=True)[:, :k]

    def burst(self, *_: Any) -> None:
        return None


def backend_for(
    device: torch.device, kernels: str = "exact", exact: bool = False, group: Any = None
) -> Backend:
    """exact: of a GPU, a row has the same bits in every pass; the CPU's kernels are exact as they are."""
    if kernels not in KERNELS:
        raise ConfigError(f"unknown kernels {kernels!r}; choose 'exact' or 'torch'")
    if kernels == "torch":
        return TorchBackend(device, group)
    if device.type == "cuda":
        from paceline.cuda.backend import CudaBackend

        return CudaBackend(device, exact, group=group)
    from paceline.cpu.backend import CpuBackend

    return CpuBackend(group=group)


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


def weight_bytes(model: ModelConfig, dtype: str) -> float:
    """Of a GPU, scales counted. Files in FP8 have embedding and output layer in 16 bits; those in MXFP4 all
    but experts, where there are some, and vectors, which are few."""
    narrow = ".mlp.experts." if dtype == "mxfp4" and model.experts is not None else "layers."
    width = {"int4": 0.57, "mxfp4": 0.54, "int8": 1.04, "fp8": 1.04, "float32": 4.0}.get(dtype, 2.0)
    ends = 2.0 if dtype in ("fp8", "mxfp4") else width
    shapes = model.weight_names().items()
    return sum(math.prod(shape) * (width if narrow in name else ends) for name, shape in shapes)


def free_memory(device: torch.device, model: ModelConfig, dtype: str) -> int:
    """Bytes that a KV cache can have: without swapping on a CPU, beside the weights on a GPU."""
    if device.type != "cpu":
        return max(0, int(torch.cuda.mem_get_info(device)[0] - weight_bytes(model, dtype) - SPARE_ON_GPU))
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def give_back(device: torch.device) -> None:
    """Memory of a GPU that nothing holds any more: torch keeps it for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_name(device: torch.device) -> str:
    """What a person would call it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
