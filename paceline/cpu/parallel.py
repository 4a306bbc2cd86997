"""Ranks of a parallel model on one machine: processes whose threads run the same compiled pass together. What
they exchange lies in memory that all have mapped, and they meet there at barriers (sync.py).

Products are split by tiles, attention by KV heads; all else as among threads of one process. Invariant: the
memory has no name and is gone with the last process that has it. Addresses are rank 0's: another adds the
distance between both mappings.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections import defaultdict
from typing import Any

import numpy as np

from paceline.core.errors import RankError
from paceline.cpu.compile import kernel
from paceline.cpu.recycle import address
from paceline.cpu.sync import (
    BROKEN,
    GROUP_NAP,
    NAP,
    NUM_ORDERS,
    ORDER,
    ORDERS,
    SPINS,
    TURNS,
    look,
    order,
    sleep_while,
)
from paceline.models.shard import Shard

SIZE, FIRST, LEAST = 2**36, 4096, 4096  # bytes: of the mapping, most of it never used; before and of a block
BASE = BROKEN + 64  # where rank 0 has mapped it
NAP_S = 0.001


@kernel
def give_order(group, b, w, logits):  # type: ignore[no-untyped-def]
    order(group, b, w, logits)


@kernel
def wait_for_order(group, seen):  # type: ignore[no-untyped-def]
    """After the last seen; whether there is one: else a rank is lost."""
    spins, turns = 0, look(group + TURNS)
    while look(group + ORDER) == seen:
        if look(group + BROKEN) != 0:
            return False
        spins += 1
        if spins >= turns:
            sleep_while(group, group + ORDER, seen & 0xFFFFFFFF, 0)
    return True


class CpuGroup:
    """Memory of all ranks. Rank 0 gives out blocks of it."""

    sends_batches = False  # a pass tells the other ranks itself

    def __init__(self, shard: Shard, number: int) -> None:
        """number: of a file descriptor that all ranks have."""
        self.shard = shard
        if shard.rank == 0:
            os.ftruncate(number, SIZE)
        while os.fstat(number).st_size < SIZE:
            time.sleep(NAP_S)
        self._bytes = np.frombuffer(mmap.mmap(number, SIZE), np.uint8)
        self.at, self.words = address(self._bytes), self._bytes[:FIRST].view(np.int64)
        if shard.rank == 0:
            self.words[TURNS // 8], self.words[NAP // 8 + 1] = SPINS, GROUP_NAP
            self.words[BASE // 8] = self.at
        while not self.words[BASE // 8]:
            time.sleep(NAP_S)
        self.distance = self.at - int(self.words[BASE // 8])
        self._free: dict[int, list[int]] = defaultdict(list)  # by size: where blocks begin
        self._end, self._seen = FIRST, 0
        self._orders = self.words[ORDERS // 8 :][: 3 * NUM_ORDERS].reshape(NUM_ORDERS, 3)

    def take(self, size: int) -> np.ndarray:
        """[size] bytes of any content, given back when nothing refers to them any more."""
        room = max(LEAST, 1 << (size - 1).bit_length())
        if self._free[room]:
            start = self._free[room].pop()
        else:
            start, self._end = self._end, self._end + room
            assert self._end <= SIZE, "the memory of ranks is used up"
        block = np.frombuffer(self._bytes.data, np.uint8, size, start)
        weakref.finalize(block, self._free[room].append, start).atexit = False
        return block

    def floats(self, count: int) -> np.ndarray:
        return self.take(4 * count).view(np.float32)

    def read(self, at: int, count: int) -> np.ndarray:
        """Numbers that rank 0 has at this address."""
        first = at + self.distance - self.at
        return self._bytes[first : first + 8 * count].view(np.int64)

    def call(self) -> None:
        """Rank 0: the others read a message."""
        give_order(self.at, 0, 0, 0)

    def next_pass(self) -> tuple[int, ...] | None:
        """Another rank: rank 0's addresses of a pass, of what is shared and of logits; None: a message."""
        if not wait_for_order(self.at, self._seen):
            raise RankError("another rank is lost")
        self._seen += 1
        given = tuple(self._orders[self._seen % NUM_ORDERS].tolist())
        return given if given[0] else None

    def follow(self, decoder: Any, kv: Any) -> None:
        """Another rank: run passes until there is a message."""
        decoder.follow(kv)

    def give_up(self) -> None:
        """From any thread: no rank waits for another any more."""
        self.words[BROKEN // 8] = 1

    def check(self) -> None:
        if self.words[BROKEN // 8]:
            raise RuntimeError("ranks did not meet")
