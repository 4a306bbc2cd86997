"""Tensor parallelism, the process of a rank above 0: reads its part of a model and runs the passes that rank
0 sends (ranks.py). It chooses nothing, so it cannot disagree.

Invariant: it ends when rank 0's end of the socket is closed, whatever it is doing.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from paceline.core.errors import PacelineError
from paceline.loaders.checkpoint import open_checkpoint
from paceline.models.shard import Shard
from paceline.models.stage import part_of
from paceline.runtime.backend import backend_for
from paceline.runtime.executor import KvMemory
from paceline.runtime.group import device_of, join
from paceline.runtime.ranks import RankSetup


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when it ends
    connection = Connection(int(sys.argv[1]))
    threading.Thread(target=end_with, args=(connection.fileno(),), daemon=True).start()
    with suppress(EOFError, OSError):  # rank 0 has ended
        connection.send("")
        given = connection.recv()
        try:
            run(connection, int(sys.argv[2]), *given)
        except (PacelineError, RuntimeError, MemoryError) as error:
            connection.send(f"{type(error).__name__}: {error}")


def end_with(number: int) -> None:
    hangup = select.poll()
    hangup.register(number, select.POLLRDHUP)
    hangup.poll()
    os._exit(0)


def run(connection: Connection, number: int, shard: Shard, folder: str, setup: RankSetup) -> None:
    torch.set_num_threads(setup.num_threads)
    device = device_of(setup.device, shard.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = join(shard, setup.kernels, folder, number, device)
    connection.send("")  # the folder is not needed any more
    connection.recv()  # once rank 0 has packed and compiled what can be found on disk then
    backend = backend_for(device, setup.kernels, group=group)
    source = open_checkpoint(setup.model, False, setup.load_format)
    mine = part_of(source, setup.stage)
    decoder = backend.load(mine, setup.dtype, setup.context)
    kept = backend.kv_format(setup.dtype, setup.kv_cache_dtype)
    memory = KvMemory(shard.own(mine.config), setup.num_blocks, device, kept)
    connection.send("")
    while True:
        group.follow(decoder, memory.layers)
        kind, *given = connection.recv()
        if kind == "move":
            memory.apply(*given)
        else:
            batch, num_layers, x = given
            more: dict[str, Any] = {} if x is None else {"x": torch.from_numpy(x)}
            decoder.forward(batch, memory.layers, num_layers=num_layers, **more)


if __name__ == "__main__":
    main()
