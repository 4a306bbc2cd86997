"""What a policy decides, and the one that does what it was told. auto.py has the one that weighs what pays.

Invariant: a policy decides time, never text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from paceline.core.types import Answers, Draft, Request, ScheduledRequest
from paceline.core.weigh import NUM_CELLS
from paceline.drafters.base import Drafter
from paceline.heads.rows import BurstWeights, TreeShape
from paceline.runtime.record import StepRecord

Step = Sequence[ScheduledRequest]
Asks = list[tuple[int, int]]  # (index of the scheduled request, most nodes)


class Plan(NamedTuple):
    """asks: by drafter. least: the path probability below which a head need not draft on."""

    asks: Sequence[Asks] = ()
    plain_steps: int = 0  # this one included, for which nothing will be drafted whatever comes of them
    keeps_hidden: bool = False  # in plain steps, too: a head is about to read on
    least: float = 0.0

    @property
    def nodes(self) -> dict[int, int]:
        """By scheduled request: the most nodes it is asked about."""
        found: dict[int, int] = {}
        for index, count in (ask for asks in self.asks for ask in asks):
            found[index] = max(found.get(index, 0), count)
        return found


class Policy(Protocol):
    drafters: tuple[Drafter, ...]  # in the order in which they are asked
    # What it knows of the step that it was last asked about. Where several are under way the engine keeps it
    # for each, and gives it back before `observe`.
    step: Any = None

    def plan(self, scheduled: Step) -> Plan:
        """Which drafters to ask in this step, for how much."""

    def choose(self, scheduled: Step, answers: Answers) -> Mapping[int, Draft]:
        """By scheduled request: what the target checks of all that was drafted."""

    def replan(self, number: int, asks: Asks, scheduled: Step, answers: Answers, is_burst: bool) -> Asks:
        """What still pays to ask a drafter now that others have answered; is_burst: which is in a burst."""
        return asks

    def tree(self, length: int, trees: Sequence[TreeShape]) -> TreeShape | None:
        """What a head drafts in a burst; None: chains of that length. 0: it drafts no chains."""
        return trees[0] if trees and not length else None

    def weights(self, head: int | None, matcher: int | None, request: Request, length: int) -> BurstWeights:
        """How a burst weighs these drafts; here all are believed and cost nothing, so all are checked."""
        sure = [1.0] * NUM_CELLS
        return BurstWeights(1.0, [0.0] * (length + 1), 0.0, sure, 1.0, sure, 1.0)

    def observe(self, record: StepRecord) -> None:
        """Learn from a step that was committed."""
        return None

    def release(self, request: Request) -> None:
        """Forget a request."""
        return None


class FixedPolicy(Policy):
    """One drafter, K tokens whenever there is room, and every one of them is checked."""

    def __init__(self, drafter: Drafter | None, num_speculative_tokens: int) -> None:
        self.drafters: tuple[Drafter, ...] = () if drafter is None else (drafter,)
        self.num_speculative_tokens = num_speculative_tokens

    def plan(self, scheduled: Step) -> Plan:
        if not self.drafters:
            return Plan(plain_steps=1 << 30)
        limits = (min(one.draft_limit, self.num_speculative_tokens) for one in scheduled)
        return Plan([[(index, count) for index, count in enumerate(limits) if count > 0]])

    def choose(self, scheduled: Step, answers: Answers) -> dict[int, Draft]:
        return {index: drafts[0][1] for index, drafts in answers.items()}
