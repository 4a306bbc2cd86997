"""What is on its way while the caller looks at what was said: a pass, or several that a drafter and a device run by themselves.

Invariant: whatever is launched lands before anything else is scheduled, but for what nobody is left to hear; who was stopped meanwhile has
no part in the landing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from paceline.engine.plan import Plan
from paceline.engine.scheduler import Turn
from paceline.types import Draft, Flown, Flyer, Output, Proposer, Request

Answers = dict[int, list[tuple[int, Draft]]]  # by turn: who drafted what


class Flight(NamedTuple):
    """A pass on its way, and what led to it."""

    turns: list[Turn]
    plan: Plan
    proposed: Answers
    drafts: list[Draft | None]
    output: Output
    launched: float  # when
    planning: float  # seconds the policy took for it


@dataclass(slots=True)
class Rounds:
    """Several passes on their way, each with what a drafter made of the one before. A step lands one of them."""

    turns: list[Turn]
    plan: Plan
    proposed: Answers  # of others, for the first
    drafter: int
    flyer: Flyer  # the same
    flown: Flown
    since: float  # when they were launched, then when the last of them landed
    landed: int = 0

    @property
    def is_under_way(self) -> bool:
        """There is more to land, and somebody to say it."""
        return self.landed < len(self.flown) and not all(turn.request.is_finished for turn in self.turns)


def flyer_of(drafter: Proposer) -> Flyer | None:
    return cast(Flyer, drafter) if getattr(drafter, "most_rounds", 0) else None


def useful_rounds(requests: Sequence[Request], length: int, max_model_len: int) -> int:
    """How many rounds with drafts of this length each of the requests needs at least to end, and has room for."""
    needed = min(-(-(request.params.max_tokens - request.num_output) // (length + 1)) for request in requests)
    return min(needed, *((max_model_len - request.cache.num_cached) // (length + 1) for request in requests))
