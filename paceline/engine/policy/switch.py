"""Off where speculation loses: measured time against plain decoding's, one switch a batch size.

Every drafted step saves or loses time against plain steps for as many tokens. Savings fill a bounded credit,
losses draw on it; when it is empty, drafting is off, twice as long after each failure in a row. Invariant:
what counts is the whole step as the clock saw it, drafting and the host's work included.
"""

from __future__ import annotations

from paceline.engine.policy.cost import Median

CREDIT, MOST_CREDIT = 4.0, 12.0  # plain steps that may be lost: at first, and at most
FIRST_OFF, MOST_OFF = 16, 1024  # plain steps until the next trial
NUM_PLAIN = 2  # plain steps before the first trial: without them there is nothing to compare with
LONGEST = 4.0  # plain steps: no step counts as longer, a pause of the process is not the drafts' fault


class Switch:
    __slots__ = ("_backoff", "_credit", "_plain", "plain_steps")

    def __init__(self) -> None:
        self._plain = Median(
            1.0
        )  # of a plain step: measured seconds over those of its pass in the cost table
        self.plain_steps = NUM_PLAIN  # to come before anything is drafted
        self._credit, self._backoff = CREDIT, FIRST_OFF

    def note_plain(self, seconds: float) -> None:
        """seconds: of a step, over those of its pass in the cost table; so that they can be compared while
        texts grow.
        """
        self._plain.add(seconds)
        self.plain_steps -= self.plain_steps > 0

    def note_drafted(self, seconds: float, tokens: float) -> None:
        """seconds: likewise, over those of a pass without drafts; tokens: emitted by each request, on
        average.
        """
        if self.plain_steps:  # of a burst that was under way when drafting was switched off
            return
        saved = tokens - min(seconds / self._plain.value, LONGEST)
        self._credit = min(self._credit + saved, MOST_CREDIT)
        if self._credit < 0:
            self._credit, self.plain_steps = CREDIT / 2, self._backoff
            self._backoff = min(2 * self._backoff, MOST_OFF)
        elif self._credit == MOST_CREDIT:
            self._backoff = FIRST_OFF
