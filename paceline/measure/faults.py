"""`paceline bench soak --faults N`: clients that vanish at every stage, bodies that are not what they should
be, slow ones, bursts, grammars that are hard, an engine that is stopped, hung or killed; many at once.
Invariant: a fault is made from a seed and a number. Every request is answered, refused in words, or was left
by its own client; what is none of these is lost, and a fault in the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.measure.endpoint import Endpoint, Refused
from paceline.measure.load import CHAT, metrics

WITHIN_S = 120.0  # a request that has not ended by then is lost, and so is a server that is not ready
BODY_TIMEOUT_S, ENGINE_TIMEOUT_S = 2.0, 5.0
# Small, so that bursts and slow clients pass them.
SERVER_OPTIONS = f"""--max-num-seqs 4 --max-queue 8 --max-request-bytes 65536 --body-timeout {BODY_TIMEOUT_S}
    --engine-timeout {ENGINE_TIMEOUT_S}"""
BURST = 24
ANSWERED, REFUSED, LEFT, LOST = "answered", "refused", "left", "lost"
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

    def body(self, **more: Any) -> bytes:
        said = {
            "role": "user",
            "content": self.source.choice(("Why is the sky blue?", "Say it again: the line.")),
        }
        asked = {
            "messages": [said],
            "temperature": 0,
            "max_tokens": self.source.randint(4, 40),
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
                try:
                    for part in parts:
                        writer.write(part)
                        await writer.drain()
                        await asyncio.sleep(pause)
                except ConnectionError:
                    pass  # it has answered already, and closed
                return outcome(await self._read(reader, writer, reads))
        except (TimeoutError, OSError) as error:
            return LOST if isinstance(error, TimeoutError) else f"{LOST}: {error}"

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.endpoint.host, self.endpoint.port, limit=2**16)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pause: float) -> bytes:
        data = b""
        with contextlib.suppress(ConnectionResetError):  # of what it had not read of ours
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

    async def hurt(self, number: int, seconds: float = 0.0) -> str:
        """A request under way while the engine gets a signal; after it is to go on, or another to come."""
        async with self.hurting:
            asking = asyncio.create_task(self.sent(self.message(stream=True, max_tokens=200)))
            await asyncio.sleep(self.source.random() * 0.3)
            engine = int((await metrics(self.endpoint))["engine_pid"])
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, number)
                if seconds:
                    await asyncio.sleep(seconds)
                    os.kill(engine, signal.SIGCONT)
            found = await asking
            await ready(self.endpoint)
            return found


async def ready(endpoint: Endpoint) -> None:
    async with asyncio.timeout(WITHIN_S):
        while True:
            with contextlib.suppress(Refused):
                await endpoint.get("/ready")
                return
            await asyncio.sleep(0.1)


def outcome(data: bytes) -> str:
    head, _, body = data.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    status = int(words[1]) if len(words) > 2 and words[1].isdigit() else 0
    is_chunked = b"transfer-encoding: chunked" in head.lower()
    is_whole = body.endswith(b"0\r\n\r\n") if is_chunked else bool(body)
    if status == 200 and is_whole:
        return REFUSED if b'data: {"error"' in body else ANSWERED
    return REFUSED if 400 <= status < 600 and status != 500 else f"{LOST}: {data[:120]!r}"


Acting = Callable[[Fault], Awaitable[str | Sequence[str]]]


async def _burst(fault: Fault) -> Sequence[str]:
    return await asyncio.gather(*(fault.sent(fault.message(stream=True)) for _ in range(BURST)))


def _body(fault: Fault) -> Awaitable[str]:
    body = bad_body(fault.source)
    return fault.sent(fault.head(len(body)) + body)


def _length(fault: Fault) -> Awaitable[str]:
    body, source = fault.body(), fault.source
    wrong = source.choice((len(body) + 50, len(body) // 2, -1, "x", "1e3", f"{len(body)}, 7", "9" * 30))
    return fault.sent(fault.head(wrong) + body)


# What is done, how often (of about 100), and what may become of it.
OVER_S = 1.5 * BODY_TIMEOUT_S
KINDS: dict[str, tuple[int, Acting, tuple[str, ...]]] = {
    "leaves at once": (5, lambda f: f.left(b""), (LEFT,)),
    "leaves in headers": (6, lambda f: f.left(f.cut(f.head(9))), (LEFT,)),
    "leaves in body": (6, lambda f: f.left(f.head(500) + f.cut(f.body())), (LEFT,)),
    "leaves in the queue": (8, lambda f: f.left(f.message(max_tokens=200)), (LEFT,)),
    "leaves in a stream": (8, lambda f: f.left(f.message(stream=True, max_tokens=200), reads=True), (LEFT,)),
    "a bad body": (20, _body, (REFUSED,)),
    "a wrong length": (6, _length, (REFUSED,)),
    "reads slowly": (6, lambda f: f.sent(f.message(stream=True), reads=0.05), (ANSWERED, REFUSED)),
    "writes slowly": (5, lambda f: f.sent(*_pieces(f.message()), pause=0.2), (ANSWERED, REFUSED)),
    "writes too slowly": (4, lambda f: f.sent(f.head(90), b"{", pause=OVER_S), (REFUSED,)),
    "dribbles headers": (4, lambda f: f.sent(*_pieces(f.head(90)[:-4]), pause=OVER_S / 5), (REFUSED,)),
    "a burst": (3, _burst, (ANSWERED, REFUSED)),
    "a hard grammar": (4, lambda f: f.sent(f.message(**f.source.choice(HARD))), (ANSWERED, REFUSED)),
    "engine paused": (4, lambda f: f.hurt(signal.SIGSTOP, f.source.random() * 2), (ANSWERED, REFUSED)),
    "engine hung": (1, lambda f: f.hurt(signal.SIGSTOP), (ANSWERED, REFUSED)),
    "engine killed": (3, lambda f: f.hurt(signal.SIGKILL), (ANSWERED, REFUSED)),
    "nothing": (10, lambda f: f.sent(f.message()), (ANSWERED, REFUSED)),
}


def _pieces(data: bytes, num: int = 5) -> list[bytes]:
    size = -(-len(data) // num)
    return [data[start : start + size] for start in range(0, len(data), size)]


async def rage(
    endpoint: Endpoint, count: int, clients: int, seed: int, tell: Callable[[str], None]
) -> Counts:
    """So many faults, some at the same time; by kind what became of the requests."""
    names = random.Random(seed).choices(list(KINDS), [weight for weight, _, _ in KINDS.values()], k=count)
    counts: Counts = {name: Counter() for name in names}
    waiting, hurting = iter(enumerate(names)), asyncio.Lock()

    async def client() -> None:
        for number, name in waiting:
            _, act, allowed = KINDS[name]
            fault = Fault(endpoint, random.Random(f"{seed}/{number}"), hurting)
            if fault.source.random() < 0.8:  # most find a server that would answer
                await ready(endpoint)
            found = await act(fault)
            for one in [found] if isinstance(found, str) else found:
                is_usual = one in allowed
                counts[name][one if is_usual else LOST] += 1
                if not is_usual:
                    counts[name][f"{number}: {one}"] += 1
            tell(name)

    await asyncio.gather(*(client() for _ in range(clients)))
    return counts


Counts = dict[str, Counter[str]]


def descendants(pid: int) -> set[int]:
    """All processes below this one."""
    parents = dict(_parents())
    below, found = {pid}, set[int]()
    while below:
        below = {child for child, parent in parents.items() if parent in below}
        found |= below
    return found


def _parents() -> Iterator[tuple[int, int]]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            yield int(path.parent.name), int(path.read_text().rsplit(")", 1)[1].split()[1])


async def gone(pids: set[int], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while any(
        Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids
    ):
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.1)
    return True
