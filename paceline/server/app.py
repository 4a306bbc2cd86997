"""The server as an ASGI app: which route leads where, and what every request passes.

Invariant: a route exists only here, so that the list which a wrong path is answered with is whole.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from paceline import __version__
from paceline.server import anthropic_types
from paceline.server import openai_types as types
from paceline.server.config import ServerConfig, read_keys
from paceline.server.doors import Doors
from paceline.server.frames import ROUTE
from paceline.server.metrics import Metrics
from paceline.server.middleware import Guarded, Keys, Logged
from paceline.server.responses import ANTHROPIC, ApiError
from paceline.server.service import Service

# "4XX": FastAPI then adds no 422 of its own, which is a 400 here.
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": types.ErrorBody} for status in (400, 401, 404, 408, 413, 429, 503, 504, "4XX")
}
ANTHROPIC_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": anthropic_types.ErrorBody} for status in ERRORS
}


def make_app(service: Service) -> FastAPI:
    app = FastAPI(title="Paceline", version=__version__, docs_url=None, redoc_url=None, responses=ERRORS)
    config = service.config
    routes: dict[str, Callable[..., Awaitable[Response]]] = {
        "POST /v1/completions": service.completions,
        "POST /v1/chat/completions": service.chat_completions,
        "GET /v1/models": service.models,
        "GET /v1/models/{model:path}": service.model,
        **Doors(service).routes(),
        "POST /tokenize": service.tokenize,
        "POST /detokenize": service.detokenize,
        "GET /health": service.health,
        "GET /ready": service.ready,
        "GET /version": service.version,
        "GET /metrics": service.show_metrics,
    }
    if config.role == "prefill":
        routes |= {f"POST {ROUTE}": service.handover, f"DELETE {ROUTE}/{{name}}": service.release_handover}
    service.routes = ", ".join(routes).replace(":path", "")
    for route, answer in routes.items():
        method, path = route.split()
        errors = ANTHROPIC_ERRORS if path.startswith(ANTHROPIC) else None
        app.add_api_route(path, answer, methods=[method], responses=errors)
    app.add_api_route("/", partial(service.page, "index.html"), include_in_schema=False)
    app.add_api_route("/playground/{name}", service.page, include_in_schema=False)
    for kind in (ApiError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, service.refused)
    for middleware, options in passed(config, service.metrics):
        app.add_middleware(middleware, **options)
    return app


def passed(config: ServerConfig, metrics: Metrics) -> list[tuple[Any, dict[str, Any]]]:
    """What every request passes, innermost first."""
    found: list[tuple[Any, dict[str, Any]]] = [(Guarded, {"keys": Keys(read_keys(config)), "config": config})]
    if config.cors_origin:
        allowed = {"allow_methods": ["GET", "POST", "DELETE"], "allow_headers": ["*"]}
        found.append((CORSMiddleware, {"allow_origins": config.cors_origin, **allowed}))
    return [*found, (Logged, {"metrics": metrics})]
