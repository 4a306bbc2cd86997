"""Options of the engine, one small frozen config per owner. Unknown options are errors; "auto" is resolved
before construction.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeGuard, TypeVar

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
            value = getattr(self, name)
            require(is_whole(value) and value >= 1, name, value, "use a whole number, 1 or more")
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


def option(default: Any, panel: str, text: str, *flags: str) -> Any:
    """A dataclass field that is an option of the command line and the server: the panel of --help that it
    stands in, what is said of it there, and its short flags."""
    return field(default=default, metadata={"panel": panel, "help": text, "flags": flags})


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is an int and not a bool, which Python takes for one."""
    return isinstance(value, int) and not isinstance(value, bool)


def brief(value: object, width: int = 40) -> str:
    """What a message shows of a value: the beginning of its repr."""
    try:
        return repr(value)[:width]
    except ValueError:  # Python prints no number of more than 4,300 digits
        return "a number of thousands of digits"


def require(ok: bool, name: str, value: object, remedy: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {brief(value, 60)}; {remedy}")


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
