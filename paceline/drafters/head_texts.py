"""What a learned head reads of the target: hidden states of a request's text, as passes show them.

The hidden state of position t and the token of position t + 1 are one row. Invariant: a row is read once, in
the order of positions, before a draft begins with the last one. What a head guesses lies behind the rows of
the text and is overwritten in the next round, so nothing has to be rolled back. Positions that no pass showed
(their K/V were found in the cache) are missing: a text begins with the rows of another like it where there is
one, else the head reads on without them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from paceline.core.params import SamplingParams
from paceline.core.types import Request, Seen
from paceline.drafters.base import num_same
from paceline.heads.rows import Feed, ReadingBackend, Row, Span
from paceline.runtime.kv_cache import whole_blocks

MOST_WAITING = 2048  # rows kept for a head that is not asked; older ones are forgotten
KEPT = 4  # finished texts whose rows others may start with


@dataclass(slots=True)
class Text:
    """One request: what has been seen of it, and what its head has read."""

    request: Request
    waiting: deque[Row]  # seen and not read
    next: int = 0  # the first position not seen yet
    place: Any = None  # the rows that were read have their keys and values here, one after the other
    count: int = 0  # rows read
    has_begun: bool = False  # there is a place
    is_whole: bool = True  # read from the first token on, nothing missing

    def show(self, seen: Seen) -> None:
        """Rows of the text: the known tokens and the accepted path, after the commit."""
        known, verdict = seen.num_known, seen.verdict
        rows: Sequence[int] = range(known)
        if verdict is not None and len(verdict.path) > 1:
            rows = [*rows, *(known - 1 + node for node in verdict.path[1:])]
        end = seen.request.cache.num_cached
        for position, index in enumerate(rows, start=end - len(rows)):
            if position >= self.next:
                self.waiting.append(Row(position, seen.hidden, index))
        self.next = max(self.next, end)

    def skip(self, end: int) -> None:
        """All rows that wait, and those after them up to this position, were read on the device."""
        self.count += len(self.waiting) + end - self.next
        self.is_whole = self.is_whole and self.count == end
        self.next = end
        self.waiting.clear()

    def take(self, count: int) -> Feed:
        """Rows to be read now; they count as read from here on."""
        feed = self.unread(count)
        for _ in range(count):
            self.waiting.popleft()
        self.is_whole = self.is_whole and (not count or feed.rows[0].position == self.count)
        self.count += count
        return feed

    def unread(self, count: int) -> Feed:
        rows = list(islice(self.waiting, count))
        return Feed(self.place, self.count, [self.request.tokens[row.position + 1] for row in rows], rows)


class HeadTexts:
    """The texts that a head reads, by request, and a few that it has read."""

    def __init__(self, head: ReadingBackend | None, chunk: int, lookahead: int = 1) -> None:
        """head: None if it keeps nothing of a text but its last hidden state. chunk: where more rows wait,
        all but the last are read before a draft. lookahead: tokens that a row depends on after its own."""
        self._head: Any = head
        self._chunk, self._lookahead = chunk, lookahead
        self.live: dict[str, Text] = {}
        self._finished: deque[Text] = deque(maxlen=KEPT)

    def of(self, request: Request) -> Text:
        if request.id not in self.live:
            self.live[request.id] = Text(request, deque(maxlen=MOST_WAITING if self._head is not None else 1))
        return self.live[request.id]

    def observe(self, seen: Sequence[Seen], is_eager: bool) -> None:
        """is_eager: long prompts are read now, all together, unless there are too many."""
        is_eager, feeds = is_eager and len(seen) <= self._head.most_read, []
        for one in seen:
            text = self.of(one.request)
            if is_eager and one.num_known > self._chunk and not text.waiting:
                feeds += self._prompt(text, one)
            else:
                text.show(one)
                if is_eager and one.num_known > self._chunk:
                    self._begin(text, self._chunk)
        if feeds:
            self._head.read(*feeds)

    def _prompt(self, text: Text, seen: Seen) -> list[Feed]:
        """What a part of a prompt has to read now: all rows that are new but the last, which waits."""
        end = text.request.cache.num_cached
        first = max(text.next, end - seen.num_known)
        rows = Span(Row(first, seen.hidden, first - end + seen.num_known), end - first)
        if not rows:
            return []
        text.next = end
        text.waiting.append(rows[len(rows) - 1])
        if not text.has_begun:
            self._open(text, first)
        text.is_whole = text.is_whole and first == text.count
        feed = Feed(text.place, text.count, text.request.tokens[first + 1 : end], rows[:-1])
        text.count += len(feed.rows)
        return [feed] if feed.rows else []

    def feeds(self, texts: Sequence[Text]) -> list[Feed]:
        """What the head has not read of each text; it counts as read."""
        for text in texts:  # all of them before rows of one are taken: they may share
            self._begin(text, self._chunk)
        return [text.take(len(text.waiting)) for text in texts]

    def unread(self, text: Text, most: int) -> Feed:
        """The same of one text, at most `most` rows, and nothing counts as read yet."""
        self._begin(text, min(self._chunk, most))
        return text.unread(len(text.waiting))

    def _begin(self, text: Text, most: int) -> None:
        """See to it that it has a place, and that at most `most` rows wait."""
        if not text.has_begun:
            self._open(text, text.waiting[0].position)
        if len(text.waiting) > most:
            self._head.read(text.take(len(text.waiting) - 1))  # a draft begins with the last row

    def _open(self, text: Text, missing: int) -> None:
        """Begin, with the rows of another text as far as the first ones are missing here."""
        text.has_begun, text.place, ahead = True, self._head.place(), self._lookahead
        if not missing:
            return
        best, most = None, 0
        for other in (*self.live.values(), *self._finished):
            if other is text or not other.has_begun or not other.is_whole:
                continue
            limit = missing + ahead
            same = num_same(other.request.tokens[:limit], text.request.tokens[:limit]) - ahead
            if same > max(most, other.count) and len(other.waiting) > 1:
                self._head.read(other.take(len(other.waiting) - 1))
            if min(same, other.count) > most:
                best, most = other, min(same, other.count)
        if best is not None:
            text.place, text.count = self._head.fork(best.place, most), most

    def kept(self, count: int) -> dict[str, torch.Tensor]:
        """See Drafter: the rows of so many tokens."""
        if self._head is None or not count:
            return {}
        place = self._head.place()
        place.reserve(count)
        return {"rows": torch.empty_like(place.export(count), device="meta")}

    def export(self, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
        """Of a text that begins so, read as far."""
        count = whole_blocks(tokens)
        limit = count + self._lookahead
        for text in (*self.live.values(), *self._finished):
            if self._head is None or list(text.request.tokens[:limit]) != list(tokens[:limit]):
                continue
            if len(text.waiting) > 1:
                self._begin(text, 1)
            if text.has_begun and text.is_whole and text.count >= count:
                return {"rows": text.place.export(count)}
        return {}

    def adopt(self, tokens: Sequence[int], parts: Mapping[str, torch.Tensor]) -> None:
        """A text that begins so will begin with these rows."""
        count, place = whole_blocks(tokens), self._head.place()
        place.reserve(count)
        place.adopt(parts["rows"])
        request = Request("", SamplingParams(), list(tokens), len(tokens), 0)
        self._finished.append(Text(request, deque(), count, place, count, True))

    def finish(self, request: Request) -> None:
        text = self.live.pop(request.id, None)
        if text is not None and text.has_begun and text.is_whole and text.count:
            text.waiting.clear()
            self._finished.append(text)
