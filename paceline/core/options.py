"""Options of the engine, one small frozen config per owner. Unknown options are errors; "auto" is resolved
before construction.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from paceline.core.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    max_num_seqs: int = 16  # requests in one pass
    max_num_batched_tokens: int = 512  # rows in one pass: prompt chunks, roots and drafts together
    max_model_len: int = 2048
    num_speculative_tokens: int = 0  # most draft nodes a request gets in a step
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            require(
                isinstance(getattr(self, name), int) and getattr(self, name) >= 1,
                name,
                getattr(self, name),
                "use a whole number, 1 or more",
            )
        require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            f"use at least max_num_seqs ({self.max_num_seqs}), so that every running request gets a token",
        )
        require(
            self.num_speculative_tokens < self.max_model_len,
            "num_speculative_tokens",
            self.num_speculative_tokens,
            f"it must be smaller than the context of {self.max_model_len} tokens",
        )


def require(ok: bool, name: str, value: object, remedy: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value!r}; {remedy}")


def nearest(word: str, known: list[str]) -> str:
    """`did you mean` for an unknown word, or the list of known ones."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"


def from_options(kind: type[T], options: Mapping[str, Any], owner: str) -> T:
    """A config of this kind; an option it does not have is an error that names it."""
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            raise ConfigError(f"{owner} has no option {name!r}; {nearest(str(name), known)}")
    return kind(**options)
