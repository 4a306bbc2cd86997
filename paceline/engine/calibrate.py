"""How often drafters are right when they say they are, over all requests and for each. No tensors.

A drafter claims for each node the chance that it is accepted once its parent is; claims are counted in bins
by depth, and what was seen outweighs the claim as it grows. A request that goes better or worse than the
others has a factor of its own. Old counts fade, so both follow the text. Invariant: with nothing seen, a
claim is taken at its word.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.types import Draft
from paceline.engine.costs import Line, Median

BINS = 12  # of claimed chances
DEPTHS = 3  # told apart: 1, 2, and all deeper ones
STANDINGS = (
    3  # told apart: what nobody else says anything about, what others say too, and what others contradict
)
ALONE, AGREED, CONTRADICTED = range(STANDINGS)
TRUST = 2.0  # observations that a claim itself is worth
KNOWN_TRUST = 10.0  # and what was seen elsewhere
MANY = 20.0  # observations after which nothing but them counts
MEMORY = 0.99  # of a count, from one observation in its bin to the next
SURE = 0.995  # no claim is taken for more
UNSAID = 0.5  # what a drafter that makes no claims is taken to claim
OWN_MEMORY, OWN_PRIOR = (
    0.96,
    10.0,
)  # of a request's own acceptance: how long it is remembered, and the hits it starts with
UNLIKELY, DOUBT = 0.002, 0.5  # a streak of mistakes so unlikely halves what is believed of a request, at once
GAIN_MEMORY = 0.94  # of what asking a drafter gained
USUAL_LENGTH = 200  # tokens of a request when it is first asked about, until some are
GRANT, MOST_CREDIT, ALL_CREDIT = (
    32,
    256,
    4096,
)  # asks that can be paid: when a request enters, at most, and for all requests together


class Calibration:
    """Of one drafter, over all requests."""

    __slots__ = ("_hits", "_known", "_seen")

    def __init__(self, known: Sequence[float] = ()) -> None:
        """known: by depth, how often its nodes were accepted elsewhere."""
        self._known = tuple(known[:DEPTHS])
        self._seen = [0.0] * (BINS * DEPTHS * STANDINGS)
        self._hits = [0.0] * (BINS * DEPTHS * STANDINGS)

    def chance(self, cell: int, claimed: float) -> float:
        """That a node is accepted if its parent is."""
        seen = self._seen[cell]
        return self._hits[cell] / seen if seen else claimed

    def table(self) -> list[float]:
        """The same by cell, -1 where a claim is taken at its word."""
        return [hits / seen if seen else -1.0 for hits, seen in zip(self._hits, self._seen, strict=True)]

    def rates(self) -> list[float]:
        """The same before anything is drafted, over all claims: at depth 1, 2, and deeper. What was never
        tried is as good as what comes before it."""
        rates, before = [], UNSAID
        for depth in range(DEPTHS):
            before, trust = (self._known[depth], KNOWN_TRUST) if depth < len(self._known) else (before, TRUST)
            cells = slice(BINS * depth, BINS * (depth + 1))
            seen = sum(self._seen[cells])
            before = (
                (sum(self._hits[cells]) + trust * before) / (seen + trust)
                if seen < MANY
                else sum(self._hits[cells]) / seen
            )
            rates.append(before)
        return rates

    def observe(self, cell: int, claimed: float, is_hit: bool) -> float:
        """Count a claim; the chance it was given until now."""
        seen, hits = self._seen[cell] or TRUST, self._hits[cell]
        if seen == TRUST:  # the claim itself is the first observation, and fades like the others
            hits = TRUST * claimed
        self._seen[cell] = seen * MEMORY + 1.0
        self._hits[cell] = hits * MEMORY + is_hit
        return hits / seen


def cell_of(depth: int, claimed: float, standing: int = 0) -> int:
    return BINS * ((depth if depth < DEPTHS else DEPTHS) - 1 + DEPTHS * standing) + int(
        claimed * (BINS - 0.001)
    )


def scaled(chance: float, factor: float) -> float:
    """For a request that goes so much better than the others its odds, so that likely does not become
    certain, or so much worse.
    """
    better = chance * factor
    if factor > 1.0:
        better /= 1.0 - chance + better
    return better if better < SURE else SURE


class Record:
    """What is known of a drafter over all requests."""

    __slots__ = ("calibration", "credit", "entry", "is_free", "learning", "line", "rounds", "seconds")

    def __init__(self, is_free: bool, seconds: float, known: Sequence[float] = ()) -> None:
        self.is_free = is_free
        self.calibration = Calibration(known)
        self.seconds = Median(seconds)  # of asking it for one request
        self.line = Line(seconds / 2, seconds / 2)  # of asking one that runs a model, by the nodes it drafts
        self.entry = Median(
            seconds / USUAL_LENGTH
        )  # of the first ask for a request, by token: it may read all of its text
        self.rounds: dict[
            int, Median
        ] = {}  # of one that runs them by itself, of a whole round, by how many requests have part in it
        self.learning = Median(0.0)  # of showing it a request's part of a pass
        self.credit = (
            GRANT * seconds
        )  # seconds that it has saved and not yet cost: new requests get their first asks out of it


class Asked:
    """One drafter's answer for one request. By node: the claimed chance given its parent, the cell in which
    it is counted, and the score by which it is kept: the expected chance of its whole path. Where the draft
    was sampled, a node's score does not know its own token."""

    __slots__ = (
        "added",
        "cells",
        "children",
        "claimed",
        "count",
        "draft",
        "is_falling",
        "record",
        "scores",
        "tally",
    )

    def __init__(self, draft: Draft, record: Record, tally: Tally) -> None:
        self.draft, self.record, self.tally = draft, record, tally
        self.children: list[list[int]] | None = None
        self.count, self.added = 0, 0.0  # nodes that are worth checking, and the seconds they take
        self.is_falling = True  # the first nodes are the best
        parents, chances, chance_of, factor = (
            draft.tree.parents,
            draft.chances,
            record.calibration.chance,
            tally.factor,
        )
        depths, claimed, cells, scores = [0], [1.0], [0], [1.0]
        self.claimed, self.cells, self.scores = claimed, cells, scores
        for node in range(1, len(parents)):
            parent = parents[node]
            depth = depths[parent] + 1
            claim = UNSAID
            if chances is not None:
                above, claim = chances[parent], chances[node]
                claim = claim / above if claim < above else 1.0
            cell = cell_of(depth, claim)
            score = scores[parent] * scaled(chance_of(cell, claim), factor)
            if score > scores[-1]:
                self.is_falling = False
            depths.append(depth)
            claimed.append(claim)
            cells.append(cell)
            scores.append(score)
        if draft.q is not None:
            self._score_sampled(depths)

    def expected(self, node: int) -> float:
        """The chance that a node is accepted if its parent is."""
        return scaled(self.record.calibration.chance(self.cells[node], self.claimed[node]), self.tally.factor)

    def compare(self, standing: int) -> None:
        """Another drafter says the same first token, or another. Scores that fall go on to do so: all but the
        root's change alike.
        """
        before = self.scores[1]
        self.cells[1] += standing * BINS * DEPTHS
        factor = self.expected(1) / before if before else 0.0
        self.scores = [1.0, *(score * factor for score in self.scores[1:])]

    def _score_sampled(self, depths: Sequence[int]) -> None:
        rates, paths, parents = self.record.calibration.rates(), self.scores, self.draft.tree.parents
        self.scores = [1.0]
        for node in range(1, len(parents)):
            above = paths[parents[node]]
            rate = rates[min(depths[node], DEPTHS) - 1] * self.tally.factor
            self.scores.append(min(above * rate, self.scores[parents[node]]))

    def children_of(self, node: int) -> list[int]:
        if self.children is None:
            self.children = self.draft.tree.children()
        return self.children[node]


class Tally:
    """What is known of one drafter for one request."""

    __slots__ = (
        "_expected", "_hits", "_streak", "count", "credit", "factor", "first", "gain", "is_new", "length", "next_look", "probe",
        "promise", "shadow", "shadow_node",
    )  # fmt: skip

    def __init__(self, length: int = USUAL_LENGTH) -> None:
        self._hits = self._expected = OWN_PRIOR
        self.length = length  # tokens of the request when it was first seen
        self.factor = 1.0  # by which this request's acceptance differs from the others'
        self.credit = 0.0  # seconds that asking has saved and not yet cost; it is asked while there are any
        self.gain = 0.0  # seconds an ask saves, averaged
        self.is_new = True  # the drafter was not asked yet
        self.probe = 0.0  # seconds paid for an ask from which nothing was expected
        self.promise = 0.0  # of one that runs a model: seconds that an ask should save,
        self.count, self.first = 0, 0.0  # the nodes it is worth asking for, what the first of them costs,
        self.next_look = 0  # and the step from which on that is looked at again
        self._streak = 1.0  # the chance of having been wrong so often in a row
        self.shadow: Asked | None = None  # a draft that was not checked to its end and has been right so far
        self.shadow_node = 0

    def note(self, expected: float, is_hit: bool) -> None:
        self._hits = OWN_MEMORY * self._hits + (1 - OWN_MEMORY) * OWN_PRIOR + is_hit
        self._expected = OWN_MEMORY * self._expected + (1 - OWN_MEMORY) * OWN_PRIOR + expected
        self._streak = 1.0 if is_hit else self._streak * (1.0 - expected)
        if self._streak < UNLIKELY:  # no bad luck: the text has changed
            self._hits *= DOUBT
            self._streak = UNLIKELY**0.5
        self.factor = self._hits / self._expected

    def enter(self, record: Record, cost: float) -> None:
        """The first ask is at hand: its first few are lent by what the drafter saved for others."""
        self.is_new = False
        self.credit = min(GRANT * cost, record.credit)
        record.credit -= self.credit

    def saved(self, record: Record, seconds: float, cost: float) -> None:
        """An ask is expected to have saved so much, and has cost so much."""
        gained = seconds - (0.0 if self.probe else cost)
        self.credit = min(max(self.credit + gained, 0.0), MOST_CREDIT * cost)
        record.credit = min(max(record.credit + gained, 0.0), ALL_CREDIT * cost)
        self.gain = seconds + GAIN_MEMORY * (self.gain - seconds)
