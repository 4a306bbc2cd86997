"""Counts of speculation, per request and in all, and where the time of a step goes. num_tokens ==
num_accepted + num_own, always.
"""

from __future__ import annotations

import warnings
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the server's HTTP process reads counts with this module, and needs no torch
    from paceline.core.types import Draft, Verdict
    from paceline.drafters.base import Drafter
    from paceline.runtime.record import StepRecord

# a drafter is reported whose first token was right less often than this, in this number of drafts
NEVER_RIGHT, AFTER = (0.01, 200)
# or less often than this share of what was measured when it was trained: texts differ, but not as much
TOO_RARE = 0.4
WINDOW = 15  # numbers of which a median counts
OUTLIER = 8.0  # times the median: no number counts as more


@dataclass(slots=True)
class DraftCounts:
    """Drafted tokens, in all and by depth from 1 on."""

    num_drafted: int = 0  # nodes the target checked
    num_accepted: int = 0  # of them, emitted
    drafted_at: list[int] = field(default_factory=list)  # rounds that drafted so deep
    accepted_at: list[int] = field(default_factory=list)  # rounds that accepted so deep

    @property
    def acceptance_per_position(self) -> list[float]:
        """Of the rounds that drafted so deep, the share that accepted so deep."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    def add(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """A round's nodes, by their depths. A depth counts once, however many siblings were drafted there."""
        self.num_drafted += len(drafted)
        self.num_accepted += len(accepted)
        missing = max(drafted, default=0) - len(self.drafted_at)
        for counts, depths in ((self.drafted_at, drafted), (self.accepted_at, accepted)):
            counts.extend([0] * missing)
            for depth in set(depths):
                counts[depth - 1] += 1

    def add_chains(self, count: int, num_accepted: int, steps: int) -> None:
        """The same of chains that are alike."""
        self.num_drafted += steps * count
        self.num_accepted += steps * num_accepted
        for counts, length in ((self.drafted_at, count), (self.accepted_at, num_accepted)):
            counts.extend([0] * (count - len(counts)))
            counts[:length] = [number + steps for number in counts[:length]]

    def counts_json(self) -> dict[str, object]:
        names = ("num_drafted", "num_accepted", "acceptance_per_position")
        return {name: getattr(self, name) for name in names}


@dataclass(slots=True)
class SpecStats(DraftCounts):
    num_steps: int = 0  # target passes that spoke for this request
    num_tokens: int = 0  # emitted
    num_own: int = 0  # emitted tokens that are the target's own: a bonus or a replacement
    by_source: dict[str, DraftCounts] = field(default_factory=dict)  # of the nodes that each drafter proposed
    lengths: dict[int, int] = field(default_factory=dict)  # nodes checked in a step -> steps
    # chains that `settle` has not counted yet: source, nodes, accepted ones, emitted tokens -> steps
    chains: dict[tuple[str, int, int, int], int] = field(default_factory=dict)

    @property
    def tau(self) -> float:
        """Mean tokens per target pass, bonus included."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def alpha(self) -> float:
        """Share of drafted tokens that were accepted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def num_drafts(self) -> int:
        """Steps that checked a draft."""
        return self.num_steps - self.lengths.get(0, 0)

    def record_plain(self, num_rounds: int = 1) -> None:
        """Rounds without a draft, each of which emits a token."""
        self.num_steps += num_rounds
        self.num_tokens += num_rounds
        self.num_own += num_rounds
        self.lengths[0] = self.lengths.get(0, 0) + num_rounds

    def record(self, draft: Draft, path: Sequence[int], num_tokens: int, *others: SpecStats) -> None:
        """path: the nodes of the draft that were emitted; the rest of the tokens are the target's own. A
        chain of one drafter counts with the next call of `settle`. others: where it counts, too."""
        is_chain = draft.sources is None and draft.tree.is_chain
        key = (draft.source, len(draft.tree.tokens) - 1, len(path), num_tokens)
        for stats in (self, *others):
            if is_chain:
                stats.chains[key] = stats.chains.get(key, 0) + 1
            else:
                stats._record_tree(draft, path, num_tokens)

    def _record_tree(self, draft: Draft, path: Sequence[int], num_tokens: int) -> None:
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.num_own += num_tokens - len(path)
        self.lengths[draft.num_drafted] = self.lengths.get(draft.num_drafted, 0) + 1
        depths = draft.tree.depths()
        drafted, accepted = depths[1:], [depths[node] for node in path]
        self.add(drafted, accepted)
        nodes = defaultdict[str, list[int]](list)
        for node in range(1, len(depths)):
            nodes[draft.source_of(node)].append(node)
        for source, own in nodes.items():
            taken = [depths[node] for node in path if node in own]
            self._counts(source).add([depths[node] for node in own], taken)

    def settle(self) -> SpecStats:
        """Count the chains that were recorded since; before anything is read. Returns itself."""
        for (source, count, num_accepted, num_tokens), steps in self.chains.items():
            self.num_steps += steps
            self.num_tokens += steps * num_tokens
            self.num_own += steps * (num_tokens - num_accepted)
            self.lengths[count] = self.lengths.get(count, 0) + steps
            for counts in (self, self._counts(source)):
                counts.add_chains(count, num_accepted, steps)
        self.chains.clear()
        return self

    def _counts(self, source: str) -> DraftCounts:
        return self.by_source.setdefault(source, DraftCounts())

    def to_dict(self) -> dict[str, object]:
        return {
            **{name: getattr(self, name) for name in ("tau", "alpha", "num_steps", "num_tokens")},
            **self.counts_json(),
            "drafts": {str(length): self.lengths[length] for length in sorted(self.lengths)},
            "by_source": {source: counts.counts_json() for source, counts in self.by_source.items()},
        }


@dataclass(slots=True)
class Suspicion:
    """Notices a drafter that is never right: a wrong head, layer or model shows so, and nothing else does."""

    _seen: dict[str, int] = field(default_factory=dict)
    _right: dict[str, int] = field(default_factory=dict)

    def judge(self, record: StepRecord, drafters: Sequence[Drafter]) -> None:
        """Look at the drafts of greedy requests, as where heads were trained, until enough were seen."""
        if all(self._seen.get(drafter.name, 0) >= AFTER for drafter in drafters):
            return
        for index in record.answers.keys() & record.verdicts.keys():
            for number, draft in record.answers[index]:
                if record.scheduled[index].request.params.is_greedy:
                    self._judge(drafters[number], draft, record.verdicts[index])

    def _judge(self, drafter: Drafter, draft: Draft, verdict: Verdict) -> None:
        is_right, tree = verdict.num_accepted > 0, draft.tree
        if draft.q is None:  # it may have been right and not checked
            first = [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == 0]
            is_right = verdict.tokens[0] in first
        self.note(drafter.name, is_right, drafter.usual)

    def note(self, name: str, is_right: bool, usual: float = 0.0) -> None:
        """Was the first token of a draft right? usual: how often it was when the drafter was trained, 0 if
        not known."""
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

    def add(self, number: float) -> None:
        self._recent.append(min(number, OUTLIER * self.value) if self.value > 0 else number)
        self.value = sorted(self._recent)[(len(self._recent) - 1) // 2]
