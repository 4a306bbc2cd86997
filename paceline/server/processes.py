"""The processes of the server: how they are started, the messages between them and their logs. Both are JSON
objects, one a line, over a socket and on stderr.

To the engine:   add, abort, tokenize, detokenize, handover, release, ping   (key "do")
From the engine: ready, failed, answer, refused, step, pong             (key "is")

Invariant: neither side runs anything it reads (JSON, never pickle). No prompt, no answer and no key is ever
handed to a log call; an error's message may quote what a client sent, so only its kind and place are logged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

LONGEST = 2**30  # bytes of a message
LOGGER = logging.getLogger("paceline.server")
Message = dict[str, Any]


def start(module: str, has_session: bool = False) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process that runs a module of this package, and our end of the socket whose number it is given.
    has_session: in a session of its own, with what it starts, so that `kill` ends them together."""
    ours, theirs = socket.socketpair()
    with theirs:
        # -P: modules come from where they are installed, never from the folder the server was started in.
        command = [sys.executable, "-P", "-m", module, str(theirs.fileno())]
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        given["start_new_session"] = has_session
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), **given)
    return process, ours


def kill(process: subprocess.Popen[bytes]) -> None:
    """One that has a session, and all that share it: those of them that are stopped do not see that it is
    gone."""
    process.kill()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            _, _, _, session, *_ = path.read_text().rpartition(")")[2].split()
            if int(session) == process.pid:
                os.kill(int(path.parent.name), signal.SIGKILL)


def pack(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def unpack(line: bytes) -> Message | None:
    """None when the other side is gone: half a line is what a process that was killed has left."""
    return json.loads(line) if line.endswith(b"\n") else None


class _Json(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, Any] = {"time": stamp, "level": record.levelname.lower(), "process": self._process}
        line |= {"event": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info and (error := record.exc_info[1]) is not None:
            frames = traceback.extract_tb(error.__traceback__)[-12:]
            line["error"] = type(error).__name__
            line["trace"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        return json.dumps(line, default=str)


def set_up_logs(level: str, process: str) -> None:
    """All logs of this process, those of libraries too, become JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio"):
        library = logging.getLogger(name)
        library.handlers.clear()
        library.setLevel(logging.WARNING)
        library.propagate = name != "uvicorn.access"


def log(event: str, level: int = logging.INFO, **fields: Any) -> None:
    LOGGER.log(level, event, extra={"fields": fields})


def log_error(event: str, error: BaseException, **fields: Any) -> None:
    LOGGER.error(event, exc_info=error, extra={"fields": fields})
