"""The step: schedule, propose, forward, accept, commit. Plain decoding is a step whose drafts are empty.

Which drafters are asked for how much is the policy's to say, and it is shown what came of it. A step either
launches a pass, or a burst of several that a device runs by itself; each of them lands through `_land`, and
commit.py alone changes a request. The engine knows token ids and nothing of text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from paceline.core.batch import segment_of
from paceline.core.errors import RequestError
from paceline.core.options import EngineConfig
from paceline.core.sampling import pick_of
from paceline.core.types import Answers, FinishReason, Needs, PassSizes, Request, Segment
from paceline.core.watch import Watch
from paceline.drafters.base import Drafter
from paceline.engine.commit import Commits, Emission
from paceline.engine.pending import BurstParts, Pass, PendingBurst, PendingPasses, rooted
from paceline.engine.policy.base import Asks, FixedPolicy, Plan, Policy
from paceline.engine.scheduler import Scheduler
from paceline.engine.stats import Median, SpecStats, Suspicion
from paceline.heads.rows import BurstBackend, BurstInput
from paceline.runtime.executor import LocalExecutor
from paceline.runtime.record import Drafting, Scheduled, StepRecord, longest

BURST_SECONDS = 0.12  # of a burst that is over before anything is heard of it; what arrives meanwhile waits
STREAM_SECONDS = 0.04  # of such a burst where the text is streamed: it flows, and does not come in lumps
CHUNK_SECONDS = 0.12  # of the prompts in a pass that streamed texts wait for,
LEAST_CHUNK = 32  # which have at least this many tokens
MOST_LENGTH = 32  # tokens of a draft without a head in such a burst,
MATCH_LENGTH = 8  # where a policy chooses: longer ones do not pay there
STOP_ROUNDS = 2  # rounds of such a burst for a request with stop strings, which only the host looks for
LOOK_EVERY = 4  # rounds of a burst between two looks at whether other drafts would be worth more,
MOST_LOOKED = 1  # for so few requests: of more, the host has no time for it, and some always have a match


class Engine:
    def __init__(
        self,
        executor: LocalExecutor,
        drafter: Drafter | None,
        config: EngineConfig,
        policy: Policy | None = None,
    ) -> None:
        """Without a policy the drafter proposes `config.num_speculative_tokens` whenever it can."""
        self.executor, self.drafter, self.config = executor, drafter, config
        self.policy = policy or FixedPolicy(drafter, config.num_speculative_tokens)
        self.scheduler = Scheduler(config, executor.kv, num_under_way=executor.num_under_way)
        self._totals = SpecStats()
        self.stats: dict[str, SpecStats] = {}  # by request
        self.watch: Watch | None = None  # is shown every draft being judged
        self._commits = Commits(executor.kv, config.max_model_len, self._totals, self.stats, self._finish)
        self._suspicion = Suspicion()
        drafters = self.policy.drafters
        self._learners = [drafter for drafter in drafters if drafter.needs.verdicts]
        self._hidden_layers = tuple(sorted({layer for d in drafters for layer in d.needs.hidden_layers}))
        self._top_tokens = max((drafter.needs.top_tokens for drafter in drafters), default=0)
        self._headless_length = MATCH_LENGTH if policy else min(config.num_speculative_tokens, MOST_LENGTH)
        decoder, layers = executor.decoder, executor.memory.layers
        self._headless = executor.backend.burst(decoder, layers, None, self._headless_length)
        self._round_seconds = Median(BURST_SECONDS / 8)
        self._row_seconds = Median(CHUNK_SECONDS / 128)  # of prompts
        self._num_arrivals = 0
        self._has_better = False  # than the last burst's head: a drafter that the host asked
        # In the order in which they land, with what the policy knows of each: at most one a stage.
        self._under_way: deque[tuple[PendingPasses | PendingBurst, Any]] = deque()
        self._committed: float | None = None  # when the last step was, if nothing was waited for since
        executor.record(PassSizes(config.max_num_seqs, config.num_speculative_tokens), self._hidden_layers)
        self.num_recorded = executor.backend.num_recordings  # by now: requests wait for any that follow

    @property
    def totals(self) -> SpecStats:
        return self._totals.settle()

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def check_fits(self, request: Request) -> None:
        """Refuse what could never run, before anything is queued."""
        limit = self.config.max_model_len
        if request.num_tokens >= limit:
            what = f"the prompt has {request.num_tokens:,} tokens and the context holds {limit:,}"
            raise RequestError(f"{what}; shorten it to at most {limit - 1:,}")
        method, names = request.params.speculative_method, [drafter.name for drafter in self.policy.drafters]
        if method is not None and method not in names:
            known = ", ".join(names) or "none"
            raise RequestError(f"speculative_method is {method!r:.40}; loaded are: {known}")

    def add(self, request: Request) -> None:
        self.check_fits(request)
        self._num_arrivals += 1
        request.arrival = self._num_arrivals
        pick = pick_of(request, rooted(request.tokens[-1]))
        request.pick = pick if pick is not None and self.executor.can_pick(pick) else None
        self.stats[request.id] = SpecStats()
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """Stop a request at any moment; its blocks are free when this returns."""
        if not request.is_finished:
            self._finish(request, FinishReason.ABORT)

    def set_aside(self) -> list[Request]:
        """After an exception in `step`: forget the pass under way and take every request out, its blocks free
        and the drafters' memory of it gone. Returns those that ran, then those that waited; the scheduler
        takes one back with `add`, and its tokens are computed again."""
        requests = self.scheduler.requests
        self._under_way.clear()
        self._committed = None
        for request in list(self.scheduler.running):
            self.scheduler.preempt(request)
            self._release(request)
        self.scheduler.waiting.clear()
        self.check()
        return requests

    def step(self) -> list[Emission]:
        """What was said in one step. Where passes run by themselves the next is on its way already: the
        caller's work hides behind it."""
        self._fill()
        if not self._under_way:
            self._committed = None
            return []
        pending, self.policy.step = self._under_way.popleft()
        if self.executor.backend.is_async and self.watch is None:
            pending.extend()
        record = pending.next(self.watch)
        if self._under_way:  # it has waited for others, too
            record.pass_seconds = None
        emissions = self._land(record)
        if pending.is_under_way:
            self._under_way.appendleft((pending, self.policy.step))
        elif self.executor.backend.is_async:
            self._fill()
        return emissions

    def _fill(self) -> None:
        """Launch until as many passes are under way as may be: one where no stages overlap."""
        while len(self._under_way) < self.executor.num_under_way:
            pending = self._launch()
            if pending is None:
                return
            self._under_way.append((pending, self.policy.step))

    def _launch(self) -> PendingPasses | PendingBurst | None:
        """Schedule, then start a burst where one can do what is planned; else propose and start a pass."""
        self.scheduler.most_beside_streams = max(int(CHUNK_SECONDS / self._row_seconds.value), LEAST_CHUNK)
        busy = frozenset(request.id for pending, _ in self._under_way for request in pending.requests)
        scheduled = self.scheduler.schedule(busy)
        if not scheduled:
            assert busy or not self.has_work, "requests are waiting and none can run"
            return None
        plan = self.policy.plan(scheduled)
        answers, drafting = Answers(), Drafting()
        burst = self._launch_burst(scheduled, plan) or self._propose(scheduled, plan, answers, drafting)
        if burst is not None:
            return burst
        chosen = self.policy.choose(scheduled, answers) if answers else {}
        drafts = [  # what is checked: often nothing but the root
            (chosen.get(i) or rooted(one.request.tokens[-1])) if one.is_caught_up else None
            for i, one in enumerate(scheduled)
        ]
        segments = [segment_of(one, draft) for one, draft in zip(scheduled, drafts, strict=True)]
        if self.watch is not None:  # what is watched is chosen by the host
            segments = [segment._replace(pick=None) for segment in segments]
        sent, layers, top_tokens = perf_counter(), self._hidden_layers, self._top_tokens
        if plan.plain_steps:  # nothing will be learned from it but by a head that is about to draft
            layers, top_tokens = layers if plan.keeps_hidden else (), 0
        output = self.executor.forward(segments, hidden_layers=layers, top_tokens=top_tokens)
        sent_passes = deque([Pass(scheduled, drafts, output, sent)])
        sizes = plan.plain_steps, layers if plan.plain_steps else ()
        return PendingPasses(self.executor, self.scheduler, sent_passes, *sizes, answers, drafting)

    def _propose(
        self, scheduled: Scheduled, plan: Plan, answers: Answers, drafting: Drafting
    ) -> PendingBurst | None:
        """Add what each drafter that is asked says, and what it took: by drafter, nodes and seconds. A burst
        instead, where a head still pays for all requests after the others have answered and can have one."""
        self.scheduler.reserve_drafts(scheduled, plan.nodes)
        for number, asks in enumerate(plan.asks):
            asks = [(i, min(count, scheduled[i].num_lookahead_tokens)) for i, count in asks]
            asks = [(i, count) for i, count in asks if count]
            backend = self.policy.drafters[number].burst_backend
            is_burst = backend is not None and not backend.is_weighing and self._can_burst(backend, scheduled)
            if asks and answers:
                asks = self.policy.replan(number, asks, scheduled, answers, is_burst)
            if is_burst and len(asks) == len(scheduled):
                burst = self._launch_head_burst(scheduled, number, asks)
                if burst is not None:
                    return burst
            if asks:
                taken = self._ask(number, asks, scheduled, answers, plan.least)
                if taken is not None:
                    drafting[number] = (longest(answers, number), taken)
        return None

    def _ask(
        self, number: int, asks: Asks, scheduled: Scheduled, answers: Answers, least: float
    ) -> float | None:
        """Add a drafter's drafts to the answers; seconds, None if they say nothing about the next time."""
        drafter, started = self.policy.drafters[number], perf_counter()
        drafter.least = max(least, drafter.floor)
        drafts = drafter.propose([scheduled[i].request for i, _ in asks], [count for _, count in asks])
        taken = perf_counter() - started
        for (index, count), draft in zip(asks, drafts, strict=True):
            assert draft.num_drafted <= count, f"{drafter.name} drafted too much"
            if draft.num_drafted:
                answers.setdefault(index, []).append((number, draft))
        backend = drafter.burst_backend  # which drafts at another speed, if the device does it by itself
        return taken if backend is None or backend.is_weighing else None

    def _launch_burst(self, scheduled: Scheduled, plan: Plan) -> PendingBurst | None:
        """Where the device can draft, weigh and check all that is planned for several rounds: plain decoding,
        a matcher, or a head and a matcher, of one request. A head alone where the device does not weigh: the
        host asks the others while it runs, and here only if one of them has ended the last burst."""
        drafters, asked = self.policy.drafters, [n for n, asks in enumerate(plan.asks) if asks]
        if plan.plain_steps:
            return self._start_burst(scheduled, BurstParts(self._headless, None, None, 0), plan)
        if not asked:
            return None
        head = asked[-1] if drafters[asked[-1]].burst_backend is not None else None
        backend, others = self._headless, [n for n in asked if n != head]
        if head is not None:
            backend, asks = drafters[head].burst_backend, plan.asks[head]
            if backend is not None and not backend.is_weighing:
                is_wanted = not self._has_better and len(asks) == len(scheduled)
                return self._launch_head_burst(scheduled, head, asks) if is_wanted else None
        if backend is None or not backend.is_weighing or len(scheduled) > 1 or len(others) > 1:
            return None
        request, most = scheduled[0].request, min(count for n in asked for _, count in plan.asks[n])
        length = min(most, self._headless_length)
        if head is not None:
            length = drafters[head].burst_length([request], most)
        if not length:
            return None
        silent = Needs(verdicts=False)
        if any(drafters[n].needs != silent or drafters[n].matcher(request) is None for n in others):
            return None
        parts = BurstParts(backend, head, others[0] if others else None, length)
        return self._start_burst(scheduled, parts, plan)

    def _launch_head_burst(self, scheduled: Scheduled, number: int, asks: Asks) -> PendingBurst | None:
        """Where a device checks all that a head drafts, for all requests; near a text's end more than it can
        still use, since another length would need another recording."""
        self._has_better = False
        drafter, requests = self.policy.drafters[number], [one.request for one in scheduled]
        limits = [r.params.num_speculative_tokens for r in requests]
        rows = self.config.max_num_batched_tokens // len(requests)
        most = min([rows - 1, *(n for n in limits if n is not None)])
        length, trees = drafter.burst_length(requests, most), drafter.burst_trees(requests, most)
        tree = self.policy.tree(length, trees)
        length = length if tree is None else tree.depth
        if any(count < min(length, scheduled[i].draft_limit) for i, count in asks):
            return None
        parts = BurstParts(drafter.burst_backend, number, None, length, tree)
        return self._start_burst(scheduled, parts, Plan()) if length else None

    def _start_burst(self, scheduled: Scheduled, parts: BurstParts, plan: Plan) -> PendingBurst | None:
        """None if it cannot be: a request needs the host, or slots run out."""
        backend, requests = parts.backend, [one.request for one in scheduled]
        length, nodes = parts.length, parts.nodes
        if backend is None or not self._can_burst(backend, scheduled):
            return None
        # Each round emits a token at least; a request that has ended stays in it until the others have.
        lefts = [self.scheduler.num_left(request) for request in requests]
        count = min(max(lefts), plan.plain_steps or backend.most_rounds, backend.most_rounds)
        if backend.is_weighing:  # such a burst is over before anything is heard of it
            count = min(count, (self.config.max_model_len - requests[0].cache.num_cached) // (length + 1))
            most_seconds = STREAM_SECONDS if requests[0].is_streamed else BURST_SECONDS
            count = min(count, max(int(most_seconds / self._round_seconds.value), 1))
            count = min(count, STOP_ROUNDS) if requests[0].params.stop else count
        rooms = [min((count - 1) * (length + 1) + nodes + 1, left + nodes) for left in lefts]
        if count < 1 or not self.scheduler.reserve_burst(scheduled, rooms):
            return None
        segments = [
            Segment([r.tokens[-1], *[0] * nodes], r.cache, num_logits=nodes + 1, pick=r.pick)
            for r in requests
        ]
        given = self._burst_input(requests, parts, count, plan.least)._replace(rooms=rooms)
        burst = self.executor.burst(backend, segments, given)
        return PendingBurst(burst, scheduled, self.policy.drafters, parts, self._goes_on)

    def _can_burst(self, backend: BurstBackend, scheduled: Scheduled) -> bool:
        if self.watch is not None or len(scheduled) > backend.most_requests:
            return False
        return all(one.request.pick and one.num_new == 1 and one.is_caught_up for one in scheduled)

    def _burst_input(
        self, requests: Sequence[Request], parts: BurstParts, count: int, least: float
    ) -> BurstInput:
        (backend, head, matcher, length, tree), first = parts, requests[0]
        drafters = self.policy.drafters
        feeds, samplers = ([], []) if head is None else drafters[head].burst_feeds(requests, length)
        stops, wanted = tuple(first.stop_ids), self.scheduler.num_left(first)
        names = tuple("" if n is None else drafters[n].name for n in (matcher, head))
        given = BurstInput(count, (), feeds, samplers, stops=stops, wanted=wanted, names=names, tree=tree)
        if backend is None or not backend.is_weighing:
            return given
        weights = self.policy.weights(head, matcher, first, length)
        tables = None if matcher is None else drafters[matcher].matcher(first)
        floor = 0.0 if head is None else drafters[head].floor
        return given._replace(weights=weights, matcher=tables, least=max(least, floor))

    def _goes_on(self, pending: PendingBurst) -> bool:
        """Whether another round is better than whatever else could be done: no request waits for a seat, and
        no other drafter has something worth more. Those are asked while the device is busy."""
        if self.scheduler.waiting:
            return False
        is_looking = pending.num_landed % LOOK_EVERY == 0 and len(pending.scheduled) <= MOST_LOOKED
        if pending.parts.head is None or not is_looking:
            return True
        answers: Answers = {}
        asks = [(index, pending.parts.length) for index in range(len(pending.scheduled))]
        for number, drafter in enumerate(self.policy.drafters):
            if number != pending.parts.head and drafter.is_free:
                self._ask(number, asks, pending.scheduled, answers, 0.0)
        wanted = self.policy.replan(pending.parts.head, asks, pending.scheduled, answers, True)
        self._has_better = 2 * len(wanted) < len(asks)
        return not self._has_better

    def _land(self, record: StepRecord) -> list[Emission]:
        """Commit what was accepted, and show policy and drafters what came of it: of every pass, in whatever
        way it was made."""
        started = perf_counter()
        emissions = self._commits.land(record)
        before, committed = self._committed, perf_counter()
        since_last = None if before is None else committed - before  # None: there was no commit before
        self._committed = committed
        if record.seconds is not None:  # the device has measured its part
            record.seconds += committed - started
            self._round_seconds.add(record.seconds)
        else:
            record.seconds = since_last
            num_rows = sum(one.num_new for one in record.scheduled)
            if num_rows >= LEAST_CHUNK and since_last:
                self._row_seconds.add(since_last / num_rows)
        self.policy.observe(record)
        self._suspicion.judge(record, self.policy.drafters)
        # One that reads hidden states reads on without the rows of a pass that has kept none.
        is_blind, is_shown = record.is_plain, bool(record.hidden)
        learners = [d for d in self._learners if is_shown or not (d.needs.hidden_layers or is_blind)]
        seen = record.seen() if learners else []
        for drafter in learners:
            width = drafter.needs.top_tokens
            tops = [one.top[:, :width] if one.top is not None and width else None for one in seen]
            drafter.observe([one._replace(top=top) for one, top in zip(seen, tops, strict=True)])
        return emissions

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self.stats[request.id].settle()
        self.scheduler.finish(request, reason)
        self._release(request)

    def _release(self, request: Request) -> None:
        self.policy.release(request)
        for drafter in self.policy.drafters:
            drafter.release(request)

    def check(self) -> None:
        """Assert that the books balance: call it at any time between steps."""
        self.executor.kv.check([r.cache for r in self.scheduler.requests])
