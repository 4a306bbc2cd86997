"""Suffix decoding: if the last tokens occurred before, in this request or in answers given before, draft what
followed them then.

Two suffix trees: one over the request's own text, one over the newest answers of past requests. All matches
of the last tokens, of every length and in both trees, vote for the next token (cpu/votes.py); the chance of a
vote is count / (total + doubt / length). So a draft is as long as its match is convincing, and `chances` adds
up to the tokens expected to be accepted. Invariant: a step costs O(tree depth x nodes drafted) however long
the text is, and no tree holds more than `suffix_decoding_max_bytes`. What other requests said may change the
guesses, never the text.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.options import require
from paceline.core.tree import Tree
from paceline.core.types import Course, Draft, Flown, Needs, Proposer, Request, Round, Seen, Segment
from paceline.cpu import votes
from paceline.drafters.base import DrafterConfig, Surroundings, empty, planted
from paceline.drafters.head_backends import matching_backend
from paceline.drafters.suffix_tree import SuffixTree, address, header_of
from paceline.heads.rows import Matcher, Orders
from paceline.runtime.batch import build

# How much a single occurrence is doubted, in the request's own text and in that of others: a match of d
# tokens that occurred n times and was always followed by the same token is followed by it again with the
# chance n / (n + doubt / d). Measured: scripts/fit_suffix.py.
DOUBTS = (2.0, 12.0)
MOST_IN_ROUNDS = 8  # tokens of a draft where rounds are made in one go: on a CPU longer ones do not pay


@dataclass(frozen=True, slots=True)
class SuffixConfig(DrafterConfig):
    num_speculative_tokens: int = 8
    tree: bool = (
        True  # draft several continuations where votes differ and that is likelier than a longer chain
    )
    suffix_decoding_max_tree_depth: int = 24  # tokens of a match and what followed it
    suffix_decoding_max_spec_factor: float = 4.0  # draft at most so many times the tokens matched
    suffix_decoding_min_token_prob: float = 0.1  # draft nothing with a smaller chance of being accepted
    suffix_decoding_max_cached_requests: int = 10_000  # past answers remembered; 0: none
    suffix_decoding_max_bytes: int = (
        32 * 2**20
    )  # of the tree of past answers, and of each running request's tree

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        require(isinstance(self.tree, bool), "tree", self.tree, "use true or false")
        self._check_whole("max_tree_depth", 2, 64)
        self._check_whole("max_cached_requests", 0, 2**31)
        self._check_whole("max_bytes", 2**20, 2**36)
        self._check_number("max_spec_factor", 0.0, 1000.0)
        self._check_number("min_token_prob", 0.0, 1.0)

    def _check_whole(self, option: str, low: int, high: int) -> None:
        name = f"suffix_decoding_{option}"
        value = getattr(self, name)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        require(
            is_whole and low <= value <= high, name, value, f"use a whole number from {low:,} to {high:,}"
        )

    def _check_number(self, option: str, low: float, high: float) -> None:
        name = f"suffix_decoding_{option}"
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        require(is_number and low <= value <= high, name, value, f"use a number from {low:g} to {high:g}")


class Suffix:
    name = "suffix"
    needs = Needs(verdicts=False)
    is_free = True
    Config = SuffixConfig

    def __init__(self, config: SuffixConfig, surroundings: Surroundings | None = None) -> None:
        self.config = config
        self.past = self._new_tree()
        self._live: dict[
            str, SuffixTree
        ] = {}  # request -> its tree, which has read `num_pushed` of its tokens
        self._ends: deque[int] = deque()  # where each past answer ends
        depth, nodes = config.suffix_decoding_max_tree_depth, config.num_speculative_tokens + 1
        self._scratch = votes.scratch(depth, nodes, votes.WIDTH)
        self._scratch.settings[:] = (
            *DOUBTS,
            config.suffix_decoding_min_token_prob,
            config.suffix_decoding_max_spec_factor,
        )
        self._header = header_of(self._scratch, depth, nodes, votes.WIDTH if config.tree else 1)
        self._at = self._header.buffer_info()[0]
        self._chain_header = header_of(self._scratch, depth, nodes, 1)
        parts = (self._scratch.drafted, self._scratch.parents, self._scratch.reach)
        self._answer = tuple(memoryview(each) for each in parts)  # type: ignore[arg-type]
        self._compile()
        self._rounds, self._surroundings = (
            matching_backend(surroundings, min(config.num_speculative_tokens, MOST_IN_ROUNDS)),
            surroundings,
        )

    def _compile(self) -> None:
        """Now, so that nobody's first answer waits for it."""
        tree = self._new_tree()
        tree.extend(())
        tree.close()
        self._grow(tree, (), 1)

    @property
    def num_bytes(self) -> int:
        """Held by all trees."""
        return self.past.num_bytes + sum(tree.num_bytes for tree in self._live.values())

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return [
            self._draft(r, b) if b else empty(r, self.name) for r, b in zip(requests, budgets, strict=True)
        ]

    def _draft(self, request: Request, budget: int) -> Draft:
        tree = self._live.get(request.id) or self._live.setdefault(request.id, self._new_tree())
        size = self._grow(
            tree, request.tokens[tree.num_pushed :], min(budget, self.config.num_speculative_tokens)
        )
        tokens, parents, chances = self._answer
        return planted(
            request, tokens[:size].tolist(), parents[:size].tolist(), chances[:size].tolist(), self.name
        )

    @property
    def most_rounds(self) -> int:
        return 0 if self._rounds is None else self._rounds.most_rounds

    is_weighing = True

    def round_length(self, requests: Sequence[Request], most: int) -> int:
        rounds, (request, *more) = self._rounds, requests
        if rounds is None or more or request.pick is None or not rounds.can_fly(request.pick.temperature):
            return 0
        return min(most, self.config.num_speculative_tokens, MOST_IN_ROUNDS)

    def asks_beside(self, other: Proposer) -> bool:
        return False

    def fly(
        self,
        requests: Sequence[Request],
        count: int,
        length: int,
        course: Course | None,
        other: Proposer | None,
    ) -> Flown:
        (request,) = requests
        assert self._rounds is not None and self._surroundings is not None and course is not None, (
            "a round has a length"
        )  # noqa: PT018
        tree = self._live.get(request.id) or self._live.setdefault(request.id, self._new_tree())
        tree.extend(request.tokens[tree.num_pushed :])
        segment = Segment(
            [request.tokens[-1], *[0] * length], request.cache, num_logits=length + 1, pick=request.pick
        )
        wanted = request.params.max_tokens - request.num_output
        mine = course._replace(
            others=course.own, other_factor=course.own_factor
        )  # the kernel takes it for the one beside a head
        orders = Orders(mine, self.matcher(request), 0.0, tuple(request.stop_ids), wanted)
        return self._rounds.launch((), (), build([segment], self._surroundings.runner.kv), count, orders)

    def land(self, requests: Sequence[Request], said: Round, number: int) -> list[Draft]:
        (request,), (tokens,), (paths,) = requests, said.tokens, said.chances
        return [Draft(Tree.chain(request.tokens[-1], tokens), self.name, None, (1.0, *paths))]

    def matcher(self, request: Request) -> Matcher | None:
        """Where all lies that drafts chains for a request whose text was read: a kernel may do so, and read
        on, by itself.
        """
        tree = self._live.get(request.id)
        if tree is None or tree.num_pushed != len(request.tokens):
            return None
        scratch, drafted, reach = (
            self._chain_header.buffer_info()[0],
            self._scratch.drafted,
            self._scratch.reach,
        )
        return Matcher(
            tree.at,
            self.past.at,
            scratch,
            address(drafted),
            address(reach),
            self.config.num_speculative_tokens,
        )

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

    def observe(self, seen: Sequence[Seen]) -> None:
        """Nothing to learn: the trees follow the tokens."""

    def forget(self) -> None:
        """All past answers: who measures the same prompt twice must not be given its answer."""
        self.past = self._new_tree()
        self._ends.clear()

    def release(self, request: Request) -> None:
        """Forget the request's tree; its answer joins the past, and the oldest one leaves it if there are too
        many. Not if nobody asked about it: where drafts do not pay, neither does learning."""
        was_asked = self._live.pop(request.id, None) is not None
        if not was_asked or not request.num_output or not self.config.suffix_decoding_max_cached_requests:
            return
        self.past.extend(request.output)
        begin = (
            self._ends.popleft() if len(self._ends) >= self.config.suffix_decoding_max_cached_requests else 0
        )
        self.past.close(begin)
        self._ends.append(self.past.num_pushed)
        while self._ends[0] <= self.past.num_pushed - self.past.num_held:  # forgotten for want of room
            self._ends.popleft()
