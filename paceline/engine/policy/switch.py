"""Off where speculation loses: measured time against plain decoding's, one switch a batch size.

Every drafted step saves or loses time against plain steps for as many tokens. Savings fill a bounded credit,
losses draw on it; when it is empty, drafting is off, twice as long after each failure in a row. Invariant:
what counts is the whole step as the clock saw it, drafting and the host's work included, but no single pause
of the process. A median would not do for drafted steps: one drafter's may take three times as long as
another's.
"""

from __future__ import annotations

from paceline.engine.stats import OUTLIER, Median

CREDIT, MOST_CREDIT = 1.0, 8.0  # plain steps that may be lost: at first, and at most
FIRST_OFF, MOST_OFF = 16, 256  # plain steps until the next trial
NUM_PLAIN = 8  # plain steps before the first trial: of fewer the median would be that of the first, slow ones


class Switch:
    def __init__(self) -> None:
        self._plain = Median(1.0)  # measured seconds of a plain step over what was expected of its pass
        self.plain_steps = NUM_PLAIN  # to come before anything is drafted
        self._credit, self._backoff, self._is_first = CREDIT, FIRST_OFF, True
        self.is_new, self._was_pause = True, False

    def note_plain(self, seconds: float | None) -> None:
        """seconds: of a step, over what was expected; None if they are not known."""
        if seconds is not None:
            self._plain.add(seconds)
        self.plain_steps -= self.plain_steps > 0
        self.is_new = self.is_new and self.plain_steps > 0
        self._is_first = True

    def note_drafted(self, seconds: float, expected: float, tokens: float, is_start: bool = False) -> None:
        """expected: of the step, in plain passes; tokens: a request has emitted, on average; is_start: of a
        burst."""
        if self._is_first or is_start:  # to begin takes longer, once: what is expected counts
            self._is_first, seconds = False, min(seconds, self._plain.value)
        is_pause = seconds > OUTLIER * self._plain.value and not self._was_pause
        self._was_pause = is_pause
        if is_pause or self.plain_steps:  # the rest of a burst that has failed already
            return
        saved = tokens - expected * seconds / self._plain.value
        self._credit = min(self._credit + saved, MOST_CREDIT)
        if self._credit < 0:
            self._credit, self.plain_steps = CREDIT / 2, self._backoff
            self._backoff = min(2 * self._backoff, MOST_OFF)
        elif self._credit > MOST_CREDIT / 2:
            self._backoff = FIRST_OFF
