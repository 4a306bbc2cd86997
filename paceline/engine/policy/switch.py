"""Off where speculation loses: measured time against plain decoding's, one switch a batch size.

Every drafted step saves or loses time against plain steps for as many tokens. Savings fill a bounded credit,
losses draw on it; when it is empty, drafting is off, twice as long after each failure in a row. Invariant:
what counts is the whole step as the clock saw it, drafting and the host's work included; of drafted and plain
steps alike the median counts, since a pause of the process is not the drafts' fault.
"""

from __future__ import annotations

from paceline.engine.stats import Median

CREDIT, MOST_CREDIT = 1.0, 8.0  # plain steps that may be lost: at first, and at most
FIRST_OFF, MOST_OFF = 16, 1024  # plain steps until the next trial
NUM_PLAIN = 8  # plain steps before the first trial: of fewer the median would be that of the first, slow ones


class Switch:
    __slots__ = ("_backoff", "_credit", "_drafted", "_plain", "plain_steps")

    def __init__(self) -> None:
        # Measured seconds over what was expected of the pass and the drafts.
        self._plain, self._drafted = Median(1.0), Median(1.0)
        self.plain_steps = NUM_PLAIN  # to come before anything is drafted
        self._credit, self._backoff = CREDIT, FIRST_OFF

    def note_plain(self, seconds: float | None) -> None:
        """seconds: of a step, over what was expected; None if they are not known."""
        if seconds is not None:
            self._plain.add(seconds)
        self.plain_steps -= self.plain_steps > 0

    def note_drafted(self, seconds: float, expected: float, tokens: float) -> None:
        """expected: of the step, in plain passes; tokens: a request has emitted, on average."""
        if self.plain_steps:  # the rest of a burst that has failed already
            return
        if not len(self._drafted):
            self._drafted.add(self._plain.value)
        self._drafted.add(seconds)
        saved = tokens - expected * self._drafted.value / self._plain.value
        self._credit = min(self._credit + saved, MOST_CREDIT)
        if self._credit < 0:
            self._credit, self.plain_steps, self._drafted = CREDIT / 2, self._backoff, Median(1.0)
            self._backoff = min(2 * self._backoff, MOST_OFF)
        elif self._credit == MOST_CREDIT:
            self._backoff = FIRST_OFF
