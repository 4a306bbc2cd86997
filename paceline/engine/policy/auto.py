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
from paceline.engine.policy.switch import FIRST_OFF, MOST_OFF, Switch
from paceline.heads.rows import BurstWeights

if TYPE_CHECKING:
    from paceline.runtime.record import StepRecord

MOST_NODES = 64  # of a draft, where the costs set no limit
HOST_SECONDS = 2e-5  # of a draft that runs no model, until it is measured
HEAD_SHARE = 1 / 8  # of a pass: the same of one that runs a model
MOST_PROMPT_ROWS = 1024  # beside more, a pass is bound by arithmetic and nothing is drafted
STOP_GAIN = 1.6  # a head drafts on from a token that is worth this many times its row and its drafting
GAIN_RATE = 0.06  # of a new draft in the average of what they save
RESTART = 3.0  # passes: what it costs to end a burst and to begin another
RECHECK = 16  # steps until costs are looked at again where not even a perfect draft could pay


class Known:
    """One drafter over all requests: how often it is right, what it costs, and when it is tried again if it
    does not pay.
    """

    __slots__ = ("backoff", "calibration", "cost", "gain", "idle")

    def __init__(self, seconds: float, acceptance: Sequence[float]) -> None:
        self.calibration, self.cost = Calibration(acceptance), DraftCost(seconds)
        self.gain = 0.0  # seconds that checking the best of a draft saves, averaged over the last ones
        self.idle, self.backoff = (
            0,
            FIRST_OFF,
        )  # steps since it was asked; steps until it is asked without a gain in sight


class AutoPolicy:
    def __init__(
        self, drafters: Sequence[Drafter], costs: CostTable, *, most_nodes: int = MOST_NODES, has_trees: bool = True,
        known: Mapping[str, tuple[float, Sequence[float]]] | None = None,
    ) -> None:  # fmt: skip
        """has_trees: false where only chains may be checked. known: by drafter, seconds of a draft of one
        node and acceptance by depth.
        """
        # One that runs a model comes last, and is not asked where the others' drafts are worth more.
        self.drafters = tuple(sorted(drafters, key=lambda drafter: not drafter.is_free))
        self.costs, self.most_nodes, self.has_trees = costs, most_nodes, has_trees
        one = costs.pass_seconds(1)
        guesses = {d.name: (HOST_SECONDS if d.is_free else HEAD_SHARE * one, ()) for d in self.drafters}
        self._known = [Known(*(known or {}).get(d.name, guesses[d.name])) for d in self.drafters]
        self._factors: dict[str, list[Factor]] = {}  # by request: one a drafter
        self._switches: dict[int, Switch] = {}  # by requests that speak
        self._load = Load.of((), costs, most_nodes)
        self._weighed: dict[int, list[Answer]] = {}  # of this step, by scheduled request
        self._spent = 0.0  # seconds of drafting in the last step: what it will take in this one, about

    def plan(self, scheduled: Sequence[ScheduledRequest]) -> Plan:
        load = self._load = Load.of(scheduled, self.costs, self.most_nodes)
        self._weighed = {}
        most = min(self.most_nodes, max((one.draft_limit for one in scheduled), default=0))
        if not load.speaking or not most or load.rows - load.speaking > MOST_PROMPT_ROWS or not self.drafters:
            return Plan()  # prompts, of which drafters learn
        switch = self._switches.get(load.speaking) or self._switches.setdefault(load.speaking, Switch())
        if switch.plain_steps:
            return Plan(plain_steps=switch.plain_steps)
        cap, _ = best_count([1.0] * most, most, load.speaking, load.seconds, load.added(most))
        if not cap:
            return Plan(plain_steps=RECHECK)
        limits = [
            (i, one.request, min(one.draft_limit, cap))
            for i, one in enumerate(scheduled)
            if one.draft_limit > 0
        ]
        asks = [self._asks(number, limits) for number in range(len(self.drafters))]
        return Plan(asks, 0, self._least(load))

    def _asks(self, number: int, limits: Sequence[tuple[int, Request, int]]) -> Asks:
        drafter, known = self.drafters[number], self._known[number]
        asks: Asks = []
        for index, request, limit in limits:
            if request.params.speculative_method not in (None, drafter.name):
                continue
            count = limit if drafter.is_free else self._expected(number, request, limit)[0]
            if count:
                asks.append((index, limit if drafter.can_stop else count))
        known.idle = 0 if asks else known.idle + 1
        if asks:
            known.backoff = FIRST_OFF
        elif known.idle >= known.backoff and limits:  # a probe: the text may be another by now
            known.idle, known.backoff = 0, min(2 * known.backoff, MOST_OFF)
            return (
                [(limits[0][0], 1)] if limits[0][1].params.speculative_method in (None, drafter.name) else []
            )
        return asks

    def _expected(self, number: int, request: Request, limit: int) -> tuple[int, float]:
        """Of a draft by a model, before it is made: how many nodes pay, and the seconds they should save."""
        known, load = self._known[number], self._load
        added = load.added(limit, known.cost.each, known.cost.fixed / load.speaking)
        survival = known.calibration.survival(self._factor(number, request).value, limit)
        count, gained = best_count(survival, limit, load.speaking, load.seconds, added)
        # Drafts that are cut where they doubt gain more than those of average length; what they gained is
        # known.
        return count, max(gained * load.token_seconds - added[count], known.gain - known.cost.of(count))

    def _least(self, load: Load) -> float:
        """The probability from which it pays to draft another token after one, and to check both."""
        models = [
            known.cost.each for d, known in zip(self.drafters, self._known, strict=True) if not d.is_free
        ]
        row = (
            load.base[load.rows + 2] - load.base[load.rows + 1] + load.by_row if self.most_nodes > 1 else 0.0
        )
        return min(STOP_GAIN * (row + min(models, default=0.0)) / load.token_seconds, SURE)

    def _factor(self, number: int, request: Request) -> Factor:
        factors = self._factors.get(request.id)
        if factors is None:
            factors = self._factors[request.id] = [Factor() for _ in self.drafters]
        return factors[number]

    def replan(
        self,
        drafter: int,
        asks: Asks,
        scheduled: Sequence[ScheduledRequest],
        answers: Answers,
        is_running: bool = False,
    ) -> Asks:
        """For which requests it still pays to ask a model, now that others have answered. A sampled draft
        cannot be joined with others, so nothing is asked after one.
        """
        kept = []
        for index, count in asks:
            request = scheduled[index].request
            others = [a for a in self._weigh(index, request, answers.get(index, ())) if a.number != drafter]
            if others and not self.drafters[drafter].is_free:
                promised = (
                    self._expected(drafter, request, count)[1] + is_running * RESTART * self._load.seconds
                )
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
            sampled = [draft for _, draft in drafts if draft.q is not None]
            if sampled:  # it stands alone, whatever was drawn
                chosen[index] = sampled[0]
            else:
                trees[index] = _Joined(self._weigh(index, scheduled[index].request, drafts))
        pool = sorted(
            (-tree.scores[node], index, node)
            for index, tree in trees.items()
            for node in (range(1, len(tree.scores)) if self.has_trees else tree.best_chain())
        )
        room = {index: scheduled[index].num_lookahead_tokens for index in trees}
        nodes = []
        for score, index, node in pool:
            if room[index]:
                room[index] -= 1
                nodes.append((-score, index, node))
        load, sampled = self._load, sum(draft.num_drafted for draft in chosen.values())
        load = load._replace(rows=load.rows + sampled)
        added = load.added(len(nodes))
        count, _ = best_count(
            [n[0] for n in nodes], len(nodes), load.speaking, load.seconds + self._spent, added
        )
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
                known = self._known[answer.number]
                known.gain += GAIN_RATE * (self._worth(answer) - known.gain)
        self._weighed = {}
        drafted = sum(draft.num_drafted for draft in record.drafts if draft is not None)
        self._note_drafting(record, drafted)
        if not load.is_decoding or not record.verdicts:
            return
        if record.pass_seconds is not None:
            self.costs.observe(load.rows + drafted, load.cached, load.seen_with(drafted), record.pass_seconds)
        if record.seconds is None:
            return
        switch = self._switches.setdefault(load.speaking, Switch())
        if record.is_plain:
            switch.note_plain(record.seconds / load.seconds)
        else:
            emitted = sum(len(verdict.tokens) for verdict in record.verdicts.values())
            switch.note_drafted(record.seconds / load.seconds, emitted / load.speaking)

    def _note_drafting(self, record: StepRecord, drafted: int) -> None:
        """What drafting took; in a burst that does not tell, what the round took beyond a pass of its
        rows.
        """
        self._spent = 0.0
        for number, (nodes, seconds) in record.drafting.items():
            if seconds is None and record.seconds is not None:
                load = self._load
                seconds = record.seconds - self.costs.pass_seconds(
                    load.rows + drafted, load.cached, load.seen_with(drafted)
                )
            if seconds is not None:
                self._known[number].cost.add(nodes, max(seconds, 0.0))
                self._spent += max(seconds, 0.0)

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
