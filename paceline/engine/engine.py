"""The step: schedule, propose, forward, accept, commit. Plain decoding is a step whose drafts are empty.

Who drafts how much is the policy's to say, and it is shown what came of it. The engine knows token ids and
nothing of text. commit.py alone changes a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from time import perf_counter
from typing import TYPE_CHECKING

from paceline.core.errors import RequestError
from paceline.core.options import EngineConfig
from paceline.core.sampling import pick_of
from paceline.core.tree import Tree
from paceline.core.types import Cached, Draft, FinishReason, Proposer, Request, Segment, Verdict
from paceline.core.watch import Watch
from paceline.engine.commit import Commits, Emission
from paceline.engine.flights import Answers, Flight, Rounds, answers_of, flyer_of, possible_rounds
from paceline.engine.nodes import first_branch
from paceline.engine.plan import FixedPolicy, Plan, Policy
from paceline.engine.scheduler import Scheduler, Turn
from paceline.engine.stats import Phases, SpecStats, Suspicion
from paceline.engine.verdicts import judge, judge_round, shown
from paceline.runtime.batch import segment_of
from paceline.runtime.runner import Runner

if TYPE_CHECKING:
    import torch


# requests from which a plain pass is followed by the next before it lands; of fewer, drafts are worth more
# than that
FOLLOWED = 8

UNHEARD = 2  # rounds made in one go for a request that words may end, which nobody looks for on the way


@lru_cache(maxsize=4096)
def rooted(token: int) -> Draft:
    """Nothing drafted. A few tokens make up most of a text, so that most of these are there already."""
    return Draft(Tree.chain(token))


class Engine:
    def __init__(
        self, runner: Runner, proposer: Proposer | None, config: EngineConfig, policy: Policy | None = None
    ) -> None:
        """Without a policy the proposer drafts `config.num_speculative_tokens` whenever it can."""
        self.runner = runner
        self.proposer = proposer
        self.policy = policy or FixedPolicy(proposer, config.num_speculative_tokens)
        self.config = config
        self.scheduler = Scheduler(config, runner.kv)
        self.totals = SpecStats()
        self.phases = Phases()
        self.stats: dict[str, SpecStats] = {}
        self._commits = Commits(runner.kv, config.max_model_len, self.totals, self.stats, self._finish)
        self.watch: Watch | None = None  # is shown every draft being judged
        self._suspicion = Suspicion()
        needs = [drafter.needs for drafter in self.policy.drafters]
        self._layers: dict[
            frozenset[int], tuple[int, ...]
        ] = {}  # by who is asleep: what the others ask of a pass
        self._top_tokens = max((need.top_tokens for need in needs), default=0)
        self._learners = [
            (n, drafter) for n, drafter in enumerate(self.policy.drafters) if drafter.needs.verdicts
        ]
        self._num_arrivals = 0
        self._flight: Flight | Rounds | None = None
        self._committed: float | None = None  # when the last step was, if nothing was waited for since
        self._num_recorded = 0  # of the runner's recordings, then

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def check_fits(self, request: Request) -> None:
        """Refuse what could never run, before anything is queued."""
        limit = self.config.max_model_len
        if request.num_tokens >= limit:
            raise RequestError(
                f"the prompt has {request.num_tokens:,} tokens and the context holds {limit:,}; shorten it to at most {limit - 1:,}"
            )
        method, names = request.params.speculative_method, [drafter.name for drafter in self.policy.drafters]
        if method is not None and method not in names:
            raise RequestError(
                f"speculative_method is {method!r:.40}; loaded are: {', '.join(names) or 'none'}"
            )

    def add(self, request: Request) -> None:
        self.check_fits(request)
        self._num_arrivals += 1
        request.arrival = self._num_arrivals
        request.pick = pick_of(request, rooted(request.tokens[-1]))
        self.stats[request.id] = SpecStats()
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """Stop a request at any moment; its blocks are free when this returns."""
        if not request.is_finished:
            self._finish(request, FinishReason.ABORT)

    def set_aside(self) -> list[Request]:
        """After an exception in `step`: forget the pass under way and take every request out, its blocks free
        and the drafters' memory of it gone. Returns those that ran, then those that waited; `resume` puts one
        back, and its tokens are computed again."""
        requests = self.scheduler.requests
        self._flight = self._committed = None
        for request in list(self.scheduler.running):
            self.scheduler.preempt(request)
            self.policy.release(request)
            for drafter in self.policy.drafters:
                drafter.release(request)
        self.scheduler.waiting.clear()
        self.check()
        return requests

    def resume(self, request: Request) -> None:
        self.scheduler.add(request)

    def step(self) -> list[Emission]:
        """What was said in one step. Where passes run by themselves the next is on its way already: the
        caller's work hides behind it.
        """
        flight = self._flight or self._launch()
        self._flight = None
        if flight is None:
            self._committed = None
            return []
        if isinstance(flight, Flight):
            follower = self._follow(flight)
            emissions = self._land(flight, follower)
            if follower is not None and not all(turn.request.is_finished for turn in follower.turns):
                self._flight = follower
                return emissions
        else:
            emissions = self._land_round(flight)
            if flight.is_under_way:
                self._flight = flight
                return emissions
        if self.runner.decoder.runs_by_itself:
            self._flight = self._launch()
        return emissions

    def _launch(self) -> Flight | Rounds | None:
        """Schedule, propose, start the pass, or several where a drafter and the device can go on without
        us.
        """
        started = perf_counter()
        turns = self.scheduler.schedule()
        if not turns:
            assert not self.has_work, "requests are waiting and none can run"
            return None
        called = perf_counter()
        plan = self.policy.plan(turns)
        if plan.nodes:
            self.scheduler.give_drafts(turns, plan.nodes)
        scheduled = perf_counter()
        idle_since = (
            self._committed if self._can_follow(len(turns)) else None
        )  # a plain pass would be on its way already
        self.policy.looked(scheduled - (idle_since or called))
        proposed, rounds = self._propose(turns, plan) if plan.nodes else ({}, None)
        if rounds is not None:
            self.phases.schedule += scheduled - started
            self.phases.forward += perf_counter() - rounds.since
            return rounds
        answered = perf_counter()
        drafts = self._drafts(turns, proposed)
        segments = [self._segment(turn, draft) for turn, draft in zip(turns, drafts, strict=True)]
        drafted = perf_counter()
        top_tokens = self._top_tokens if plan.is_learning else 0
        output = self.runner.forward(
            segments, hidden_layers=self._hidden_layers(plan.asleep), top_tokens=top_tokens
        )
        phases = self.phases
        phases.schedule += scheduled - started
        phases.propose += drafted - scheduled
        phases.forward += perf_counter() - drafted
        return Flight(turns, plan, proposed, drafts, output, drafted, scheduled - called + drafted - answered)

    def _follow(self, flight: Flight) -> Flight | None:
        """The plain pass after a plain pass that has not landed: the device reads what the first picks, and
        need not wait for us. Who turns out to have ended has computed a row in vain."""
        num_turns, asleep = len(flight.turns), flight.plan.asleep
        if (
            not self._can_follow(num_turns)
            or not self.policy.stays_plain(num_turns)
            or self._hidden_layers(asleep)
            or not flight.is_plain
        ):
            return None
        if (
            flight.output.picked is not self.runner.decoder.latest
        ):  # somebody else has used the model meanwhile
            return None
        started = perf_counter()
        going = self.scheduler.follow(flight.turns)
        if not going:
            return None
        turns = [turn for _, turn in going]
        plan, called = self.policy.plan(turns), perf_counter()
        segments = [
            Segment(
                [-1 - i],
                Cached(turn.request.cache.blocks, turn.request.cache.num_cached + 1),
                None,
                1,
                turn.request.pick,
            )
            for i, turn in going
        ]
        drafted = perf_counter()
        output = self.runner.forward(segments)
        phases = self.phases
        phases.schedule += called - started
        phases.propose += drafted - called
        phases.forward += perf_counter() - drafted
        return Flight(turns, plan, {}, None, output, drafted, 0.0)

    def _can_follow(self, num_turns: int) -> bool:
        return num_turns >= FOLLOWED and self.runner.decoder.runs_by_itself and self.watch is None

    def _land(self, flight: Flight, follower: Flight | None) -> list[Emission]:
        """Accept, commit, show everybody what came of it. Who was stopped while the pass ran has gone
        already.
        """
        turns, plan, proposed, drafts, output, launched, planning = flight
        has_room = (
            drafts is not None and follower is None
        )  # nothing else was on its way: the time is this pass's own
        drafts = [rooted(turn.request.tokens[-1]) for turn in turns] if drafts is None else drafts
        landing = perf_counter()
        if output.picked is not None:
            len(output.picked)  # waits for the device
        computed = perf_counter()
        judged = judge(turns, drafts, output, self.watch, has_logits=follower is None)
        accepted = perf_counter()
        verdicts, emissions = self._commits.commit_all(turns, drafts, judged, has_more=follower is not None)
        committed = perf_counter()
        is_first = output.is_first or (follower is not None and follower.output.is_first)
        whole = self._timed(committed)
        self.policy.observe(
            turns, verdicts, committed - launched if has_room and not is_first else None, whole
        )
        self.policy.charge(planning + perf_counter() - committed)
        self._observe(turns, drafts, verdicts, output.hidden, output.top, plan)
        self._suspect(proposed, verdicts)
        phases = self.phases
        phases.forward += computed - landing
        phases.accept += accepted - computed
        phases.commit += committed - accepted
        phases.observe += perf_counter() - committed
        return emissions

    def _land_round(self, flight: Rounds) -> list[Emission]:
        """The next round, as if it were a pass of its own; those after it go on meanwhile, and another
        follows them unless somebody waits for a seat or has better drafts. Who has ended has no part in
        it."""
        landing, number, turns = perf_counter(), flight.landed, flight.turns
        said, roots = (
            flight.flown.round(number),
            [turn.request.tokens[-1] for turn in turns],
        )  # waits for the device
        computed = perf_counter()
        drafts = flight.flyer.land([turn.request for turn in turns], said, number)
        judged = judge_round(turns, drafts, said)
        flight.landed += 1
        verdicts, emissions = self._commits.commit_all(
            turns, drafts, judged, has_more=flight.landed < len(flight.flown)
        )
        committed = perf_counter()
        whole = self._timed(committed)
        if verdicts:
            checked = {index: drafts[index] for index in verdicts}
            if said.asides is None:
                is_usual = whole is not None and not flight.flown.is_first
                self.policy.flown(
                    flight.drafter, turns, checked, verdicts, committed - flight.since if is_usual else None
                )
                answers = {
                    index: [*flight.proposed.pop(index, ()), (flight.drafter, draft)]
                    for index, draft in checked.items()
                }
            else:
                numbers = [flight.drafter] if flight.other is None else [flight.drafter, flight.other]
                answers = {0: answers_of(said.asides, roots[0], numbers, self.policy.drafters)}
                seconds = said.asides.seconds + committed - landing
                self.policy.replayed(
                    turns, answers[0], drafts[0], verdicts, said.asides.head_seconds, seconds
                )
            self._observe(turns, drafts, verdicts, flight.flown.hidden(number), None, flight.plan)
            self._suspect(answers, verdicts)
        if flight.goes_on and not self.scheduler.waiting and self._stays_up(flight):
            flight.flown.more()
        flight.since = committed
        phases = self.phases
        phases.forward += computed - landing
        phases.commit += committed - computed
        phases.observe += perf_counter() - committed
        return emissions

    def _timed(self, committed: float) -> float | None:
        """Seconds since the last commit. None if there was none, or if anybody has recorded meanwhile: that
        happens once, takes longer than a hundred steps, and is nobody's fault."""
        before, num_before = self._committed, self._num_recorded
        self._committed, self._num_recorded = committed, self.runner.num_recordings
        return None if before is None or num_before != self._num_recorded else committed - before

    def _suspect(self, answers: Answers, verdicts: Mapping[int, Verdict]) -> None:
        for index, verdict in verdicts.items():
            for number, draft in answers.get(index, ()):
                self._suspicion.judge(self.policy.drafters[number], draft, verdict)

    def _hidden_layers(self, asleep: frozenset[int]) -> tuple[int, ...]:
        if asleep not in self._layers:
            needs = [
                drafter.needs for number, drafter in enumerate(self.policy.drafters) if number not in asleep
            ]
            self._layers[asleep] = tuple(sorted({layer for need in needs for layer in need.hidden_layers}))
        return self._layers[asleep]

    def _segment(self, turn: Turn, draft: Draft | None) -> Segment:
        request = turn.request
        pick = None if draft is None else request.pick if draft.q is None else pick_of(request, draft)
        return segment_of(request, turn.num_new, draft, pick)

    def _propose(self, turns: list[Turn], plan: Plan) -> tuple[Answers, Rounds | None]:
        """What each drafter that is asked says, unless one of them takes off instead."""
        proposed: Answers = {}
        for number in self.policy.order:
            asks = [
                (i, min(count, turns[i].num_lookahead_tokens))
                for i, count in plan.asks[number]
                if turns[i].num_lookahead_tokens
            ]
            rounds = self._take_off(number, asks, turns, plan, proposed, is_weighing=True) if asks else None
            if asks and proposed and rounds is None:
                asks = self.policy.reconsider(number, asks, turns)
            if asks and rounds is None:
                rounds = self._take_off(number, asks, turns, plan, proposed, is_weighing=False)
            if rounds is not None:
                return {}, rounds
            if not asks:
                continue
            for (index, _), draft in zip(asks, self._ask(number, asks, turns), strict=True):
                if draft.num_drafted:
                    proposed.setdefault(index, []).append((number, draft))
        return proposed, None

    def _ask(self, number: int, asks: Sequence[tuple[int, int]], turns: Sequence[Turn]) -> list[Draft]:
        drafter, before, started = self.policy.drafters[number], self.runner.num_recordings, perf_counter()
        drafts = drafter.propose([turns[i].request for i, _ in asks], [count for _, count in asks])
        self.policy.heard(
            number, asks, drafts, perf_counter() - started if self.runner.num_recordings == before else None
        )
        assert all(draft.num_drafted <= count for (_, count), draft in zip(asks, drafts, strict=True)), (
            f"{drafter.name} drafted too much"
        )
        return drafts

    def _stays_up(self, flight: Rounds) -> bool:
        """Whether nobody else's drafts would be worth more than the next round's. They are asked while the
        device is busy.
        """
        for number, asks in self.policy.lookouts(flight.drafter, flight.turns):
            self._ask(number, asks, flight.turns)
        rounds = [(index, flight.length) for index in range(len(flight.turns))]
        return len(self.policy.reconsider(flight.drafter, rounds, flight.turns, is_flying=True)) == len(
            rounds
        )

    def _take_off(
        self, number: int, asks: Sequence[tuple[int, int]], turns: list[Turn], plan: Plan, proposed: Answers, is_weighing: bool
    ) -> Rounds | None:  # fmt: skip
        """Rounds of all that speak in this step, where nobody else learns from the passes. is_weighing: such
        as ask others, too; others' drafts were not looked at yet."""
        flyer, requests = flyer_of(self.policy.drafters[number]), [turn.request for turn in turns]
        if (
            flyer is None
            or flyer.is_weighing != is_weighing
            or self.watch is not None
            or len(asks) < len(turns)
        ):
            return None
        if not is_weighing and not self.runner.decoder.runs_by_itself:
            return None
        others = [n for n, planned in enumerate(plan.asks) if planned and n != number]
        if is_weighing and not (
            len(others) <= 1 and all(flyer.asks_beside(self.policy.drafters[n]) for n in others)
        ):
            return None
        length, is_learning = (
            flyer.round_length(requests, min(count for _, count in asks)),
            plan.is_learning and self._top_tokens > 0,
        )
        if not length or is_learning or not self.policy.may_fly(number, asks):
            return None
        has_layers = set(self._hidden_layers(plan.asleep)) == set(flyer.needs.hidden_layers)
        other = others[0] if is_weighing and others else None
        since, course = perf_counter(), self.policy.course(number, other, length) if is_weighing else None
        most = flyer.most_rounds if course is None else min(flyer.most_rounds, course.num_rounds)
        if is_weighing and requests[0].params.stop:
            most = min(most, UNHEARD)
        count = min(most, possible_rounds(requests, length, self.config.max_model_len))
        if not has_layers or not self.scheduler.give_rounds(turns, count * (length + 1)):
            return None
        flown = flyer.fly(
            requests, count, length, course, None if other is None else self.policy.drafters[other]
        )
        return Rounds(turns, plan, proposed, number, flyer, length, flown, since, other)

    def _drafts(
        self, turns: Sequence[Turn], proposed: Mapping[int, list[tuple[int, Draft]]]
    ) -> list[Draft | None]:
        """For every turn that the target will speak in, what it checks: often nothing but the root."""
        chosen = self.policy.trim(turns, proposed) if proposed else {}
        if not self.runner.decoder.checks_trees:
            chosen = {i: draft if draft.tree.is_chain else first_branch(draft) for i, draft in chosen.items()}
        return [
            chosen.get(i) or rooted(turn.request.tokens[-1]) if turn.is_caught_up else None
            for i, turn in enumerate(turns)
        ]

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self.scheduler.finish(request, reason)
        self.policy.release(request)
        for drafter in self.policy.drafters:
            drafter.release(request)

    def _observe(
        self, turns: Sequence[Turn], drafts: Sequence[Draft | None], verdicts: Mapping[int, Verdict], hidden: Mapping[int, torch.Tensor],
        likely: torch.Tensor | None, plan: Plan,
    ) -> None:  # fmt: skip
        """Show the drafters what the pass said about each request that goes on. likely: tokens, as an
        Output's `top`.
        """
        # Whoever lives on the likeliest tokens learns nothing from a pass that did not keep them.
        learning = [
            (n, d)
            for n, d in self._learners
            if n not in plan.asleep and (plan.is_learning or not d.needs.top_tokens)
        ]
        if not learning:
            return
        seen = shown(turns, drafts, verdicts, hidden, likely)
        for number, drafter in learning:
            before, started, width = self.runner.num_recordings, perf_counter(), drafter.needs.top_tokens
            is_narrow = likely is not None and 0 < width < likely.shape[1]
            drafter.observe(
                [s._replace(top=None if s.top is None else s.top[:, :width]) for s in seen]
                if is_narrow
                else seen
            )
            if self.runner.num_recordings == before:
                self.policy.shown(number, len(seen), perf_counter() - started)

    def check(self) -> None:
        """Assert that the books balance: call it at any time between steps."""
        self.runner.kv.pool.check([r.cache.blocks for r in self.scheduler.requests])
