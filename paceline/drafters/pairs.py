"""How heads with an EAGLE layer read texts: the pair (hidden state of position t, token of position t + 1) is
one row.

Rows of the text are read with true features. What a head guesses lies behind them and is overwritten in the
next round, so nothing has to be rolled back. Invariant: a row is read once, in the order of positions, before
a draft begins with the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.core.types import Seen
from paceline.drafters.features import Library, Read, Text
from paceline.heads.rows import Feed, ReadingBackend, Row

CHUNK = 8  # rows: where more wait, all but the last are read before, which needs their keys and values alone
# requests: of so few, prompts are read as the target reads them; of more, when their drafts are asked for
EAGER = 4


class Pairs:
    def __init__(self, backend: ReadingBackend) -> None:
        self._backend = backend
        self.library = Library(backend.place, backend.fork, self._read_most, lookahead=1)

    def feeds(self, texts: Sequence[Text]) -> list[Feed]:
        """What the head has not read of each text; it counts as read."""
        reads = [self.library.reading(text, CHUNK) for text in texts]
        return [self._take(read, len(read.text.waiting)) for read in reads]

    def shown(self, text: Text, most: int) -> Feed:
        """The same, at most so many rows, and nothing counts as read yet."""
        read = self.library.reading(text, most)
        return self._feed(read, list(read.text.waiting))

    def read_ahead(self, seen: Sequence[Seen], texts: Mapping[str, Text]) -> None:
        if len(seen) <= EAGER:
            for one in seen:
                if one.num_known > CHUNK:
                    self.library.reading(texts[one.request.id], CHUNK)

    def _take(self, read: Read, count: int) -> Feed:
        start, rows = read.count, read.take(count)
        return self._feed(read, rows)._replace(start=start)

    def _feed(self, read: Read, rows: list[Row]) -> Feed:
        return Feed(read.place, read.count, [read.tokens[row.position + 1] for row in rows], rows)

    def _read_most(self, read: Read) -> None:
        self._backend.read([self._take(read, len(read.text.waiting) - 1)])
