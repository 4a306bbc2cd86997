"""The nouns between a drafter and what runs its head: rows with the target's features, nodes of a tree, and
how guesses are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from paceline.core.types import Batch, Course, Flown


class Row(NamedTuple):
    """A position of a text as a pass of the target showed it."""

    position: int
    hidden: Mapping[int, torch.Tensor]  # layer -> [rows, hidden] of that pass
    at: int  # which row of them


class Feed(NamedTuple):
    """Rows of one sequence, one after the other, with true features."""

    place: Any  # its keys and values
    start: int  # where the first row goes, and its position
    tokens: Sequence[int]
    rows: Sequence[Row]


class BlockFeed(NamedTuple):
    """Features of one sequence, one after the other, and the token that a block begins with."""

    place: Any
    start: int
    rows: Sequence[Row]
    root: int


class Node(NamedTuple):
    """A row of a tree's level."""

    place: Any
    at: int  # where its keys and values go
    position: int
    token: int
    source: Any  # what its parent put out
    seen: int  # rows of the text
    others: Sequence[int]  # where its ancestors lie, and itself


class Speaker(NamedTuple):
    """How guesses are made for a request."""

    temperature: float  # 0: the likeliest
    seed: int
    position: int  # of the first token that is guessed


class Said(NamedTuple):
    logits: torch.Tensor  # [n, draft vocabulary]; the next call may overwrite them
    outputs: Sequence[Any]  # [n]: each a source for nodes that follow


class Guesses(NamedTuple):
    """[steps][requests]; fewer steps than asked for where nothing likely was left."""

    tokens: list[list[int]]
    chances: list[list[float]]  # of the paths


class ReadingBackend(Protocol):
    """A head that reads pairs of a hidden state and the token after it."""

    def place(self) -> Any: ...  # an empty sequence
    def fork(self, place: Any, length: int) -> Any: ...  # another with the same first rows
    def read(self, feeds: Sequence[Feed]) -> None: ...


class TrunkBackend(ReadingBackend, Protocol):
    """What others speak for: its layer alone."""

    def outputs(
        self, feeds: Sequence[Feed]
    ) -> torch.Tensor: ...  # [feeds, hidden] after their last rows; the next call may overwrite it


class ChainBackend(ReadingBackend, Protocol):
    """A head that drafts token by token."""

    def can_guess(self, temperature: float) -> bool: ...
    def begin(self, feeds: Sequence[Feed]) -> Said: ...  # after the last row of each
    def level(self, nodes: Sequence[Node]) -> Said: ...
    def guess(
        self, feeds: Sequence[Feed], speakers: Sequence[Speaker], steps: int, least: float
    ) -> Guesses: ...


class Matcher(NamedTuple):
    """Where suffix matching lies (cpu/votes.py): addresses, and the length of its longest draft."""

    live: int
    past: int
    scratch: int
    drafted: int
    reach: int
    budget: int


class Orders(NamedTuple):
    """What rounds must know beside rows and tokens; who always drafts as much as it can needs none of it."""

    course: Course | None
    matcher: Matcher | None
    least: float  # the chance below which a chain is not drafted on
    stops: Sequence[int]  # tokens that end the first request
    wanted: int  # tokens that it may still say


class RoundsBackend(Protocol):
    """A head that drafts token by token and the target, left to themselves."""

    most_rounds: int
    most_requests: int
    is_asking: bool  # whether it weighs drafts, and may ask a matcher beside the head

    def can_fly(self, temperature: float) -> bool: ...
    def launch(
        self, feeds: Sequence[Feed], speakers: Sequence[Speaker], batch: Batch, count: int, orders: Orders
    ) -> Flown: ...


class BlockBackend(Protocol):
    """A head that drafts a block in one pass."""

    def place(self) -> Any: ...
    def fork(self, place: Any, length: int) -> Any: ...
    def can_guess(self, temperature: float) -> bool: ...
    def read(self, feed: BlockFeed) -> None: ...
    def guess(self, feeds: Sequence[BlockFeed], speakers: Sequence[Speaker], steps: int) -> Guesses: ...
    def logits(
        self, feeds: Sequence[BlockFeed], steps: int
    ) -> torch.Tensor: ...  # [steps, requests, draft vocabulary], no Markov head


class SideBackend(Protocol):
    """Heads beside the target's own, on its last hidden state or on a trunk's output."""

    def can_guess(self, temperature: float) -> bool: ...
    def guess(self, rows: Sequence[Row], speakers: Sequence[Speaker]) -> Guesses: ...
    def logits(self, rows: Sequence[Row]) -> torch.Tensor: ...  # [heads, requests, draft vocabulary]
