"""What a client is sent: an answer, whole or as server-sent events, or an error in OpenAI's shape with the
status that fits; the routes of Anthropic's Messages have errors in its shape. Invariant: every failure of a
request becomes one `ApiError`, whose message names the value and the remedy and holds no secret; when the
client is gone the engine's call is left at once; an error after the first byte is an event of its own, and
the stream still ends with [DONE], or in protocols whose events have a type with one that says so.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
ANTHROPIC = "/v1/messages"  # the routes whose errors have the shape of Anthropic's
ANTHROPIC_KINDS = {**KINDS, 413: "request_too_large", 503: "overloaded_error"}
CODES = {"GrammarError": "invalid_grammar", "TooLong": "context_length_exceeded"}
ENGINE_LOST = "the engine stopped while it was answering and is being started again; send the request again"
# By the engine's state, "lost" for what ran when it ended: the message and the code.
UNAVAILABLE = {
    "draining": ("the server is shutting down; send the request to another", "draining"),
    "lost": (ENGINE_LOST, "engine_lost"),
}
RETRY_AFTER_S = {
    "queue_full": 1,
    "key_busy": 1,
    "key_tokens": 10,
    "engine_lost": 2,
    "engine_unavailable": 2,
    "draining": 5,
}  # by code


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return text.encode("utf-8", "replace")


class ApiError(Exception):
    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = {"retry-after": str(RETRY_AFTER_S[code])} if code in RETRY_AFTER_S else {}
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"

    def response(self, path: str) -> JsonResponse:
        """In the shape of the route's protocol."""
        body = anthropic_body(self) if path.startswith(ANTHROPIC) else self.body()
        return JsonResponse(body, self.status, self.headers)

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def anthropic_body(error: ApiError) -> dict[str, Any]:
    usual = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = ANTHROPIC_KINDS.get(error.status, usual)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def from_validation(errors: Sequence[Any]) -> ApiError:
    """The first thing that is wrong, without what the client wrote there, but for the name of a type."""
    first = errors[0]
    place, kind = [str(part) for part in first["loc"] if part != "body"], first["type"]
    if not place or (kind == "json_invalid" and len(place) == 1):
        what = "the body is not a JSON object; send one with content-type application/json"
        return ApiError(400, what, "invalid_json")
    what = f"is wrong: {first['msg']}"
    if kind == "extra_forbidden":
        what = "is not a field of this route"
    elif kind == "value_error":  # one of ours
        what = str(first["ctx"]["error"])
    elif kind == "union_tag_invalid":
        what = f"is of type {first['ctx']['tag']!r:.60}; this server takes {first['ctx']['expected_tags']}"
    return ApiError(400, f"{'.'.join(place)[:200]} {what}", param=place[0][:80])


def unavailable(state: str) -> ApiError:
    usual = (f"the engine is {state}; try again in a moment", "engine_unavailable")
    return ApiError(503, *UNAVAILABLE.get(state, usual))


def from_engine(error: dict[str, Any]) -> ApiError:
    """A refusal or failure that the engine process reported."""
    if error["kind"] == "InternalError":
        return ApiError(500, error["message"], "internal_error")
    if error["kind"] == "OutOfMemory":
        return ApiError(503, error["message"], "out_of_memory")
    return ApiError(400, error["message"], CODES.get(error["kind"]))


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work; it is cancelled when the client leaves first."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    worker, watcher = asyncio.create_task(work), asyncio.create_task(watch())
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnect
        return worker.result()
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


class EventStream(JsonResponse):
    """A stream of events, with names where they have types. `stack` holds the engine's call and is closed
    with the response."""

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncIterator[dict[str, Any]], stack: AsyncExitStack, is_typed: bool = False
    ) -> None:
        super().__init__(None, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks, self._stack, self._is_typed = chunks, stack, is_typed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async def event(data: bytes, has_more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": has_more})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for chunk in self._chunks:
                name = f"event: {chunk['type']}\n" if self._is_typed else ""
                await event(name.encode() + b"data: " + self.render(chunk) + b"\n\n")
        except ApiError as error:
            await event(b"data: " + self.render(error.body()) + b"\n\n")
        await event(b"" if self._is_typed else b"data: [DONE]\n\n", has_more=False)
