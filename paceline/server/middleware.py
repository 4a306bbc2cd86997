"""What every request passes: a name, a key, a bound on its body; and a line in the log when it is over.
Invariant: whatever happens inside, the client gets an answer in its protocol's shape, and exactly one line is
logged, without any of the client's words. How long a key's comparison takes says nothing about the keys:
every key is compared in full, by digest. What a key may have at once is given back however a request ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.config import ServerConfig
from paceline.server.metrics import Metrics
from paceline.server.processes import log, log_error
from paceline.server.responses import ApiError

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
STATUS_OF_THE_GONE = 499  # for the log alone
QUIET = frozenset({"/health", "/ready", "/metrics"})  # asked every few seconds by machines
OPEN = ("/health", "/ready", "/version", "/metrics", "/openapi.json", "/")
NO_KEY = "there is no valid API key in the request; send Authorization: Bearer KEY or x-api-key: KEY"


class Keys:
    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]  # the keys themselves are not kept

    def find(self, authorization: str | None) -> int | None:
        """The number of the key that the header's value shows; without keys all are number 0."""
        if not self._digests:
            return 0
        scheme, _, shown = (authorization or "").partition(" ")
        digest = _digest(shown.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, found or not
        return matches.index(True) if any(matches) and scheme.lower() == "bearer" else None


@dataclass(slots=True)
class Share:
    """What one key has had: requests that run, and tokens, as debt that is paid off from minute to minute."""

    num_running: int = 0
    debt: float = 0.0
    since: float = 0.0

    @contextlib.contextmanager
    def taken(self, config: ServerConfig, state: dict[str, Any]) -> Iterator[None]:
        """Around a request; refused where the key has its share already. What it cost is in its log line."""
        now, rate = time.monotonic(), (config.key_tokens or 0) / 60
        self.debt, self.since = max(0.0, self.debt - rate * (now - self.since)), now
        if config.key_requests is not None and self.num_running >= config.key_requests:
            what = f"{config.key_requests} requests of this key are running; wait for one to end"
            raise ApiError(429, what, "key_busy")
        if config.key_tokens is not None and self.debt >= config.key_tokens:
            what = f"this key has had its {config.key_tokens:,} tokens of the last minute; try again later"
            raise ApiError(429, what, "key_tokens")
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            self.debt += sum(state["fields"].get(name, 0) for name in ("prompt_tokens", "completion_tokens"))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def needs_key(path: str) -> bool:
    """Everything but what tells nothing of prompts and runs nothing."""
    return path not in OPEN and not path.startswith("/playground/")


class Logged:
    """Outermost: names the request, counts and logs it, and answers 500 for what was not foreseen."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, given = time.monotonic(), Headers(scope=scope).get("x-request-id", "")
        name = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        state: dict[str, Any] = scope.setdefault("state", {})
        state |= {"status": 0, "fields": {}, "name": name}

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                state["status"] = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        try:
            await self.app(scope, receive, send_named)
        except ClientDisconnect:
            self.metrics.count("client_disconnects")
            state["status"] = STATUS_OF_THE_GONE
        except Exception as error:  # a mistake of ours: the client is told so, the log where
            log_error("request failed", error, request_id=name)
            if not state["status"]:
                what = "the server made a mistake; its log has the request id"
                answer = ApiError(500, what, "internal_error").response(scope["path"])
                await answer(scope, receive, send_named)
        finally:
            route = getattr(scope.get("route"), "path", "unknown")  # the route, not what the client typed
            self.metrics.count("http_requests", 1, route, str(state["status"]))
            if route not in QUIET:
                place = {"request_id": name, "method": scope["method"], "route": route}
                seconds = round(time.monotonic() - started, 4)
                log("request", **place, status=state["status"], seconds=seconds, **state["fields"])


class Guarded:
    """A key where one is needed, and a bound on the body's size and on the time it takes to come."""

    def __init__(self, app: ASGIApp, keys: Keys, config: ServerConfig) -> None:
        self.app, self.keys, self.config = app, keys, config
        self._shares: dict[int, Share] = {}  # by the number of the key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, unread = Headers(scope=scope), list[Message]()

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        try:
            is_guarded = needs_key(scope["path"]) and scope["method"] != "OPTIONS"
            shown = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"
            scope["state"]["owner"] = _digest(shown.partition(" ")[2].strip())
            key = self.keys.find(shown)
            if is_guarded and key is None:
                raise ApiError(401, NO_KEY, "invalid_api_key")
            length = headers.get("content-length", "0")
            if length.isascii() and length.isdigit():
                self._check_size(int(length[:20]))
            share = self._shares.setdefault(key or 0, Share())
            with share.taken(self.config, scope["state"]) if is_guarded else contextlib.nullcontext():
                if scope["method"] in ("POST", "PUT", "PATCH"):
                    body = await self._body(scope, receive)
                    unread.append({"type": "http.request", "body": body, "more_body": False})
                await self.app(scope, replay, send)
        except ApiError as error:
            scope["state"]["fields"]["error"] = error.code
            await error.response(scope["path"])(scope, receive, send)

    def _check_size(self, num_bytes: int) -> None:
        most = self.config.max_request_bytes
        if num_bytes > most:
            raise ApiError(413, f"the body has more than {most:,} bytes; send less", "request_too_large")

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """All of it, before anything is done with it."""
        body, seconds = bytearray(), self.config.body_timeout
        try:
            async with asyncio.timeout(seconds):
                async for part in Request(scope, receive).stream():
                    body += part
                    self._check_size(len(body))
            return bytes(body)
        except TimeoutError:
            what = f"the body did not come within {seconds:g} seconds; send it at once"
            raise ApiError(408, what, "body_timeout") from None
