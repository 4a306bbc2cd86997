"""What routes answer. Each turns a body into a job, opens a call, and hands it to a writer; nothing here
waits for anything but the engine's news. Invariant: no route runs model code, reads a tokenizer or touches a
file after the start: of the playground, only files that were in its folder at the start are served, by name,
under a strict content security policy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from paceline import __version__
from paceline.server import openai_types as types
from paceline.server import responses
from paceline.server.client import EngineClient
from paceline.server.config import ServerConfig
from paceline.server.frames import HandoverRequest, pieces
from paceline.server.metrics import Metrics
from paceline.server.responses import ApiError, EventStream, JsonResponse
from paceline.server.translate import Job, Translator
from paceline.server.writer import Writer

PLAYGROUND = Path(__file__).parent / "playground"
PAGE_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Service:
    """OpenAI's routes and the server's own, and what all routes share."""

    def __init__(self, config: ServerConfig, engine: EngineClient, metrics: Metrics, model_name: str) -> None:
        self.config, self.engine, self.metrics, self.model_name = config, engine, metrics, model_name
        self.started, self.began = time.time(), time.monotonic()
        self.routes = ""  # all of them, for those who ask for another
        files = PLAYGROUND.glob("*") if config.playground else ()
        self._pages = {path.name: path.read_bytes() for path in files if path.suffix in PAGE_KINDS}

    async def completions(self, request: Request, body: types.CompletionRequest) -> Response:
        return await self.answer(request, self.translator(body.model).completion(body), is_chat=False)

    async def chat_completions(self, request: Request, body: types.ChatRequest) -> Response:
        return await self.answer(request, self.translator(body.model).chat(body), is_chat=True)

    async def models(self) -> Response:
        return JsonResponse({"object": "list", "data": [self._model_json()]})

    async def model(self, model: str) -> Response:
        self._check_model(model)
        return JsonResponse(self._model_json())

    async def tokenize(self, body: types.TokenizeRequest) -> Response:
        question = {"do": "tokenize", "prompt": self.translator(body.model).tokenize(body)}
        return JsonResponse(await self.engine.ask(question))

    async def detokenize(self, body: types.DetokenizeRequest) -> Response:
        self._check_model(body.model)
        return JsonResponse(await self.engine.ask({"do": "detokenize", "tokens": body.tokens}))

    async def handover(self, request: Request, body: HandoverRequest) -> Response:
        """A prompt is read for a decode server: a frame of its K/V, or where in memory it lies."""
        question = {"do": "handover", **body.model_dump(exclude={"is_near"})}
        found = await responses.unless_gone(request.receive, self.engine.ask(question))
        if body.is_near:
            return JsonResponse(found)
        length, released = {"content-length": str(found["size"])}, partial(self.engine.release, found["name"])
        sent = pieces(found["memory"], released)
        return StreamingResponse(sent, headers=length, media_type="application/octet-stream")

    async def release_handover(self, name: str) -> Response:
        self.engine.release(name)
        return JsonResponse({"deleted": True})

    async def health(self) -> Response:
        """Can requests be answered? While draining those that run still are."""
        return self._state("ok", "draining")

    async def ready(self) -> Response:
        """May new requests be sent here?"""
        return self._state("ok")

    async def version(self) -> Response:
        return JsonResponse({"version": __version__})

    async def show_metrics(self) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def page(self, name: str) -> Response:
        if name not in self._pages:
            raise ApiError(404, "there is no such page")
        return Response(self._pages[name], media_type=PAGE_KINDS[Path(name).suffix], headers=PAGE_HEADERS)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, "", "default", self.model_name):
            what = f"the model {name!r:.80} does not exist; this server has {self.model_name!r}"
            raise ApiError(404, what, "model_not_found", "model")

    def translator(self, model: str | None) -> Translator:
        self._check_model(model)
        if not self.engine.info:
            raise responses.unavailable("starting")
        return Translator(self.config, self.engine.info)

    def _state(self, *good: str) -> Response:
        uptime, state = round(time.monotonic() - self.began, 1), self.engine.state
        said = {"status": state, "engine_restarts": self.engine.num_restarts, "uptime_s": uptime}
        return JsonResponse(said, 200 if state in good else 503)

    def _model_json(self) -> dict[str, Any]:
        own = {"id": self.model_name, "object": "model", "created": int(self.started), "owned_by": "paceline"}
        return own | {name: self.engine.info.get(name) for name in ("max_model_len", "speculative")}

    async def answer(
        self, request: Request, job: Job, is_chat: bool = True, door: Callable[[Writer], Any] | None = None
    ) -> Response:
        """Open the call first: what the engine refuses is an error with its own status, no failing stream.
        door: what says the chat's answer in another protocol."""
        async with AsyncExitStack() as stack:
            call = await stack.enter_async_context(self.engine.call(job.parts, job.num_choices))
            num_spec = self.engine.info["speculative"]["num_speculative_tokens"]
            writer = Writer(job, call, self.model_name, is_chat, num_spec)
            teller = door(writer) if door else writer
            stack.callback(_describe, request, writer, teller.name)
            if job.is_stream:
                return EventStream(teller.chunks(), stack.pop_all(), is_typed=door is not None)
            return JsonResponse(await responses.unless_gone(request.receive, teller.whole()))
        raise AssertionError("the block above returns or raises")

    async def refused(self, request: Request, error: Exception) -> Response:
        """The answer where a route raised."""
        if isinstance(error, RequestValidationError):
            error = responses.from_validation(error.errors())
        elif isinstance(error, HTTPException):
            here = f"there is no {request.method} {request.url.path:.80} here; this server has {self.routes}"
            words = {404: here, 405: "this route does not take that method"}
            message = words.get(error.status_code, "the body could not be read; send JSON")
            error = ApiError(error.status_code, message)
        assert isinstance(error, ApiError)
        request.scope["state"]["fields"]["error"] = error.code or "invalid_request"
        if error.status in (429, 503, 504):
            self.metrics.count("requests_rejected", 1, error.code or "unknown")
        return error.response(request.url.path)


def _describe(request: Request, writer: Writer, name: str) -> None:
    """For the log: sizes and times, no words."""
    call = writer.call
    request.scope["state"]["fields"] |= {
        "id": name,
        "stream": writer.job.is_stream,
        "choices": call.total_choices,
        "completion_tokens": call.num_tokens,
        "prompt_tokens": sum(call.prompts.values()),
        "first_token_s": call.timings()["first_token_s"],
        "finish": sorted({end["reason"] for end in call.ends.values()}),
        "error": call.error.code if call.error else None,
    }
