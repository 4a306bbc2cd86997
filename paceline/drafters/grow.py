"""Grows one token tree per request with a model, level by level: what draft models, early exit and learned
heads share.

A node's chance is the product of the model's probabilities along its path, and the best chances win: under a
budget of nodes, at most `tree_width` nodes of a level are read on, `tree_width` tokens offered after each.
Width 1 is a chain. Invariants: requests are only read. Where tokens are sampled (q), how many children a node
gets is decided before one of them, or of their cousins, is drawn. And such a tree branches at its root or
nowhere: chains are judged as a block, trees sibling by sibling, and which of the two applies may not depend
on what was drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.core.errors import GrammarError
from paceline.core.options import require
from paceline.core.sampling import noise_of, processed, warped
from paceline.core.tree import Tree
from paceline.core.types import Draft, Segment
from paceline.drafters.base import DrafterConfig, within
from paceline.drafters.reading import Candidate, GrammarWalk, Reading, draw, likeliest

# by node: the model's logits [vocab] after it, or the tokens that are likeliest there where they are known
Level = torch.Tensor | Sequence[Sequence[Candidate]]
Edge = tuple[int, int]  # a parent's index, and a token


@dataclass(frozen=True, slots=True)
class TreeConfig(DrafterConfig):
    """num_speculative_tokens is the number of nodes."""

    # nodes of a level that are read on, and tokens offered after each; 1: a chain
    tree_width: int = within(1, 16, 1)
    tree_depth: int | None = within(1, 128, None)  # None: as deep as there are nodes
    # what is less likely than this, as a whole path, is not drafted (sampled: not drafted on)
    confidence_threshold: float = within(0.0, 1.0, 0.0)

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        require(self.confidence_threshold < 1, "confidence_threshold", 1, "use a number from 0 to below 1")


class Growth:
    """One request's tree while it grows. Node 0 is the root; levels follow each other."""

    def __init__(self, reading: Reading, config: TreeConfig, number: int = 0) -> None:
        self.reading, self.config, self.number = reading, config, number
        self.request, self.width = reading.request, config.tree_width
        self.tokens, self.parents, self.chances = [reading.unread[-1]], [-1], [1.0]
        self.q: dict[int, torch.Tensor] = {}
        self.depth = self.newest = 0  # of the newest level, and its first node
        self.frontier = [0]  # nodes to be read next
        self.trunk = -1  # the last node whose K/V count as cached
        self.rows: list[int] = []  # nodes read in the last pass, in the order of their slots
        self.grammar = GrammarWalk(self.request.constraint)

    @property
    def num_left(self) -> int:
        return self.reading.budget - len(self.tokens) + 1

    @property
    def levels_left(self) -> int:
        return (self.config.tree_depth or self.reading.budget) - self.depth

    def segment(self) -> Segment:
        """What to read next: the unread text, or the frontier with those of its ancestors that are not
        cached."""
        cache, wanted = self.reading.cache, set[int]()
        if self.trunk < 0:
            return Segment(self.reading.unread, cache)
        for node in self.frontier:
            while node != self.trunk and node not in wanted:
                wanted.add(node)
                node = self.parents[node]
        while self.rows and [n for n in wanted if self.parents[n] == self.trunk] == [self.rows[0]]:
            # all that is read on follows this one, and it lies in the right slot
            self.trunk = self.rows.pop(0)
            wanted.remove(self.trunk)
            cache.num_cached += 1
        self.rows = sorted(wanted)
        parents, tokens = zip(*self.edges(), strict=True)
        return Segment(tokens, cache, parents, num_logits=len(self.frontier))

    def edges(self) -> list[Edge]:
        """Of the rows read last, parents by their place among them."""
        local = {node: i for i, node in enumerate(self.rows)}
        return [(local.get(self.parents[n], -1), self.tokens[n]) for n in self.rows]

    def extend(self, level: Level) -> None:
        """Add what may follow the nodes of the frontier."""
        if self.trunk < 0:
            self.reading.cache.num_cached += len(self.reading.unread)
            self.trunk = 0
        first = len(self.tokens)
        if isinstance(level, torch.Tensor) and self.request.is_sampled:
            self._sample(level)
        else:
            self._offer(level)
        self.newest, self.depth = first, self.depth + 1
        self.frontier = sorted(sorted(self._to_read_on(), key=lambda n: -self.chances[n])[: self.width])

    def _offer(self, level: Level) -> None:
        """The likeliest after each node; more than the budget holds, and the best are kept in the end."""
        found: list[tuple[float, int, int]] = []
        for node, row in zip(self.frontier, level, strict=True):
            if isinstance(row, torch.Tensor):
                path = self.path(node)
                try:
                    self.grammar.go(path)
                    row = likeliest(self.request, path, row, self.width)
                except GrammarError:  # the drafter offers nothing that the request allows; the target may
                    continue
            found.extend((self.chances[node] * c.chance, node, c.token) for c in row)
        for chance, node, token in sorted(found, key=lambda f: -f[0]):
            self._add(node, token, chance)

    def _sample(self, level: torch.Tensor) -> None:
        read: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # node, warped logits [vocab], q [vocab]
        for node, row in zip(self.frontier, level, strict=True):
            path = self.path(node)
            try:
                self.grammar.go(path)
                logits = warped(self.request.params, processed(self.request, path, row))
                read.append((node, logits, logits.softmax(0)))
            except GrammarError:
                continue
        counts = self._numbers_of_children([(node, q) for node, _, q in read])
        if self.depth == 0 and sum(counts) == 1:
            self.width = 1
        position, noise = self.request.num_tokens + self.depth, noise_of(self.request)
        for (node, logits, q), count in zip(read, counts, strict=True):
            if count:
                self.q[node] = q
                for token in draw(logits.cpu().numpy(), position, count, noise):
                    self._add(node, token, self.chances[node] * float(q[token]))

    def _numbers_of_children(self, read: Sequence[tuple[int, torch.Tensor]]) -> list[int]:
        """Share the budget between this level's places and those of deeper levels, known only by how sure the
        model is here. read: nodes, each with its q [vocab].

        A place is the r-th child of a node, as good as the r-th best token there. The best place of the level
        is imagined to go on as a chain, each token as sure as it; what remains of the budget goes to the best
        of all these."""
        if self.width == 1:
            return [1] * len(read)
        places: list[tuple[float, int]] = []
        for i, (node, q) in enumerate(read):
            largest = q.topk(min(self.width, q.numel())).values.tolist()
            places += [(self.chances[node] * p, -i) for p in largest if p > 0]
        places.sort(reverse=True)
        counts = [0] * len(read)
        for rank, (value, i) in enumerate(places):
            best = places[0][0]
            sureness = best / self.chances[read[-places[0][1]][0]]
            # how many of sureness, sureness**2, ... are above this place's share of the best
            num_above = self.levels_left - 1 if value < best else 0
            if value < best and sureness < 1:
                num_above = min(math.ceil(math.log(value / best) / math.log(sureness)) - 1, num_above)
            if rank + num_above < self.num_left:
                counts[-i] += 1
        return counts

    def _to_read_on(self) -> list[int]:
        """Nodes of the newest level whose children might be kept."""
        if self.levels_left <= 0:
            return []
        sure, ends = self.config.confidence_threshold, self.request.stop_ids
        newest = range(self.newest, len(self.tokens))
        level = [n for n in newest if self.chances[n] >= sure and self.tokens[n] not in ends]
        if self.request.is_sampled:
            return level if self.num_left else []
        # the last one's children would be worse than all that are kept
        kept = set(self._ranked()[: self.reading.budget - 1])
        return [n for n in level if n in kept]

    def _ranked(self) -> list[int]:
        return sorted(range(1, len(self.tokens)), key=lambda n: -self.chances[n])

    def _add(self, parent: int, token: int, chance: float) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.chances.append(chance)

    def path(self, node: int) -> list[int]:
        """Tokens from below the root to `node`."""
        tokens = []
        while node > 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def draft(self, source: str) -> Draft:
        """The best of what was offered, or all that was sampled. Depth first, siblings in the order they were
        added: the likeliest path comes first and needs no moving when accepted."""
        kept: Sequence[int] = range(1, len(self.tokens))
        if not self.request.is_sampled:
            sure, ranked = self.config.confidence_threshold, self._ranked()[: self.reading.budget]
            kept = sorted(n for n in ranked if self.chances[n] >= sure)
        children: dict[int, list[int]] = {}
        for n in reversed(kept):
            children.setdefault(self.parents[n], []).append(n)
        order, todo = [], [0]
        while todo:
            order.append(todo.pop())
            todo += children.get(order[-1], [])
        new = {node: i for i, node in enumerate(order)}
        tree = Tree(tuple(self.tokens[n] for n in order), tuple(new.get(self.parents[n], -1) for n in order))
        q = {new[n]: row for n, row in self.q.items()}
        return Draft(tree, source, q or None, tuple(self.chances[n] for n in order))


def grow(growths: Sequence[Growth], read: Callable[[Sequence[Growth]], Level], source: str) -> list[Draft]:
    """Each one's draft. read: what may follow the nodes of these frontiers, one growth after the other."""
    try:
        while growing := [growth for growth in growths if growth.frontier]:
            level, first = read(growing), 0
            for growth in growing:
                end = first + len(growth.frontier)
                growth.extend(level[first:end])
                first = end
    finally:
        for growth in growths:
            growth.grammar.go([])
    return [growth.draft(source) for growth in growths]
