"""Suffix decoding: if the last tokens occurred before, in this request or in answers given before, draft what
followed them then.

Two suffix trees: one over the request's own text, one over the newest answers of past requests. All matches
of the last tokens, of every length and in both trees, vote for the next token (cpu/votes.py); the chance of a
vote is count / (total + doubt / length). So a draft is as long as its match is convincing, and `chances` adds
up to the tokens expected to be accepted. Invariant: a step costs O(tree depth x nodes drafted) however long
the text is, and no tree holds more than `suffix_decoding_max_bytes`. Other requests may change the
guesses, never the text.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.types import Draft, Needs, Request
from paceline.cpu import suffixes, votes
from paceline.cpu.compile import entry_of
from paceline.cpu.suffixes import Arrays
from paceline.drafters.base import Drafter, DrafterConfig, DrafterContext, tree_draft
from paceline.heads.rows import Matcher

# How much a single occurrence is doubted, in the request's own text and in that of others: a match of d
# tokens that occurred n times and was always followed by the same token is followed by it again with the
# chance n / (n + doubt / d). Fitted to answers of the default model.
DOUBTS = (2.0, 12.0)
SLOT_BYTES = 8 * 4 + 2 * 4 + 4  # of a node, its two places in the hash table, and a token of text
FIRST_SIZE = 1024  # slots


@dataclass(frozen=True, slots=True)
class SuffixConfig(DrafterConfig):
    num_speculative_tokens: int = 8
    # draft several continuations where votes differ and that is likelier than a longer chain
    tree: bool = True
    suffix_decoding_max_tree_depth: int = 24  # tokens of a match and what followed it
    suffix_decoding_max_spec_factor: float = 4.0  # drafted tokens for each that matched, at most
    suffix_decoding_min_token_prob: float = 0.1  # draft nothing with a smaller chance of being accepted
    suffix_decoding_max_cached_requests: int = 10_000  # past answers remembered; 0: none
    # of the tree of past answers, and of each running request's tree
    suffix_decoding_max_bytes: int = 32 * 2**20
    limits = (
        *DrafterConfig.limits,
        ("suffix_decoding_max_tree_depth", 2, 64),
        ("suffix_decoding_max_cached_requests", 0, 2**31),
        ("suffix_decoding_max_bytes", 2**20, 2**36),
        ("suffix_decoding_max_spec_factor", 0.0, 1000.0),
        ("suffix_decoding_min_token_prob", 0.0, 1.0),
    )


class SuffixTree:
    """Counts of all strings up to a depth in the newest text it was shown; cpu/suffixes.py has the layout.

    Invariant: it never holds more than `max_bytes` (`num_bytes` says how many it does). Until then it grows;
    after that the oldest tokens are forgotten, one for each that comes. A token costs at most `depth` steps.
    """

    def __init__(self, depth: int, max_bytes: int) -> None:
        self.max_size = 1 << (max_bytes // SLOT_BYTES).bit_length() - 1
        assert self.max_size >= (depth + 2) ** 2, "a tree holds at least the last `depth` tokens"
        root, empty = np.zeros((1, 8), np.int32), np.full(1, suffixes.SEPARATOR, np.int32)
        root[0, suffixes.WHERE] = -1
        state, active = np.zeros(5, np.int64), np.zeros(depth, np.int32)
        self.arrays = Arrays(root, np.zeros(2, np.int32), empty, state, active)
        self._resize(min(FIRST_SIZE, self.max_size))

    @property
    def num_bytes(self) -> int:
        return self.size * SLOT_BYTES

    @property
    def num_pushed(self) -> int:
        """Tokens and ends of texts so far, forgotten ones too."""
        return int(self.arrays.state[suffixes.END])

    @property
    def num_held(self) -> int:
        return self.num_pushed - int(self.arrays.state[suffixes.BEGIN])

    def extend(self, tokens: Iterable[int]) -> None:
        """The text goes on."""
        left = array("i", tokens)
        while True:
            num_taken = suffixes.extend(self.at, left.buffer_info()[0], len(left))
            if num_taken == len(left):
                return
            left = left[num_taken:]
            self.grow()

    def close(self, begin: int = 0) -> None:
        """The text is complete, and what comes next is another. All that began before `begin`, as
        `num_pushed` counts, is forgotten."""
        suffixes.close(self.at, begin)

    def grow(self) -> None:
        self._resize(2 * self.size)

    def _resize(self, size: int) -> None:
        old = self.arrays
        nodes, table = np.zeros((size, 8), np.int32), np.zeros(2 * size, np.int32)
        self.arrays = Arrays(nodes, table, np.empty(size, np.int32), old.state, old.active)
        suffixes.move(*self.arrays[:4], old.nodes, old.text)
        self._header = header_of(self.arrays, size, len(old.active), size < self.max_size)
        self.at = self._header.buffer_info()[0]  # what kernels are given
        self.size = size


class Suffix(Drafter):
    name = "suffix"
    needs = Needs(verdicts=False)
    is_free = True
    Config = SuffixConfig

    def __init__(self, config: SuffixConfig, context: DrafterContext | None = None) -> None:
        super().__init__(config)
        self.past = self._new_tree()
        self._live: dict[str, SuffixTree] = {}  # by request, of which it has read `num_pushed` tokens
        self._ends: deque[int] = deque()  # where each past answer ends
        depth, nodes = config.suffix_decoding_max_tree_depth, config.num_speculative_tokens + 1
        self._scratch = whole, floats, _ = votes.scratch(depth, nodes)
        chance, factor = config.suffix_decoding_min_token_prob, config.suffix_decoding_max_spec_factor
        floats[votes.SETTINGS, :4] = (*DOUBTS, chance, factor)
        sizes = whole.shape[1], depth, nodes
        self._header = header_of(self._scratch, *sizes, votes.WIDTH if config.tree else 1)
        self._at = self._header.buffer_info()[0]
        self._chain_header = header_of(self._scratch, *sizes, 1)
        parts = whole[votes.DRAFTED], whole[votes.PARENTS], floats[votes.REACH]
        self._answer = tuple(memoryview(each) for each in parts)
        tree = self._new_tree()  # compile now: the first request would wait for it
        tree.extend(())
        tree.close()
        self._grow(tree, (), 1)

    @property
    def num_bytes(self) -> int:
        """Held by all trees."""
        return self.past.num_bytes + sum(tree.num_bytes for tree in self._live.values())

    def draft(self, request: Request, budget: int) -> Draft:
        tree = self._live.get(request.id) or self._live.setdefault(request.id, self._new_tree())
        limit = min(budget, self.config.num_speculative_tokens)
        size = self._grow(tree, request.tokens[tree.num_pushed :], limit)
        tokens, parents, chances = (part[:size].tolist() for part in self._answer)
        return tree_draft(request, tokens, parents, chances, self.name)

    def matcher(self, request: Request) -> Matcher:
        tree = self._live.get(request.id) or self._live.setdefault(request.id, self._new_tree())
        tree.extend(request.tokens[tree.num_pushed :])
        whole, floats, _ = self._scratch
        written = address(whole[votes.DRAFTED]), address(floats[votes.REACH])
        places = (tree.at, self.past.at, self._chain_header.buffer_info()[0], *written)
        return Matcher(entry_of(votes.draft, 6), *places, self.config.num_speculative_tokens)

    def _grow(self, tree: SuffixTree, tokens: Sequence[int], budget: int) -> int:
        """Read the tokens that are new and draft: how many nodes, the root counted."""
        left = array("i", tokens)
        while True:
            size: int = votes.draft(tree.at, self.past.at, left.buffer_info()[0], len(left), budget, self._at)
            if size > 0:
                return size
            left = left[-1 - size :]
            tree.grow()

    def _new_tree(self) -> SuffixTree:
        return SuffixTree(self.config.suffix_decoding_max_tree_depth, self.config.suffix_decoding_max_bytes)

    def forget(self) -> None:
        """Drop all past answers: a prompt that is measured twice must not find its own."""
        self.past = self._new_tree()
        self._ends.clear()

    def release(self, request: Request) -> None:
        """Forget the request's tree; its answer joins the past, and the oldest one leaves it if there are too
        many. Not if it was never drafted for: where drafts do not pay, neither does learning."""
        most, was_drafted = self.config.suffix_decoding_max_cached_requests, request.id in self._live
        self._live.pop(request.id, None)
        if not was_drafted or not request.num_output or not most:
            return
        self.past.extend(request.output)
        self.past.close(self._ends.popleft() if len(self._ends) >= most else 0)
        self._ends.append(self.past.num_pushed)
        while self._ends[0] <= self.past.num_pushed - self.past.num_held:  # forgotten for want of room
            self._ends.popleft()


def header_of(arrays: Iterable[np.ndarray], *sizes: int) -> array[int]:
    """What a kernel is given the address of (`buffer_info()[0]`): where the arrays lie, and their sizes."""
    return array("q", [*(address(each) for each in arrays), *sizes])


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
