"""Decides who computes what in the next pass. No tensors here.

There is no prefill and no decode: a request has tokens known (`num_tokens`, and with its draft
`num_tokens_with_spec`) and tokens computed (`num_cached`), and the second catches up with the first under a
token budget. Drafts come last, for those whom the policy chose, from what the budget and the free blocks
leave (`num_lookahead_tokens`), and never cost another request its turn. Invariant: every scheduled request
has slots for all its rows, its alone to write.
"""

from __future__ import annotations

import sys
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.options import EngineConfig
from paceline.core.types import FinishReason, Request, ScheduledRequest, Status
from paceline.runtime.kv_cache import KvCache


@dataclass(slots=True)
class Scheduler:
    config: EngineConfig
    kv: KvCache
    waiting: list[Request] = field(default_factory=list)  # by (priority, arrival)
    running: list[Request] = field(default_factory=list)  # likewise
    num_preemptions: int = 0
    num_prefix_queries: int = 0  # tokens of the requests that were started or started again
    num_prefix_hits: int = 0  # of them, found in the cache or shared with a sibling
    most_beside_streams: int = sys.maxsize  # tokens of prompts in a pass that streams wait for
    num_under_way: int = 1  # passes under way at a time, each with its share of the requests
    _plan: dict[str, ScheduledRequest] = field(default_factory=dict)
    _budget: int = 0
    _chunk: int = 0  # of the budget, what is left for prompts
    _most: int = 0  # requests of this pass
    _busy: frozenset[str] = frozenset()  # requests whose pass is under way

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=_order)

    @property
    def requests(self) -> list[Request]:
        return [*self.running, *self.waiting]

    def schedule(self, busy: frozenset[str] = frozenset()) -> list[ScheduledRequest]:
        """busy: requests whose pass is under way. They are neither in this one nor preempted for it."""
        self._plan, self._budget, self._busy = {}, self.config.max_num_batched_tokens, busy
        wanting = min(len(self.running) + len(self.waiting), self.config.max_num_seqs)
        self._most = -(-wanting // self.num_under_way)
        has_streams = any(r.is_streamed and r.num_output for r in self.running)
        self._chunk = min(self._budget, self.most_beside_streams if has_streams else sys.maxsize)
        num_preemptions = self.num_preemptions
        # Requests with one token to compute go first, so that a long prompt delays no stream.
        idle = [request for request in self.running if request.id not in busy]
        for request in sorted(idle, key=lambda r: len(r.tokens) - r.cache.num_cached > 1)[: self._most]:
            if request.status is Status.RUNNING and (num_new := self._num_new(request)):
                self._continue(request, num_new)
        if self.num_preemptions == num_preemptions:
            self._admit()
        scheduled = list(self._plan.values())
        if asked := self.config.num_speculative_tokens:
            for one in scheduled:
                if one.num_new == 1 and one.is_caught_up:
                    most, left = one.request.params.num_speculative_tokens, self.num_left(one.request)
                    # the target adds a token of its own to whatever is accepted
                    limit = min(asked, asked if most is None else most, left - 1, self._budget)
                    one.draft_limit = max(limit, 0)
        return scheduled

    def reserve_drafts(self, scheduled: Sequence[ScheduledRequest], nodes: Mapping[int, int]) -> None:
        """Slots for the nodes that are wanted of each, as far as the budget and the free blocks go. nodes: by
        index."""
        for index, wanted in nodes.items():
            one = scheduled[index]
            one.num_lookahead_tokens = max(min(wanted, one.draft_limit, self._budget), 0)
            drafted = one.num_lookahead_tokens
            if not self.kv.reserve(one.request.cache, one.num_tokens_with_spec, drafted):
                one.num_lookahead_tokens = 0
            self._budget -= one.num_lookahead_tokens

    def reserve_burst(self, scheduled: Sequence[ScheduledRequest], rooms: Sequence[int]) -> bool:
        """Slots for that many tokens of each, its root among them. False if blocks run out: what was reserved
        until then goes back with the next commit, as reserved drafts do."""
        caches = [(one.request.cache, room) for one, room in zip(scheduled, rooms, strict=True)]
        return all(self.kv.reserve(cache, cache.num_cached + room) for cache, room in caches)

    def follow(self, scheduled: Sequence[ScheduledRequest]) -> list[tuple[int, ScheduledRequest]]:
        """Of plain requests whose pass is still under way: those whose next token is wanted whatever this one
        is, each with a slot for it. Empty if a request waits for a seat, or blocks run out; and where layers
        are recurrent, since the slot of the state that comes next is known when this pass has landed."""
        going = [(i, one.request) for i, one in enumerate(scheduled) if not one.request.is_finished]
        has_seats = bool(self.waiting) and len(self.running) < self.config.max_num_seqs
        if has_seats or len(going) < len(self.running) or self.kv.states is not None:
            return []
        lasting = [(i, request) for i, request in going if self.num_left(request) > 1]
        if not all(self.kv.reserve(request.cache, request.cache.num_cached + 2) for _, request in lasting):
            return []
        return [(i, ScheduledRequest(request, 1)) for i, request in lasting]

    def _num_new(self, request: Request) -> int:
        """Tokens of it that can be computed now: its newest, or a chunk of what it has."""
        left = len(request.tokens) - request.cache.num_cached
        return min(left, self._budget if left == 1 else min(self._budget, self._chunk))

    def _take(self, request: Request, num_new: int) -> None:
        self._plan[request.id] = ScheduledRequest(request, num_new)
        self._budget -= num_new
        self._chunk -= num_new if num_new > 1 else 0

    def _continue(self, request: Request, num_new: int) -> None:
        cache = request.cache
        while not self.kv.reserve(cache, cache.num_cached + num_new):
            victim = next(other for other in reversed(self.running) if other.id not in self._busy)
            if victim is request and self._busy:
                return  # it waits for blocks that those under way will give back
            self.preempt(victim)
            if victim is request:
                return
        self._take(request, num_new)

    def _admit(self) -> None:
        """Find shared blocks and reserve the first chunk, of as many as there is room for."""
        for request in list(self.waiting):
            has_room = len(self._plan) < self._most and self._budget and self._chunk
            if len(self.running) >= self.config.max_num_seqs or not has_room:
                return
            leader, cache = request.leader, request.cache
            if leader is not None and leader.status is not Status.RUNNING:
                leader = None
            if leader is not None and leader.cache.num_cached < request.num_prompt:
                continue  # its prompt will be shared
            if leader is not None and request.num_output == 0 and self.kv.states is None:
                self.kv.fork(leader.cache, cache, request.num_prompt - 1)
            elif self.config.enable_prefix_caching and not request.num_unscored:
                self.kv.adopt_prefix(cache, request.tokens)
            num_shared, num_new = cache.num_cached, self._num_new(request)
            if not self.kv.reserve(cache, num_shared + num_new):
                self.kv.free(cache)  # there is no room yet, and nothing may be held
                return
            self.num_prefix_hits += num_shared
            self.num_prefix_queries += request.num_tokens
            if not request.num_preemptions:
                request.num_prefix_hits = num_shared
            self._take(request, num_new)
            self.waiting.remove(request)
            insort(self.running, request, key=_order)
            request.status = Status.RUNNING

    def num_left(self, request: Request) -> int:
        """Tokens that it may still emit."""
        left = request.max_tokens - request.num_output
        return min(left, self.config.max_model_len - request.num_tokens)

    def preempt(self, request: Request) -> None:
        """Take all its blocks; its tokens stay and are computed again when it comes back."""
        one = self._plan.pop(request.id, None)
        if one is not None:
            self._budget += one.num_new
        self.kv.free(request.cache)
        self.running.remove(request)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.add(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Remove a request at any moment and give its blocks back."""
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        self.kv.free(request.cache)
        request.status = Status.FINISHED
        request.finish_reason = reason


def _order(request: Request) -> tuple[int, int]:
    return (request.priority, request.arrival)
