"""A connection between two processes of one model: frames of a few named numbers and arrays, in order.

Invariant: what is received is JSON and numbers of known types and sizes: nothing in it can run code.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.core.types import Batch, Columns, ColumnsOf, Moves, Pick

SIZE = struct.Struct("<I")
TYPES = ("<f4", "<i8")
MOST_HEADER, MOST_BYTES = 2**24, 2**32
BUFFER = 2**22  # bytes that a sender need not wait for: a pass and what enters it
IDLE_S, UNHEARD_MS = 5, 10_000  # of TCP: between two probes; until a machine that does not answer is given up
Fields = dict[str, Any]


class Link:
    """Several threads may send; one receives."""

    def __init__(self, own: socket.socket) -> None:
        self.socket, self.heard = own, time.monotonic()  # when something came last
        self._lock = threading.Lock()
        own.settimeout(None)
        for name in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            own.setsockopt(socket.SOL_SOCKET, name, BUFFER)
        if own.family != socket.AF_UNIX:
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, IDLE_S)
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MS)

    def send(self, kind: str, fields: Fields | None = None, arrays: Sequence[np.ndarray] = ()) -> None:
        given = [np.ascontiguousarray(array) for array in arrays]
        shapes = [(array.dtype.str, array.shape) for array in given]
        header = json.dumps({**(fields or {}), "kind": kind, "arrays": shapes}).encode()
        with self._lock:
            self.socket.sendall(SIZE.pack(len(header)) + header)
            for array in given:
                if array.nbytes:
                    self.socket.sendall(array.data.cast("B"))

    def receive(self) -> tuple[Fields, list[np.ndarray]]:
        """Waits. An OSError: the connection is lost, or this is no frame."""
        (size,) = SIZE.unpack(self._read(SIZE.size))
        try:
            fields = json.loads(self._read(size, MOST_HEADER))
            shapes, arrays = fields.pop("arrays"), []
            for kind, shape in shapes:
                if kind not in TYPES or not all(type(n) is int and 0 <= n < MOST_BYTES for n in shape):
                    raise ValueError("an array of another kind")
                count = 1
                for n in shape:
                    count *= n
                dtype = np.dtype(kind)
                read = self._read(count * dtype.itemsize, MOST_BYTES)
                arrays.append(np.frombuffer(read, dtype).reshape(shape))
            if not isinstance(fields["kind"], str):
                raise ValueError("a frame without a kind")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConnectionError(f"what came is no frame ({error!s:.60})") from error
        return fields, arrays

    def _read(self, size: int, most: int = MOST_BYTES) -> bytearray:
        if size > most:
            raise ConnectionError(f"a frame of {size:,} bytes")
        found = bytearray(size)
        view, at = memoryview(found), 0
        while at < size:
            count = self.socket.recv_into(view[at:])
            if not count:
                raise ConnectionError("the connection has ended")
            at, self.heard = at + count, time.monotonic()
        return found

    def close(self) -> None:
        """A thread that sends or receives goes on with an error."""
        with suppress(OSError):  # the other end was first
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class PassInput(NamedTuple):
    """What a stage must know of a pass."""

    batch: Batch
    num_layers: int  # of the whole model, as the next
    hidden_layers: Sequence[int]
    x: torch.Tensor | None = None  # [T, hidden]: the residual stream that enters; None at the first stage
    needs_logits: bool = True  # also where the last stage has picked a token of every row

    def fields(self) -> Fields:
        columns, picks = self.batch.columns, self.batch.picks
        return {
            "sizes": [len(column) for column in columns], "num_layers": self.num_layers,
            "hidden": list(self.hidden_layers), "picks": None if picks is None else [*map(tuple, picks)],
            "needs_logits": self.needs_logits,
        }  # fmt: skip

    def arrays(self) -> list[np.ndarray]:
        """All but what enters."""
        moves = self.batch.moves or Moves([], [])
        return [np.frombuffer(self.batch.flat, np.int64), *(np.array(each, np.int64) for each in moves)]


def received(fields: Fields, arrays: Sequence[np.ndarray]) -> PassInput:
    flat, sources, targets, x = arrays
    numbers, columns, first = flat.tolist(), list[list[int]](), 0
    for size in fields["sizes"]:
        columns.append(numbers[first : first + size])
        first += size
    picks = fields["picks"] and [Pick(*pick) for pick in fields["picks"]]
    moves = Moves(sources.tolist(), targets.tolist()) if len(sources) else None
    made: Columns = ColumnsOf(*columns)
    batch = Batch(made, "cpu", picks, moves)
    x_in, needs_logits = torch.from_numpy(x), fields["needs_logits"]
    return PassInput(batch, fields["num_layers"], fields["hidden"], x_in, needs_logits)
