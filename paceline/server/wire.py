"""The processes of the server and the messages between them: JSON objects, one a line, over a socket.

To the engine:   add, abort, tokenize, detokenize, ping                 (key "do")
From the engine: ready, failed, admitted, refused, step, answer, pong   (key "is")

Invariant: neither side runs anything it reads (JSON, never pickle).
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from typing import Any, BinaryIO

LONGEST = 2**30  # bytes of a message
Message = dict[str, Any]


def start(module: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process that runs a module of this package, and our end of the socket whose number it is given."""
    ours, theirs = socket.socketpair()
    with theirs:
        # -P: modules come from where they are installed, never from the folder the server was started in.
        command = [sys.executable, "-P", "-m", module, str(theirs.fileno())]
        quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), start_new_session=True, **quiet)
    return process, ours


def pack(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def read(file: BinaryIO) -> Message | None:
    """The next message; None when the other side is gone."""
    return _parse(file.readline())


async def read_async(reader: asyncio.StreamReader) -> Message | None:
    try:
        return _parse(await reader.readline())
    except ConnectionError:
        return None


def _parse(line: bytes) -> Message | None:
    """Half a line is what a process that was killed has left."""
    return json.loads(line) if line.endswith(b"\n") else None
