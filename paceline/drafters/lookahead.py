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
from dataclasses import dataclass

from paceline.core.tree import Tree, join
from paceline.core.types import Draft, Needs, Request, Seen
from paceline.drafters.base import Drafter, DrafterConfig, DrafterContext, within

MAX_KEYS = 4096  # first tokens that a request's pool remembers; the least recently used go first
# how often a token of the pool, and of the window, is right after one that was: roughly as measured
FOUND, WINDOW = (0.45, 0.05)
Path = tuple[Sequence[int], float]  # tokens, each of this chance after the one before


@dataclass(frozen=True, slots=True)
class LookaheadConfig(DrafterConfig):
    num_speculative_tokens: int = within(0, 128, 0)  # 0: as many nodes as window and n-grams need
    # So small because a CPU pays for every row. Where rows are nearly free the paper's 7, 5, 7 accept more.
    max_window_size: int = within(1, 32, 1)  # W
    max_ngram_size: int = within(2, 16, 2)  # N
    max_verification_set_size: int = within(1, 32, 1)  # G: n-grams checked in a step
    pool_from_text: bool = True  # n-grams of the text itself are in the pool too

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        if not self.num_speculative_tokens:
            needed = (self.max_window_size + self.max_verification_set_size) * (self.max_ngram_size - 1)
            object.__setattr__(self, "num_speculative_tokens", min(needed, 128))


class Pool:
    """N-grams by their first token: at most `width` each, the latest first; at most MAX_KEYS first tokens."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._grams: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(grams) for grams in self._grams.values())

    def add(self, gram: Sequence[int]) -> None:
        first, rest = gram[0], tuple(gram[1:])
        others = [gram for gram in self._grams.pop(first, ()) if gram != rest]
        self._grams[first] = [rest, *others][: self.width]
        if len(self._grams) > MAX_KEYS:
            self._grams.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        return self._grams.get(token, [])


@dataclass(slots=True)
class _State:
    pool: Pool
    # W lists of N-1 tokens; column j begins j + 1 tokens after the last of the text
    columns: list[list[int]]
    num_pooled: int = 0  # tokens of the text whose n-grams are in the pool


class Lookahead(Drafter):
    name = "lookahead"
    needs = Needs(top_tokens=1)
    is_free = can_rewind = True
    Config = LookaheadConfig

    def __init__(self, config: LookaheadConfig, context: DrafterContext | None = None) -> None:
        super().__init__(config)
        self._states: dict[str, _State] = {}

    def draft(self, request: Request, budget: int) -> Draft:
        state, text = self._states.get(request.id), request.tokens
        if state is None:  # the first window is made of pieces of the text: soon overwritten
            levels, columns = range(self.config.max_ngram_size - 1), range(self.config.max_window_size)
            first = [[text[(j + i) % len(text)] for i in levels] for j in columns]
            state = self._states[request.id] = _State(Pool(self.config.max_verification_set_size), first)
            self._pool_text(state, text)
        paths: list[Path] = [(gram, FOUND) for gram in state.pool.after(text[-1])]
        paths += [(path, WINDOW) for path in _paths(state.columns)]
        limit = min(budget, self.config.num_speculative_tokens)
        return _tree_of(text[-1], paths, limit, request.stop_ids)

    def _pool_text(self, state: _State, text: Sequence[int]) -> None:
        if self.config.pool_from_text:
            size = self.config.max_ngram_size
            for end in range(max(min(state.num_pooled, len(text)) + 1, size), len(text) + 1):
                state.pool.add(text[end - size : end])
            state.num_pooled = len(text)

    def observe(self, seen: Sequence[Seen]) -> None:
        for each in seen:
            state = self._states.get(each.request.id)
            if state is None or each.draft is None or each.verdict is None or each.top is None:
                continue
            self._move_on(state, each.draft.tree, each.top[:, 0].tolist())
            passed, last = len(each.verdict.tokens) - 1, each.request.tokens[-1]
            del state.columns[:passed]
            for _ in range(min(passed, self.config.max_window_size)):
                before = state.columns[-1] if state.columns else [last] * (self.config.max_ngram_size - 1)
                state.columns.append([*before[1:], before[0]])
            self._pool_text(state, each.request.tokens)

    def _move_on(self, state: _State, tree: Tree, choices: Sequence[int]) -> None:
        """Each column takes the target's choice after it and gives up its first token."""
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
        state.columns = moved

    def release(self, request: Request) -> None:
        self._states.pop(request.id, None)


def _paths(columns: Sequence[Sequence[int]]) -> list[list[int]]:
    """The path of each column's last node: the trunk up to the column, then down."""
    trunk = [column[0] for column in columns]
    return [[*trunk[:j], *column] for j, column in enumerate(columns)]


def _tree_of(root: int, paths: Sequence[Path], budget: int, ends: frozenset[int]) -> Draft:
    """The draft of these paths, up to a token that ends the request. One that the budget does not hold is
    left out."""
    cut = [(path[: next((i + 1 for i, t in enumerate(path) if t in ends), None)], c) for path, c in paths]
    tokens, parents, places = join([Tree.chain(root, path) for path, _ in cut])
    chances, kept = [0.0] * len(tokens), {0}
    for nodes, (_, chance) in zip(places, cut, strict=True):
        for depth, node in enumerate(nodes):
            chances[node] = max(chances[node], chance**depth)
        if len(kept.union(nodes)) <= budget + 1:
            kept.update(nodes)
    draft = Draft(Tree.known(tuple(tokens), tuple(parents)), Lookahead.name, chances=tuple(chances))
    return draft.cut(sorted(kept))
