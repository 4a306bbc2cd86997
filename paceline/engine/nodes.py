"""Drafted nodes: the drafts of a request joined into one tree, weighed against what a pass costs, and cut.

Invariant: a node's score is never above its parent's, so the best nodes of a tree are a tree with the same
root.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.tree import Tree, join
from paceline.core.types import Draft
from paceline.engine.calibrate import AGREED, ALONE, BINS, CONTRADICTED, DEPTHS, Asked


class Lone:
    """One draft whose best nodes are its first: a chain, or a tree that was grown best first and is believed.
    By far the commonest.
    """

    __slots__ = ("asked", "q", "scores")

    def __init__(self, asked: Asked) -> None:
        self.asked, self.scores, self.q = asked, asked.scores, None

    @staticmethod
    def fits(asked: Sequence[Asked], has_trees: bool) -> bool:
        if len(asked) > 1 or asked[0].draft.q is not None:
            return False
        return asked[0].is_falling and (has_trees or asked[0].draft.tree.is_chain)

    def owner(self, node: int) -> Asked:
        return self.asked

    def chain(self) -> Sequence[int]:
        return range(1, len(self.scores))

    def cut(self, nodes: Sequence[int]) -> Draft:
        """The nodes are the first ones."""
        return first_of(self.asked.draft, len(nodes))


class Joined:
    """The drafts of one request as one tree, each node with its score and who holds it."""

    __slots__ = ("chances", "holders", "parents", "q", "scores", "tokens")

    def __init__(self, asked: Sequence[Asked]) -> None:
        self.q, self.scores = asked[0].draft.q, asked[0].scores
        self.tokens, self.parents, places = join([one.draft.tree for one in asked])
        self.holders: list[list[tuple[Asked, int]]] = [[] for _ in self.tokens]
        for one, where in zip(asked, places, strict=True):
            for node, place in enumerate(where):
                self.holders[place].append((one, node))
        first = [holders[0] for holders in self.holders]
        self.chances = [(one.draft.chances or one.scores)[node] for one, node in first]
        if len(asked) > 1:
            assert all(one.draft.q is None for one in asked), "sampled drafts stand alone"
            self._compare()

    def _compare(self) -> None:
        """Score anew by who else says so: a token that another drafter contradicts is right far less often
        than one it agrees with.
        """
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
        q = (
            None
            if self.q is None
            else {place[n]: row for n, row in self.q.items() if place.get(n, -2) in parents}
        )
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
    return Draft(Tree.known(tree.tokens[:end], tree.parents[:end]), draft.source, None, chances, sources)


def admitted(
    scores: Sequence[float], tokens: float, seconds: float, added: Sequence[float], margin: float
) -> int:
    """How many of the best nodes to check so that tokens a second are most. scores: falling; `tokens` in
    `seconds` without any; added[n]: seconds that the first n + 1 nodes take together. Costs have steps, so
    every length is looked at. 0 unless it is `margin` times better than none."""
    best, best_rate = 0, margin * tokens / seconds
    for index, score in enumerate(scores):
        tokens += score
        rate = tokens / (seconds + added[index])
        if rate > best_rate:
            best, best_rate = index + 1, rate
    return best


def best_start(
    scores: Sequence[float],
    tokens: float,
    seconds: float,
    base: Sequence[float],
    rows: int,
    each: float,
    margin: float,
    fixed: float = 0.0,
) -> tuple[int, float, float]:
    """The same for the nodes of one request in their order, each with a row of the pass and `each` seconds:
    how many, the tokens expected of them, and the seconds that they add. base: seconds by rows, of which
    there are `rows` without any; fixed: for having a draft."""
    best, best_rate, gain, cost = 0, margin * tokens / seconds, 0.0, 0.0
    gained, start = 0.0, base[rows]
    for count, score in enumerate(scores, start=1):
        tokens += score
        gained += score
        added = fixed + (base[rows + count] - start + count * each)
        rate = tokens / (seconds + added)
        if rate > best_rate:
            best, best_rate, gain, cost = count, rate, gained, added
    return best, gain, cost


def first_branch(draft: Draft) -> Draft:
    """The path of first children: all that is checked where side branches would not have the bits of plain
    decoding.
    """
    children, path = draft.tree.children(), [0]
    while children[path[-1]]:
        path.append(children[path[-1]][0])
    tree = Tree.chain(draft.tree.tokens[0], [draft.tree.tokens[node] for node in path[1:]])
    q = {i: draft.q[node] for i, node in enumerate(path[:-1]) if node in draft.q} if draft.q else None
    chances = draft.chances and tuple(draft.chances[node] for node in path)
    return Draft(
        tree, draft.source, q or None, chances, draft.sources and tuple(draft.sources[node] for node in path)
    )
