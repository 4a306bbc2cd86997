"""The route by which a prefill server hands over what it has read; server/handover.py has both engines'
sides.

Invariant: it knows nothing of what is in a frame, so the process that answers HTTP needs neither torch nor an
engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel

ROUTE, PIECE = "/handover", 2**20  # bytes that are sent at a time


class HandoverRequest(BaseModel, strict=True, extra="forbid"):
    tokens: list[int]
    identity: dict[str, str]
    parts: dict[str, list[Any]]
    is_near: bool = False


def pieces(place: str, release: Callable[[], None]) -> Iterator[bytes]:
    """Of a frame that lies there."""
    with open(place, "rb") as source:
        release()
        while piece := source.read(PIECE):
            yield piece
