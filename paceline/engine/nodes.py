"""Drafted nodes: the drafts of a request joined into one tree, weighed against what a pass costs, and cut.

Invariant: a node's score is never above its parent's, so the best nodes of a tree are a tree with the same root.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.calibrate import AGREED, ALONE, BINS, CONTRADICTED, DEPTHS, Asked
from paceline.types import Draft
from paceline.verify.tree import Tree


class Joined:
    """The drafts of one request as one tree, each node with its score and who holds it."""

    __slots__ = ("chances", "holders", "parents", "q", "scores", "tokens")

    def __init__(self, asked: Sequence[Asked]) -> None:
        first = asked[0]
        self.q = first.draft.q
        self.tokens, self.parents = list(first.draft.tree.tokens), list(first.draft.tree.parents)
        self.holders: list[list[tuple[Asked, int]]] = [[(first, node)] for node in range(len(self.tokens))]
        self.scores, self.chances = first.scores, list(first.draft.chances or first.scores)
        if len(asked) > 1:
            assert all(one.draft.q is None for one in asked), "sampled drafts stand alone"
            for other in asked[1:]:
                self._add(other)
            self._compare()

    def _add(self, other: Asked) -> None:
        places = {edge: node for node, edge in enumerate(zip(self.parents, self.tokens, strict=True))}
        tree, chances = other.draft.tree, other.draft.chances or other.scores
        where = [0]  # node of the other tree -> node here
        for node in range(1, len(tree.tokens)):
            edge = (where[tree.parents[node]], tree.tokens[node])
            place = places.setdefault(edge, len(self.tokens))
            if place == len(self.tokens):
                self.parents.append(edge[0])
                self.tokens.append(edge[1])
                self.holders.append([])
                self.chances.append(chances[node])
            self.holders[place].append((other, node))
            where.append(place)

    def _compare(self) -> None:
        """Score anew by who else says so: a token that another drafter contradicts is right far less often than one it agrees with."""
        speakers: dict[int, set[int]] = {}  # node -> those who drafted something after it
        for node, parent in enumerate(self.parents):
            speakers.setdefault(parent, set()).update(id(asked) for asked, _ in self.holders[node])
        self.scores = [1.0]
        for node in range(1, len(self.tokens)):
            holders, parent = self.holders[node], self.parents[node]
            standing = AGREED if len(holders) > 1 else CONTRADICTED if len(speakers[parent]) > 1 else ALONE
            best = 0.0
            for asked, own in holders:
                asked.cells[own] += standing * BINS * DEPTHS
                best = max(best, asked.expected(own))
            self.scores.append(self.scores[parent] * best)

    def owner(self, node: int) -> Asked:
        return self.holders[node][0][0]

    def chain(self) -> list[int]:
        """The nodes of one path: the best child of the root, its best child, and so on."""
        path, node = [], 0
        while following := [n for n, parent in enumerate(self.parents) if parent == node]:
            node = max(following, key=lambda n: self.scores[n])
            path.append(node)
        return path

    def cut(self, nodes: Sequence[int]) -> Draft:
        """The draft of the root and these nodes, which are in order."""
        place = {0: 0}
        for node in nodes:
            place[node] = len(place)
        parents = (-1, *(place[self.parents[node]] for node in nodes))
        q = None if self.q is None else {place[n]: row for n, row in self.q.items() if place.get(n, -2) in parents}
        kept = (0, *nodes)
        sources = tuple(asked.draft.source_of(own) for asked, own in (self.holders[n][0] for n in kept))
        tree = Tree(tuple(self.tokens[n] for n in kept), parents)
        return Draft(tree, sources[-1], q, tuple(self.chances[n] for n in kept), sources)


def first_of(draft: Draft, count: int) -> Draft:
    """A draft without q up to its node `count`."""
    if count == draft.num_drafted:
        return draft
    tree, end = draft.tree, count + 1
    chances, sources = draft.chances and draft.chances[:end], draft.sources and draft.sources[:end]
    return Draft(Tree(tree.tokens[:end], tree.parents[:end]), draft.source, None, chances, sources)


def admitted(scores: Sequence[float], tokens: float, seconds: float, added: Sequence[float], margin: float) -> int:
    """How many of the best nodes to check so that tokens a second are most. scores: falling; `tokens` in `seconds` without any;
    added[n]: seconds that the first n + 1 nodes take together. Costs have steps, so every length is looked at. 0 unless it is `margin`
    times better than none."""
    best, best_rate = 0, margin * tokens / seconds
    for index, score in enumerate(scores):
        tokens += score
        rate = tokens / (seconds + added[index])
        if rate > best_rate:
            best, best_rate = index + 1, rate
    return best


def first_branch(draft: Draft) -> Draft:
    """The path of first children: all that is checked where side branches would not have the bits of plain decoding."""
    children, path = draft.tree.children(), [0]
    while children[path[-1]]:
        path.append(children[path[-1]][0])
    tree = Tree.chain(draft.tree.tokens[0], [draft.tree.tokens[node] for node in path[1:]])
    q = {i: draft.q[node] for i, node in enumerate(path[:-1]) if node in draft.q} if draft.q else None
    chances = draft.chances and tuple(draft.chances[node] for node in path)
    return Draft(tree, draft.source, q or None, chances, draft.sources and tuple(draft.sources[node] for node in path))
