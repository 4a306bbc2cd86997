"""The routes. Each turns a body into a job, opens a call, and hands it to a writer; nothing here waits for
anything but the engine's news.

Invariant: no route runs model code, reads a tokenizer or touches a file after the start.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from paceline import __version__
from paceline.server.answers import Writer
from paceline.server.client import EngineClient
from paceline.server.config import ServerConfig, read_keys
from paceline.server.errors import ApiError, bad_request, unavailable
from paceline.server.keys import Keys
from paceline.server.metrics import Metrics
from paceline.server.middleware import Guarded, Logged, response_of
from paceline.server.openai_types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ErrorBody,
    TokenizeRequest,
)
from paceline.server.pages import add_pages
from paceline.server.streaming import ClientGone, EventStream, JsonResponse, json_unless_gone
from paceline.server.translate import Job, Translator, check_model

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 429, 503, 504)
}


class Service:
    """What the routes share."""

    def __init__(self, config: ServerConfig, engine: EngineClient, metrics: Metrics, model_name: str) -> None:
        self.config, self.engine, self.metrics, self.model = config, engine, metrics, model_name
        self.started = time.time()

    @property
    def translator(self) -> Translator:
        if not self.engine.info:
            raise unavailable("starting")
        return Translator(self.config, self.engine.info)

    def health(self) -> dict[str, Any]:
        uptime = round(time.time() - self.started, 1)
        return {"status": self.engine.state, "engine_restarts": self.engine.num_restarts, "uptime_s": uptime}

    def model_json(self) -> dict[str, Any]:
        info = self.engine.info
        return {
            "id": self.model,
            "object": "model",
            "created": int(self.started),
            "owned_by": "paceline",
            "max_model_len": info.get("max_model_len"),
            "speculative": info.get("speculative"),
        }

    async def answer(self, request: Request, job: Job, is_chat: bool) -> Response:
        """Open the call first: what the engine refuses is an error with its own status, no failing stream."""
        async with AsyncExitStack() as stack:
            call = await stack.enter_async_context(self.engine.call(job.parts, job.num_choices))
            num_spec = self.engine.info["speculative"]["num_speculative_tokens"]
            writer = Writer(job, call, self.model, is_chat, num_spec)
            stack.callback(self._describe, request, job, writer)
            if job.is_stream:
                return EventStream(writer.chunks(), stack.pop_all(), self._gone)
            try:
                return await json_unless_gone(request, writer.whole())
            except ClientGone:
                self._gone()
                raise
        raise AssertionError("the block above returns or raises")

    def _gone(self) -> None:
        self.metrics.count("client_disconnects")

    def _describe(self, request: Request, job: Job, writer: Writer) -> None:
        """For the log: sizes and times, no words."""
        call = writer.call
        request.scope["state"]["fields"] |= {
            "id": writer.name,
            "stream": job.is_stream,
            "choices": call.total_choices,
            "completion_tokens": call.num_tokens,
            "prompt_tokens": sum(call.prompts.values()),
            "first_token_s": call.timings()["first_token_s"],
            "finish": sorted(set(call.reasons.values())),
            "error": call.error.code if call.error else None,
        }


def make_app(service: Service) -> FastAPI:
    app = FastAPI(title="Paceline", version=__version__, docs_url=None, redoc_url=None, responses=ERRORS)
    _add_openai_routes(app, service)
    _add_small_routes(app, service)
    add_pages(app, service.config.playground)
    _add_errors(app, service.metrics)
    app.openapi = lambda: _schema(app)  # type: ignore[method-assign]
    config = service.config
    app.add_middleware(Guarded, keys=Keys(read_keys(config)), config=config)
    if config.cors_origin:
        allowed: dict[str, Any] = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        app.add_middleware(CORSMiddleware, allow_origins=config.cors_origin, **allowed)
    app.add_middleware(Logged, metrics=service.metrics)
    return app


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        check_model(body.model, service.model)
        return await service.answer(request, service.translator.completion(body), is_chat=False)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        check_model(body.model, service.model)
        return await service.answer(request, service.translator.chat(body), is_chat=True)

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [service.model_json()]})

    @app.get("/v1/models/{model:path}", response_model=None)
    async def model(model: str) -> Response:
        check_model(model, service.model)
        return JsonResponse(service.model_json())


def _add_small_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeRequest) -> Response:
        check_model(body.model, service.model)
        question = {"do": "tokenize", "prompt": service.translator.tokenize(body)}
        return JsonResponse(await service.engine.ask(question))

    @app.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeRequest) -> Response:
        check_model(body.model, service.model)
        return JsonResponse(await service.engine.ask({"do": "detokenize", "tokens": body.tokens}))

    @app.get("/health", response_model=None)
    async def health() -> Response:
        """Can requests be answered? While draining those that run still are."""
        return JsonResponse(service.health(), 200 if service.engine.state in ("ok", "draining") else 503)

    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        """May new requests be sent here?"""
        return JsonResponse(service.health(), 200 if service.engine.state == "ok" else 503)

    @app.get("/version", response_model=None)
    async def version() -> Response:
        return JsonResponse({"version": __version__})

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_errors(app: FastAPI, metrics: Metrics) -> None:
    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        request.scope["state"]["fields"]["error"] = error.code or "invalid_request"
        if error.status in (429, 503, 504):
            metrics.count("requests_rejected", reason=error.code or "unknown")
        return response_of(error)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await api_error(request, _as_bad_request(error))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = {404: "there is no such route", 405: "this route does not take that method"}
        message = words.get(error.status_code, "the body could not be read; send JSON")
        return await api_error(request, ApiError(error.status_code, message))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)


def _as_bad_request(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong, without what the client wrote there."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid" or not place:
        what = "the body is not a JSON object; send one with content-type application/json"
        return bad_request(what, code="invalid_json")
    is_unknown = first["type"] == "extra_forbidden"
    what = "is not a field of this route" if is_unknown else f"is wrong: {first['msg']}"
    return bad_request(f"{'.'.join(place)[:200]} {what}", place[0][:80])


def _schema(app: FastAPI) -> dict[str, Any]:
    """As FastAPI writes it, but for the 422 it assumes: here that is a 400."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        app.openapi_schema = schema
    return app.openapi_schema
