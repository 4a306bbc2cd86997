"""What is done to a server over the wire: bodies that are not what they should be, parts that come slowly,
clients that leave. Invariant: what becomes of a request is read off the bytes that came back, and a request
that has not ended in WITHIN_S is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from typing import Any, NamedTuple

from paceline.measure.endpoint import Endpoint
from paceline.measure.faults_files import ANSWERED, LEFT, LOST, REFUSED, Files
from paceline.measure.load import CHAT

WITHIN_S = 120.0  # a request that has not ended by then is lost, and so is a server that is not ready
BODY_TIMEOUT_S, ENGINE_TIMEOUT_S = 2.0, 5.0
# Small, so that bursts and slow clients pass them.
SERVER_OPTIONS = f"""--max-num-seqs 4 --max-queue 8 --max-request-bytes 65536 --body-timeout {BODY_TIMEOUT_S}
    --engine-timeout {ENGINE_TIMEOUT_S}"""
# The last takes minutes to compile.
PATTERNS = [
    {"type": "string", "pattern": f".*{c}.{{{20 + i}}}"} for i, c in enumerate("abcdefghijklmnopqrstuvwxyz")
]
HARD: tuple[dict[str, Any], ...] = (
    {"guided_regex": "(((a{1,99}){1,99}){1,99}){1,99}b"},
    {"guided_json": {"type": "array", "items": {"$ref": "#"}, "minItems": 10**6}},
    {"guided_json": {"allOf": PATTERNS}},
)


def bad_body(source: random.Random) -> bytes:
    good = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    text = json.dumps(good)
    kind = source.randrange(8)
    if kind == 0:
        return text[: source.randrange(1, len(text) - 1)].encode()
    if kind == 1:
        field = source.choice(("messages", "max_tokens", "temperature", "stop", "n", "logit_bias", "stream"))
        wrong: Any = source.choice(([[]], {"a": 1}, "x\ud800", -1e400, [None], -7))
        return json.dumps(good | {field: wrong}).encode()
    if kind == 2:
        return f'{text[:-1]}, "seed": {"9" * source.choice((30, 5000))}}}'.encode()
    if kind == 3:
        return source.choice((b"[", b'{"a":', b'{"messages":[')) * source.choice((1000, 9000))
    if kind == 4:
        return (
            text.replace("x", "\x00")
            .encode()
            .replace(b"\\u0000", source.choice((b"\xff", b"\xc3", b"\xed\xa0\x80")))
        )
    if kind == 5:
        return b'{"messages": "' + b"x" * source.choice((70_000, 2_000_000)) + b'"}'
    if kind == 6:
        return bytes(source.randrange(256) for _ in range(source.randrange(1, 400)))
    return source.choice((b"", b"null", b"[]", b"7", b'"text"', b"{}", b'{"messages": []}'))


class Fault(NamedTuple):
    """One of them, with all that is random about it."""

    endpoint: Endpoint
    source: random.Random
    hurting: asyncio.Lock  # one at a time does something to the engine
    files: Files

    def body(self, **more: Any) -> bytes:
        said = {
            "role": "user",
            "content": self.source.choice(("Why is the sky blue?", "Say it again: the line.")),
        }
        asked = {
            "messages": [said],
            "temperature": 0,
            "max_tokens": self.source.randint(2, 24),
            "ignore_eos": True,
        }
        return json.dumps(asked | more).encode()

    def head(self, length: object) -> bytes:
        lines = [f"POST {CHAT} HTTP/1.1", "Host: x", "Connection: close", "Content-Type: application/json"]
        return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()

    def message(self, **more: Any) -> bytes:
        body = self.body(**more)
        return self.head(len(body)) + body

    async def sent(self, *parts: bytes, pause: float = 0.0, reads: float = 0.0) -> str:
        """What becomes of a request that is sent in these parts, with pauses, and read with pauses."""
        try:
            async with asyncio.timeout(WITHIN_S):
                reader, writer = await self._connected()
                # From now on: a server that has refused it may reset what is still being written.
                reading = asyncio.create_task(self._read(reader, writer, reads))
                try:
                    for part in parts:
                        writer.write(part)
                        await writer.drain()
                        await asyncio.sleep(pause)
                except ConnectionError:
                    pass  # it has answered already, and closed
                return outcome(await reading)
        except (TimeoutError, OSError) as error:
            return LOST if isinstance(error, TimeoutError) else f"{LOST}: {error}"

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.endpoint.host, self.endpoint.port, limit=2**16)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pause: float) -> bytes:
        data = b""
        with contextlib.suppress(ConnectionError):  # of what it had not read of ours
            while part := await reader.read(512 if pause else 2**16):
                data += part
                await asyncio.sleep(pause)
        writer.close()
        return data

    async def left(self, data: bytes, reads: bool = False) -> str:
        """Goes after these bytes, politely or with a reset; `reads`: after the first bytes of the answer."""
        reader, writer = await self._connected()
        writer.write(data)
        if reads:
            with contextlib.suppress(TimeoutError, ConnectionError):
                await asyncio.wait_for(reader.read(300), WITHIN_S)
        await asyncio.sleep(self.source.random() * 0.3)
        if self.source.random() < 0.5:
            no_linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
        writer.close()
        return LEFT

    def cut(self, data: bytes) -> bytes:
        return data[: self.source.randrange(1, len(data))]


def outcome(data: bytes) -> str:
    head, _, body = data.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    status = int(words[1]) if len(words) > 2 and words[1].isdigit() else 0
    is_chunked = b"transfer-encoding: chunked" in head.lower()
    is_whole = body.endswith(b"0\r\n\r\n") if is_chunked else bool(body)
    if status == 200 and is_whole:
        return REFUSED if b'data: {"error"' in body else ANSWERED
    return REFUSED if 400 <= status < 600 and status != 500 else f"{LOST}: {data[:120]!r}"
