"""How often drafters are right when they say they are: over all requests, and for each. No tensors.

What was seen in a cell outweighs the claim as it grows; old counts fade, so both follow the text. A request
that goes better or worse than the others has a factor of its own. Invariant: with nothing seen, a claim is
taken at its word.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.types import Draft, Verdict
from paceline.core.weigh import (
    AGREED,
    ALONE,
    BINS,
    CONTRADICTED,
    DEPTHS,
    NUM_CELLS,
    SURE,
    acceptance,
    cell_of,
)

TRUST = 2.0  # observations that a claim is worth, or a rate that was measured elsewhere
MEMORY = 0.99  # of a count, from one observation in its cell to the next
REQUEST_MEMORY = 0.96  # the same of a request's own hits
REQUEST_PRIOR = 10.0  # hits that a request starts with, as many as expected
UNLIKELY = 0.002  # mistakes in a row of which this was the probability halve a request's hits
UNSAID = 0.5  # the claim of a drafter that makes none


class Calibration:
    """Of one drafter, over all requests."""

    __slots__ = ("_hits", "_known", "_seen")

    def __init__(self, known: Sequence[float] = ()) -> None:
        """known: by depth, how often its nodes were accepted elsewhere."""
        self._known = tuple(known[:DEPTHS])
        self._seen, self._hits = [0.0] * NUM_CELLS, [0.0] * NUM_CELLS

    def table(self) -> list[float]:
        """By cell: the rate seen, -1 where a claim is taken at its word."""
        return [self.rate(cell) for cell in range(NUM_CELLS)]

    def rate(self, cell: int) -> float:
        seen = self._seen[cell]
        return self._hits[cell] / seen if seen else -1.0

    def survival(self, factor: float, count: int) -> list[float]:
        """By depth: the probability that a draft is right that far, before anything is drafted."""
        rates, before = [], UNSAID
        for depth in range(DEPTHS):
            before = self._known[depth] if depth < len(self._known) else before
            cells = slice(BINS * depth, BINS * (depth + 1))
            before = (sum(self._hits[cells]) + TRUST * before) / (sum(self._seen[cells]) + TRUST)
            rates.append(min(before * factor, SURE))
        total, found = 1.0, []
        for depth in range(count):
            total *= rates[min(depth, DEPTHS - 1)]
            found.append(total)
        return found

    def observe(self, cell: int, claim: float, is_hit: bool) -> float:
        """Count a claim; the rate it was given until now."""
        seen, hits = self._seen[cell] or TRUST, self._hits[cell]
        if not self._seen[cell]:  # the claim itself is the first observation, and fades like the others
            hits = TRUST * claim
        self._seen[cell] = seen * MEMORY + 1.0
        self._hits[cell] = hits * MEMORY + is_hit
        return hits / seen


class Factor:
    """By how much one request's acceptance of one drafter differs from the others'."""

    __slots__ = ("_expected", "_hits", "_streak", "value")

    def __init__(self) -> None:
        self._hits = self._expected = REQUEST_PRIOR
        self._streak = self.value = 1.0  # the probability of as many mistakes in a row as were just made

    def note(self, expected: float, is_hit: bool) -> None:
        prior = (1 - REQUEST_MEMORY) * REQUEST_PRIOR
        self._hits = REQUEST_MEMORY * self._hits + prior + is_hit
        self._expected = REQUEST_MEMORY * self._expected + prior + expected
        self._streak = 1.0 if is_hit else self._streak * (1.0 - expected)
        if self._streak < UNLIKELY:  # the text has changed
            self._hits, self._streak = self._hits / 2, UNLIKELY**0.5
        self.value = self._hits / self._expected


class Answer:
    """One drafter's draft for one request, weighed. By node: the claim given its parent, its cell, its
    score.
    """

    __slots__ = ("calibration", "cells", "claims", "draft", "factor", "number", "scores")

    def __init__(self, number: int, draft: Draft, calibration: Calibration, factor: Factor) -> None:
        """number: of the drafter."""
        self.number, self.draft, self.calibration, self.factor = number, draft, calibration, factor
        parents, chances = draft.tree.parents, draft.chances
        depths, claims, cells, scores = [0], [1.0], [0], [1.0]
        for node in range(1, len(parents)):
            parent, claim = parents[node], UNSAID
            if chances is not None:
                claim = chances[node] / chances[parent] if chances[node] < chances[parent] else 1.0
            depths.append(depths[parent] + 1)
            claims.append(claim)
            cells.append(cell_of(depths[-1], claim, ALONE))
            scores.append(scores[parent] * acceptance(claim, calibration.rate(cells[-1]), factor.value))
        self.claims, self.cells, self.scores = claims, cells, scores

    def set_agreement(self, node: int, agreement: int) -> float:
        """What another drafter says at this place: the node's acceptance, given its parent's."""
        self.cells[node] = self.cells[node] % (BINS * DEPTHS) + BINS * DEPTHS * agreement
        return acceptance(self.claims[node], self.calibration.rate(self.cells[node]), self.factor.value)

    def learn(self, checked: Draft | None, verdict: Verdict) -> None:
        """Which claims came true. A node that was not checked is judged too: had it been there, it would have
        been accepted if and only if its token was emitted. Of a sampled draft only what was checked can be.
        """
        tokens, parents = self.draft.tree.tokens, self.draft.tree.parents
        path = verdict.path if self.draft.q is not None else None
        if path is not None and checked is not self.draft:
            return  # cut to a chain: the numbers of its nodes are others
        node = 0
        for depth, token in enumerate(verdict.tokens):
            reached = 0
            for child in range(node + 1, len(parents)):
                if parents[child] != node:
                    continue
                if path is None:
                    is_hit = tokens[child] == token
                else:
                    is_hit = depth + 1 < len(path) and path[depth + 1] == child
                cell = self.cells[child]
                self.factor.note(self.calibration.observe(cell, self.claims[child], is_hit), is_hit)
                reached = child if is_hit else reached
            if not reached:
                return
            node = reached


def compare(
    answers: Sequence[Answer], holders: Sequence[Sequence[tuple[Answer, int]]], parents: Sequence[int]
) -> list[float]:
    """The scores of a joined tree: a token that another drafter contradicts is right far less often than one
    it agrees with. holders: by joined node, the answers that hold it and its number there.
    """
    if len(answers) == 1:
        return answers[0].scores
    drafting: dict[int, set[int]] = {}  # node -> the drafters with something after it
    for node, parent in enumerate(parents):
        drafting.setdefault(parent, set()).update(answer.number for answer, _ in holders[node])
    scores = [1.0]
    for node in range(1, len(parents)):
        held, parent = holders[node], parents[node]
        agreement = AGREED if len(held) > 1 else CONTRADICTED if len(drafting[parent]) > 1 else ALONE
        scores.append(scores[parent] * max(answer.set_agreement(own, agreement) for answer, own in held))
    return scores
