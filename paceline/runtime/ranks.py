"""Tensor parallelism, rank 0's side: the processes of the other ranks, and an executor that has every pass
run by all of them. Ranks know batches and KV moves and nothing of requests (rank.py).

Invariant: a rank that ends or hangs ends the group: what is asked then and later raises a RankError within
seconds. Ranks end when rank 0's end of their socket does, however that came about.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from paceline.core.errors import RankError
from paceline.core.options import require
from paceline.core.types import Batch, Burst, Moves, Output, Segment
from paceline.heads.rows import BurstBackend, BurstInput
from paceline.models.shard import Shard
from paceline.models.stage import Stage
from paceline.runtime.backend import Backend, Decoder
from paceline.runtime.executor import KvMemory, LocalExecutor
from paceline.runtime.group import LOST_S, join

REMEDY, WATCH_MS = "make a new LLM", 500


class RankSetup(NamedTuple):
    """What a rank must know to hold its part of a model."""

    model: str
    load_format: str
    kernels: str
    dtype: str
    kv_cache_dtype: str
    num_blocks: int
    context: int
    num_threads: int  # of torch
    is_by_expert: bool = False
    num_ranks: int = 1  # of a stage
    stage: Stage = Stage()
    device: str = "cpu"  # of rank 0


class Ranks:
    """All but rank 0."""

    def __init__(self, setup: RankSetup) -> None:
        """Returns when all processes have come; `wait` returns when they have read their weights."""
        size = setup.num_ranks
        self.shard, self.lost = Shard(0, size, setup.is_by_expert), ""
        number = os.memfd_create("paceline") if hasattr(os, "memfd_create") else -1
        require(number >= 0, "tensor_parallel_size", size, "it needs Linux; use 1")
        started = [_start(number) for _ in range(1, size)]
        self._processes, self._connections = [p for p, _ in started], [c for _, c in started]
        self.close = weakref.finalize(self, _end, self._processes, self._connections)
        self.wait()
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder, self.guard():
            for rank, connection in enumerate(self._connections, 1):
                connection.send((self.shard._replace(rank=rank), folder, setup))
            self.group = join(self.shard, setup.kernels, folder, number, torch.device(setup.device))
            self.wait()
        os.close(number)
        watched = [connection.fileno() for connection in self._connections]
        threading.Thread(target=_watch, args=(watched, self.group, self.close), daemon=True).start()

    def wait(self) -> None:
        """For a word of every rank."""
        with self.guard():
            for connection in self._connections:
                if said := connection.recv():
                    raise RuntimeError(said)

    def send(self, *message: Any) -> None:
        with self.guard():
            for connection in self._connections:
                connection.send(message)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around what needs all ranks."""
        if self.lost:
            raise RankError(self.lost)
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:
            self.lost = f"{self._reason(error)}; {REMEDY}"
            self.close()
            raise RankError(self.lost) from error

    def _reason(self, error: Exception) -> str:
        """Which rank has ended, and how. One whose socket has just closed is given a moment to end."""
        for rank, connection in enumerate(self._connections, 1):
            with suppress(OSError, EOFError):
                if connection.poll() and (said := connection.recv()):
                    return f"rank {rank} has failed: {said}"
        for limit in (0.0, 0.5):
            for rank, process in enumerate(self._processes, 1):
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(limit)
                    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                    return f"rank {rank} of {self.shard.size} has ended ({how})"
        return f"a rank has not answered within {LOST_S:.0f} s ({error!s:.80})"


def _watch(numbers: Sequence[int], group: Any, close: weakref.finalize[Any, Any]) -> None:
    """A pass under way ends soon after a rank has."""
    hangup = select.poll()
    for number in numbers:
        hangup.register(number, select.POLLRDHUP)
    while close.alive:
        if hangup.poll(WATCH_MS):
            return group.give_up()


def _start(number: int) -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = socket.socketpair()
    with theirs:
        # -P: modules come from where they are installed, never from the folder this was started in.
        command = [sys.executable, "-P", "-m", "paceline.runtime.rank", str(theirs.fileno()), str(number)]
        # A group of its own: Ctrl-C is for rank 0 alone.
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "process_group": 0}
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(), number), **given)
    return process, Connection(ours.detach())


def _end(processes: Sequence[subprocess.Popen[bytes]], connections: Sequence[Connection]) -> None:
    for connection in connections:
        connection.close()
    for process in processes:  # none holds anything that must be written down
        process.kill()
        process.wait()


class RanksExecutor(LocalExecutor):
    def __init__(self, backend: Backend, decoder: Decoder, memory: KvMemory, ranks: Ranks) -> None:
        super().__init__(backend, decoder, memory)
        self.ranks, self.num_ranks = ranks, ranks.shard.size
        ranks.send("load")
        ranks.wait()

    def apply(self, moves: Moves) -> None:
        super().apply(moves)
        self.ranks.send("move", moves)
        self.ranks.group.call()

    def run(
        self, batch: Batch, num_layers: int | None, hidden_layers: Sequence[int],
        x: torch.Tensor | None = None,
    ) -> Output:  # fmt: skip
        if self.ranks.group.sends_batches:
            self.ranks.send("pass", Batch(batch.columns), num_layers, None if x is None else x.numpy())
        with self.ranks.guard():
            output = super().run(batch, num_layers, hidden_layers, x)
            self.ranks.group.check()
        return output

    def burst(self, backend: BurstBackend, segments: Sequence[Segment], given: BurstInput) -> Burst:
        with self.ranks.guard():
            burst = super().burst(backend, segments, given)
            self.ranks.group.check()
        return burst

    def close(self) -> None:
        self.ranks.lost = self.ranks.lost or f"the model is closed; {REMEDY}"
        self.ranks.close()
