"""The nouns between a drafter and what runs its head: rows with the target's features, nodes of a tree, how
guesses are made, and the interfaces of heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from paceline.core.types import Batch, Burst


class Row(NamedTuple):
    """A position of a text as a pass of the target showed it."""

    position: int
    hidden: Mapping[int, torch.Tensor]  # layer -> [rows, hidden] of that pass
    at: int  # which row of them


class Span(Sequence[Row]):
    """Rows of a pass that follow each other, as a prompt's do; each is made where it is asked for."""

    def __init__(self, first: Row, count: int) -> None:
        self.first, self._count = first, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        inside, (position, hidden, at) = range(self._count)[index], self.first
        if isinstance(inside, range):
            return Span(Row(position + inside.start, hidden, at + inside.start), len(inside))
        return Row(position + inside, hidden, at + inside)


class Feed(NamedTuple):
    """Rows of one sequence, one after the other, with true features."""

    place: Any  # its keys and values
    start: int  # where the first row goes, and its position
    tokens: Sequence[int]  # of the positions after the rows'; a draft begins with the last one
    rows: Sequence[Row]  # none for a head that reads tokens alone


class Node(NamedTuple):
    """A row of a tree's level."""

    place: Any
    at: int  # where its keys and values go
    position: int
    token: int
    source: Any  # what its parent put out
    seen: int  # rows of the text
    others: Sequence[int]  # where its ancestors lie, and itself


class Sampler(NamedTuple):
    """How a head chooses tokens for a request: as `Pick` says, from this position on."""

    temperature: float  # 0: the likeliest
    seed: int
    position: int  # of the first token that is guessed


class HeadOutput(NamedTuple):
    logits: torch.Tensor  # [n, draft vocabulary]; the next call may overwrite them
    outputs: Any  # [n]: each a source for nodes that follow


class TreeShape(NamedTuple):
    """Of trees that a device grows by itself."""

    width: int  # nodes of a level, each read on, with as many tokens offered after it
    depth: int
    nodes: int  # the best of all levels, which are checked


class Guesses(NamedTuple):
    """[steps][requests]; fewer steps than asked for where nothing likely was left."""

    tokens: list[list[int]]
    chances: list[list[float]]  # of the paths


class ReadingBackend(Protocol):
    """A head that reads pairs of a hidden state and the token after it."""

    most_read: int  # requests: prompts of so few are read as the target reads them, of more when drafted for

    def place(self) -> Any: ...  # an empty sequence
    def fork(self, place: Any, length: int) -> Any: ...  # another with the same first rows
    def read(self, *feeds: Feed) -> None: ...
    def can_guess(self, temperature: float) -> bool: ...


class ChainHead(ReadingBackend, Protocol):
    """A head that drafts token by token."""

    # [feeds, hidden] after their last rows, for heads that read its layer; the next call may overwrite it
    def outputs(self, feeds: Sequence[Feed]) -> torch.Tensor: ...
    def begin(self, feeds: Sequence[Feed]) -> HeadOutput: ...  # after the last row of each
    def level(self, nodes: Sequence[Node]) -> HeadOutput: ...
    def guess(self, feeds: Sequence[Feed], samplers: Sequence[Sampler], steps: int, least: float) -> Guesses:
        """least: no token is guessed after a path that is less likely."""


class BlockBackend(ReadingBackend, Protocol):
    """A head that drafts a block in one pass."""

    def guess(self, feeds: Sequence[Feed], samplers: Sequence[Sampler], steps: int) -> Guesses: ...
    # [steps, requests, draft vocabulary], no Markov head
    def logits(self, feeds: Sequence[Feed], steps: int) -> torch.Tensor: ...


class SideBackend(Protocol):
    """Heads beside the target's own, on its last hidden state or on a trunk's output."""

    def can_guess(self, temperature: float) -> bool: ...
    def guess(self, rows: Sequence[Row], samplers: Sequence[Sampler]) -> Guesses: ...
    def logits(self, rows: Sequence[Row]) -> torch.Tensor: ...  # [heads, requests, draft vocabulary]


class Matcher(NamedTuple):
    """A drafter that runs no model, for a kernel: its entry, the addresses it is called with, where it
    writes, and the length of its longest draft."""

    entry: int
    live: int  # of the request's tables
    past: int
    scratch: int
    drafted: int
    reach: int  # float64: path probabilities
    budget: int


class BurstWeights(NamedTuple):
    """How drafts of one request are weighed in a burst, as core/weigh.py takes it. Tables are by cell."""

    seconds: float  # of a pass without a draft
    added: Sequence[float]  # [length + 1]: seconds that n nodes add to it
    promised: float  # seconds that asking the head should save: it is not asked where a match saves more
    head_rates: Sequence[float]
    head_factor: float  # of the request
    match_rates: Sequence[float]
    match_factor: float


class BurstInput(NamedTuple):
    """What a burst must know beside the rows of its first pass."""

    num_rounds: int  # at most
    rooms: Sequence[int] = ()  # slots that each request has, its root's among them
    feeds: Sequence[Feed] = ()  # what the head has not read; none: no head drafts
    samplers: Sequence[Sampler] = ()
    weights: BurstWeights | None = None  # for devices that weigh drafts; others check all of them
    matcher: Matcher | None = None
    least: float = 0.0  # the path probability below which a head does not draft on
    stops: Sequence[int] = ()  # tokens that end the first request
    wanted: int = 0  # tokens that it may still emit
    names: tuple[str, ...] = ("", "")  # of the drafters: which matches, and whose head drafts
    tree: TreeShape | None = None  # what the head drafts; None: chains


class BurstBackend(Protocol):
    """Draft, check and the next draft on the device."""

    most_rounds: int  # in a row
    most_requests: int

    def longest(self, num_requests: int) -> int: ...  # tokens of a chain, at most
    def trees(self, num_requests: int) -> Sequence[TreeShape]: ...  # that may be drafted instead

    is_weighing: bool  # whether drafts are cut to what pays, and a matcher may draft beside the head

    def launch(self, batch: Batch, given: BurstInput) -> Burst: ...
