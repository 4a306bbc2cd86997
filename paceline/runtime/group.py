"""How ranks find each other: for compiled passes in memory that all have mapped (cpu/parallel.py), for the
reference in torch and for GPUs through torch.distributed, over the loopback: NCCL where every rank has a GPU
of its own, else gloo, which meets on the host.

Invariant: an exchange ends within LOST_S seconds, with every rank's part or with an exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from paceline.models.shard import Shard

LOST_S = 8.0  # a rank that has not answered for so long is given up
MEETING_S = 60.0  # in which all must have come at the start


class TorchGroup:
    """A group of its own: several can be in one process, beside torch's default one."""

    sends_batches = True  # to every rank, before rank 0 runs a pass

    def __init__(self, shard: Shard, folder: str, device: torch.device) -> None:
        """folder: where ranks find each other; not needed afterwards. Returns when all have come."""
        self.shard = shard
        c10d: Any = distributed
        store = c10d.FileStore(f"{folder}/store", shard.size)
        has_own = device.type == "cuda" and shard.size <= torch.cuda.device_count()
        kind = c10d.ProcessGroupNCCL if has_own else c10d.ProcessGroupGloo
        options = kind.Options() if has_own else kind._Options()
        if not has_own:
            options._devices = [kind.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=MEETING_S)
        self._group, self._place = kind(store, shard.rank, shard.size, options), device
        self._meets_at = device if has_own else torch.device("cpu")

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        own = torch.nn.functional.pad(x, (0, max(sizes) - x.shape[-1])).to(self._meets_at).contiguous()
        parts = [torch.empty_like(own) for _ in sizes]
        self._group.allgather([parts], [own]).wait(timedelta(seconds=LOST_S))
        whole = torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)
        return whole.to(self._place)

    def follow(self, _decoder: Any, _kv: Any) -> None:
        """Passes come as messages."""

    def give_up(self) -> None:
        """A pass under way ends: NCCL would wait on the device, gloo ends by itself."""
        if self._meets_at.type == "cuda":
            self._group.abort()

    def call(self) -> None: ...
    def check(self) -> None: ...


def device_of(first: str, rank: int) -> torch.device:
    """Of a rank: the GPUs from the first on, and round again where there are fewer than ranks."""
    device = torch.device(first)
    if device.type == "cpu":
        return device
    return torch.device("cuda", ((device.index or 0) + rank) % torch.cuda.device_count())


def join(shard: Shard, kernels: str, folder: str, number: int, device: torch.device) -> Any:
    """The group of these ranks. folder, number: a folder and a file descriptor that they all have."""
    if kernels == "torch" or device.type == "cuda":
        return TorchGroup(shard, folder, device)
    from paceline.cpu.parallel import CpuGroup

    return CpuGroup(shard, number)
