"""Token ids to text, one token at a time, with stop strings.

Text is *settled* once no later token can change or cut it: characters that miss bytes, and a tail that may
become a stop string, are held back. Invariant: without a stop, `finish` makes it `tokenizer.decode(all ids)`.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Container, Sequence

from paceline.loaders.tokenizer import Tokenizer


class Detokenizer:
    """`min_tokens`: the first that many tokens can complete no stop string; `hidden`: those that are no part
    of the text, the special ones unless given."""

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), include_stop: bool = False, min_tokens: int = 0,
        hidden: Container[int] | None = None,
    ) -> None:  # fmt: skip
        self._token_bytes = tokenizer.token_bytes
        self._hidden: Container[int] = tokenizer.special_ids if hidden is None else hidden
        self._strips_space = tokenizer.strips_leading_space
        self._stop, self._include_stop, self.has_stops = tuple(stop), include_stop, bool(stop)
        self._num_unstoppable = min_tokens
        self._unread: list[int] = []  # without stop strings, tokens are decoded together when text is read
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._taken: list[str] = []  # settled text that `take` has returned
        self._new: list[str] = []  # settled since
        self._tail = ""  # decoded, but maybe the beginning of a stop string
        self.stopped_by: str | None = None  # the stop string that ended the text

    @property
    def is_stopped(self) -> bool:
        return self.stopped_by is not None

    def show(self, tokens: Collection[int]) -> None:
        """These special tokens are text, too, where not all tokens are hidden."""
        if isinstance(self._hidden, frozenset):
            self._hidden -= frozenset(tokens)

    def push(self, token: int) -> bool:
        """Add a token; True if it completed a stop string. Tokens after that change nothing."""
        if not self._stop:
            self._unread.append(token)
            return False
        can_stop = self._num_unstoppable == 0
        self._num_unstoppable -= not can_stop
        if not self.is_stopped and token not in self._hidden:
            self._add(self._decoder.decode(self._token_bytes(token)), can_stop)
            return self.is_stopped
        return False

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens, where there are no stop strings."""
        self._unread.extend(tokens)

    @property
    def text(self) -> str:
        """All settled text."""
        self._read()
        self._taken, self._new = ["".join(self._taken)], ["".join(self._new)]
        return self._taken[0] + self._new[0]

    def take(self) -> str:
        """The text settled since the last take."""
        self._read()
        new = "".join(self._new)
        self._taken.append(new)
        self._new.clear()
        return new

    def finish(self) -> str:
        """Settle all that is held back: no more tokens come. Returns what the next `take` will return."""
        self._read()
        if not self.is_stopped:
            self._add(self._decoder.decode(b"", final=True), can_stop=False)
            self._settle(len(self._tail))
        return "".join(self._new)

    def _read(self) -> None:
        if self._unread:
            new = b"".join([self._token_bytes(token) for token in self._unread if token not in self._hidden])
            self._unread.clear()
            self._add(self._decoder.decode(new), can_stop=False)

    def _add(self, new: str, can_stop: bool) -> None:
        if self._strips_space and new:
            new, self._strips_space = new.removeprefix(" "), False
        num_old = len(self._tail)
        self._tail += new
        if can_stop:
            # the stop string that the new text completes first; of equal ends, the longest
            found = [(self._tail.find(s, max(0, num_old - len(s) + 1)), s) for s in self._stop]
            _, start, stop = min(((at + len(s), at, s) for at, s in found if at >= 0), default=(0, 0, ""))
            if stop:
                self._settle(start + len(stop) * self._include_stop)
                self._tail, self.stopped_by = "", stop
                return
        # held back: the longest end of the tail that begins a stop string
        num_held = min(max(map(len, self._stop), default=1) - 1, len(self._tail))
        while num_held and not any(s.startswith(self._tail[-num_held:]) for s in self._stop):
            num_held -= 1
        self._settle(len(self._tail) - num_held)

    def _settle(self, length: int) -> None:
        if length:
            self._new.append(self._tail[:length])
            self._tail = self._tail[length:]
