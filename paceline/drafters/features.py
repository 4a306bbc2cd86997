"""What heads read of the target: hidden states of a request's text, position by position, as passes show
them.

Invariant: rows wait in the order of their positions, none twice. Positions that no pass showed (their K/V
were found in the cache) are missing, and a head reads on without them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.types import Request, Seen
from paceline.heads.rows import Row

MOST_WAITING = 2048  # rows kept for a head that is not asked; older ones are forgotten
KEPT = 4  # finished texts whose rows others may start with


@dataclass(slots=True)
class Text:
    """One request as far as its hidden states have been seen."""

    request: Request
    waiting: deque[Row]
    next: int = 0  # the first position not seen yet

    @classmethod
    def of(cls, request: Request, most_waiting: int | None = None) -> Text:
        return cls(request, deque(maxlen=most_waiting or MOST_WAITING))

    @property
    def is_ready(self) -> bool:
        """All but the newest token has been seen, and there is something to read."""
        return bool(self.waiting) and self.next == len(self.request.tokens) - 1

    def show(self, seen: Seen) -> None:
        """Rows of the text: the known tokens and the accepted path, after the commit."""
        request, known, _, verdict, _, hidden = seen
        rows: Sequence[int] = range(known)
        if verdict is not None and len(verdict.path) > 1:
            rows = [*rows, *(known - 1 + node for node in verdict.path[1:])]
        end = request.cache.num_cached
        for position, index in enumerate(rows, start=end - len(rows)):
            if position >= self.next:
                self.waiting.append(Row(position, hidden, index))
        self.next = max(self.next, end)

    def take(self, count: int) -> list[Row]:
        return [self.waiting.popleft() for _ in range(count)]


@dataclass(slots=True)
class Read:
    """What a head has read of a text: rows whose keys and values lie in `place`, one after the other."""

    text: Text
    place: Any
    count: int = 0
    is_whole: bool = True  # from the first token on, nothing missing

    @property
    def tokens(self) -> list[int]:
        return self.text.request.tokens

    def take(self, count: int) -> list[Row]:
        """Rows to be read now; they count as read from here on."""
        rows = self.text.take(count)
        self.is_whole = self.is_whole and (not rows or rows[0].position == self.count)
        self.count += count
        return rows


@dataclass(slots=True)
class Library:
    """Texts that are being read, and a few that were: one whose first rows no pass showed starts with those
    of another like it.
    """

    place: Callable[[], Any]  # of a new sequence
    fork: Callable[[Any, int], Any]  # (place, rows): another sequence with the same first rows
    read_most: Callable[[Read], None]  # take in what waits but for the last row, with which a draft begins
    lookahead: int  # tokens after its position that a row depends on
    reads: dict[str, Read] = field(default_factory=dict)
    finished: deque[Read] = field(default_factory=lambda: deque(maxlen=KEPT))

    def reading(self, text: Text, most: int) -> Read:
        """What was read of a text, at most so many rows left to be read. Begin with all texts before taking
        rows of one: they may share.
        """
        read = self.reads.get(text.request.id)
        if read is None:
            read = self.reads[text.request.id] = Read(text, self.place())
            self._begin(read)
        if len(text.waiting) > most:
            self.read_most(read)
        return read

    def _begin(self, read: Read) -> None:
        missing = read.text.waiting[0].position
        best, most = None, 0
        for other in (*self.reads.values(), *self.finished) if missing else ():
            if other is read or not other.is_whole:
                continue
            same = min(
                _num_same(other.tokens, read.tokens, missing + self.lookahead) - self.lookahead, missing
            )
            if same > max(most, other.count) and len(other.text.waiting) > 1:
                self.read_most(other)
            if min(same, other.count) > most:
                best, most = other, min(same, other.count)
        if best is not None:
            read.place, read.count = self.fork(best.place, most), most

    def finish(self, request_id: str) -> None:
        read = self.reads.pop(request_id, None)
        if read is not None and read.is_whole and read.count:
            read.text.waiting.clear()
            self.finished.append(read)


def _num_same(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """How many of the first `limit` tokens are the same."""
    count = min(len(a), len(b), limit)
    return next((i for i in range(count) if a[i] != b[i]), count)
