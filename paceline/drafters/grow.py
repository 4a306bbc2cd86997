"""Grows one token tree per request with a model, level by level: what draft models, quantized models and
early exit share.

A node's chance is the product of the model's probabilities along its path, and the best chances win: under a
budget of nodes, at most `tree_width` nodes of a level are read on, `tree_width` tokens offered after each.
Width 1 is a chain. Invariants: requests are only read. Where tokens are sampled (q), how many children a node
gets is decided before one of them, or of their cousins, is drawn. And such a tree branches at its root or
nowhere: chains are judged as a block, trees sibling by sibling, and which of the two applies may not depend
on what was drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.core.errors import GrammarError
from paceline.core.options import require
from paceline.core.sampling import noise_of
from paceline.core.tree import Tree
from paceline.core.types import Draft, Request, Segment
from paceline.drafters.base import DrafterConfig, check_number, check_whole, empty, fit_vocabulary
from paceline.drafters.candidates import Candidate, Sampling, draw, is_sampled, likeliest, sampling_of
from paceline.drafters.reading import GrammarWalk, ModelDrafter, Reading, Rows


@dataclass(frozen=True, slots=True)
class TreeConfig(DrafterConfig):
    """num_speculative_tokens is the number of nodes."""

    tree_width: int = 1  # nodes of a level that are read on, and tokens offered after each; 1: a chain
    tree_depth: int | None = None  # None: as deep as there are nodes
    confidence_threshold: float = (
        0.0  # what is less likely than this, as a whole path, is not drafted (sampled: not drafted on)
    )

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        check_whole(self, "tree_width", 1, 16)
        if self.tree_depth is not None:
            check_whole(self, "tree_depth", 1, 128)
        check_number(self, "confidence_threshold", 0.0, 1.0)
        require(self.confidence_threshold < 1, "confidence_threshold", 1, "use a number from 0 to below 1")


def grow(
    reader: ModelDrafter, requests: Sequence[Request], budgets: Sequence[int], config: TreeConfig, source: str
) -> list[Draft]:
    """A draft for each request; empty where there is no budget or the model cannot read it."""
    growths = [Growth(reading, config) for reading in reader.open(requests, budgets)]
    try:
        while growing := [g for g in growths if g.frontier]:
            output = reader.executor.forward([g.segment() for g in growing], num_layers=reader.num_layers)
            logits = fit_vocabulary(output.logits, reader.vocab_size)
            first = 0
            for growth in growing:
                count = len(growth.frontier)
                growth.extend(logits[first : first + count])
                first += count
    finally:
        for growth in growths:
            growth.grammar.restore()
    for growth in growths:
        reader.close(growth.reading, growth.fed(), growth.rows_left())
    drafts = {id(g.request): g.draft(source) for g in growths}
    return [drafts.get(id(r)) or empty(r, source) for r in requests]


@dataclass(slots=True)
class Growth:
    """One request's tree while it grows. Node 0 is the root; nodes of a level follow those of the level
    before.
    """

    reading: Reading
    config: TreeConfig
    width: int = 1
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=lambda: [-1])
    chances: list[float] = field(default_factory=lambda: [1.0])
    q: dict[int, torch.Tensor] = field(default_factory=dict)
    depth: int = 0  # of the newest level
    newest: int = 0  # its first node
    frontier: list[int] = field(default_factory=lambda: [0])  # nodes to be read next
    trunk: int = -1  # the last node whose K/V count as cached
    # nodes read in the last pass, in the order of their slots after the cached tokens
    rows: list[int] = field(default_factory=list)
    grammar: GrammarWalk = field(init=False)

    def __post_init__(self) -> None:
        self.tokens.append(self.reading.unread[-1])
        self.width = self.config.tree_width
        self.grammar = GrammarWalk(self.request.constraint)

    @property
    def request(self) -> Request:
        return self.reading.request

    @property
    def num_left(self) -> int:
        return self.reading.budget - len(self.tokens) + 1

    @property
    def levels_left(self) -> int:
        return (self.config.tree_depth or self.reading.budget) - self.depth

    def segment(self) -> Segment:
        """What to read next: the unread text, or the frontier with those of its ancestors that are not
        cached.
        """
        cache = self.reading.cache
        if self.trunk < 0:
            return Segment(self.reading.unread, cache)
        wanted = {a for n in self.frontier for a in self._below_trunk(n)}
        while self.rows and [n for n in wanted if self.parents[n] == self.trunk] == [self.rows[0]]:
            # all that is read on follows this one, and it lies in the right slot
            self.trunk = self.rows.pop(0)
            wanted.remove(self.trunk)
            cache.num_cached += 1
        self.rows = sorted(wanted)
        local = {node: i for i, node in enumerate(self.rows)}
        parents = [local.get(self.parents[n], -1) for n in self.rows]
        return Segment([self.tokens[n] for n in self.rows], cache, parents, num_logits=len(self.frontier))

    def extend(self, logits: torch.Tensor, offers: Sequence[Sequence[Candidate]] | None = None) -> None:
        """Add the next level. logits: [frontier, vocab], the drafting model's; offers: the likeliest after
        each, where they are known.
        """
        if self.trunk < 0:
            self.reading.cache.num_cached += len(self.reading.unread)
            self.trunk = 0
        first = len(self.tokens)
        if offers is not None:
            self._add_best(
                [
                    (self.chances[node] * c.chance, node, c.token)
                    for node, some in zip(self.frontier, offers, strict=True)
                    for c in some
                ]
            )
        else:
            (self._sample if is_sampled(self.request) else self._offer)(logits)
        self.newest, self.depth = first, self.depth + 1
        self.frontier = sorted(sorted(self._promising(), key=lambda n: -self.chances[n])[: self.width])

    def _offer(self, logits: torch.Tensor) -> None:
        """The likeliest after each node; more than the budget holds, and the best are kept in the end."""
        found: list[tuple[float, int, int]] = []
        for node, row in zip(self.frontier, logits, strict=True):
            path = self.path(node)
            try:
                self.grammar.go(path)
                candidates = likeliest(self.request, path, row, self.width)
            except GrammarError:  # the drafter has nothing to say that the request allows; the target may
                continue
            found.extend((self.chances[node] * c.chance, node, c.token) for c in candidates)
        self._add_best(found)

    def _add_best(self, found: Sequence[tuple[float, int, int]]) -> None:
        for chance, node, token in sorted(found, key=lambda f: -f[0]):
            self._add(node, token, chance)

    def _sample(self, logits: torch.Tensor) -> None:
        read: list[tuple[int, Sampling]] = []
        for node, row in zip(self.frontier, logits, strict=True):
            path = self.path(node)
            try:
                self.grammar.go(path)
                read.append((node, sampling_of(self.request, path, row)))
            except GrammarError:
                continue
        counts = self._numbers_of_children(read)
        if self.depth == 0 and sum(counts) == 1:
            self.width = 1
        position, noise = self.request.num_tokens + self.depth, noise_of(self.request)
        for (node, sampling), count in zip(read, counts, strict=True):
            if count:
                self.q[node] = sampling.q
                for token in draw(sampling, position, count, noise):
                    self._add(node, token, self.chances[node] * float(sampling.q[token]))

    def _numbers_of_children(self, read: Sequence[tuple[int, Sampling]]) -> list[int]:
        """Share the budget between this level's places and those of deeper levels, known only by how sure the
        model is here.

        A place is the r-th child of a node, as good as the r-th best token there. The best place of the level
        is imagined to go on as a chain, each token as sure as it; what remains of the budget goes to the best
        of all these.
        """
        if self.width == 1:
            return [1] * len(read)
        places = sorted(
            (
                (self.chances[node] * p, -i)
                for i, (node, s) in enumerate(read)
                for p in _largest(s.q, self.width)
            ),
            reverse=True,
        )
        counts = [0] * len(read)
        for rank, (value, i) in enumerate(places):
            best = places[0][0]
            sureness = best / self.chances[read[-places[0][1]][0]]
            if rank + min(_num_above(value / best, sureness), self.levels_left - 1) < self.num_left:
                counts[-i] += 1
        return counts

    def _promising(self) -> list[int]:
        """Nodes of the newest level whose children might be kept."""
        if self.levels_left <= 0:
            return []
        sure, ends = self.config.confidence_threshold, self.request.stop_ids
        level = [
            n
            for n in range(self.newest, len(self.tokens))
            if self.chances[n] >= sure and self.tokens[n] not in ends
        ]
        if is_sampled(self.request):
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

    def _below_trunk(self, node: int) -> list[int]:
        path = []
        while node != self.trunk:
            path.append(node)
            node = self.parents[node]
        return path

    def fed(self) -> list[int]:
        """The tokens whose K/V count as cached."""
        return [*self.request.tokens, *self.path(self.trunk)]

    def rows_left(self) -> Rows:
        local = {node: i for i, node in enumerate(self.rows)}
        return Rows(
            tuple(self.tokens[n] for n in self.rows), tuple(local.get(self.parents[n], -1) for n in self.rows)
        )

    def draft(self, source: str) -> Draft:
        """The best of what was offered, or all that was sampled; the likeliest path first, so that it needs
        no moving when accepted.
        """
        kept = set(range(1, len(self.tokens)))
        if not is_sampled(self.request):
            sure = self.config.confidence_threshold
            kept = {n for n in self._ranked()[: self.reading.budget] if self.chances[n] >= sure}
        order = self._in_order(kept)
        new = {node: i for i, node in enumerate(order)}
        tree = Tree(tuple(self.tokens[n] for n in order), tuple(new.get(self.parents[n], -1) for n in order))
        q = {new[n]: row for n, row in self.q.items()}
        return Draft(tree, source, q or None, tuple(self.chances[n] for n in order))

    def _in_order(self, kept: set[int]) -> list[int]:
        """Depth first from the root, siblings in the order they were added."""
        children: dict[int, list[int]] = {}
        for n in sorted(kept, reverse=True):
            children.setdefault(self.parents[n], []).append(n)
        order, todo = [], [0]
        while todo:
            order.append(todo.pop())
            todo += children.get(order[-1], [])
        return order


def _largest(q: torch.Tensor, count: int) -> list[float]:
    return [p for p in q.topk(min(count, q.numel())).values.tolist() if p > 0]


def _num_above(share: float, sureness: float) -> int:
    """How many of sureness, sureness**2, ... are above `share`."""
    if share >= 1:
        return 0
    return 10**6 if sureness >= 1 else math.ceil(math.log(share) / math.log(sureness)) - 1
