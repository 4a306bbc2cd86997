"""The playground's files, read once at the start and served under a strict content security policy.

Invariant: only files that were in the folder at the start are served, by name; nothing a client sends becomes
a path.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

from paceline.server.errors import ApiError

FOLDER = Path(__file__).parent / "playground"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".json": "application/json",
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_pages(app: FastAPI, is_wanted: bool) -> None:
    found = FOLDER.glob("*") if is_wanted else ()
    files = {path.name: path.read_bytes() for path in found if path.suffix in KINDS}

    def page(name: str) -> Response:
        if name not in files:
            raise ApiError(404, "there is no such page")
        return Response(files[name], media_type=KINDS[Path(name).suffix], headers=HEADERS)

    @app.get("/", response_model=None, include_in_schema=False)
    async def index() -> Response:
        return page("index.html")

    @app.get("/playground/{name}", response_model=None, include_in_schema=False)
    async def file(name: str) -> Response:
        return page(name)
