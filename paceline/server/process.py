"""An engine process and the socket to it. Invariant: when the block is left the process is gone, by itself or
killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from paceline.server import wire

READ_AHEAD = 2**22  # bytes
PATIENCE_S = 3.0  # for a process whose socket is closed to end


class EngineProcess:
    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self.reader, self._writer = process, reader, writer

    @classmethod
    @asynccontextmanager
    async def start(cls, setup: dict[str, Any]) -> AsyncIterator[EngineProcess]:
        ours, theirs = socket.socketpair()
        with theirs:
            # -P: modules come from where they are installed, never from the folder the server was started in.
            command = (sys.executable, "-P", "-m", "paceline.server.worker", str(theirs.fileno()))
            quiet: dict[str, Any] = {
                "stdin": asyncio.subprocess.DEVNULL,
                "stdout": asyncio.subprocess.DEVNULL,
            }
            process = await asyncio.create_subprocess_exec(
                *command, pass_fds=(theirs.fileno(),), start_new_session=True, **quiet
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=READ_AHEAD)
        made = cls(process, reader, writer)
        made.send(setup)
        try:
            yield made
        finally:
            await made._end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: dict[str, Any]) -> None:
        """Never waits: what a dead process cannot take is lost, and its calls are failed by what reads
        from it."""
        if not self._writer.is_closing():
            self._writer.write(wire.pack(message))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def wait(self) -> int:
        return await self._process.wait()

    async def _end(self) -> None:
        self._writer.close()  # the process ends when it reads the end
        try:
            await asyncio.wait_for(asyncio.shield(self._process.wait()), PATIENCE_S)
        except TimeoutError:
            self.kill()
            await self._process.wait()
        with contextlib.suppress(ConnectionError, BrokenPipeError):
            await self._writer.wait_closed()
