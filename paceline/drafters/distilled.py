"""A small model distilled from the target: it reads the target's embeddings and writes a reduced vocabulary,
one compiled call a draft.

Unlike the other heads it needs nothing of the target but the text, so it reads what it missed by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.core.types import Request, Seen
from paceline.drafters.eagle import Eagle
from paceline.drafters.features import Read, Text
from paceline.drafters.heads import Asked
from paceline.drafters.pairs import CHUNK
from paceline.heads.rows import Feed


class Distilled(Eagle):
    name = "draft"
    kinds = ("draft",)

    def _asked(self, requests: Sequence[Request], budgets: Sequence[int]) -> Iterator[Asked]:
        for request, budget in zip(requests, budgets, strict=True):
            limit = min(budget, self.config.num_speculative_tokens)
            if limit:
                text = self._texts.get(request.id) or self._texts.setdefault(request.id, Text.of(request))
                yield Asked(text, limit, self._speaker(request))

    def _feeds(self, asked: Sequence[Asked]) -> list[Feed]:
        """What it has not read of each text, the newest token last."""
        feeds = []
        for text, _, _ in asked:
            key, tokens = text.request.id, text.request.tokens
            reads = self._pairs.library.reads
            read = reads.get(key) or reads.setdefault(key, Read(text, self._backend.place()))
            if read.count == len(tokens):  # asked again before the text went on
                read.count -= 1
            if len(tokens) - read.count > CHUNK:
                self._backend.read([Feed(read.place, read.count, tokens[read.count : -1], ())])
                read.count = len(tokens) - 1
            feeds.append(Feed(read.place, read.count, tokens[read.count :], ()))
            read.count = len(tokens)
        return feeds

    def observe(self, seen: Sequence[Seen]) -> None:
        """Nothing to do: it reads the text itself."""
