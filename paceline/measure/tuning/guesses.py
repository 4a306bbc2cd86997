"""What a drafter said at each token of a text, held against the text. No clock and no tensors.

A draft of K tokens is the best K nodes of a longer one. So a text that was written token by token, with a
drafter asked before each and not listened to, tells what it would have gained with any K: walk along the
text, a step and what it got right at a time. Invariant: the text is plain decoding's, whatever was guessed
about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.types import Draft, Proposer, Verdict
from paceline.engine.plan import FixedPolicy, Plan, Proposed
from paceline.engine.scheduler import Turn


class Step(NamedTuple):
    """Of a request that is given so many guesses at once."""

    num_cached: int
    num_drafted: int
    num_right: int


@dataclass(frozen=True, slots=True)
class Account:
    """One text, and what was guessed about it."""

    num_prompt: int
    output: Sequence[int]
    most_tokens: int  # where it had to end
    guesses: Mapping[int, Draft]  # by the number of tokens written when it was made
    # guessed at every token; else the guesses were checked, and those they got right were passed over
    is_everywhere: bool

    def steps(self, k: int) -> Iterator[Step]:
        """As they would be with k tokens a draft."""
        place = 1
        for at in sorted(self.guesses):
            if at < place:
                continue
            step = self._step(at, min(k, self.most_tokens - at - 1))
            if self.is_everywhere:
                place = at + step.num_right + 1
            yield step

    def _step(self, at: int, k: int) -> Step:
        nodes = best(self.guesses[at], k)
        return Step(
            self.num_prompt + at - 1, len(nodes), len(followed(self.guesses[at], nodes, self.output[at:]))
        )


def best(draft: Draft, k: int) -> list[int]:
    """Its k likeliest nodes: a tree with the same root, since a path is never likelier than its beginning."""
    nodes, chances = list(range(1, draft.num_drafted + 1)), draft.chances
    if chances is not None:
        nodes.sort(key=lambda node: -chances[node])
    return nodes[: max(k, 0)]


def followed(draft: Draft, nodes: Sequence[int], text: Sequence[int]) -> list[int]:
    """Which of these nodes are what the text says, from the first token on."""
    tree, path, at = draft.tree, [], 0
    for token in text:
        found = next(
            (node for node in nodes if tree.parents[node] == at and tree.tokens[node] == token), None
        )
        if found is None:
            break
        path.append(found)
        at = found
    return path


def acceptance(accounts: Sequence[Account]) -> tuple[float, ...]:
    """By depth from 1 on: how often a token was right where one was guessed after tokens that were."""
    guessed: list[int] = []
    right: list[int] = []
    for account in accounts:
        for at, draft in account.guesses.items():
            text = account.output[at:]
            path = [0, *followed(draft, range(1, draft.num_drafted + 1), text)]
            for depth, node in enumerate(path[: len(text)]):
                if node not in draft.tree.parents:
                    break
                if depth == len(guessed):
                    guessed.append(0)
                    right.append(0)
                guessed[depth] += 1
                right[depth] += depth + 1 < len(path)
    return tuple(r / g for r, g in zip(right, guessed, strict=True))


@dataclass(slots=True)
class Times:
    """Seconds, in each step: of a drafter, and of the pass with what follows it."""

    entering: list[float] = field(
        default_factory=list
    )  # the first ask for a request, with whatever it must read for it
    asking: list[float] = field(
        default_factory=list
    )  # each further one; of one that runs a model, for each token asked for
    learning: list[float] = field(default_factory=list)  # looking at what a pass said
    passing: list[tuple[int, int, float]] = field(default_factory=list)  # (rows, cached tokens, seconds)


class Listening(FixedPolicy):
    """Asks before every token and writes down the answer. It is checked only where the drafter lives on
    that.
    """

    def __init__(self, proposer: Proposer | None, most: int) -> None:
        super().__init__(proposer, most)
        self.times = Times()
        self.is_checking = proposer is not None and proposer.needs.top_tokens > 0
        self._guesses: dict[int, Draft] = {}
        self._turn: Turn | None = None
        self._num_cached = self._num_checked = 0

    def plan(self, turns: Sequence[Turn]) -> Plan:
        (self._turn,) = turns
        self._num_cached, self._num_checked = self._turn.request.cache.num_cached, 0
        return super().plan(turns)

    def heard(
        self, drafter: int, asks: Sequence[tuple[int, int]], drafts: Sequence[Draft], seconds: float | None
    ) -> None:
        ((_, count),), (draft,) = asks, drafts
        assert self._turn is not None, "nobody is asked before a plan"
        if seconds is None:
            pass
        elif self._guesses:
            self.times.asking.append(seconds if self.drafters[drafter].is_free else seconds / count)
        else:
            self.times.entering.append(seconds)
        self._guesses[self._turn.request.num_output] = draft

    def shown(self, drafter: int, num_requests: int, seconds: float) -> None:
        self.times.learning.append(seconds)

    def trim(self, turns: Sequence[Turn], proposed: Proposed) -> dict[int, Draft]:
        checked = super().trim(turns, proposed) if self.is_checking else {}
        self._num_checked = sum(draft.num_drafted for draft in checked.values())
        return checked

    def observe(
        self, turns: Sequence[Turn], verdicts: Mapping[int, Verdict], seconds: float | None, whole: float | None = None
    ) -> None:  # fmt: skip
        if seconds is not None and turns[0].num_new == 1:
            self.times.passing.append((1 + self._num_checked, self._num_cached, seconds))

    def account(self, num_prompt: int, output: Sequence[int], most_tokens: int) -> Account:
        """Of the request that has just ended."""
        guesses, self._guesses = self._guesses, {}
        return Account(num_prompt, output, most_tokens, guesses, not self.is_checking)
