"""When a policy looks again at who might draft: a look among many requests takes as long as a good part of a
pass. No clock of its own.

Invariant: while nothing is due, a step is plain whatever comes of the one before it, so that a device may
begin it before that has landed.
"""

from __future__ import annotations

from paceline.engine.accounts import Accounts, thrift
from paceline.engine.load import Load

SHARE, MOST_QUIET = (
    0.005,
    512,
)  # of the time, at most, for looks that end with nobody asked; and steps without another then
MOST_OF = 0.9  # of the requests of the last look: while as many are there, it holds


class Looks:
    __slots__ = (
        "_accounts",
        "_load",
        "_num_requests",
        "is_quiet",
        "is_vain",
        "is_waking",
        "least_cost",
        "quiet",
        "seconds",
        "skipped",
    )

    def __init__(self, accounts: Accounts, load: Load, least_cost: float) -> None:
        self._accounts, self._load, self._num_requests = accounts, load, 0  # the last two of the last look
        self.quiet = 0  # steps to go without one
        self.skipped = 0  # since the last
        self.seconds = 0.0  # that the last took, all in all; nothing in a step without one
        self.is_quiet = False  # this step has none
        self.is_vain = False  # the last looked at requests and asked nobody
        self.is_waking = False  # models are awake for a while, and looked at in every step of it
        self.least_cost = least_cost  # seconds of asking the cheapest drafter

    def are_over(self, num_requests: int) -> bool:
        """For the next step: the last look holds among as many requests, or nearly; or nothing that came of
        another could be paid for.
        """
        if self.quiet > 0 and num_requests >= MOST_OF * self._num_requests:
            return True
        return (
            num_requests > 1
            and not self.is_waking
            and self._accounts.is_broke(self._load, 1 + self.skipped, self.least_cost)
        )

    def skip(self) -> None:
        self.quiet -= self.quiet > 0
        self.skipped += 1
        self.seconds = 0.0

    def begin(self, load: Load) -> None:
        """A step that only reads prompts has no share to give, and must not take what was saved."""
        self._load, self.is_vain = load, False
        if load.speaking:
            self._accounts.earn(load, 1 + self.skipped)
            self.skipped = 0

    def end(self, num_requests: int, quiet: int) -> None:
        self.quiet, self._num_requests = quiet, num_requests

    def took(self, seconds: float) -> None:
        """The last look, all in all. If it asked nobody, the next one comes when it is paid for."""
        self.seconds = 0.0 if self.is_quiet else seconds
        if self.is_vain and not self.is_waking:
            self.quiet = max(
                self.quiet, min(int(seconds / (SHARE * thrift(self._load) * self._load.seconds)), MOST_QUIET)
            )

    def left(self, num_requests: int) -> None:
        """One of so many is gone: who comes in its place may be worth asking about."""
        self.quiet = self.quiet * (num_requests - 1) // num_requests
