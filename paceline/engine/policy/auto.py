"""Chooses each step which drafters to ask, for how much, and which drafted nodes the target checks. No
tensors, no clock.

With measured t(rows, context), calibrated acceptance and drafting time counted, it checks the nodes that
maximise expected tokens over expected time; per batch size, a switch compares what was measured with plain
decoding and backs off while it loses. Invariant: a sampled token never decides whether it is itself checked:
a draft with q is as long as was asked for and checked whole. Else a policy could change the text, and only
its time may change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from paceline.core.tree import Tree, join
from paceline.core.types import Answers, Draft, Request, ScheduledRequest
from paceline.core.weigh import NUM_CELLS, SURE, best_count
from paceline.drafters.base import Drafter
from paceline.engine.policy.base import Asks, Plan
from paceline.engine.policy.calibration import Answer, Calibration, Factor, compare
from paceline.engine.policy.cost import CostTable, DraftCost, Load
from paceline.engine.policy.switch import FIRST_OFF, Switch
from paceline.heads.rows import BurstWeights

if TYPE_CHECKING:
    from paceline.runtime.record import StepRecord

HEAD_SHARE = 1 / 8  # of a pass: what a draft of one node takes until it is measured
MOST_PROMPT_ROWS = 1024  # beside more, a pass is bound by arithmetic and nothing is drafted
STOP_GAIN = 1.6  # a head drafts on from a token that is worth this many times its row and its drafting
RESTART = 3.0  # passes: what it costs to end a burst and to begin another
PROBE_SHARE = 0.005  # of all time that may go to asking a model from which nothing is expected


class Known:
    """One drafter over all requests: how often it is right, and what a draft takes, by batch size."""

    __slots__ = ("_costs", "calibration", "idle")

    def __init__(self, seconds: float, acceptance: Sequence[float]) -> None:
        self.calibration, self._costs = Calibration(acceptance), {1: DraftCost(seconds / 2, seconds / 2)}
        self.idle = 0  # steps since it was asked

    def cost(self, speaking: int) -> DraftCost:
        """Until it is measured, what it takes at the nearest batch size: all are drafted for together."""
        if speaking not in self._costs:
            near = self._costs[min(self._costs, key=lambda other: abs(other - speaking))]
            self._costs[speaking] = DraftCost(near.fixed, near.each)
        return self._costs[speaking]


class AutoPolicy:
    def __init__(
        self, drafters: Sequence[Drafter], costs: CostTable, *, most_nodes: int = 64,
        most_requests: int = 1 << 30, has_trees: bool = True,
        known: Mapping[str, tuple[float, Sequence[float]]] | None = None,
    ) -> None:  # fmt: skip
        """most_nodes: of a draft. most_requests: of a batch for which anything is drafted. has_trees: false
        where only chains may be checked. known: by drafter, seconds of a draft of one node and acceptance by
        depth.
        """
        # One that runs a model comes last, and is not asked where the others' drafts are worth more.
        self.drafters = tuple(sorted(drafters, key=lambda drafter: not drafter.is_free))
        self.costs, self.most_nodes, self.has_trees = costs, most_nodes, has_trees
        self._most_requests = most_requests
        guess = (HEAD_SHARE * costs.pass_seconds(1), ())
        self._known = [Known(*(known or {}).get(drafter.name, guess)) for drafter in self.drafters]
        self._factors: dict[str, list[Factor]] = {}  # by request: one a drafter
        self._switches: dict[int, Switch] = {}  # by requests that speak
        self._load = Load.of((), costs, most_nodes)
        self._weighed: dict[int, list[Answer]] = {}  # of this step, by scheduled request
        self._spent = 0.0  # seconds of drafting in the last step: what it will take in this one, about

    def plan(self, scheduled: Sequence[ScheduledRequest]) -> Plan:
        load = self._load = Load.of(scheduled, self.costs, self.most_nodes)
        self._weighed = {}
        if not load.speaking or load.rows - load.speaking > MOST_PROMPT_ROWS or not self.drafters:
            return Plan()  # no plain step: heads read what a prompt's pass shows, also while drafting is off
        switch = self._switches.setdefault(load.speaking, Switch())
        if switch.plain_steps:
            return Plan(plain_steps=switch.plain_steps if load.is_decoding else 0)
        if load.speaking > self._most_requests:
            return Plan(plain_steps=FIRST_OFF if load.is_decoding else 0)
        most = min(self.most_nodes, max(one.draft_limit for one in scheduled))
        cap, _ = best_count([1.0] * most, most, load.speaking, load.seconds, load.added(most))
        if not cap:  # not even a perfect draft could pay
            return Plan(plain_steps=FIRST_OFF if load.is_decoding else 0)
        limits = [(i, one.request, min(one.draft_limit, cap)) for i, one in enumerate(scheduled)]
        asks = [self._asks(n, [limit for limit in limits if limit[2] > 0]) for n in range(len(self.drafters))]
        return Plan(asks, 0, self._least(load))

    def _asks(self, number: int, limits: Sequence[tuple[int, Request, int]]) -> Asks:
        drafter, known = self.drafters[number], self._known[number]
        asks: Asks = []
        limits = [limit for limit in limits if limit[1].params.speculative_method in (None, drafter.name)]
        for index, request, limit in limits:
            count = limit if drafter.is_free else self._expected(number, request, limit)[0]
            if count:
                asks.append((index, limit if drafter.can_stop else count))
        probe = known.cost(self._load.speaking).of(1) / (PROBE_SHARE * self._load.seconds)
        if not asks and limits and known.idle >= probe:  # the text may be another by now
            return [(limits[0][0], 1)]
        return asks

    def _expected(self, number: int, request: Request, limit: int) -> tuple[int, float]:
        """Of a draft by a model, before it is made: how many nodes pay, and the seconds they should save. All
        that speak are drafted for together, and each bears its share.
        """
        known, load = self._known[number], self._load
        cost = known.cost(load.speaking)
        added = load.added(limit, cost.each / load.speaking, cost.fixed / load.speaking)
        survival = known.calibration.survival(self._factor(number, request).value, limit)
        count, gained = best_count(survival, limit, load.speaking, load.seconds, added)
        return count, gained * load.token_seconds - added[count]

    def _least(self, load: Load) -> float:
        """The probability from which it pays to draft another token after one, and to check both."""
        pairs = zip(self.drafters, self._known, strict=True)
        each = min((known.cost(load.speaking).each for d, known in pairs if not d.is_free), default=0.0)
        row = load.added(2)[2] - load.added(1)[1] if self.most_nodes > 1 else 0.0
        return min(STOP_GAIN * (row + each / load.speaking) / load.token_seconds, SURE)

    def _factor(self, number: int, request: Request) -> Factor:
        if request.id not in self._factors:
            self._factors[request.id] = [Factor() for _ in self.drafters]
        return self._factors[request.id][number]

    def replan(
        self, drafter: int, asks: Asks, scheduled: Sequence[ScheduledRequest], answers: Answers,
        is_running: bool = False,
    ) -> Asks:  # fmt: skip
        """For which requests it still pays to ask a model, now that others have answered. A sampled draft
        cannot be joined with others, so nothing is asked after one.
        """
        kept = []
        for index, count in asks:
            request = scheduled[index].request
            others = [a for a in self._weigh(index, request, answers.get(index, ())) if a.number != drafter]
            if others and not self.drafters[drafter].is_free:
                restart = RESTART * self._load.seconds if is_running else 0.0
                promised = self._expected(drafter, request, count)[1] + restart
                if any(a.draft.q is not None or self._worth(a) > promised for a in others):
                    continue
            kept.append((index, count))
        return kept

    def _weigh(self, index: int, request: Request, drafts: Sequence[tuple[int, Draft]]) -> list[Answer]:
        """The drafts of one request with their scores; each is weighed once a step."""
        weighed = self._weighed.setdefault(index, [])
        for number, draft in drafts[len(weighed) :]:
            factor = self._factor(number, request)
            weighed.append(Answer(number, draft, self._known[number].calibration, factor))
        return weighed

    def _worth(self, answer: Answer) -> float:
        """Seconds that checking the best of a draft should save."""
        load, scores = self._load, sorted(answer.scores[1:], reverse=True)
        added = load.added(len(scores))
        count, gained = best_count(scores, len(scores), load.speaking, load.seconds, added)
        return gained * load.token_seconds - added[count]

    def choose(self, scheduled: Sequence[ScheduledRequest], answers: Answers) -> dict[int, Draft]:
        """Of all drafted nodes of all requests, those with which the batch is expected to emit most tokens a
        second. Sampled drafts are checked whole.
        """
        trees, chosen = {}, {}
        for index, drafts in answers.items():
            sampled = next((draft for _, draft in drafts if draft.q is not None), None)
            if sampled is not None:  # it stands alone
                chosen[index] = sampled
            else:
                trees[index] = _Joined(self._weigh(index, scheduled[index].request, drafts))
        pool = sorted(
            (-tree.scores[node], index, node)
            for index, tree in trees.items()
            for node in (range(1, len(tree.scores)) if self.has_trees else tree.best_chain())
        )
        room, nodes = {index: scheduled[index].num_lookahead_tokens for index in trees}, []
        for score, index, node in pool:
            if room[index]:
                room[index] -= 1
                nodes.append((-score, index, node))
        num_sampled = sum(draft.num_drafted for draft in chosen.values())
        load = self._load._replace(rows=self._load.rows + num_sampled)
        scores, seconds = [node[0] for node in nodes], load.seconds + self._spent
        count, _ = best_count(scores, len(nodes), load.speaking, seconds, load.added(len(nodes)))
        kept: dict[int, list[int]] = {}
        for _, index, node in nodes[:count]:
            kept.setdefault(index, []).append(node)
        return chosen | {index: trees[index].cut(sorted(some)) for index, some in kept.items()}

    def weights(self, head: int | None, matcher: int | None, request: Request, length: int) -> BurstWeights:
        unknown = ([-1.0] * NUM_CELLS, 1.0)
        own, other = (
            unknown if n is None else (self._known[n].calibration.table(), self._factor(n, request).value)
            for n in (head, matcher)
        )
        promised = 0.0 if head is None else self._expected(head, request, length)[1]
        load = self._load
        return BurstWeights(load.seconds, load.added(length), promised, *own, *other)

    def observe(self, record: StepRecord) -> None:
        load = self._load
        for index, verdict in record.verdicts.items():
            request, drafts = record.scheduled[index].request, record.answers.get(index, ())
            for answer in self._weigh(index, request, drafts):
                answer.learn(record.drafts[index], verdict)
        self._weighed = {}
        drafted = sum(draft.num_drafted for draft in record.drafts if draft is not None)
        expected = 0.0
        if load.speaking:
            expected = self.costs.pass_seconds(load.rows + drafted, load.cached, load.seen_with(drafted))
        expected += self._note_drafting(record, expected)
        if not load.is_decoding or not record.verdicts:
            return
        if record.pass_seconds is not None:
            self.costs.observe(load.rows + drafted, load.cached, load.seen_with(drafted), record.pass_seconds)
        switch = self._switches.setdefault(load.speaking, Switch())
        seconds = None if record.seconds is None else record.seconds / expected
        if record.is_plain:
            switch.note_plain(seconds)
        elif seconds is not None:
            emitted = sum(len(verdict.tokens) for verdict in record.verdicts.values())
            switch.note_drafted(seconds, expected / load.seconds, emitted / load.speaking)

    def _note_drafting(self, record: StepRecord, expected: float) -> float:
        """Learn what drafting took; in a burst that does not tell, what the round took beyond the expected
        pass. Returns the seconds that were expected of it.
        """
        total = self._spent = 0.0
        for number, known in enumerate(self._known):
            known.idle = 0 if number in record.drafting else known.idle + 1
        for number, (length, seconds) in record.drafting.items():
            cost = self._known[number].cost(self._load.speaking)
            total += cost.of(length)
            if seconds is None and record.seconds is not None:
                seconds = record.seconds - expected
            if seconds is not None:
                cost.add(length, max(seconds, 0.0))
                self._spent += max(seconds, 0.0)
        return total

    def release(self, request: Request) -> None:
        self._factors.pop(request.id, None)


class _Joined:
    """The drafts of one request as one tree. A node's score is never above its parent's, so the best nodes of
    a tree are a tree with the same root.
    """

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.tokens, self.parents, places = join([answer.draft.tree for answer in answers])
        self.holders: list[list[tuple[Answer, int]]] = [[] for _ in self.tokens]
        for answer, where in zip(answers, places, strict=True):
            for node, place in enumerate(where):
                self.holders[place].append((answer, node))
        self.scores = compare(answers, self.holders, self.parents)

    def best_chain(self) -> list[int]:
        """The best child of the root, its best child, and so on."""
        path, node = [], 0
        while following := [n for n, parent in enumerate(self.parents) if parent == node]:
            node = max(following, key=lambda n: self.scores[n])
            path.append(node)
        return path

    def cut(self, nodes: Sequence[int]) -> Draft:
        """The draft of the root and these nodes, which are in order."""
        kept = (0, *nodes)
        place = {node: i for i, node in enumerate(kept)}
        first = [self.holders[node][0] for node in kept]
        if len(kept) == len(self.tokens) and all(answer is first[0][0] for answer, _ in first):
            return first[0][0].draft
        tree = Tree(tuple(self.tokens[n] for n in kept), tuple(place.get(self.parents[n], -1) for n in kept))
        sources = tuple(answer.draft.source_of(own) for answer, own in first)
        chances = tuple((answer.draft.chances or answer.scores)[own] for answer, own in first)
        return Draft(tree, sources[-1], None, chances, sources)
