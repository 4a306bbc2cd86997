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

TRUST = 2.0  # observations that a claim is worth, or a rate that was measured elsewhere
MEMORY = 0.99  # of a count, from one observation in its cell to the next
REQUEST_MEMORY = 0.96  # the same of a request's own hits
REQUEST_PRIOR = 10.0  # hits that a request starts with, as many as expected
UNLIKELY = 0.002  # mistakes in a row of which this was the probability halve a request's hits
UNSAID = 0.5  # the claim of a drafter that makes none


class Calibration:
    """Of one drafter, over all requests."""

    __slots__ = ("_hits", "_known", "_seen", "rates")

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
    """One drafter's draft for one request, weighed. By node: claim given its parent, cell, score."""

    __slots__ = ("calibration", "cells", "claims", "draft", "factor", "number", "scores")

    def __init__(self, number: int, draft: Draft, calibration: Calibration, factor: Factor) -> None:
        """number: of the drafter."""
        self.number, self.draft, self.calibration, self.factor = number, draft, calibration, factor
        parents, chances, depths = draft.tree.parents, draft.chances, [0]
        self.claims, self.cells, self.scores = [1.0], [0], [1.0]
        for node in range(1, len(parents)):
            parent, claim = parents[node], UNSAID
            if chances is not None:
                claim = chances[node] / chances[parent] if chances[node] < chances[parent] else 1.0
            depths.append(depths[parent] + 1)
            self.claims.append(claim)
            self.cells.append(weigh.cell_of(depths[-1], claim, weigh.ALONE))
            self.scores.append(self.scores[parent] * self._acceptance(node))

    def _acceptance(self, node: int) -> float:
        return weigh.acceptance(
            self.claims[node], self.calibration.rates[self.cells[node]], self.factor.value
        )

    def set_agreement(self, node: int, agreement: int) -> float:
        """What another drafter says at this place: the node's acceptance, given its parent's."""
        self.cells[node] = (
            self.cells[node] % (weigh.BINS * weigh.DEPTHS) + weigh.BINS * weigh.DEPTHS * agreement
        )
        return self._acceptance(node)

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


class JoinedTree:
    """The drafts of one request as one tree. A node's score is never above its parent's, so the best nodes of
    a tree are a tree with the same root.
    """

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.tokens, self.parents, places = join([answer.draft.tree for answer in answers])
        # By node: the answers that hold it, and its number there.
        self.holders: list[list[tuple[Answer, int]]] = [[] for _ in self.tokens]
        for answer, where in zip(answers, places, strict=True):
            for node, place in enumerate(where):
                self.holders[place].append((answer, node))
        self.scores = answers[0].scores if len(answers) == 1 else self._joint_scores()

    def _joint_scores(self) -> list[float]:
        """A token that another drafter contradicts is right far less often than one it agrees with."""
        drafting: dict[int, set[int]] = {}  # node -> the drafters with something after it
        for node, parent in enumerate(self.parents):
            drafting.setdefault(parent, set()).update(answer.number for answer, _ in self.holders[node])
        scores = [1.0]
        for held, parent in zip(self.holders[1:], self.parents[1:], strict=True):
            agreement = (
                weigh.AGREED
                if len(held) > 1
                else weigh.CONTRADICTED
                if len(drafting[parent]) > 1
                else weigh.ALONE
            )
            scores.append(scores[parent] * max(answer.set_agreement(own, agreement) for answer, own in held))
        return scores

    def best_chain(self) -> list[int]:
        """The best child of the root, its best child, and so on."""
        path, node = [], 0
        while following := [n for n, parent in enumerate(self.parents) if parent == node]:
            node = max(following, key=lambda n: self.scores[n])
            path.append(node)
        return path

    def cut(self, nodes: Sequence[int]) -> Draft:
        """The draft of the root and these nodes, which are in order."""
        kept = (0, *nodes)
        first = [self.holders[node][0] for node in kept]
        if len(kept) == len(self.tokens) and all(answer is first[0][0] for answer, _ in first):
            return first[0][0].draft
        place = {node: i for i, node in enumerate(kept)}
        tree = Tree(tuple(self.tokens[n] for n in kept), tuple(place.get(self.parents[n], -1) for n in kept))
        sources = tuple(answer.draft.source_of(own) for answer, own in first)
        chances = tuple((answer.draft.chances or answer.scores)[own] for answer, own in first)
        return Draft(tree, sources[-1], None, chances, sources)
