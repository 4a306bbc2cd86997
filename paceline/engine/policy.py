"""Chooses each step who drafts, how much, and which drafted nodes the target checks. No tensors, no devices,
no clock of its own.

    plan      before drafting: whom to ask for which request, and for how many nodes; often nobody, and that
    costs nothing reconsider  before asking one that runs a model: not where what others have just said is
    worth more trim      after drafting: of all nodes of all requests, those with which the batch is expected
    to emit most tokens a second observe   after the pass: what was right, also of the nodes that were not
    checked, and what it took

What all this may cost is limited by two accounts (accounts.py): nothing is checked, and nobody asked but now
and then, while the purse is empty. Invariant: a drafter's sampled token never decides whether it is itself
checked (a draft with q is cut by what was drawn before a node, against a threshold set before it was drawn);
else a policy could change the text, and only its time may change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.core.types import Course, Draft, Proposer, Request, Verdict
from paceline.engine.accounts import Accounts
from paceline.engine.calibrate import Asked, Record, Tally
from paceline.engine.choice import MARGIN, Caps, Choice, compare
from paceline.engine.costs import CostModel, Median
from paceline.engine.judging import learn
from paceline.engine.load import Load
from paceline.engine.looks import Looks
from paceline.engine.plan import Plan, Proposed
from paceline.engine.promises import best_count, course_of, least_chance, saved_by_round
from paceline.engine.scheduler import Turn

MOST_NODES = 64  # nodes of a draft, where the costs set no limit
HOST_SECONDS = 2e-5  # of asking a drafter, and of judging its answer, until they are measured
QUIET = 16  # steps without another look after one that found that no draft could pay, unless requests leave
LANDING = 3.0  # passes: what it takes to end rounds under way, and to begin again
MOST_BESIDE = (
    1024  # rows of prompts in a pass: beside more nobody drafts, since a pass is bound by arithmetic then
)
PLAIN_EVERY = 100  # steps after which one goes without drafts, to know what that takes
LOOK_EVERY = 4  # steps between two looks at what a model promises for a request
SLEEP_EVERY, WAKE_EVERY = (
    16,
    512,
)  # looks between two at whether it pays to ask a model at all, and between two times it is woken


class AutoPolicy:
    """Drafters are asked one by one and their drafts joined; costs and chances are learned on the way."""

    def __init__(
        self, drafters: Sequence[Proposer], costs: CostModel, *, most_nodes: int = MOST_NODES, has_trees: bool = True,
        known: Mapping[str, tuple[float, Sequence[float]]] | None = None,
    ) -> None:  # fmt: skip
        """has_trees: false where only chains may be checked. known: by drafter, seconds of asking it and
        acceptance by depth.
        """
        self.drafters, self.costs, self.most_nodes, self.has_trees = (
            tuple(drafters),
            costs,
            most_nodes,
            has_trees,
        )
        one = costs.pass_seconds(1)
        guesses = [(HOST_SECONDS if drafter.is_free else one / 8, ()) for drafter in self.drafters]
        self._records = [
            Record(drafter.is_free, *(known or {}).get(drafter.name, guess))
            for drafter, guess in zip(self.drafters, guesses, strict=True)
        ]
        # Who runs a model comes last, and is not asked where the others promise more.
        self.order = tuple(sorted(range(len(self.drafters)), key=lambda d: not self._records[d].is_free))
        self._can_stop = [hasattr(drafter, "least") for drafter in self.drafters]
        self._can_fly = [hasattr(drafter, "usual_round") for drafter in self.drafters]
        self._models = [number for number, record in enumerate(self._records) if not record.is_free]
        self._asleep: frozenset[int] = frozenset()  # models that would not pay for a request like the others
        self._num_speaking = 0  # when that was decided
        self._learners = [
            number for number, drafter in enumerate(self.drafters) if drafter.needs.top_tokens
        ]  # from likely tokens
        self._tallies: dict[str, list[Tally]] = {}
        self._shadowed: set[str] = (
            set()
        )  # requests with a draft that has been right so far and was not checked to its end
        self.accounts = Accounts(one)
        self._caps = Caps(costs, most_nodes)
        self._num_steps = 0
        self._round_of: Record | None = None  # who may run rounds by itself in this step,
        self._round = (
            0,
            0.0,
        )  # the length of its drafts then, and the seconds that a round saves for each request
        self._num_observed = 0  # requests of the last step
        self._since_plain = PLAIN_EVERY // 2
        self._judging = Median(HOST_SECONDS)  # of planning and judging, for each ask
        self._choice = self._new_choice(())
        self.looks = Looks(self.accounts, self._choice.load, HOST_SECONDS)
        self._planned: dict[int, list[Tally]] = {}  # by turn
        self._asked: dict[int, list[Asked]] = {}  # by turn

    def plan(self, turns: Sequence[Turn]) -> Plan:
        looks = self.looks
        looks.is_quiet = looks.are_over(len(turns))
        if looks.is_quiet:
            looks.skip()
            return Plan([], [], False, self._asleep)
        choice = self._choice = self._new_choice(turns)
        load, self._planned, self._asked = choice.load, {}, {}
        self._num_steps += 1
        looks.begin(load)
        choice.can_lose = self.accounts.purse > 0
        is_reading = load.rows - load.speaking > MOST_BESIDE
        cap = self._caps.of(load) if load.speaking and self.drafters and not is_reading else 0
        is_time = (
            load.speaking != self._num_speaking or self._num_steps % SLEEP_EVERY == 0 or not choice.can_lose
        )
        if self._models and load.speaking and is_time:
            self._num_speaking, self._asleep = load.speaking, self._sleepers(cap)
        looks.end(len(turns), 0 if cap or not load.speaking or is_reading or looks.is_waking else QUIET)
        if not cap or self._since_plain >= PLAIN_EVERY:
            return Plan([], [], False, self._asleep)
        self._look_at_rounds(turns)
        nodes, asks = self._look_around(turns, cap)
        looks.least_cost = min(self._cost(record) for record in self._records)
        if not any(asks):
            looks.is_vain = bool(self._planned)
            return Plan([], [], False, self._asleep)
        return Plan(nodes, asks, any(asks[drafter] for drafter in self._learners), self._asleep)

    def _look_around(self, turns: Sequence[Turn], cap: int) -> tuple[list[int], list[list[tuple[int, int]]]]:
        """For each turn the most nodes it may get; for each drafter whom it is asked about."""
        load = self._choice.load
        # type: list[int], list[list[tuple[int, int]]]
        nodes, asks = [0] * len(turns), [[] for _ in self.drafters]
        first = self._num_steps % len(turns)  # probes go round
        for index in (*range(first, len(turns)), *range(first)):
            limit = turns[index].draft_limit
            if self.accounts.is_broke(load, 0, self.looks.least_cost):  # nothing is left for the others
                break
            if limit > 0:
                nodes[index] = self._plan_one(
                    index, turns[index].request, limit if limit < cap else cap, asks
                )
        if self._models:
            self._choice.threshold = load.row_seconds(sum(nodes)) / load.price
            for drafter, planned in enumerate(asks):
                if planned and self._can_stop[drafter]:
                    self.drafters[drafter].least = least_chance(load, self.costs, self._records[drafter])  # type: ignore[attr-defined]
        return nodes, asks

    def stays_plain(self, num_requests: int) -> bool:
        return self.looks.are_over(num_requests)

    def looked(self, seconds: float) -> None:
        self.looks.took(seconds)

    def _new_choice(self, turns: Sequence[Turn]) -> Choice:
        return Choice(
            Load(turns, self.costs), self.costs, self.has_trees, self._cost, self.accounts.purse > 0
        )

    def _sleepers(self, cap: int) -> frozenset[int]:
        """Models that would not pay for a request like the others, among several; all of them with an empty
        purse. Now and then they are woken: the text may be another."""
        self.looks.is_waking = self._num_steps % WAKE_EVERY < SLEEP_EVERY
        if self._choice.load.speaking == 1 or self.looks.is_waking:
            return frozenset()
        is_poor = not cap or self.accounts.purse <= 0
        return frozenset(
            d
            for d in self._models
            if is_poor or not best_count(self._choice.load, self.costs, self._records[d], 1.0, cap)[0]
        )

    def _look_at_rounds(self, turns: Sequence[Turn]) -> None:
        """Whether it pays that all requests draft and check by themselves. What was never tried is taken to
        draft for all as for one.
        """
        load, self._round_of = self._choice.load, None
        for number in self._models if len(turns) == load.speaking else ():
            length = (
                self.drafters[number].usual_round(len(turns))  # type: ignore[attr-defined]
                if self._can_fly[number] and number not in self._asleep
                else 0
            )
            if not length:
                continue
            record, known = self._records[number], (self._tallies.get(turn.request.id) for turn in turns)
            saved = saved_by_round(
                load, record, [tallies[number].factor if tallies else 1.0 for tallies in known], length
            )
            if saved > (MARGIN - 1.0) * load.seconds:
                self._round_of, self._round = record, (length, saved / len(turns))

    def _plan_one(self, index: int, request: Request, limit: int, asks: list[list[tuple[int, int]]]) -> int:
        """Whom to ask for this request; the most nodes anybody is asked for."""
        tallies = self._tallies.get(request.id)
        if tallies is None:
            tallies = self._tallies[request.id] = [Tally(request.num_tokens) for _ in self._records]
        self._planned[index] = tallies
        most = 0
        for drafter in self.order:
            if drafter in self._asleep or request.params.speculative_method not in (
                None,
                self.drafters[drafter].name,
            ):
                continue
            record, tally = self._records[drafter], tallies[drafter]
            count = (
                self._wanted_free(tally, record, limit)
                if record.is_free
                else self._wanted(tally, record, limit)
            )
            if count:
                count = limit if self._can_stop[drafter] else count
                asks[drafter].append((index, count))
                most = max(most, count)
        return most

    def _wanted_free(self, tally: Tally, record: Record, limit: int) -> int:
        tally.probe = 0.0
        if tally.is_new:  # it may have much to read: out of the purse, while there is something in it
            seconds = record.entry.value * tally.length
            return (
                limit
                if self._may_enter(record, seconds) or self._may_probe(tally, seconds + self._judging.value)
                else 0
            )
        return (
            limit
            if (tally.credit > 0 and self.accounts.purse > 0) or self._may_probe(tally, self._cost(record))
            else 0
        )

    def _cost(self, record: Record) -> float:
        """Seconds of asking a drafter for one request, with everything that follows from it on this side."""
        return record.seconds.value + record.learning.value + self._judging.value

    def _wanted(self, tally: Tally, record: Record, limit: int) -> int:
        """Of a drafter that runs a model: as many nodes as pay by the rates seen at each depth, or one as a
        probe.
        """
        self._look(tally, record, limit)
        tally.probe = 0.0
        length = self._round[0] if record is self._round_of else 0
        count = max(tally.count, length if length <= limit else 0)
        if count and (
            self._may_enter(record, record.entry.value * tally.length)
            if tally.is_new
            else self.accounts.purse > 0
        ):
            return count
        return 1 if self._may_probe(tally, tally.first) else 0

    def _look(self, tally: Tally, record: Record, limit: int) -> None:
        """What asking it promises now, every few steps."""
        if self._num_steps < tally.next_look and limit >= tally.count:
            return
        tally.next_look = self._num_steps + LOOK_EVERY
        load, fixed, each = self._choice.load, record.line.fixed, record.line.each
        count, gained, added = best_count(load, self.costs, record, tally.factor, limit)
        base = self.costs.base(load.rows + 1)
        tally.count, tally.first, tally.promise = (
            count,
            fixed + (base[load.rows + 1] - base[load.rows] + each + load.by_row),
            0.0,
        )
        # drafts that are cut where they doubt gain more than those of average length; what they gained lately
        # is known
        if count:
            tally.promise = max(gained * load.price - added, tally.gain - fixed - each * count)

    def reconsider(
        self, drafter: int, asks: Sequence[tuple[int, int]], turns: Sequence[Turn], is_flying: bool = False
    ) -> list[tuple[int, int]]:  # fmt: skip
        """For whom it still pays to ask, now that others have answered. A sampled draft cannot be joined with
        others: it stands alone, so that whoever is asked after it would be asked in vain."""
        if self._records[drafter].is_free:
            return list(asks)
        kept, landing = [], LANDING * self._choice.load.seconds if is_flying else 0.0
        of_round = self._round[1] if self._records[drafter] is self._round_of else 0.0
        for index, count in asks:
            tally, answers = self._planned[index][drafter], self._asked.get(index, ())
            is_sampled, promise = (
                any(one.draft.q is not None for one in answers),
                max(tally.promise, of_round) + landing,
            )
            if is_sampled or (
                not tally.probe and any(self._choice.worth(one, turns[index]) > promise for one in answers)
            ):
                self.accounts.probes += tally.probe
                self._choice.prepaid -= tally.probe
            else:
                kept.append((index, count))
        return kept

    def _may_enter(self, record: Record, seconds: float) -> bool:
        """Read a request's whole text, while what others enter for in this step leaves something in the
        purse; a model may be invested in."""
        choice, accounts = self._choice, self.accounts
        may_enter = accounts.purse > choice.entering + (0.0 if record.is_free else seconds)
        if not may_enter and (
            record.is_free or not accounts.may_invest(choice.entering + seconds, choice.load)
        ):
            return False
        choice.entering += seconds
        return True

    def _may_probe(self, tally: Tally, seconds: float) -> bool:
        if not self.accounts.may_probe(seconds):
            return False
        tally.probe = seconds
        self._choice.prepaid += seconds
        return True

    def heard(
        self, drafter: int, asks: Sequence[tuple[int, int]], drafts: Sequence[Draft], seconds: float | None
    ) -> None:
        """What a drafter answered, and how long it took; None if that says nothing."""
        record, entering, num_drafted = self._records[drafter], 0, 0
        for (index, _), draft in zip(asks, drafts, strict=True):
            tally, count = self._planned[index][drafter], len(draft.tree.tokens) - 1
            num_drafted += count or 1
            if tally.is_new:
                entering += tally.length
                tally.enter(record, self._cost(record))
            if count:
                self._asked.setdefault(index, []).append(Asked(draft, record, tally))
            else:
                tally.saved(record, 0.0, self._cost(record))
        if seconds is None:
            self._choice.spent += record.seconds.value * len(asks)
            return
        if entering:
            record.entry.add(seconds / entering)
            if not record.is_free:
                self.accounts.invest(seconds)
                self._choice.entered += seconds
                return
        else:
            record.seconds.add(seconds / len(asks))
            if not record.is_free:
                record.line.add(num_drafted / len(asks), seconds / len(asks))
        self._choice.spent += seconds

    def shown(self, drafter: int, num_requests: int, seconds: float) -> None:
        """A drafter took so long to look at what a pass said."""
        self._records[drafter].learning.add(seconds / max(num_requests, 1))

    def trim(self, turns: Sequence[Turn], proposed: Proposed) -> dict[int, Draft]:
        choice = self._choice
        for index, drafts in proposed.items():
            if index not in self._asked:
                tallies = self._planned[index]
                self._asked[index] = [Asked(draft, self._records[d], tallies[d]) for d, draft in drafts]
            asked = self._asked[index]
            if (
                len(asked) > 1 and asked[-1].draft.q is not None
            ):  # that it would be used was decided before it was drawn
                self._asked[index] = asked[-1:]
        choice.make(turns, self._asked)
        return choice.checked

    def observe(
        self, turns: Sequence[Turn], verdicts: Mapping[int, Verdict], seconds: float | None, whole: float | None = None
    ) -> None:  # fmt: skip
        """seconds: from the start of the pass to the commit; whole: from the last commit to this one. None if
        they would say nothing.
        """
        if len(turns) != self._num_observed:  # a step in which requests came or went takes longer
            self._num_observed, whole = len(turns), None
        if self.looks.is_quiet:
            if len(turns) == self._choice.load.speaking:
                self.accounts.note_plain(self._choice.load, whole, self.looks.seconds)
            return
        whole = None if whole is None else whole - self._choice.entered
        load, num_nodes, num_accepted = self._choice.load, 0, 0
        for index, draft in self._choice.checked.items():
            num_nodes += draft.num_drafted
            num_accepted += verdicts[index].num_accepted if index in verdicts else 0
        self._since_plain = self._since_plain + 1 if num_nodes else 0
        if seconds is not None and load.rows == load.speaking:
            self.costs.observe(
                load.rows + num_nodes, load.cached, load.cached + self._choice.seen_by_nodes, seconds
            )
        if self._asked or self._shadowed:
            for index, verdict in verdicts.items():
                name = turns[index].request.id
                tallies = self._tallies.get(name)  # None: the request has just ended
                if tallies is not None and (index in self._asked or name in self._shadowed):
                    refund, has_shadow = learn(
                        tallies, self._asked.get(index, ()), self._choice.checked.get(index), verdict
                    )
                    self.accounts.probes += refund  # whoever is right is soon asked again
                    (self._shadowed.add if has_shadow else self._shadowed.discard)(name)
        if num_nodes or self._asked or self._choice.spent:
            self.accounts.settle(
                load, num_accepted, whole, self._choice.added + self._choice.spent, self._choice.prepaid
            )
        elif (
            not self.looks.is_waking
        ):  # with models that are shown every pass a step takes longer than it would without
            self.accounts.note_plain(load, whole, self.looks.seconds)

    def may_fly(self, drafter: int, asks: Sequence[tuple[int, int]]) -> bool:
        """Not where an ask is a probe, paid for one draft, nor, unless drafts are weighed on the way, for a
        request that is new to it.
        """
        may_be_new = getattr(self.drafters[drafter], "is_weighing", False)
        tallies = [self._planned[index][drafter] for index, _ in asks]
        return not any(tally.probe or (tally.is_new and not may_be_new) for tally in tallies)

    def lookouts(self, drafter: int, turns: Sequence[Turn]) -> list[tuple[int, list[tuple[int, int]]]]:
        """While one flies: the others that cost next to nothing, as far as they are worth asking. What they
        say is about the round after the one that has just landed; a better draft ends the flight."""
        found, cap = [], self._caps.of(self._choice.load)
        for index, turn in enumerate(turns):
            self._look(self._planned[index][drafter], self._records[drafter], turn.draft_limit)
        for number in self.order:
            record, name = self._records[number], self.drafters[number].name
            asks = []
            for index, turn in enumerate(turns) if record.is_free and number != drafter else ():
                limit = min(turn.draft_limit, cap)
                is_wanted = (
                    turn.request.params.speculative_method in (None, name) and not turn.request.is_finished
                )
                if is_wanted and limit > 0 and self._wanted_free(self._planned[index][number], record, limit):
                    asks.append((index, limit))
            if asks:
                found.append((number, asks))
        return found

    def flown(
        self, drafter: int, turns: Sequence[Turn], drafts: Mapping[int, Draft], verdicts: Mapping[int, Verdict], seconds: float | None
    ) -> None:  # fmt: skip
        """What a round took beyond the pass that is expected to check it is what drafting took: together they
        are what was measured, and what passes take is learned from those that the host saw alone."""
        load, record, count = self._choice.load, self._records[drafter], len(drafts)
        num_nodes = sum(draft.num_drafted for draft in drafts.values())
        self._choice.added = load.row_seconds(num_nodes) * num_nodes
        if seconds is not None:
            drafting = max(seconds - load.seconds - self._choice.added, 0.0)
            self._choice.added = max(min(seconds - load.seconds, self._choice.added), 0.0)
            self._choice.spent += drafting
            record.rounds.setdefault(load.speaking, Median(seconds)).add(seconds)
            record.seconds.add(drafting / count)
            record.line.add(num_nodes / count, drafting / count)
        for index, draft in drafts.items():
            one = Asked(draft, record, self._planned[index][drafter])
            for other in self._asked.get(index, ()):
                other.tally.saved(other.record, 0.0, self._cost(other.record))
            one.tally.saved(
                record, sum(one.scores[1:]) * load.price - self._choice.added / count, self._cost(record)
            )
            self._asked.setdefault(index, []).append(one)
        self._choice.checked = dict(drafts)
        self.observe(turns, verdicts, None, seconds)
        self._num_steps += 1
        self._asked, self._choice.spent = {}, 0.0  # what others said was about the first round
        self._choice.can_lose = self.accounts.purse > 0

    def course(self, drafter: int, other: int | None, length: int) -> Course:
        """As `reconsider` and `trim` would decide for the one request of this step."""
        (tallies,) = self._planned.values()
        beside = None if other is None else (self._records[other], tallies[other])
        return course_of(self._choice.load, self._records[drafter], tallies[drafter], beside, length)

    def replayed(
        self, turns: Sequence[Turn], answers: Sequence[tuple[int, Draft]], checked: Draft, verdicts: Mapping[int, Verdict], drafting: float,
        seconds: float | None,
    ) -> None:  # fmt: skip
        """A round that went by `course`: as if it had been a step of its own."""
        choice, ((index, tallies),) = self._choice, self._planned.items()
        for tally, record in zip(tallies, self._records, strict=True):
            if tally.is_new:
                tally.enter(record, record.seconds.value)
        asked = [Asked(draft, self._records[number], tallies[number]) for number, draft in answers]
        if len(asked) == 2:
            compare(*asked)
        choice.added, choice.spent = (
            choice.load.row_seconds(checked.num_drafted) * checked.num_drafted,
            drafting,
        )
        for one in asked:
            record, is_checked = one.record, checked.num_drafted > 0 and one.draft.source == checked.source
            if not record.is_free:
                record.seconds.add(drafting)
                record.line.add(one.draft.num_drafted, drafting)
            one.tally.saved(
                record, choice.worth(one, turns[index]) if is_checked else 0.0, record.seconds.value
            )
        choice.checked, self._asked = ({index: checked} if checked.num_drafted else {}), {index: asked}
        self.observe(turns, verdicts, None, seconds)
        self._num_steps += 1
        self._asked, choice.spent, choice.can_lose = {}, 0.0, self.accounts.purse > 0

    def charge(self, seconds: float) -> None:
        """Planning and judging took so long in this step."""
        if self.looks.is_quiet:
            return
        num_asked = 0
        for asked in self._asked.values():
            num_asked += len(asked)
        if num_asked:
            self._judging.add(seconds / num_asked)
            if not self.accounts.is_settled:
                self.accounts.pay(seconds, self._choice.load)

    def release(self, request: Request) -> None:
        self.looks.left(max(self._choice.load.speaking, 1))
        self._tallies.pop(request.id, None)
        self._shadowed.discard(request.id)
