"""Token ids to text, one token at a time, with stop strings.

Invariant: without a stop, the text after `finish` is `tokenizer.decode(all ids)`. Text is *settled* once no
later token can change or cut it: characters still missing bytes, and a tail that may yet become a stop
string, are held back. Each token takes time proportional to its own length.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from paceline.loaders.tokenizer import Tokenizer


class Detokenizer:
    """`min_tokens`: the first that many tokens can complete no stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
    ) -> None:
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise ConfigError(f"stop is {stop!r}; give a list of non-empty strings")
        self._token_bytes = tokenizer.token_bytes
        self._hidden = tokenizer.special_ids if skip_special else frozenset[int]()
        self._strips_space = tokenizer.strips_leading_space
        self._stop, self._include_stop = tuple(stop), include_stop
        self._num_unstoppable = min_tokens
        self._unread: list[int] = []  # without stop strings, tokens are decoded together when text is read
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._taken: list[str] = []  # settled text that `take` has returned
        self._new: list[str] = []  # settled since
        self._tail = ""  # decoded, but maybe the beginning of a stop string
        self.is_stopped = False

    def push(self, token: int) -> bool:
        """Add a token; True if it completed a stop string. Tokens after that change nothing."""
        if not self._stop:
            self._unread.append(token)
            return False
        can_stop = self._num_unstoppable == 0
        self._num_unstoppable -= not can_stop
        if self.is_stopped or token in self._hidden:
            return False
        return self._add(self._decoder.decode(self._token_bytes(token)), can_stop)

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

    def _add(self, new: str, can_stop: bool) -> bool:
        if self._strips_space and new:
            new, self._strips_space = new.removeprefix(" "), False
        if not self._stop:
            self._tail = new
            self._settle(len(new))
            return False
        num_old = len(self._tail)
        self._tail += new
        found = self._earliest_stop(num_old) if can_stop else None
        if found is None:
            self._settle(len(self._tail) - self._num_held())
            return False
        start, stop = found
        self._settle(start + len(stop) * self._include_stop)
        self._tail, self.is_stopped = "", True
        return True

    def _earliest_stop(self, num_old: int) -> tuple[int, str] | None:
        """The stop string that the text beyond `num_old` completes first; of equal ends, the longest."""
        found = [(self._tail.find(s, max(0, num_old - len(s) + 1)), s) for s in self._stop]
        complete = [(at + len(s), at, s) for at, s in found if at >= 0]
        return min(complete)[1:] if complete else None

    def _num_held(self) -> int:
        """Length of the longest end of the tail that begins a stop string."""
        longest = max(map(len, self._stop)) - 1
        for length in range(min(longest, len(self._tail)), 0, -1):
            end = self._tail[-length:]
            if any(s.startswith(end) for s in self._stop):
                return length
        return 0

    def _settle(self, length: int) -> None:
        if length:
            self._new.append(self._tail[:length])
            self._tail = self._tail[length:]
