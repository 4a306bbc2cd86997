"""Sending an answer, whole or as server-sent events, to a client that may leave at any moment. Invariant:
when the client is gone the engine's call is left at once, so its blocks are free before the next step; an
error after the first byte is an event of its own, and the stream still ends with [DONE].
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.server.errors import ApiError

T = TypeVar("T")
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class ClientGone(Exception):
    """The client has closed the connection."""


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return text.encode("utf-8", "replace")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work; it is cancelled when the client leaves first."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    worker, watcher = asyncio.create_task(work), asyncio.create_task(watch())
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGone
        return worker.result()
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


class EventStream(JsonResponse):
    """A stream of events. `stack` holds the engine's call and is closed with the response."""

    def __init__(self, chunks: AsyncIterator[dict[str, Any]], stack: AsyncExitStack) -> None:
        super().__init__(None, headers=HEADERS)
        del self.headers["content-length"]
        self._chunks, self._stack = chunks, stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async def event(data: bytes, has_more: bool = True) -> None:
            body = b"data: " + data + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": has_more})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for chunk in self._chunks:
                await event(self.render(chunk))
        except ApiError as error:
            await event(self.render(error.body()))
        await event(b"[DONE]", has_more=False)
