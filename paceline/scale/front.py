"""The front: one address for all replicas. It reads a request, asks for a seat, sends it there and passes on
what comes back; it knows no route but those about itself. Invariant: a request of which nothing was passed on
when its replica is lost is sent once more, to another; one whose stream had begun ends with an error in its
protocol's shape; what a client gets never ends within an event.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import aiohttp
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from paceline.scale.fleet import SEAT, Fleet, Lost, Seat
from paceline.scale.router import pieces_of
from paceline.scale.samples import joined
from paceline.server.app import passed
from paceline.server.responses import (
    ANTHROPIC,
    ApiError,
    JsonResponse,
    anthropic_body,
    unavailable,
    unless_gone,
)

OWN = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "upgrade", "te", "trailer"}
OWN |= {"expect", "proxy-connection"}  # headers of one connection
RESPONSES = "/v1/responses"
ENGINE_LOST = b'"code":"engine_lost"'
KEPT = re.compile(r"/v1/responses/[^/]+")  # a response that one of the replicas keeps
EVENTS = "text/event-stream"
IDLE_S = 15.0  # less than replicas keep a connection that is not used
CONNECT_S = 3.0


class Front:
    """An ASGI app."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.began = fleet, time.monotonic()
        self.session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, is_get = scope["path"], scope["method"] == "GET"
        scope["route"] = SimpleNamespace(
            path=path if path in ("/health", "/ready", "/metrics") else "replica"
        )
        try:
            if path in ("/health", "/ready") and is_get:
                good = ("ok", "draining") if path == "/health" else ("ok",)
                await self._state(good)(scope, receive, send)
            elif path == "/metrics" and is_get:
                text = await self._metrics()
                media = "text/plain; version=0.0.4; charset=utf-8"
                await Response(text, media_type=media)(scope, receive, send)
            else:
                await self._pass_on(scope, receive, send)
        except ApiError as error:
            scope["state"]["fields"]["error"] = error.code
            if error.status in (429, 503, 504):
                self.fleet.metrics.count("requests_rejected", 1, error.code or "unknown")
            await error.response(path)(scope, receive, send)

    def _state(self, good: tuple[str, ...]) -> Response:
        replicas = {name: state for name, (state, _) in self.fleet.states.items()}
        uptime, state = round(time.monotonic() - self.began, 1), self.fleet.state
        said = {"status": state, "replicas": replicas, "uptime_s": uptime}
        return JsonResponse(said, 200 if state in good else 503)

    async def _metrics(self) -> bytes:
        """Those of all replicas, and of the front."""
        texts = {"front": self.fleet.metrics.text().decode()}

        async def ask(name: str, url: str) -> None:
            try:
                async with self._http().get(f"{url}/metrics", timeout=aiohttp.ClientTimeout(2.0)) as answer:
                    texts[name] = await answer.text()
            except (aiohttp.ClientError, OSError, TimeoutError):
                return  # it is being lost, which `Fleet` finds out

        await asyncio.gather(*(ask(name, url) for name, (_, url) in self.fleet.states.items()))
        return joined(texts).encode()

    def _http(self) -> aiohttp.ClientSession:
        if self.session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
            jar = aiohttp.DummyCookieJar()
            options: dict[str, Any] = {"auto_decompress": False, "trust_env": False}
            self.session = aiohttp.ClientSession(
                timeout=timeout, connector=connector, cookie_jar=jar, **options
            )
        return self.session

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, tried = await Request(scope, receive).body(), set[str]()
        told = _json(body) if scope["method"] == "POST" else {}
        # A response that is kept is at one replica only, and at which is not known: the next one is asked.
        is_kept = bool(KEPT.fullmatch(scope["path"])) or told.get("previous_response_id") is not None
        num_tries = max(2, len(self.fleet.states)) if is_kept else 2
        pieces, fields = pieces_of(told), scope["state"]["fields"]
        for number in range(1, num_tries + 1):
            answer = Answer(scope, body, send, may_refuse=number < num_tries, is_kept=is_kept)
            try:
                async with self.fleet.attend(pieces, tried) as seat:
                    fields |= {"replica": seat.replica, "tries": number}
                    tried.add(seat.replica)
                    await unless_gone(receive, self._until_lost(seat, answer))
                    return
            except Lost:
                if answer.has_begun:
                    return await answer.break_off(unavailable(self.fleet.lost_state))
                self.fleet.metrics.count("requests_retried")
        raise unavailable(self.fleet.lost_state)

    async def _until_lost(self, seat: Seat, answer: Answer) -> None:
        """The answer, unless Ray says first that the replica is gone: its connection may just hang."""
        work = asyncio.create_task(answer.come(self._http(), seat))
        seat.end.add_done_callback(lambda end: work.cancel() if _has_failed(end) else None)
        try:
            await work
        except asyncio.CancelledError:
            if _has_failed(seat.end):
                raise Lost from None
            raise
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self.fleet.lose(seat.replica)
            raise Lost(str(error)) from None


@dataclass(slots=True)
class Answer:
    """What a client gets of one try. may_refuse: another replica can be asked, so that an answer of one that
    cannot answer now, or does not have what is kept, is not passed on."""

    scope: Scope
    body: bytes
    send: Send
    may_refuse: bool
    is_kept: bool
    has_begun: bool = False

    async def come(self, http: aiohttp.ClientSession, seat: Seat) -> None:
        scope, asked = self.scope, dict[str, str]()
        for name, value in Headers(scope=scope).items():
            if name not in OWN:
                asked[name] = f"{asked[name]}, {value}" if name in asked else value
        asked |= {SEAT: seat.name, "x-request-id": scope["state"]["name"]}
        # Of what the client wrote only path and query are taken: the place is ours.
        url = URL(seat.url).join(URL.build(path="/" + quote(scope["path"].lstrip("/")), encoded=True))
        query = scope.get("query_string", b"").decode("latin-1")
        url = URL(f"{url}?{query}" if query else str(url), encoded=True)
        data, plain = self.body or None, ("user-agent", "accept", "accept-encoding", "content-type")
        options: dict[str, Any] = {"allow_redirects": False, "skip_auto_headers": plain}
        async with http.request(scope["method"], url, headers=asked, data=data, **options) as answer:
            if answer.content_type != EVENTS:
                whole = await answer.read()
                if self.may_refuse and (answer.status == 503 or (self.is_kept and answer.status == 404)):
                    raise Lost
                return await self._say(answer, whole, has_more=False)
            rest = b""
            async for data in answer.content.iter_any():
                rest += data
                end = rest.rfind(b"\n\n") + 2
                if end == 1:
                    continue
                if self.may_refuse and not self.has_begun and ENGINE_LOST in rest:
                    raise Lost
                await self._say(answer, rest[:end])
                rest = rest[end:]
            await self._say(answer, rest, has_more=False)

    async def _say(self, answer: aiohttp.ClientResponse, data: bytes, has_more: bool = True) -> None:
        if not self.has_begun:
            self.has_begun = True
            headers = [(name.lower(), value) for name, value in answer.raw_headers]
            headers = [(name, value) for name, value in headers if name.decode("latin-1") not in OWN]
            if not has_more:
                headers.append((b"content-length", str(len(data)).encode()))
            start: Message = {"type": "http.response.start", "status": answer.status, "headers": headers}
            await self.send(start)
        await self.send({"type": "http.response.body", "body": data, "more_body": has_more})

    async def break_off(self, error: ApiError) -> None:
        """The last event of a stream that cannot go on."""
        path = self.scope["path"]
        told, name, last = error.body(), b"", b"data: [DONE]\n\n"
        if path.startswith((ANTHROPIC, RESPONSES)):
            told = anthropic_body(error) if path.startswith(ANTHROPIC) else {"type": "error", **told["error"]}
            name, last = b"event: error\n", b""
        event = name + b"data: " + json.dumps(told).encode() + b"\n\n" + last
        await self.send({"type": "http.response.body", "body": event, "more_body": False})


def _has_failed(end: asyncio.Task[None]) -> bool:
    return end.done() and (end.cancelled() or end.exception() is not None)


def _json(body: bytes) -> dict[str, Any]:
    """What cannot be read is refused by the replica."""
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def front_app(fleet: Fleet) -> Any:
    """With what every request passes: keys, limits, the log."""
    app: Any = Front(fleet)
    for middleware, options in passed(fleet.config, fleet.metrics):
        app = middleware(app, **options)
    return app
