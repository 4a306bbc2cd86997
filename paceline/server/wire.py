"""Messages between the HTTP process and the engine process: JSON objects, each behind its length, over a
socket.

Invariant: no message is larger than MAX_MESSAGE, and neither side runs anything it reads (JSON, never
pickle).

To the engine:   add, abort, tokenize, detokenize, ping         (key "do")
From the engine: ready, failed, admitted, refused, step, answer, pong   (key "is")
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

MAX_MESSAGE = 256 * 2**20
_LENGTH = struct.Struct(">I")
Message = dict[str, Any]


def pack(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    assert len(body) <= MAX_MESSAGE, f"a message of {len(body)} bytes"
    return _LENGTH.pack(len(body)) + body


def read_blocking(channel: socket.socket) -> Message | None:
    """The next message; None when the other side is gone."""
    head = _read_exactly(channel, _LENGTH.size)
    body = None if head is None else _read_exactly(channel, _LENGTH.unpack(head)[0])
    return None if body is None else json.loads(body)


def _read_exactly(channel: socket.socket, count: int) -> bytearray | None:
    data = bytearray()
    while len(data) < count:
        try:
            piece = channel.recv(min(count - len(data), 2**20))
        except OSError:
            return None
        if not piece:
            return None
        data += piece
    return data


async def read(reader: asyncio.StreamReader) -> Message | None:
    """The next message; None when the other side is gone."""
    try:
        head = await reader.readexactly(_LENGTH.size)
        message: Message = json.loads(await reader.readexactly(_LENGTH.unpack(head)[0]))
        return message
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
