"""Lookahead (Jacobi) decoding as a token tree: the target refines guesses of its own future while it checks
n-grams it made that way.

The window has W columns of N-1 tokens. The columns' first tokens are a trunk below the root; the rest of
column j hangs below the trunk's j-th node. So each token sees the text, the trunk up to its column and its
own column, and stands where the paper's mask puts it. The target's likeliest token after each column
completes an n-gram for the pool, and the window moves on. N-grams of the pool that begin with the last token
are further branches. Equal siblings are one node. Invariant: the nodes are ordinary guesses, judged like any
others, so the text cannot depend on the window or the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.tree import Tree
from paceline.core.types import Draft, Needs, Request, Seen
from paceline.drafters.base import (
    Drafter,
    DrafterConfig,
    DrafterContext,
    check_flag,
    check_whole,
    propose_each,
)

MAX_KEYS = 4096  # first tokens that a request's pool remembers; the least recently used go first
# how often a token of the pool, and of the window, is right after one that was: roughly as measured
FOUND, WINDOW = (0.45, 0.05)


@dataclass(frozen=True, slots=True)
class LookaheadConfig(DrafterConfig):
    num_speculative_tokens: int = 0  # 0: as many nodes as window and n-grams need
    # So small because a CPU pays for every row. Where rows are nearly free the paper's 7, 5 and 7 accept
    # more.
    max_window_size: int = 1  # W
    max_ngram_size: int = 2  # N
    max_verification_set_size: int = 1  # G: n-grams checked in a step
    pool_from_text: bool = True  # n-grams of the text itself are in the pool too

    def __post_init__(self) -> None:
        check_whole(self, "max_window_size", 1, 32)
        check_whole(self, "max_ngram_size", 2, 16)
        check_whole(self, "max_verification_set_size", 1, 32)
        check_flag(self, "pool_from_text")
        if self.num_speculative_tokens == 0 and not isinstance(self.num_speculative_tokens, bool):
            needed = (self.max_window_size + self.max_verification_set_size) * (self.max_ngram_size - 1)
            object.__setattr__(self, "num_speculative_tokens", min(needed, 128))
        DrafterConfig.__post_init__(self)


class Pool:
    """N-grams by their first token: at most `width` each, the latest first; at most MAX_KEYS first tokens."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._grams: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(grams) for grams in self._grams.values())

    def add(self, gram: Sequence[int]) -> None:
        first, rest = gram[0], tuple(gram[1:])
        grams = self._grams.setdefault(first, [])
        if rest in grams:
            grams.remove(rest)
        grams.insert(0, rest)
        del grams[self.width :]
        self._grams.move_to_end(first)
        if len(self._grams) > MAX_KEYS:
            self._grams.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        return self._grams.get(token, [])


@dataclass(slots=True)
class _State:
    pool: Pool
    # W lists of N-1 tokens; column j begins j + 1 tokens after the last of the text
    columns: list[list[int]] = field(default_factory=list)
    num_pooled: int = 0  # tokens of the text whose n-grams are in the pool


class _Nodes:
    """A tree under construction, in which a path is added once."""

    def __init__(self, root: int, budget: int) -> None:
        self.tokens, self.parents, self.chances = [root], [-1], [1.0]
        self._places: dict[tuple[int, int], int] = {}
        self.budget = budget

    def add(self, path: Sequence[int], chance: float, ends: frozenset[int]) -> None:
        """All of a path or, if the budget does not hold it, nothing; up to a token that ends the request."""
        path = path[: next((i + 1 for i, t in enumerate(path) if t in ends), len(path))]
        node, depth = 0, 0
        while depth < len(path) and (node, path[depth]) in self._places:
            node = self._places[node, path[depth]]
            depth += 1
            self.chances[node] = max(self.chances[node], chance**depth)
        if len(self.tokens) + len(path) - depth > self.budget + 1:
            return
        for token in path[depth:]:
            depth += 1
            self._places[node, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(node)
            self.chances.append(chance**depth)
            node = len(self.tokens) - 1


class Lookahead(Drafter):
    name = "lookahead"
    needs = Needs(top_tokens=1)
    is_free = True
    can_rewind = True
    Config = LookaheadConfig

    def __init__(self, config: LookaheadConfig, context: DrafterContext | None = None) -> None:
        self.config = config
        self._states: dict[str, _State] = {}

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return propose_each(self, self._draft, requests, budgets)

    def _draft(self, request: Request, budget: int) -> Draft:
        state = self._states.get(request.id) or self._states.setdefault(request.id, self._new_state(request))
        nodes = _Nodes(request.tokens[-1], min(budget, self.config.num_speculative_tokens))
        for gram in state.pool.after(request.tokens[-1]):
            nodes.add(gram, FOUND, request.stop_ids)
        for path in _paths(state.columns):
            nodes.add(path, WINDOW, request.stop_ids)
        return Draft(Tree(tuple(nodes.tokens), tuple(nodes.parents)), self.name, chances=tuple(nodes.chances))

    def _new_state(self, request: Request) -> _State:
        """The first window is made of pieces of the text: better than nothing, and soon overwritten."""
        state, text = _State(Pool(self.config.max_verification_set_size)), request.tokens
        levels = self.config.max_ngram_size - 1
        state.columns = [
            [text[(j + i) % len(text)] for i in range(levels)] for j in range(self.config.max_window_size)
        ]
        self._pool_text(state, text)
        return state

    def _pool_text(self, state: _State, text: Sequence[int]) -> None:
        if self.config.pool_from_text:
            size = self.config.max_ngram_size
            for end in range(max(min(state.num_pooled, len(text)) + 1, size), len(text) + 1):
                state.pool.add(text[end - size : end])
            state.num_pooled = len(text)

    def observe(self, seen: Sequence[Seen]) -> None:
        for each in seen:
            state = self._states.get(each.request.id)
            if (
                state is not None
                and each.draft is not None
                and each.verdict is not None
                and each.top is not None
            ):
                choices, num_emitted = each.top[:, 0].tolist(), len(each.verdict.tokens)
                self._move_on(state, each.draft.tree, choices, num_emitted, each.request.tokens[-1])
                self._pool_text(state, each.request.tokens)

    def _move_on(
        self, state: _State, tree: Tree, choices: Sequence[int], num_emitted: int, last: int
    ) -> None:
        """Each column takes the target's choice after it and gives up its first token; those that the text
        has passed go.
        """
        places = {edge: node for node, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
        moved = []
        for column, path in zip(state.columns, _paths(state.columns), strict=True):
            node: int | None = 0
            for token in path:
                node = None if node is None else places.get((node, token))
            # A column that had no place in the tree, or that an end cut off, moves on by repeating itself.
            new = column[-1] if node is None else choices[node]
            if node is not None:
                state.pool.add([*column, new])
            moved.append([*column[1:], new])
        columns = moved[num_emitted - 1 :]
        while len(columns) < len(moved):
            before = columns[-1] if columns else [last] * len(moved[0])
            columns.append([*before[1:], before[0]])
        state.columns = columns

    def release(self, request: Request) -> None:
        self._states.pop(request.id, None)


def _paths(columns: Sequence[Sequence[int]]) -> list[list[int]]:
    """The path of each column's last node: the trunk up to the column, then down."""
    trunk = [column[0] for column in columns]
    return [[*trunk[:j], *column] for j, column in enumerate(columns)]
