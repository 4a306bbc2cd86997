"""How a drafting model reads a request: its place in the text, and the request's grammar moved along guesses
and back.

Invariant: the request itself is only read. A grammar is where it was once `GrammarWalk.restore` returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.types import Cached, Constraint, Request
from paceline.drafters.base import Drafter
from paceline.runtime.executor import LocalExecutor


@dataclass(slots=True)
class Reading:
    """One request as a drafting model sees it, with slots reserved for the unread text and `budget`
    guesses.
    """

    request: Request
    cache: Cached  # the model's K/V of the text so far; num_cached moves on as it reads
    unread: list[int]  # text it has not read; the last token is the root of what will be drafted
    budget: int


class Rows(NamedTuple):
    """Guesses whose K/V lie in the slots after the cached tokens, in this order."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()  # index of each one's parent, -1 for the last cached token


class ModelDrafter(Drafter):
    """Reads requests with a model and guesses on: a draft model, or the target's first layers."""

    can_rewind = True
    executor: LocalExecutor
    num_layers: int | None = None  # None: all
    vocab_size: int  # the target's

    def open(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Reading]:
        """Without those that it cannot read."""
        raise NotImplementedError

    def close(self, reading: Reading, fed: list[int], rows: Rows) -> None:
        """fed: the tokens that the cache holds now."""


@dataclass(slots=True)
class GrammarWalk:
    """Moves a grammar from one path of guesses to another, undoing and redoing as little as possible. Where a
    guess proves too complex for the grammar, `go` raises and stays before it.
    """

    constraint: Constraint | None
    path: list[int] = field(default_factory=list)

    def go(self, path: Sequence[int]) -> None:
        if self.constraint is None:
            return
        same = next(
            (i for i, (a, b) in enumerate(zip(self.path, path, strict=False)) if a != b),
            min(len(self.path), len(path)),
        )
        if same < len(self.path):
            self.constraint.rollback(len(self.path) - same)
            del self.path[same:]
        for token in path[same:]:
            self.constraint.advance(token)
            self.path.append(token)

    def restore(self) -> None:
        self.go([])
