"""An OpenAI-compatible server as a load generator sees it: a connection for each request, events as they
arrive. asyncio's streams do it: the client shares the machine with what it measures, so it should do little
for each event. Invariant: what goes wrong with one request is a `Refused` with a short reason, never an
exception of the network's; leaving an event loop early closes the connection, which frees the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from paceline.core.errors import ConfigError

MAX_BODY_BYTES = 16 * 2**20
READ_BYTES = 65_536
GET_TIMEOUT_S = 30.0


class Refused(Exception):
    """One request without an answer; the text is a short reason."""

    code = ""  # of the server's own error, such as engine_lost


class Response(NamedTuple):
    status: int
    headers: dict[str, str]  # names in lower case
    reader: asyncio.StreamReader

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            while size := int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16):
                if size > MAX_BODY_BYTES:
                    raise Refused(f"a piece of {size} bytes")
                yield await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            return
        length = self.headers.get("content-length", "")
        left = int(length) if length.isdigit() else math.inf
        while left > 0 and (part := await self.reader.read(READ_BYTES)):
            left -= len(part)
            yield part

    async def whole(self) -> bytes:
        body = b""
        async for part in self.parts():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise Refused(f"an answer of more than {MAX_BODY_BYTES} bytes")
        return body

    async def lines(self) -> AsyncIterator[bytes]:
        kept = b""
        async for part in self.parts():
            *lines, kept = (kept + part).split(b"\n")
            for line in lines:
                yield line
            if len(kept) > MAX_BODY_BYTES:
                raise Refused("an event that never ends")
        yield kept


class Endpoint(NamedTuple):
    host: str
    port: int
    is_tls: bool
    folder: str  # of the address, without a slash at the end; what a proxy may put before /v1
    api_key: str | None

    async def get(self, path: str) -> bytes:
        try:
            async with asyncio.timeout(GET_TIMEOUT_S), self.asked("GET", path) as response:
                body = await response.whole()
        except TimeoutError:
            raise Refused(f"no answer after {GET_TIMEOUT_S:g} s") from None
        if response.status != 200:
            raise _refusal(f"HTTP {response.status}", _json(body))
        return body

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """What follows `data:`, until [DONE] or the end of the answer."""
        async with self.asked("POST", path, json.dumps(body).encode()) as response:
            if response.status != 200:
                raise _refusal(f"HTTP {response.status}", _json(await response.whole()))
            async for line in response.lines():
                if line.startswith(b"data:"):
                    if line[5:].strip() == b"[DONE]":
                        return
                    event = _json(line[5:])
                    if not isinstance(event, dict):
                        raise Refused("an event that is not a JSON object")
                    if event.get("error"):
                        raise _refusal("broke off", event)
                    yield event

    @contextlib.asynccontextmanager
    async def asked(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[Response]:
        writer = None
        try:
            context = ssl.create_default_context() if self.is_tls else None
            reader, writer = await asyncio.open_connection(self.host, self.port, ssl=context)
            host = f"[{self.host}]" if ":" in self.host else self.host
            lines = [f"{method} {self.folder}{path} HTTP/1.1", f"Host: {host}:{self.port}"]
            lines += ["Connection: close", "Accept: */*"]
            if self.api_key:
                lines.append(f"Authorization: Bearer {self.api_key}")
            if body:
                lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
            writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
            await writer.drain()
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            version, _, rest = first.partition(" ")
            if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
                raise Refused("not an HTTP server")
            pairs = (line.partition(":") for line in lines if line)
            headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
            yield Response(int(rest[:3]), headers, reader)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise Refused(_in_words(error)) from None
        except ValueError:
            raise Refused("the answer is not HTTP") from None
        finally:
            if writer is not None:
                writer.close()


def endpoint_of(base_url: str, api_key: str | None) -> Endpoint:
    """With or without /v1 at the end: clients of OpenAI write it, benchmarks do not."""
    try:
        parts = urlsplit(base_url)
        port = parts.port
    except ValueError:
        form = "whose port is not a number; write http://127.0.0.1:8000"
        raise ConfigError(f"--base-url is {base_url!r}, {form}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--base-url is {base_url!r}; write http://127.0.0.1:8000 or https://...")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("--api-key holds characters that no key has; give it as the server knows it")
    is_tls = parts.scheme == "https"
    folder = parts.path.rstrip("/").removesuffix("/v1")
    return Endpoint(parts.hostname, port or (443 if is_tls else 80), is_tls, folder, api_key)


def _json(data: bytes) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(data)
    return None


def _refusal(what: str, event: Any) -> Refused:
    """What went wrong, with the message and the code of a server's error."""
    error = event.get("error", event) if isinstance(event, dict) else event
    fields = error if isinstance(error, dict) else {"message": error or ""}
    said = " ".join(str(fields.get("message", error)).split())[:200]
    refused = Refused(f"{what}: {said}" if said else what)
    refused.code = str(fields.get("code") or "")
    return refused


def _in_words(error: Exception) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "the connection broke off"
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror) and (error.errno or 0) > 0:
        return os.strerror(error.errno or 0)
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__)[:200]
