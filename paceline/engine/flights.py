"""What is on its way while the caller looks at what was said: a pass, or several that a drafter and a device
run by themselves.

A plain pass may be followed by another before it lands: the device knows the tokens, and the host all else.
Invariant: whatever is launched lands before anything else is scheduled, but for what nobody is left to hear;
who was stopped meanwhile has no part in the landing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from paceline.core.tree import Tree
from paceline.core.types import Asides, Draft, Flown, Flyer, Output, Proposer, Request
from paceline.engine.plan import Plan
from paceline.engine.scheduler import Turn

Answers = dict[int, list[tuple[int, Draft]]]  # by turn: who drafted what


class Flight(NamedTuple):
    """A pass on its way, and what led to it."""

    turns: list[Turn]
    plan: Plan
    proposed: Answers
    drafts: list[Draft | None] | None  # None: of roots alone, which were not known when it was launched
    output: Output
    launched: float  # when
    planning: float  # seconds the policy took for it

    @property
    def is_plain(self) -> bool:
        """Every request has one row, and the device picks all their tokens."""
        if self.drafts is None or self.output.picked is None:
            return self.drafts is None
        return all(
            d is not None and len(d.tree.tokens) == turn.num_new == 1
            for turn, d in zip(self.turns, self.drafts, strict=True)
        )


@dataclass(slots=True)
class Rounds:
    """Several passes on their way, each with what a drafter made of the one before. A step lands one of them
    and sends another.
    """

    turns: list[Turn]
    plan: Plan
    proposed: Answers  # of others, for the first
    drafter: int
    flyer: Flyer  # the same
    length: int  # of each draft
    flown: Flown
    since: float  # when they were launched, then when the last of them landed
    other: int | None = None  # who is asked beside it in each of them
    landed: int = 0

    @property
    def is_under_way(self) -> bool:
        """There is more to land, and somebody to say it."""
        return self.landed < len(self.flown) and not all(turn.request.is_finished for turn in self.turns)

    @property
    def goes_on(self) -> bool:
        """Everybody will probably have more to say after what is under way: half of each draft is taken to be
        right.
        """
        num_flying, requests = len(self.flown) - self.landed, [turn.request for turn in self.turns]
        if not num_flying or not self.flown.num_left or any(request.is_finished for request in requests):
            return False
        left = min(request.params.max_tokens - request.num_output for request in requests)
        return left > num_flying * (self.length + 1) / 2


def flyer_of(drafter: Proposer) -> Flyer | None:
    return cast(Flyer, drafter) if getattr(drafter, "most_rounds", 0) else None


def answers_of(
    said: Asides, root: int, numbers: Sequence[int], drafters: Sequence[Proposer]
) -> list[tuple[int, Draft]]:
    """Who drafted what in a round. numbers: of the head, and of whom it has asked beside."""
    chains = zip(numbers, (said.own, said.other), strict=False)
    drafts = [
        (n, Draft(Tree.chain(root, tokens), drafters[n].name, None, (1.0, *paths)))
        for n, (tokens, paths) in chains
        if tokens
    ]
    return drafts[::-1]  # in the order in which they were asked


def possible_rounds(requests: Sequence[Request], length: int, max_model_len: int) -> int:
    """With drafts of this length: there is room for all of their tokens, and each round says at least one
    that is wanted.
    """
    room = min((max_model_len - request.cache.num_cached) // (length + 1) for request in requests)
    return min(room, *(request.params.max_tokens - request.num_output for request in requests))
