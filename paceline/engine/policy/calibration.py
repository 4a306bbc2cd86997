"""How often drafters are right when they say they are: over all requests, and for each. No tensors.

What was seen in a cell outweighs the claim as it grows; old counts fade, so both follow the text. A request
that goes better or worse than the others has a factor of its own. Invariant: with nothing seen, a claim is
taken at its word.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core import weigh
from paceline.core.tree import Tree, join
from paceline.core.types import Draft, Verdict
from paceline.core.weigh import AGREED, ALONE, CONTRADICTED

TRUST = 2.0  # observations that a claim is worth, or a rate that was measured elsewhere
MEMORY = 0.99  # of a count, from one observation in its cell to the next
REQUEST_MEMORY = 0.96  # the same of a request's own hits
REQUEST_PRIOR = 10.0  # hits that a request starts with, as many as expected
UNLIKELY = 0.002  # mistakes in a row of which this was the probability halve a request's hits
UNSAID = 0.5  # the claim of a drafter that makes none


class Calibration:
    """Of one drafter, over all requests."""

    def __init__(self, known: Sequence[float] = ()) -> None:
        """known: by depth, how often its nodes were accepted elsewhere."""
        self._known = tuple(known[: weigh.DEPTHS])
        self._seen, self._hits = [0.0] * weigh.NUM_CELLS, [0.0] * weigh.NUM_CELLS
        self.rates = [-1.0] * weigh.NUM_CELLS  # by cell: what was seen, -1 where a claim is taken at its word

    def survival(self, factor: float, count: int) -> list[float]:
        """By depth: the probability that a draft is right that far, before anything is drafted."""
        total, rate, found = 1.0, UNSAID, []
        for depth in range(count):
            if depth < weigh.DEPTHS:
                rate = self._known[depth] if depth < len(self._known) else rate
                cells = slice(weigh.BINS * depth, weigh.BINS * (depth + 1))
                rate = (sum(self._hits[cells]) + TRUST * rate) / (sum(self._seen[cells]) + TRUST)
            total *= min(rate * factor, weigh.SURE)
            found.append(total)
        return found

    def observe(self, cell: int, claim: float, is_hit: bool) -> float:
        """Count a claim; the rate it was given until now."""
        seen, hits = self._seen[cell] or TRUST, self._hits[cell]
        if not self._seen[cell]:  # the claim itself is the first observation, and fades like the others
            hits = TRUST * claim
        self._seen[cell] = seen * MEMORY + 1.0
        self._hits[cell] = hits * MEMORY + is_hit
        self.rates[cell] = self._hits[cell] / self._seen[cell]
        return hits / seen


class Factor:
    """By how much one request's acceptance of one drafter differs from the others'."""

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
    """One drafter's draft for one request, weighed. By node: claim given its parent, cell, score."""

    def __init__(self, number: int, draft: Draft, calibration: Calibration, factor: Factor) -> None:
        """number: of the drafter."""
        self.number, self.draft, self.calibration, self.factor = number, draft, calibration, factor
        parents, chances, self._depths = draft.tree.parents, draft.chances, draft.tree.depths()
        self.claims, self.scores = [1.0], [1.0]
        self.cells = [0] * len(parents)
        for node in range(1, len(parents)):
            parent, claim = parents[node], UNSAID
            if chances is not None:
                claim = chances[node] / chances[parent] if chances[node] < chances[parent] else 1.0
            self.claims.append(claim)
            self.scores.append(self.scores[parent] * self.acceptance(node, ALONE))

    def acceptance(self, node: int, agreement: int) -> float:
        """Of a node, given its parent's. agreement: what another drafter says at this place."""
        cell = self.cells[node] = weigh.cell_of(self._depths[node], self.claims[node], agreement)
        return weigh.acceptance(self.claims[node], self.calibration.rates[cell], self.factor.value)

    def learn(self, checked: Draft | None, verdict: Verdict) -> None:
        """Which claims came true. A node that was not checked is judged too: had it been there, it would have
        been accepted if and only if its token was emitted. Of a sampled draft only what was checked can be.
        """
        is_sampled, tree = self.draft.q is not None, self.draft.tree
        if is_sampled and checked is not self.draft:
            return  # cut to a chain: the numbers of its nodes are others
        node: int | None = 0
        for token in verdict.tokens:
            children, node = [n for n, parent in enumerate(tree.parents) if parent == node], None
            for child in children:
                is_hit = child in verdict.path if is_sampled else tree.tokens[child] == token
                expected = self.calibration.observe(self.cells[child], self.claims[child], is_hit)
                self.factor.note(expected, is_hit)
                node = child if is_hit else node
            if node is None:
                return


def joined(answers: Sequence[Answer]) -> tuple[Draft, list[float]]:
    """The drafts of one request as one tree, and its scores. None is above its parent's: the best nodes are a
    tree. A token that another drafter contradicts is right far less often than one it agrees with."""
    if len(answers) == 1:
        return answers[0].draft, answers[0].scores
    tokens, parents, places = join([answer.draft.tree for answer in answers])
    holders: list[list[tuple[Answer, int]]] = [[] for _ in tokens]  # and a node's number there
    for answer, where in zip(answers, places, strict=True):
        for own, node in enumerate(where):
            holders[node].append((answer, own))
    drafting: dict[int, set[int]] = {}  # node -> the drafters with something after it
    for parent, held in zip(parents, holders, strict=True):
        drafting.setdefault(parent, set()).update(answer.number for answer, _ in held)
    scores = [1.0]
    for parent, held in zip(parents[1:], holders[1:], strict=True):
        agreement = AGREED if len(held) > 1 else CONTRADICTED if len(drafting[parent]) > 1 else ALONE
        scores.append(scores[parent] * max(answer.acceptance(own, agreement) for answer, own in held))
    sources = tuple(answer.draft.source_of(own) for (answer, own), *_ in holders)
    chances = tuple((answer.draft.chances or answer.scores)[own] for (answer, own), *_ in holders)
    return Draft(Tree(tuple(tokens), tuple(parents)), sources[-1], None, chances, sources), scores
