"""A token tree: what a drafter proposes and the target checks in one pass.

Node 0 is the root (the request's newest token). `parents[i] < i`, siblings hold different tokens. A chain is
a thin tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from operator import lt


@cache
def _chain(count: int) -> tuple[int, ...]:
    """The parents of a chain's nodes."""
    return tuple(range(-1, count - 1))


@dataclass(frozen=True, slots=True)
class Tree:
    tokens: tuple[int, ...]  # [n]
    parents: tuple[int, ...]  # [n], parents[0] == -1

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents) >= 1, "a tree has a root and one parent a node"
        assert self.parents[0] == -1, "node 0 is the root"
        edges = set(zip(self.parents, self.tokens, strict=True))
        assert len(edges) == len(self.tokens), "siblings hold different tokens"
        assert all(map(lt, self.parents, count())), "parents come before their children"
        assert min(self.parents[1:], default=0) >= 0, "only the root has no parent"

    @classmethod
    def known(cls, tokens: tuple[int, ...], parents: tuple[int, ...]) -> Tree:
        """Without checks, for callers that cannot be wrong: they take as long as drafting."""
        tree = object.__new__(cls)
        object.__setattr__(tree, "tokens", tokens)
        object.__setattr__(tree, "parents", parents)
        return tree

    @classmethod
    def chain(cls, root: int, tokens: Sequence[int] = ()) -> Tree:
        return cls.known((root, *tokens), _chain(len(tokens) + 1))

    @property
    def is_chain(self) -> bool:
        return self.parents == _chain(len(self.parents))

    def depths(self) -> list[int]:
        depths = [0] * len(self.tokens)
        for i, p in enumerate(self.parents[1:], start=1):
            depths[i] = depths[p] + 1
        return depths

    def children(self) -> list[list[int]]:
        children: list[list[int]] = [[] for _ in self.tokens]
        for i, p in enumerate(self.parents[1:], start=1):
            children[p].append(i)
        return children

    def first_path(self) -> list[int]:
        """The root, its first child, that one's first child, and so on."""
        children, path = self.children(), [0]
        while following := children[path[-1]]:
            path.append(following[0])
        return path


def join(trees: Sequence[Tree]) -> tuple[list[int], list[int], list[list[int]]]:
    """Tokens and parents of all nodes of trees with one root, and where each tree's nodes are among them."""
    tokens, parents = list(trees[0].tokens), list(trees[0].parents)
    places = [list(range(len(tokens)))]
    found = {edge: node for node, edge in enumerate(zip(parents, tokens, strict=True))}
    for tree in trees[1:]:
        where = [0]
        for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
            place = found.setdefault((where[parent], token), len(tokens))
            if place == len(tokens):
                parents.append(where[parent])
                tokens.append(token)
            where.append(place)
        places.append(where)
    return tokens, parents, places
