"""Prefill and decode apart, between two servers. The decode server's engine asks the prefill server for the
K/V of long prompts over HTTP: a frame (engine/handover.py), or on the same machine where it lies in memory.

Invariant: what is asked for and not had is read by the decode server itself, so no request fails for it;
after a failure the next prompts do not wait for a server that may be gone. A frame has no name in any file
system.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from paceline.core.errors import HandoverError
from paceline.core.types import Request
from paceline.engine.handover import READING, Handover, Handovers, Shapes, check_identity, received
from paceline.server.config import LOOPBACK
from paceline.server.frames import ROUTE
from paceline.server.processes import log

PLACE = re.compile(r"/proc/\d{1,9}/fd/\d{1,9}")
RETRY_S, HELD_S = 5.0, 20.0  # after a failure; a frame that is not fetched
MOST_ANSWER = 4096  # bytes of an answer that is no frame


@dataclass(slots=True)
class Asker:
    """The decode server's side. `fetch` is called from several threads."""

    url: str
    key: str | None
    least: int  # tokens that must be missing here
    timeout: float
    handovers: Handovers
    counts: dict[str, int] = field(default_factory=lambda: {"handovers": 0, "handovers_failed": 0})
    _failed_at: float | None = None
    _is_near: bool = True  # until its memory could not be opened
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def is_wanted(self, request: Request) -> bool:
        if (
            request.params.prompt_logprobs is not None
            or self.handovers.num_missing(request.tokens) < self.least
        ):
            return False
        return self._failed_at is None or time.monotonic() - self._failed_at > RETRY_S

    def fetch(self, tokens: list[int]) -> Handover | None:
        """None where it could not be had: the prompt is read here."""
        shapes, identity = self.handovers.shapes(tokens), self.handovers.identity
        asked = {"tokens": tokens, "identity": identity, "parts": shapes}
        try:
            found = self._ask(asked, lambda source: received(source, tokens, identity, shapes))
        except (OSError, http.client.HTTPException, HandoverError, ValueError) as error:
            self.failed(error)
            return None
        with self._lock:
            if self._failed_at is not None:
                log("prefill server answers again")
            self.counts["handovers"] += 1
            self._failed_at = None
        return found

    def failed(self, error: Exception) -> None:
        """Said once for a row of failures."""
        with self._lock:
            if self._failed_at is None:
                why = str(error) if isinstance(error, HandoverError) else type(error).__name__
                log("prefill server does not serve; prompts are read here", logging.ERROR, why=why)
            self.counts["handovers_failed"] += 1
            self._failed_at = time.monotonic()

    def _ask(self, asked: dict[str, Any], take: Callable[[BinaryIO], Handover]) -> Handover:
        parts, is_near = urlsplit(self.url), self._is_near
        is_near = is_near and parts.hostname in LOOPBACK
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout)
        headers, path = {"content-type": "application/json"}, parts.path.rstrip("/") + ROUTE
        headers |= {"authorization": f"Bearer {self.key}"} if self.key else {}
        with closing(connection):
            connection.request("POST", path, json.dumps(asked | {"is_near": is_near}), headers)
            answer = connection.getresponse()
            if answer.status == 200 and not is_near:
                return take(answer)
            said = answer.read(MOST_ANSWER)
            if answer.status != 200:
                raise HandoverError(f"it answered {answer.status}: {said.decode(errors='replace')[:300]}")
            place = json.loads(said)
            if not (isinstance(place, dict) and PLACE.fullmatch(str(place.get("memory")))):
                raise HandoverError(
                    "what came is no handover; let --prefill name a server with --role prefill"
                )
            try:
                with open(place["memory"], "rb", buffering=0) as source:
                    return take(source)
            except OSError:  # in another container, or another user's
                self._is_near = False
            finally:
                with suppress(OSError, http.client.HTTPException):
                    connection.request("DELETE", f"{path}/{place.get('name')}", headers=headers)
                    connection.getresponse().read(MOST_ANSWER)
        return self._ask(asked, take)


class Giver:
    """The prefill server's side, in the engine's process: prompts that are read, frames that wait."""

    def __init__(self, handovers: Handovers) -> None:
        self._handovers = handovers
        self._reading: dict[Request, tuple[str, Shapes]] = {}  # the call, and what it wants
        self._frames: dict[str, tuple[int, float]] = {}  # by call: a file descriptor, and since when

    def check(self, message: Mapping[str, Any]) -> None:
        """From any thread, before the prompt is read."""
        check_identity(message["identity"], self._handovers.identity)

    def begin(self, name: str, request: Request, message: Mapping[str, Any]) -> None:
        self._reading[request] = name, message["parts"]

    def call_of(self, request: Request) -> str:
        """For which it is read; empty: for none."""
        return self._reading.get(request, ("", {}))[0]

    def left(self, name: str) -> list[Request]:
        """What was read for a call that is over."""
        requests = [request for request, (call, _) in self._reading.items() if call == name]
        for request in requests:
            del self._reading[request]
        return requests

    def finish(self, request: Request) -> dict[str, Any]:
        """It has been read: where its frame lies now."""
        name, wanted = self._reading.pop(request)
        tokens = request.tokens[: request.num_prompt]
        pieces = self._handovers.export(tokens, wanted).frame()
        number = os.memfd_create("paceline")
        for piece in pieces:
            rest = memoryview(piece).cast("B")
            while rest:
                rest = rest[os.write(number, rest) :]
        os.lseek(number, 0, os.SEEK_SET)
        self._frames[name] = number, time.monotonic()
        place, size = f"/proc/{os.getpid()}/fd/{number}", sum(memoryview(piece).nbytes for piece in pieces)
        return {"memory": place, "size": size, "name": name}

    def release(self, name: str = "") -> None:
        """Close this call's frame, and those that were not fetched in time."""
        now = time.monotonic()
        for each, (number, since) in list(self._frames.items()):
            if each == name or now - since > HELD_S:
                del self._frames[each]
                os.close(number)

    @property
    def is_holding(self) -> bool:
        return bool(self._frames)


def reading(tokens: Any, intake: Any) -> Request:
    """What reads a prompt for another server."""
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise HandoverError("tokens are no list of token ids; update both servers")
    (request,) = intake.requests(tokens, READING)
    return request
