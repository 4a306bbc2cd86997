"""What drafting may cost, in seconds. No tensors, no clock of its own.

Two accounts keep the promise that drafting is never slower. Asking without expected gain is paid from
`probes`, which gets a small share of the time; losses are paid from `purse`, which gets the gains and another
share. Invariant: gains and losses are what steps really took, all of it, against steps without drafts for as
many tokens, as soon as such steps were seen.

Where a model reads a request's text before its first draft, that is an investment: it is paid back out of
half of the gains, and out of the purse's share of the time, and until it is, no more than so much is
invested.
"""

from __future__ import annotations

from paceline.engine.costs import Median
from paceline.engine.load import Load

PROBES = 0.003  # of the time, for asking whom it does not pay to ask
INCOME = 0.005  # of the time, into the purse
LOAN, MOST_SAVED, MOST_OWED = (
    8.0,
    16.0,
    4.0,
)  # passes' worth of time in the purse: at first, at most, and missing, at most
MOST_INVESTED = 16.0  # passes, beyond what was gained lately
LONGEST = 4.0  # steps without drafts: no step counts as longer


def thrift(load: Load) -> float:
    """Among several, drafts gain less and the host's time, not all of which is seen here, is dearer: down to
    a quarter is risked.
    """
    return 1.0 / min(max(load.speaking, 1), 4)


class Accounts:
    __slots__ = ("_gained", "_invested", "_plain", "is_settled", "probes", "purse")

    def __init__(self, one: float) -> None:
        """one: seconds of a pass of one row."""
        self.purse, self.probes = LOAN * one, 0.0
        self._gained: dict[
            int, float
        ] = {}  # by requests: by drafts lately, all in all. May be risked, too, among as many
        self._invested = 0.0
        self._plain: dict[int, Median] = {}  # by requests: seconds of a step without drafts, all of it
        self.is_settled = True  # what the last step took is in the purse

    def earn(self, load: Load, num_steps: int) -> None:
        """The shares of so many steps' time."""
        seconds = num_steps * load.seconds * thrift(load)
        self.probes = min(self.probes + PROBES * seconds, load.seconds)
        self._invested = max(self._invested - INCOME * seconds, 0.0)
        self.purse = min(
            self.purse + INCOME * seconds,
            MOST_SAVED * thrift(load) * load.seconds + self._gained.get(load.speaking, 0.0),
        )

    def is_broke(self, load: Load, num_steps: int, least: float) -> bool:
        """After as many steps as are not paid in yet there is nothing for drafts, nor for a probe that takes
        the least.
        """
        seconds = num_steps * load.seconds * thrift(load)
        return self.purse + INCOME * seconds <= 0 and self.probes + PROBES * seconds < least

    def may_probe(self, seconds: float) -> bool:
        if self.probes < seconds:
            return False
        self.probes -= seconds
        return True

    def may_invest(self, seconds: float, load: Load) -> bool:
        """In reading texts for the requests of a step, all together."""
        return self.purse > 0 and self._invested + seconds <= MOST_INVESTED * load.seconds + self._gained.get(
            load.speaking, 0.0
        )

    def invest(self, seconds: float) -> None:
        self._invested += seconds

    def pay(self, seconds: float, load: Load) -> None:
        """Out of the purse. One mishap, such as a pause of the whole process, must not end drafting for
        good.
        """
        gained = self._gained.get(load.speaking, 0.0) - seconds
        back = min(self._invested, max(-seconds, 0.0) / 2)
        self._invested -= back
        self.purse = max(self.purse - seconds - back, -MOST_OWED * load.seconds)
        self._gained[load.speaking] = min(max(gained, 0.0), MOST_SAVED * load.seconds)

    def note_plain(self, load: Load, whole: float | None, looking: float = 0.0) -> None:
        """A step without drafts took so long, of which looking at who might draft would not have been without
        a policy. What its pass is expected to take has no part in it: that is learned, too, and changes."""
        if whole is not None and load.rows == load.speaking:
            seconds = max(whole - looking, 0.5 * whole)
            self._plain.setdefault(load.speaking, Median(seconds)).add(seconds)

    def settle(
        self, load: Load, num_accepted: int, whole: float | None, known: float, prepaid: float = 0.0
    ) -> None:
        """Of a step in which somebody was asked. known: what its drafts are known to have taken, where steps
        without were not seen yet; prepaid: for probes. With an empty purse all that was asked were probes,
        and what they took beyond their price is theirs to pay."""
        plain = self._plain.get(load.speaking) if load.rows == load.speaking else None
        self.is_settled = plain is not None and whole is not None
        if plain is not None and whole is not None:
            lost = min(whole, LONGEST * plain.value) - plain.value * (1 + num_accepted / load.speaking)
        else:
            lost = known - num_accepted * load.price
        if prepaid and self.purse <= 0 < lost:
            self.probes -= min(max(lost - prepaid, 0.0), MOST_OWED * load.seconds)
        else:
            self.pay(lost, load)
