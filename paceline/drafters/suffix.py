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
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.types import Draft, Needs, Request
from paceline.cpu import votes
from paceline.cpu.compile import entry_of
from paceline.cpu.recycle import address
from paceline.cpu.suffix_tree import SuffixTree, header_of
from paceline.drafters.base import Drafter, DrafterConfig, DrafterContext, tree_draft, within
from paceline.heads.rows import Matcher

# How much a single occurrence is doubted, in the request's own text and in that of others: a match of d
# tokens that occurred n times and was always followed by the same token is followed by it again with the
# chance n / (n + doubt / d). Fitted to answers of the default model.
DOUBTS = (2.0, 12.0)


@dataclass(frozen=True, slots=True)
class SuffixConfig(DrafterConfig):
    num_speculative_tokens: int = within(1, 128, 8)
    # draft several continuations where votes differ and that is likelier than a longer chain
    tree: bool = True
    suffix_decoding_max_tree_depth: int = within(2, 64, 24)  # tokens of a match and what followed it
    # drafted tokens for each that matched, at most
    suffix_decoding_max_spec_factor: float = within(0.0, 1000.0, 4.0)
    # draft nothing with a smaller chance of being accepted
    suffix_decoding_min_token_prob: float = within(0.0, 1.0, 0.1)
    # past answers remembered; 0: none
    suffix_decoding_max_cached_requests: int = within(0, 2**31, 10_000)
    # of the tree of past answers, and of each running request's tree
    suffix_decoding_max_bytes: int = within(2**20, 2**36, 32 * 2**20)


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
        # answers that are read when something is drafted next: the end of a request does not wait for it
        self._unread = deque[Sequence[int]](maxlen=config.suffix_decoding_max_cached_requests)
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
        tree = self._tree(request)
        limit = min(budget, self.config.num_speculative_tokens)
        size = self._grow(tree, request.tokens[tree.num_pushed :], limit)
        tokens, parents, chances = (part[:size].tolist() for part in self._answer)
        return tree_draft(request, tokens, parents, chances, self.name)

    def matcher(self, request: Request) -> Matcher:
        tree = self._tree(request)
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

    def _tree(self, request: Request) -> SuffixTree:
        """The request's own; answers that ended meanwhile join the past, and the oldest leave it if there are
        too many."""
        while self._unread:
            self.past.extend(self._unread.popleft())
            is_full = len(self._ends) >= self.config.suffix_decoding_max_cached_requests
            self.past.close(self._ends.popleft() if is_full else 0)
            self._ends.append(self.past.num_pushed)
            while self._ends[0] <= self.past.num_pushed - self.past.num_held:  # forgotten for want of room
                self._ends.popleft()
        return self._live.get(request.id) or self._live.setdefault(request.id, self._new_tree())

    def _new_tree(self) -> SuffixTree:
        return SuffixTree(self.config.suffix_decoding_max_tree_depth, self.config.suffix_decoding_max_bytes)

    def forget(self) -> None:
        """Drop all past answers: a prompt that is measured twice must not find its own."""
        self.past = self._new_tree()
        self._ends.clear()
        self._unread.clear()

    def release(self, request: Request) -> None:
        """Forget the request's tree and remember its answer, if it was drafted for: where drafts do not pay,
        neither does learning."""
        if self._live.pop(request.id, None) is not None and request.num_output:
            self._unread.append(request.output)
