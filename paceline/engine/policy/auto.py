"""Chooses which drafters to ask, for how much, and which drafted nodes to check. No tensors, no clock.

With measured t(rows, context), calibrated acceptance and drafting time counted, it checks the nodes that
maximise expected tokens over expected time; per batch size, a switch compares what was measured with plain
decoding and backs off while it loses. Invariant: a sampled token never decides whether it is itself checked,
which could change the text: a draft with q is as long as was asked for and checked whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from paceline.core.types import Answers, Draft, Request
from paceline.core.weigh import NUM_CELLS, SURE, best_count
from paceline.drafters.base import Drafter, num_same
from paceline.engine.policy.base import Asks, Plan, Policy, Step
from paceline.engine.policy.calibration import Answer, Calibration, Factor, joined
from paceline.engine.policy.cost import CostTable, Load
from paceline.engine.policy.switch import FIRST_OFF, Switch
from paceline.engine.policy.trees import Trees
from paceline.engine.stats import Median
from paceline.heads.rows import BurstWeights, TreeShape
from paceline.runtime.record import StepRecord

HEAD_SHARE = 1 / 8  # of a pass: what a draft of one node takes until it is measured
MOST_PROMPT_ROWS = 1024  # beside more, a pass is bound by arithmetic and nothing is drafted
STOP_GAIN = 1.6  # a head drafts on from a token that is worth this many times its row and its drafting
RESTART = 3.0  # plain passes that a draft by the host between two bursts costs, until that is measured
WHILE_OFF = 64  # plain steps before the next plan where no draft can pay
MOST_LEARNED = 8  # answers of a step, in turn: all of many requests' would take the host longer than a pass
PROBE_SHARE = 0.005  # of all time that may go to asking a model from which nothing is expected


class Known:
    """One drafter over all requests: how often it is right, and what a draft takes, by batch size."""

    def __init__(self, seconds: float, acceptance: Sequence[float]) -> None:
        # by whether tokens are the likeliest or drawn, which are far harder to guess
        self.calibrations = {is_greedy: Calibration(acceptance) for is_greedy in (True, False)}
        self.idle = 0  # steps since it was asked
        self._costs = {1: CostTable({1: max(seconds, 1e-9), 5: max(3 * seconds, 1e-9)})}

    def seconds(self, size: int) -> CostTable:
        """Until it is measured, what it takes at the nearest batch size: all are drafted for together."""
        if size not in self._costs:
            near = self._costs[min(self._costs, key=lambda other: abs(other - size))]
            self._costs[size] = CostTable({n: near.pass_seconds(n) for n in (1, 5)})
        return self._costs[size]


class AutoPolicy(Policy):
    def __init__(
        self, drafters: Sequence[Drafter], costs: CostTable, *, most_nodes: int = 64,
        most_requests: int = 1 << 30, most_matched: int = 1 << 30,
        known: Mapping[str, tuple[float, Sequence[float]]] | None = None,
    ) -> None:  # fmt: skip
        """most_nodes: of a draft. most_requests: of a batch for which anything is drafted; most_matched: by
        a drafter that is free, and runs on the host. known: by drafter, seconds of one node and acceptance by
        depth."""
        # One that runs a model comes last, and is not asked where the others' drafts are worth more.
        self.drafters = tuple(sorted(drafters, key=lambda drafter: not drafter.is_free))
        self.costs, self.most_nodes = costs, most_nodes
        guesses = {d.name: (HEAD_SHARE * costs.pass_seconds(1), [d.usual] * (d.usual > 0)) for d in drafters}
        self._known = [Known(*(guesses | dict(known or {}))[drafter.name]) for drafter in self.drafters]
        # by request: one a drafter
        self._factors: dict[str, list[Factor]] = defaultdict(lambda: [Factor() for _ in self.drafters])
        self._switches: dict[int, Switch] = defaultdict(Switch)  # by batch size
        self._trees: dict[int, Trees] = defaultdict(Trees)  # likewise
        self._chain = 1  # tokens of a chain where trees could be had instead
        # the step's load, and its drafts with their scores by scheduled request
        self.step: tuple[Load, dict[int, list[Answer]]] = Load.of((), costs, most_nodes), {}
        self._most_requests, self._most_matched = most_requests, most_matched
        backends = [
            drafter.burst_backend for drafter in self.drafters
        ]  # of several requests, without the host
        self._has_bursts = any(each is not None and each.most_requests > 1 for each in backends)
        # What a drafted step took longer than expected, in plain passes, by whether the host drafted; then
        # with what the burst that follows takes to begin.
        self._excess, self._between = {True: Median(RESTART), False: Median(0.0)}, 0.0
        self._turn = 0  # of the requests from whose answers is learned
        self._spent = 0.0  # seconds of drafting in the last step: what it will take in this one, about

    @property
    def _load(self) -> Load:
        return self.step[0]

    def plan(self, scheduled: Step) -> Plan:
        load = Load.of(scheduled, self.costs, self.most_nodes)
        self.step = load, {}
        if len(scheduled) > self._most_requests:
            return Plan(plain_steps=WHILE_OFF if load.is_decoding else 1)
        if not load.speaking or load.rows - load.speaking > MOST_PROMPT_ROWS or not self.drafters:
            return Plan()  # no plain step: heads read what a prompt's pass shows, also while drafting is off
        most = min(self.most_nodes, max(one.draft_limit for one in scheduled))
        switch, cap = self._switches[load.size], 0
        off = switch.plain_steps
        if not off:
            cap, _ = best_count([1.0] * most, most, load.speaking, load.seconds, load.added(most))
        if not cap:  # it is off, or not even a perfect draft could pay
            steps = (off or WHILE_OFF) if load.is_decoding else 0
            return Plan(plain_steps=steps, keeps_hidden=switch.is_new)
        limits = [(i, one.request, min(one.draft_limit, cap)) for i, one in enumerate(scheduled)]
        asks = [self._asks(n, [limit for limit in limits if limit[2] > 0]) for n in range(len(self.drafters))]
        if not any(asks) and load.is_decoding:
            return Plan(plain_steps=FIRST_OFF)
        return Plan(asks, least=self._least(load))

    def _asks(self, number: int, limits: Sequence[tuple[int, Request, int]]) -> Asks:
        drafter, known = self.drafters[number], self._known[number]
        asks: Asks = []
        if drafter.is_free and len(limits) > (1 if self._has_bursts else self._most_matched):
            return asks
        limits = [limit for limit in limits if limit[1].params.speculative_method in (None, drafter.name)]
        backend, some = drafter.burst_backend, limits
        is_together = backend is not None and not backend.is_weighing and len(limits) > 1
        if is_together:  # a few stand for all
            some = limits[:: 1 + len(limits) // MOST_LEARNED]
        for index, request, limit in some:
            count = limit if drafter.is_free else self._expected(number, request, limit)[0]
            if count:
                asks.append((index, limit if drafter.can_stop else count))
        if is_together:
            asks = [(index, limit) for index, _, limit in limits] if 2 * len(asks) >= len(some) else []
        probe = known.seconds(self._load.size).pass_seconds(1) / (PROBE_SHARE * self._load.seconds)
        if not asks and limits and known.idle >= probe:  # the text may be another by now
            return [(limits[0][0], 1)]
        return asks

    def _expected(self, number: int, request: Request, limit: int) -> tuple[int, float, float]:
        """`_best` of a draft by a model, before it is made."""
        known, factor = self._known[number], self._factors[request.id][number].value
        survival = known.calibrations[request.params.is_greedy].survival(factor, limit)
        return self._best(survival, known.seconds(self._load.size).base(limit))

    def _best(self, scores: Sequence[float], drafting: Sequence[float] = ()) -> tuple[int, float, float]:
        """How many nodes pay, best first, the tokens that they should gain, and the seconds that they add."""
        load, added = self._load, self._load.added(len(scores), drafting)
        count, gained = best_count(scores, len(scores), load.speaking, load.seconds, added)
        return count, gained, added[count]

    def _least(self, load: Load) -> float:
        """The probability from which it pays to draft another token after one, and to check both."""
        models = [known for d, known in zip(self.drafters, self._known, strict=True) if not d.is_free]
        two = [load.added(2, known.seconds(load.size).base(2)) for known in models] or [load.added(2)]
        return min(STOP_GAIN * min(added[2] - added[1] for added in two) / load.token_seconds, SURE)

    def replan(self, number: int, asks: Asks, scheduled: Step, answers: Answers, is_burst: bool) -> Asks:
        """For which requests it still pays to ask a model, now that others have answered: for none after a
        sampled draft, which cannot be joined with others."""
        if self.drafters[number].is_free:
            return asks
        kept, excess = [], (self._excess[is_host].value * is_burst for is_host in (True, False))
        host, burst = (self._load.token_seconds * (1.0 + each) for each in excess)
        for index, count in asks:
            request = scheduled[index].request
            others = [a for a in self._weigh(index, request, answers.get(index, ())) if a.number != number]
            _, gained, added = self._expected(number, request, count)
            drafted = [self._best(sorted(a.scores[1:], reverse=True)) for a in others]
            best = max(((1.0 + more) / (host + after) for _, more, after in drafted), default=0.0)
            if (1.0 + gained) / (burst + added) >= best and not any(a.draft.q is not None for a in others):
                kept.append((index, count))
        return kept

    def _weigh(self, index: int, request: Request, drafts: Sequence[tuple[int, Draft]]) -> list[Answer]:
        """The drafts of one request with their scores; each is weighed once a step."""
        weighed = self.step[1].setdefault(index, [])
        for number, draft in drafts[len(weighed) :]:
            known, factor = self._known[number], self._factors[request.id][number]
            weighed.append(Answer(number, draft, known.calibrations[request.params.is_greedy], factor))
        return weighed

    def choose(self, scheduled: Step, answers: Answers) -> dict[int, Draft]:
        """Of all drafted nodes, those with which the batch should emit most tokens a second."""
        trees, chosen, pool = {}, {}, list[tuple[float, int, int]]()
        for index, drafts in answers.items():
            sampled = next((draft for _, draft in drafts if draft.q is not None), None)
            if sampled is not None:  # it stands alone and is checked whole
                chosen[index] = sampled
                continue
            trees[index], scores = joined(self._weigh(index, scheduled[index].request, drafts))
            room = scheduled[index].num_lookahead_tokens
            pool += sorted((-scores[node], index, node) for node in range(1, len(scores)))[:room]
        pool.sort()
        num_sampled = sum(draft.num_drafted for draft in chosen.values())
        load = self._load._replace(rows=self._load.rows + num_sampled)
        scores, seconds = [-score for score, _, _ in pool], load.seconds + self._spent
        count, _ = best_count(scores, len(pool), load.speaking, seconds, load.added(len(pool)))
        kept: dict[int, list[int]] = {}
        for _, index, node in pool[:count]:
            kept.setdefault(index, []).append(node)
        return chosen | {index: trees[index].cut([0, *sorted(some)]) for index, some in kept.items()}

    def tree(self, length: int, trees: Sequence[TreeShape]) -> TreeShape | None:
        if not trees:
            return None
        self._chain = length or max(tree.depth for tree in trees)
        return self._trees[self._load.size].choose([*([None] if length else []), *trees])

    def _note_tree(self, record: StepRecord, load: Load) -> None:
        """Of a round of a burst with a head, after its first."""
        if not (record.is_in_place and record.drafting and record.seconds and record.verdicts):
            return
        emitted = chained = sum(len(verdict.tokens) for verdict in record.verdicts.values())
        if record.tree is not None:
            paths = {index: record.answers[index][0][1].tree.tokens[1:] for index in record.verdicts}
            each = [(paths[index][: self._chain], v.tokens) for index, v in record.verdicts.items()]
            chained = sum(1 + num_same(path, tokens) for path, tokens in each)
        self._trees[load.size].note(record.tree, record.seconds, emitted, chained)

    def weights(self, head: int | None, matcher: int | None, request: Request, length: int) -> BurstWeights:
        unknown, factors, way = ([-1.0] * NUM_CELLS, 1.0), self._factors[request.id], request.params.is_greedy
        own, other = (
            unknown if n is None else (self._known[n].calibrations[way].rates, factors[n].value)
            for n in (head, matcher)
        )
        _, gained, added = (0, 0.0, 0.0) if head is None else self._expected(head, request, length)
        promised = gained * self._load.token_seconds - added
        return BurstWeights(self._load.seconds, self._load.added(length), promised, *own, *other)

    def observe(self, record: StepRecord) -> None:
        load = self._load
        self._turn += 1
        found = [index for index in record.answers if index in record.verdicts]
        for index in found[self._turn % (1 + len(found) // MOST_LEARNED) :: 1 + len(found) // MOST_LEARNED]:
            request, verdict = record.scheduled[index].request, record.verdicts[index]
            for answer in self._weigh(index, request, record.answers[index]):
                answer.learn(record.drafts[index], verdict)
        self.step = load, {}
        self._note_tree(record, load)
        nodes = 0 if record.is_plain else sum(d.num_drafted for d in record.drafts if d is not None)
        drafted = load.with_nodes(nodes)
        expected = self.costs.pass_seconds(*drafted) if load.speaking else 0.0
        expected += self._note_drafting(record, expected)
        if not load.is_decoding or not record.verdicts:
            return
        if record.pass_seconds is not None:
            self.costs.observe(record.pass_seconds, *drafted)
        switch = self._switches[load.size]
        seconds = None if record.seconds is None else record.seconds / expected
        if record.is_plain:
            switch.note_plain(seconds)
        elif record.seconds is not None and seconds is not None:
            self._note_excess((record.seconds - expected) / load.seconds, record.pass_seconds is not None)
            emitted = sum(len(verdict.tokens) for verdict in record.verdicts.values())
            each = emitted / len(record.verdicts)  # of those that go on
            switch.note_drafted(seconds, expected / load.seconds, each, record.is_start)

    def _note_excess(self, excess: float, is_host: bool) -> None:
        before, self._between = self._between, excess if is_host else 0.0
        if before and not is_host:
            self._excess[True].add(before + excess - self._excess[False].value)
        elif not is_host:
            self._excess[False].add(excess)

    def _note_drafting(self, record: StepRecord, expected: float) -> float:
        """Learn what drafting took; in a burst that does not tell, what the round took beyond the expected
        pass. Returns the seconds that were expected of it."""
        total = self._spent = 0.0
        for number, known in enumerate(self._known):
            known.idle = 0 if number in record.drafting else known.idle + 1
        for number, (length, seconds) in record.drafting.items():
            cost = self._known[number].seconds(self._load.size)
            total += cost.pass_seconds(length) if length else 0.0
            if seconds is None and record.seconds is not None:
                seconds = record.seconds - expected
            if seconds is not None:
                cost.observe(max(seconds, 1e-9), max(length, 1))
                self._spent += max(seconds, 0.0)
        return total

    def release(self, request: Request) -> None:
        self._factors.pop(request.id, None)
