"""Counts of speculation, per request and in all, and where the time of a step goes. num_tokens ==
num_accepted + num_own, always.
"""

from __future__ import annotations

import warnings
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.core.types import Draft, Verdict
from paceline.drafters.base import Drafter

# a drafter is reported whose first token was right less often than this in so many drafts
NEVER_RIGHT, AFTER = (0.01, 200)
# or less often than this share of what was measured when it was trained: texts differ, but not as much
TOO_RARE = 0.4
WINDOW = 15  # numbers of which a median counts
OUTLIER = 8.0  # times the median: no number counts as more


@dataclass(slots=True)
class Positions:
    """By depth from 1 on: rounds that drafted so deep, and rounds that accepted so deep."""

    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def record(self, drafted: Iterable[int], accepted: Iterable[int]) -> None:
        """A round that drafted and accepted at these depths."""
        for counts, depths in ((self.drafted_at, drafted), (self.accepted_at, accepted)):
            for depth in depths:
                missing = depth - len(self.drafted_at)
                self.drafted_at.extend([0] * missing)
                self.accepted_at.extend([0] * missing)
                counts[depth - 1] += 1

    @property
    def acceptance(self) -> list[float]:
        """Of the rounds that drafted so deep, the share that accepted so deep."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]


@dataclass(slots=True)
class SpecStats:
    num_steps: int = 0  # target passes that spoke for this request
    num_tokens: int = 0  # emitted
    num_drafted: int = 0  # nodes the target checked
    num_accepted: int = 0  # of them, emitted
    num_own: int = 0  # emitted tokens that are the target's own: a bonus or a replacement
    positions: Positions = field(default_factory=Positions)
    by_source: dict[str, Positions] = field(default_factory=dict)  # of the nodes that each drafter proposed
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)  # nodes checked in a step -> steps

    @property
    def tau(self) -> float:
        """Mean tokens per target pass, bonus included."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def alpha(self) -> float:
        """Share of drafted tokens that were accepted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def drafted_at(self) -> list[int]:
        return self.positions.drafted_at

    @property
    def accepted_at(self) -> list[int]:
        return self.positions.accepted_at

    @property
    def acceptance_per_position(self) -> list[float]:
        return self.positions.acceptance

    def record_plain(self, num_rounds: int = 1) -> None:
        """Rounds without a draft, each of which emits a token."""
        self.num_steps += num_rounds
        self.num_tokens += num_rounds
        self.num_own += num_rounds
        self.lengths[0] = self.lengths.get(0, 0) + num_rounds

    def record(self, draft: Draft, path: Sequence[int], num_tokens: int) -> None:
        """path: the nodes of the draft that were emitted; the rest of the tokens are the target's own."""
        num_drafted, num_accepted = draft.num_drafted, len(path)
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.num_own += num_tokens - num_accepted
        self.lengths[num_drafted] = self.lengths.get(num_drafted, 0) + 1
        self._record_nodes(draft, path)

    def _record_nodes(self, draft: Draft, path: Sequence[int]) -> None:
        """A depth counts once a round, however many siblings were drafted there."""
        depths, nodes = draft.tree.depths(), defaultdict(list)
        self.positions.record(range(1, max(depths) + 1), range(1, len(path) + 1))
        for node in range(1, len(depths)):
            nodes[draft.source_of(node)].append(node)
        for source, its_nodes in nodes.items():
            accepted = [node for node in path if node in its_nodes]
            self.drafted_by_source[source] = self.drafted_by_source.get(source, 0) + len(its_nodes)
            self.accepted_by_source[source] = self.accepted_by_source.get(source, 0) + len(accepted)
            positions = self.by_source.setdefault(source, Positions())
            positions.record({depths[node] for node in its_nodes}, {depths[node] for node in accepted})

    def to_dict(self) -> dict[str, object]:
        return {
            "tau": self.tau,
            "alpha": self.alpha,
            "acceptance_per_position": self.acceptance_per_position,
            "num_steps": self.num_steps,
            "num_tokens": self.num_tokens,
            "num_drafted": self.num_drafted,
            "num_accepted": self.num_accepted,
            "drafts": {str(length): self.lengths[length] for length in sorted(self.lengths)},
            "by_source": {
                source: {
                    "num_drafted": self.drafted_by_source[source],
                    "num_accepted": self.accepted_by_source[source],
                    "acceptance_per_position": positions.acceptance,
                }
                for source, positions in self.by_source.items()
            },
        }


@dataclass(slots=True)
class Suspicion:
    """Notices a drafter that is never right: a wrong head, layer or model shows so, and nothing else does."""

    _seen: dict[str, int] = field(default_factory=dict)
    _right: dict[str, int] = field(default_factory=dict)

    def judge(self, drafter: Drafter, draft: Draft, verdict: Verdict) -> None:
        if self._seen.get(drafter.name, 0) >= AFTER:
            return
        is_right, tree = verdict.num_accepted > 0, draft.tree
        if draft.q is None:  # it may have been right and not checked
            first = [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == 0]
            is_right = verdict.tokens[0] in first
        self.note(drafter.name, is_right, drafter.usual)

    def note(self, name: str, is_right: bool, usual: float = 0.0) -> None:
        """Was the first token of a draft right? usual: how often it was when the drafter was trained, 0 if
        not known.
        """
        seen = self._seen[name] = self._seen.get(name, 0) + 1
        right = self._right[name] = self._right.get(name, 0) + is_right
        if seen == AFTER and right < max(NEVER_RIGHT, TOO_RARE * usual) * AFTER:
            known = f" (where it was trained: {usual * AFTER:.0f})" if usual else ""
            message = f"the drafter {name} was right {right} times in its first {AFTER} drafts{known}; "
            remedy = "check that it fits this model and reads the right layers, or leave it out"
            warnings.warn(message + remedy, RuntimeWarning, stacklevel=2)


class Median:
    """Of the last few numbers, each capped: one that waited for a compiler must not be believed for long."""

    def __init__(self, first: float) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self.value = first  # until something is seen

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, number: float) -> None:
        self._recent.append(min(number, OUTLIER * self.value) if self.value > 0 else number)
        self.value = sorted(self._recent)[(len(self._recent) - 1) // 2]
