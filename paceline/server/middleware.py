"""What every request passes: a name, a key, a bound on its body; and a line in the log when it is over.

Invariant: whatever happens inside, the client gets an answer in OpenAI's shape, and exactly one line is
logged, without any of the client's words.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.config import ServerConfig
from paceline.server.errors import ApiError
from paceline.server.keys import Keys, needs_key
from paceline.server.logs import log, log_error
from paceline.server.metrics import Metrics
from paceline.server.streaming import STATUS_OF_THE_GONE, ClientGone, JsonResponse

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
QUIET = frozenset({"/health", "/ready", "/metrics"})  # asked every few seconds by machines


def response_of(error: ApiError) -> JsonResponse:
    return JsonResponse(error.body(), error.status, error.headers)


class Logged:
    """Outermost: names the request, counts and logs it, and answers 500 for what was not foreseen."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        state: dict[str, Any] = scope.setdefault("state", {})
        state |= {"request_id": name, "started": time.monotonic(), "status": 0, "fields": {}}

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                state["status"] = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        try:
            await self.app(scope, receive, send_named)
        except ClientGone:
            state["status"] = STATUS_OF_THE_GONE
        except Exception as error:  # a mistake of ours: the client is told so, the log where
            log_error("request failed", error, request_id=name)
            if not state["status"]:
                what = "the server made a mistake; its log has the request id"
                failed = response_of(ApiError(500, what, "internal_error"))
                await failed(scope, receive, send_named)
        finally:
            self._note(scope, state)

    def _note(self, scope: Scope, state: dict[str, Any]) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "unknown")  # the route, not what the client typed
        self.metrics.count("http_requests", route=path, status=str(state["status"]))
        if path not in QUIET:
            fields = {"request_id": state["request_id"], "method": scope["method"], "route": path}
            seconds = round(time.monotonic() - state["started"], 4)
            log("request", **fields, status=state["status"], seconds=seconds, **state["fields"])


class Guarded:
    """A key where one is needed, and a bound on the body's size and on the time it takes to come."""

    def __init__(self, app: ASGIApp, keys: Keys, config: ServerConfig) -> None:
        self.app, self.keys, self.config = app, keys, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            self._check(scope)
            if scope["method"] in ("POST", "PUT", "PATCH"):
                receive = _replay(await self._body(receive), receive)
        except ApiError as error:
            return await response_of(error)(scope, receive, send)
        return await self.app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        is_guarded = needs_key(scope["path"]) and scope["method"] != "OPTIONS"
        if is_guarded and not self.keys.allow(headers.get("authorization")):
            what = "there is no valid API key in the request; send the header Authorization: Bearer KEY"
            raise ApiError(401, what, "invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit():
            self._check_size(int(length[:20]))

    def _check_size(self, num_bytes: int) -> None:
        most = self.config.max_request_bytes
        if num_bytes > most:
            raise ApiError(413, f"the body has more than {most:,} bytes; send less", "request_too_large")

    async def _body(self, receive: Receive) -> bytes:
        """All of it, before anything is done with it."""
        body, seconds = bytearray(), self.config.body_timeout
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    body += message.get("body", b"")
                    self._check_size(len(body))
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            what = f"the body did not come within {seconds:g} seconds; send it at once"
            raise ApiError(408, what, "body_timeout") from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive that first gives the body that was read already."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed
