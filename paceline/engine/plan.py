"""What a policy is asked, and the policy that always does what it was told. See policy.py for the one that
weighs what pays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from paceline.core.types import Course, Draft, Proposer, Request, Verdict
from paceline.engine.scheduler import Turn

LONGEST_FLIGHT = (
    0.12  # seconds of rounds made in one go: nobody hears what they say before, and who arrives waits
)
Proposed = Mapping[int, list[tuple[int, Draft]]]  # by turn: (drafter, its draft)


class Plan(NamedTuple):
    nodes: list[int]  # for each turn: most nodes it may get; empty if none gets any
    asks: list[list[tuple[int, int]]]  # for each drafter: (turn, most nodes)
    is_learning: bool  # whether drafters should be shown what the pass found likely
    asleep: frozenset[int] = (
        frozenset()
    )  # drafters that are not even shown what the pass computes: nobody means to ask them


class Policy(Protocol):
    drafters: tuple[Proposer, ...]
    order: tuple[int, ...]  # in which drafters are asked

    def plan(self, turns: Sequence[Turn]) -> Plan: ...
    def reconsider(
        self, drafter: int, asks: Sequence[tuple[int, int]], turns: Sequence[Turn], is_flying: bool = False
    ) -> list[tuple[int, int]]: ...
    def heard(
        self, drafter: int, asks: Sequence[tuple[int, int]], drafts: Sequence[Draft], seconds: float | None
    ) -> None: ...
    def shown(self, drafter: int, num_requests: int, seconds: float) -> None: ...
    def trim(self, turns: Sequence[Turn], proposed: Proposed) -> dict[int, Draft]: ...
    def observe(
        self,
        turns: Sequence[Turn],
        verdicts: Mapping[int, Verdict],
        seconds: float | None,
        whole: float | None = None,
    ) -> None: ...
    def may_fly(
        self, drafter: int, asks: Sequence[tuple[int, int]]
    ) -> bool: ...  # whether it may run several rounds by itself
    def lookouts(
        self, drafter: int, turns: Sequence[Turn]
    ) -> list[tuple[int, list[tuple[int, int]]]]: ...  # whom to ask meanwhile
    def flown(
        self,
        drafter: int,
        turns: Sequence[Turn],
        drafts: Mapping[int, Draft],
        verdicts: Mapping[int, Verdict],
        seconds: float | None,
    ) -> None: ...  # one of these rounds: its drafts were checked whole, and it took so long
    def course(
        self, drafter: int, other: int | None, length: int
    ) -> Course: ...  # how one request's drafts are weighed meanwhile
    def replayed(
        self, turns: Sequence[Turn], answers: Sequence[tuple[int, Draft]], checked: Draft, verdicts: Mapping[int, Verdict], drafting: float,
        seconds: float | None,
    ) -> None: ...  # fmt: skip  # a round of one request: who said what, what was checked, seconds of the model that drafted and of all
    def looked(
        self, seconds: float
    ) -> None: ...  # the last plan took so long, and while it was made a device may have been idle
    def stays_plain(
        self, num_requests: int
    ) -> bool: ...  # nobody will be asked in the next step, whatever comes of this one
    def charge(self, seconds: float) -> None: ...
    def release(self, request: Request) -> None: ...


def rounds_within(seconds: float) -> int:
    """How many rounds of so many seconds may be made before anybody hears of them."""
    return max(int(LONGEST_FLIGHT / seconds), 1)


class FixedPolicy:
    """What was asked for: one drafter, K tokens whenever there is room, and every one of them is checked."""

    def __init__(self, proposer: Proposer | None, num_speculative_tokens: int) -> None:
        self.drafters: tuple[Proposer, ...] = () if proposer is None else (proposer,)
        self.num_speculative_tokens = num_speculative_tokens
        self.order = tuple(range(len(self.drafters)))
        self._round_seconds = LONGEST_FLIGHT / 2  # until one is seen

    def plan(self, turns: Sequence[Turn]) -> Plan:
        nodes = (
            [min(turn.draft_limit, self.num_speculative_tokens) for turn in turns] if self.drafters else []
        )
        return Plan(nodes, [[(i, count) for i, count in enumerate(nodes) if count]], bool(self.drafters))

    def reconsider(
        self, drafter: int, asks: Sequence[tuple[int, int]], turns: Sequence[Turn], is_flying: bool = False
    ) -> list[tuple[int, int]]:  # fmt: skip
        return list(asks)

    def heard(
        self, drafter: int, asks: Sequence[tuple[int, int]], drafts: Sequence[Draft], seconds: float | None
    ) -> None:
        """Nothing depends on it."""

    def shown(self, drafter: int, num_requests: int, seconds: float) -> None:
        """Nothing depends on it."""

    def trim(self, turns: Sequence[Turn], proposed: Proposed) -> dict[int, Draft]:
        return {index: drafts[0][1] for index, drafts in proposed.items()}

    def observe(
        self, turns: Sequence[Turn], verdicts: Mapping[int, Verdict], seconds: float | None, whole: float | None = None
    ) -> None:  # fmt: skip
        """Nothing depends on it."""

    def may_fly(self, drafter: int, asks: Sequence[tuple[int, int]]) -> bool:
        """Who matches texts drafts trees, which rounds do not have."""
        return not self.drafters[drafter].is_free

    def lookouts(self, drafter: int, turns: Sequence[Turn]) -> list[tuple[int, list[tuple[int, int]]]]:
        return []

    def flown(
        self, drafter: int, turns: Sequence[Turn], drafts: Mapping[int, Draft], verdicts: Mapping[int, Verdict], seconds: float | None
    ) -> None:  # fmt: skip
        """Nothing depends on it."""

    def course(self, drafter: int, other: int | None, length: int) -> Course:
        """Everything is checked, since nothing costs anything."""
        return Course(
            rounds_within(self._round_seconds),
            1.0,
            [0.0] * (length + 1),
            1.0,
            0.0,
            1.0,
            1,
            1,
            [-1.0] * 3,
            1.0,
            [-1.0] * 3,
            1.0,
        )

    def replayed(
        self, turns: Sequence[Turn], answers: Sequence[tuple[int, Draft]], checked: Draft, verdicts: Mapping[int, Verdict], drafting: float,
        seconds: float | None,
    ) -> None:  # fmt: skip
        """How many fit into a flight."""
        self._round_seconds = seconds or self._round_seconds

    def looked(self, seconds: float) -> None:
        """Nothing depends on it."""

    def stays_plain(self, num_requests: int) -> bool:
        return not self.drafters

    def charge(self, seconds: float) -> None:
        """Nothing depends on it."""

    def release(self, request: Request) -> None:
        """Nothing is kept for a request."""
