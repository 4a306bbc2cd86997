"""What a server's prefix cache holds, told to routers of other makers in vLLM's form: over a ZMQ socket of
kind PUB, messages of three parts (topic, number, msgpack of [time, events, rank]) whose events are
BlockStored, BlockRemoved and AllBlocksCleared. Invariant: who has read every message since the first knows
exactly the blocks that can be found; the first says that what an engine before this one held is gone.
"""

from __future__ import annotations

import time
from typing import Any

import msgpack
import zmq as untyped

from paceline.core.errors import ConfigError
from paceline.core.types import BLOCK_SIZE
from paceline.runtime.kv_cache import BlockEvent, KvCache

zmq: Any = untyped  # its stubs do not name what it has
MOST_WAITING = 100_000  # messages for a subscriber that does not read


class Publisher:
    def __init__(self, place: str, kv: KvCache) -> None:
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.set_hwm(MOST_WAITING)
        try:
            self._socket.bind(place)
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise ConfigError(f"kv_events {place} cannot be listened on ({error}); choose another") from None
        self._events = kv.events = list[BlockEvent]()
        self._number = 0

    def publish(self) -> None:
        """What has changed since the last time; never waits."""
        if not self._events:
            return
        told: list[list[Any]] = [["AllBlocksCleared"]] if self._number == 0 else []
        last: bytes | None = None  # the block that the one before ends with, if it was stored
        for name, before, tokens in self._events:
            if tokens is None:
                told.append(["BlockRemoved", [_number(name)], None])
            elif last is not None and last == before:
                told[-1][1].append(_number(name))
                told[-1][3].extend(tokens)
            else:
                parent = _number(before) if before else None
                told.append(
                    ["BlockStored", [_number(name)], parent, list(tokens), BLOCK_SIZE, None, None, None]
                )
            last = name if tokens is not None else None
        self._events.clear()
        data = msgpack.packb([time.time(), told, 0])
        self._socket.send_multipart((b"", self._number.to_bytes(8, "big"), data))
        self._number += 1


def _number(name: bytes) -> int:
    """As vLLM shows hashes: 64 bits."""
    return int.from_bytes(name[-8:], "big")
