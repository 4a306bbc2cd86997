"""API keys. Invariant: how long a comparison takes says nothing about the keys: every key is compared in
full, by digest.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

OPEN = ("/health", "/ready", "/version", "/metrics", "/openapi.json", "/")
OPEN_FOLDERS = ("/playground/",)


class Keys:
    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]  # the keys themselves are not kept

    def __bool__(self) -> bool:
        return bool(self._digests)

    def allow(self, authorization: str | None) -> bool:
        """Does the value of an Authorization header show one of the keys?"""
        if not self._digests:
            return True
        scheme, _, shown = (authorization or "").partition(" ")
        digest = _digest(shown.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, found or not
        return any(matches) and scheme.lower() == "bearer"


def needs_key(path: str) -> bool:
    """Everything but what tells nothing of prompts and runs nothing."""
    return path not in OPEN and not path.startswith(OPEN_FOLDERS)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
