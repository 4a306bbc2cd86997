"""A token tree: what a drafter proposes and the target checks in one pass.

Node 0 is the root (the request's newest token). `parents[i] < i`, siblings hold different tokens. A chain is a thin tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tree:
    tokens: tuple[int, ...]  # [n]
    parents: tuple[int, ...]  # [n], parents[0] == -1

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents) >= 1, "a tree has a root and one parent a node"
        assert self.parents[0] == -1, "node 0 is the root"
        edges = set(zip(self.parents, self.tokens, strict=True))
        assert len(edges) == len(self.tokens), "siblings hold different tokens"
        assert all(0 <= p < i for i, p in enumerate(self.parents) if i), "parents come before their children"

    @classmethod
    def chain(cls, root: int, tokens: Sequence[int] = ()) -> Tree:
        return cls((root, *tokens), tuple(range(-1, len(tokens))))

    @property
    def is_chain(self) -> bool:
        return all(p == i - 1 for i, p in enumerate(self.parents))

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

    def ancestors(self, node: int) -> list[int]:
        """The path from the root to `node`, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]
