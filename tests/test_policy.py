"""The second promise in a world whose clock is only added up: never slower, near the best where drafters are
good, quick to notice change.

The first promise is tested in tests/laws, where engines with this policy say what the reference says.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise

import pytest
import torch
from paceline.engine.accounts import MOST_OWED, MOST_SAVED, Accounts
from paceline.engine.calibrate import Calibration, Tally, cell_of
from paceline.engine.load import Load
from paceline.engine.looks import SHARE, Looks
from paceline.engine.nodes import admitted

from paceline.core.params import SamplingParams
from paceline.core.tree import Tree
from paceline.core.types import Cached, Draft, Request, ScheduledRequest
from paceline.engine.policy.auto import AutoPolicy
from paceline.engine.policy.base import FixedPolicy
from paceline.engine.policy.cost import CostTable, speedup
from paceline.engine.stats import AFTER, SpecStats, Suspicion
from tests.simulation import CPU, FLAT, STEEP, Skilled, World, auto, speed

TABLES = {"cpu": CPU, "flat": FLAT, "steep": STEEP}


def sometimes(share: float) -> Callable[[Request, int], bool]:
    """Right at this share of all positions, which ones being fixed."""

    def is_right(request: Request, position: int) -> bool:
        digest = hashlib.blake2b(f"{request.id}/{position}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") < share * 2**32

    return is_right


def bound(table: Mapping[int, float], most: int) -> float:
    """The best that always being right could give."""
    costs = CostTable(table)
    return max(speedup(1.0, k, 0, costs.pass_seconds(k + 1) / costs.pass_seconds(1)) for k in range(most + 1))


@pytest.mark.parametrize("claim", [None, 0.2, 0.9])
@pytest.mark.parametrize("is_free", [True, False])
@pytest.mark.parametrize("table", TABLES)
def test_a_drafter_that_is_always_wrong_costs_next_to_nothing(
    table: str, is_free: bool, claim: float | None
) -> None:
    world = auto(TABLES[table], Skilled(sometimes(0), claim, 0.02 if is_free else 0.5, is_free))
    for _ in range(3):
        world.run(1, 128)
    assert speed(world) >= 0.97


@pytest.mark.parametrize("table", TABLES)
def test_a_drafter_that_is_always_right_is_near_the_bound(table: str) -> None:
    world = auto(TABLES[table], Skilled(sometimes(1), None, 0.0))
    for _ in range(3):
        world.run(1, 128)
    assert speed(world) >= 0.9 * bound(TABLES[table], 8)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("is_free", [True, False])
@pytest.mark.parametrize("table", TABLES)
def test_what_is_between_is_never_slower_and_near_the_best_fixed_length(
    table: str, is_free: bool, share: float
) -> None:
    cost = 0.02 if is_free else 0.5
    world = auto(TABLES[table], Skilled(sometimes(share), None, cost, is_free))
    for _ in range(5):
        world.run(1, 200)
    fixed = []
    for k in (0, 1, 2, 3, 4, 8):
        one = World(FixedPolicy(Skilled(sometimes(share), None, cost, is_free), k), TABLES[table])
        one.run(1, 400)
        fixed.append(speed(one))
    assert speed(world) >= 0.97
    assert speed(world) >= 0.93 * max(fixed)


@pytest.mark.parametrize("num_requests", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("table", TABLES)
def test_never_slower_in_a_batch(table: str, share: float, num_requests: int) -> None:
    world = auto(TABLES[table], Skilled(sometimes(share), 0.8, 0.02))
    world.run(num_requests, 150)
    plain = CostTable(TABLES[table]).pass_seconds(num_requests) / num_requests
    assert world.num_tokens * plain / world.seconds >= 0.98


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.6, 0.9])
def test_rounds_are_never_slower_and_gain_where_drafts_are_good(share: float) -> None:
    """A pass over nine rows costs little more than one; a draft of eight half as much, and in rounds a
    quarter.
    """
    worlds = [auto(FLAT, Skilled(sometimes(share), 0.8, 0.3, is_free=False)) for _ in range(2)]
    worlds[1].num_rounds = 6
    for world in worlds:
        for _ in range(4):
            world.run(1, 150)
    usual, rounds = map(speed, worlds)
    assert rounds >= 0.96
    if share >= 0.6:
        assert worlds[1].num_flights > 50
        assert rounds > 1.05 * usual


def test_what_rounds_take_is_what_is_expected_of_them() -> None:
    """Drafting seems dear to whoever waits for it, and passes seem cheaper than they are; the sum of both is
    learned.
    """
    world = auto(FLAT, Skilled(sometimes(0.7), 0.8, 0.3, is_free=False), profile={1: 5.0, 64: 5.1})
    world.num_rounds, world.share = 4, 0.25
    world.run(1, 100)
    policy = world.policy
    assert isinstance(policy, AutoPolicy)
    line, load = policy._records[0].line, policy._choice.load
    expected = load.seconds + load.row_seconds(8) * 8 + line.fixed + 8 * line.each
    assert expected == pytest.approx(CostTable(FLAT).pass_seconds(9) + 0.25 * 8 * 0.3, rel=0.02)


class Copying(Skilled):
    """Knows every other stretch of a text by heart, and when it does."""

    def _draft(self, request: Request, count: int) -> Draft:
        self.claim = 0.95 if self.is_right(request, request.num_tokens) else 0.05
        return super()._draft(request, count)


def test_rounds_end_where_another_promises_more() -> None:
    def made(has_lookouts: bool) -> tuple[World, float]:
        free = Copying(lambda request, position: position % 160 < 80, None, 0.02, length=16, name="free")
        world = auto(FLAT, free, Skilled(sometimes(0.6), 0.8, 0.3, is_free=False, name="model"))
        world.num_rounds, world.share = 16, 0.25
        if not has_lookouts:
            world.policy.lookouts = lambda drafter, turns: []  # type: ignore[method-assign]
        for _ in range(4):
            world.run(1, 60)
        return world, speed(world)

    (with_them, fast), (without, slow) = made(True), made(False)
    assert fast > 1.08 * slow
    assert with_them.num_flights > 20
    assert without.num_flights > 20


def test_a_fixed_length_loses_where_the_policy_does_not() -> None:
    """That the tests above can fail: four tokens always, from a drafter that is right one time in three, with
    eight requests.
    """
    drafter = Skilled(sometimes(0.33), None, 0.02)
    world = World(FixedPolicy(drafter, 4), CPU)
    world.run(8, 100)
    assert world.num_tokens * CostTable(CPU).pass_seconds(8) / 8 / world.seconds < 0.5


@pytest.mark.parametrize("is_free", [True, False])
def test_it_recovers_when_the_text_changes(is_free: bool) -> None:
    """Right up to 600 tokens, then wrong for 600, then right: the last part is as fast as the first."""
    drafter = Skilled(
        lambda request, position: not 600 <= position < 1200, None, 0.02 if is_free else 0.3, is_free
    )
    world = auto(CPU, drafter)
    marks = []
    request = world.new_request()
    while request.num_tokens < 1800:
        world.step([request])
        marks.append((request.num_tokens, world.seconds))
    took = [
        max(s for n, s in marks if n <= end) - min(s for n, s in marks if n > begin)
        for begin, end in pairwise((4, 600, 1200, 1800))
    ]
    plain = CostTable(CPU).pass_seconds(1) * 600
    assert plain / took[0] > 1.8
    assert plain / took[1] > 0.94
    assert plain / took[2] > 0.75 * plain / took[0]


def test_a_wrong_profile_is_not_believed_for_long() -> None:
    """It says that rows are free; they are not, and the drafter is wrong."""
    world = auto(CPU, Skilled(sometimes(0), 0.9, 0.02), profile={1: 5.1, 2: 5.1, 16: 5.2})
    world.run(1, 2000)
    assert speed(world) >= 0.94
    world = auto(CPU, Skilled(sometimes(0.5), None, 0.02), profile={1: 5.1, 2: 5.1, 16: 5.2})
    world.run(1, 2000)
    assert speed(world) >= 1.3


def test_the_confident_request_gets_the_nodes() -> None:
    """Two requests, one drafter: right for one of them, wrong for the other."""
    world = auto(CPU, Skilled(lambda request, position: int(request.id) % 2 == 0, None, 0.02))
    world.run(2, 300)
    checked = sorted(world.checked.values())
    assert checked[0] < 0.1 * checked[1]
    plain = CostTable(CPU).pass_seconds(2) / 2
    assert world.num_tokens * plain / world.seconds > 1.2


def test_of_two_drafters_the_better_is_followed_and_the_other_left_alone() -> None:
    good, bad = (
        Skilled(sometimes(0.8), None, 0.02, name="good"),
        Skilled(sometimes(0.0), 0.9, 0.2, name="bad"),
    )
    world = auto(CPU, good, bad)
    world.run(1, 800)
    alone = auto(CPU, Skilled(sometimes(0.8), None, 0.02))
    alone.run(1, 800)
    assert speed(world) > 0.95 * speed(alone)
    assert bad.num_asked < 0.3 * good.num_asked


def test_nobody_is_asked_where_no_draft_can_pay() -> None:
    drafter = Skilled(sometimes(1.0), None, 0.02)
    world = auto(STEEP, drafter)
    world.run(4, 50)
    assert drafter.num_asked == 0


def test_where_no_draft_can_pay_it_looks_seldom_and_looks_again_when_requests_leave() -> None:
    drafter = Skilled(sometimes(1.0), None, 0.0)
    policy = AutoPolicy([drafter], CostTable({1: 1.0, 2: 1.05, 4: 4.0, 8: 8.0}))
    world = World(policy, {1: 1.0, 2: 1.05, 4: 4.0, 8: 8.0})
    requests = [world.new_request() for _ in range(4)]
    looks = []
    for _ in range(40):
        world.step(requests)
        looks.append(not policy.looks.is_quiet)
    assert drafter.num_asked == 0
    assert 2 <= sum(looks) <= 4
    world.step(requests[:1])
    assert drafter.num_asked == 1


def test_a_look_that_asks_nobody_is_paid_for_before_the_next() -> None:
    drafter = Skilled(sometimes(0.0), 0.9, 0.02)
    policy = AutoPolicy([drafter], CostTable(FLAT))
    world = World(policy, FLAT)
    requests = [world.new_request() for _ in range(4)]
    looks = []
    for _ in range(400):
        world.step(requests)
        policy.looked(0.1)
        policy.charge(0.1)
        looks.append(not policy.looks.is_quiet)
    assert sum(looks[200:]) < 50, "a fiftieth of a step for each, and a quarter of a hundredth of all time"
    policy.looks.quiet = 40
    policy.release(requests[0])
    assert policy.looks.quiet == 30, "one of four is another"


def test_looks_are_due_when_they_are_paid_for_and_could_pay_for_something() -> None:
    load = Load(
        [ScheduledRequest(World(FixedPolicy(None, 0), FLAT).new_request(), 1) for _ in range(10)],
        CostTable(FLAT),
    )
    accounts = Accounts(5.0)
    looks = Looks(accounts, load, least_cost=0.1)
    assert not looks.are_over(10)
    looks.begin(load)
    looks.end(10, quiet=0)
    looks.is_vain = True
    looks.took(0.25)
    assert looks.quiet == int(0.25 / (SHARE * 0.25 * load.seconds)), (
        "a quarter as much is risked among four or more"
    )
    assert looks.are_over(9)
    assert not looks.are_over(8), "others may be worth asking about"
    looks.quiet, accounts.purse, accounts.probes = 0, -1.0, 0.0
    assert looks.are_over(8), "nothing could be paid for"
    assert not looks.are_over(1)
    for _ in range(200):
        looks.skip()
    assert not looks.are_over(8), "by now a probe could be"


def test_the_purse_is_settled_by_what_steps_take() -> None:
    load = Load([ScheduledRequest(World(FixedPolicy(None, 0), FLAT).new_request(), 1)], CostTable(FLAT))
    accounts = Accounts(5.0)
    accounts.purse = 0.0
    accounts.settle(load, 0, 7.0, known=1.0)
    assert accounts.purse == -1.0, "nothing is known of steps without drafts"
    assert not accounts.is_settled
    for whole in (
        6.5,
        6.5,
        7.0,
    ):  # one second of the host beside a pass of five, and half a second for looking around
        accounts.note_plain(load, whole, 0.5)
    accounts.purse = 0.0
    accounts.settle(load, 2, 10.0, known=1.0)
    assert accounts.purse == pytest.approx(3 * 6.0 - 10.0)
    accounts.purse = 0.0
    accounts.settle(load, 0, 1000.0, known=1.0)  # somebody paused the process
    assert accounts.purse == pytest.approx(-3 * 6.0)
    for _ in range(9):
        accounts.settle(load, 0, 20.0, known=1.0)
    assert accounts.purse == -MOST_OWED * 5.0


def test_what_drafts_have_gained_may_be_risked_among_as_many_requests_only() -> None:
    four, sixteen = (
        Load(
            [ScheduledRequest(World(FixedPolicy(None, 0), FLAT).new_request(), 1) for _ in range(number)],
            CostTable(FLAT),
        )
        for number in (4, 16)
    )
    accounts = Accounts(5.0)
    accounts.pay(-100 * four.seconds, four)
    accounts.earn(four, 1)
    assert accounts.purse == pytest.approx((MOST_SAVED / 4 + MOST_SAVED) * four.seconds)
    accounts.earn(sixteen, 1)
    assert accounts.purse == pytest.approx(MOST_SAVED / 4 * sixteen.seconds), "sixteen have gained nothing"


def test_what_is_invested_is_paid_back_out_of_gains_and_does_not_end_drafting() -> None:
    load = Load([ScheduledRequest(World(FixedPolicy(None, 0), FLAT).new_request(), 1)], CostTable(FLAT))
    accounts = Accounts(5.0)
    assert accounts.may_invest(16 * load.seconds, load)
    assert not accounts.may_invest(17 * load.seconds, load)
    purse = accounts.purse
    accounts.invest(16 * load.seconds)
    assert accounts.purse == purse
    assert not accounts.may_invest(load.seconds, load)
    accounts.pay(-8 * load.seconds, load)
    assert accounts.purse == purse + 4 * load.seconds, "the other half goes back"
    assert accounts.may_invest(12 * load.seconds, load), "four of sixteen are back, and eight were gained"
    assert not accounts.may_invest(13 * load.seconds, load)
    accounts.purse = 0.0
    assert not accounts.may_invest(load.seconds, load)


def test_rounds_of_several_are_tried_where_drafts_for_one_alone_would_not_pay() -> None:
    """A draft costs a third of a pass, for one as for four, and a token a quarter of it."""

    class Flying(Skilled):
        def usual_round(self, num_requests: int) -> int:
            return 8 if num_requests <= 4 else 0

    model = Flying(sometimes(0.7), 0.7, 0.2, is_free=False, name="model")
    policy = AutoPolicy([model], CostTable(FLAT), known={"model": (0.4, (0.7,))})
    world = World(policy, FLAT, num_rounds=6, share=0.25)
    world.run(4, 60)
    assert world.num_flights > 20
    assert world.num_tokens * CostTable(FLAT).pass_seconds(4) / 4 / world.seconds > 1.3
    assert policy._records[0].rounds[4].value == pytest.approx(
        CostTable(FLAT).pass_seconds(36) + 0.25 * 32 * 0.2
    )


def test_a_time_that_says_nothing_changes_no_record() -> None:
    policy = AutoPolicy([Skilled(sometimes(1.0))], CostTable(FLAT))
    turn = ScheduledRequest(World(policy, FLAT).new_request(), 1, draft_limit=3)
    plan = policy.plan([turn])
    before = policy._records[0].entry.value, policy._records[0].seconds.value
    policy.heard(0, plan.asks[0], policy.drafters[0].propose([turn.request], [3]), None)
    assert (policy._records[0].entry.value, policy._records[0].seconds.value) == before
    assert policy._choice.spent == before[1]


def test_a_request_that_refuses_drafts_gets_none() -> None:
    policy = AutoPolicy([Skilled(sometimes(1.0))], CostTable(FLAT))
    turns = [_turn(limit) for limit in (0, 3)]
    plan = policy.plan(turns)
    assert plan.nodes[0] == 0
    assert 0 < plan.nodes[1] <= 3
    assert [index for index, _ in plan.asks[0]] == [1]


def _turn(draft_limit: int, temperature: float = 1.0) -> Turn:
    request = Request(
        f"t{draft_limit}", SamplingParams(temperature=temperature), [1, 2], 2, 0, cache=Cached([], 1)
    )
    return ScheduledRequest(request, 1, draft_limit=draft_limit)


def test_reading_a_long_prompt_does_not_empty_the_purse() -> None:
    """A chunk of a prompt speaks for nobody. What was saved before must be there when the answer begins."""
    policy = AutoPolicy([Skilled(sometimes(1), None, 0.0)], CostTable(CPU))
    purse, request = policy.accounts.purse, Request("long", SamplingParams(), list(range(900)), 900, 0)
    policy.plan([ScheduledRequest(request, 512)])
    assert policy.accounts.purse == purse > 0


def test_costs_with_steps_are_looked_at_beyond_the_first_drop() -> None:
    """One node more costs a second pass, seven more cost nothing further."""
    scores = [0.9**i for i in range(1, 8)]
    assert admitted(scores[:1], 1, 1.0, [1.0], 1.0) == 0
    assert admitted(scores, 1, 1.0, [1.0] * 7, 1.0) == 7


@pytest.mark.parametrize("own", [0.01, 0.3, 0.99])
def test_a_sampled_tokens_own_chance_never_decides_whether_it_is_checked(own: float) -> None:
    """Non-anticipation: kept or cut, a node is so whatever its drafter thinks of the token it has drawn."""
    kept = set()
    for claim in (own, 0.5):
        policy = AutoPolicy(
            [Skilled(sometimes(0.6), is_free=False)], CostTable({1: 1.0, 2: 1.3, 3: 1.7, 8: 4.0})
        )
        policy.accounts.purse = 1e9
        turn = _turn(4)
        plan = policy.plan([turn])
        turn.num_lookahead_tokens = 4
        assert plan.asks[0]
        q = {n: torch.full((8,), 1 / 8) for n in range(3)}
        draft = Draft(Tree.chain(2, (3, 4, 5)), "m", q, (1.0, 0.9, 0.9 * claim, 0.9 * claim * 0.9))
        kept.add(policy.trim([turn], {0: [(0, draft)]})[0].num_drafted >= 2)
    assert len(kept) == 1


def test_what_comes_before_a_sampled_token_may_decide() -> None:
    """That the test above can fail: the parent's chance cuts the child."""
    lengths = []
    for first in (0.02, 0.98):
        policy = AutoPolicy(
            [Skilled(sometimes(0.6), is_free=False)], CostTable({1: 1.0, 2: 1.3, 3: 1.7, 8: 4.0})
        )
        turn = _turn(4)
        policy.plan([turn])
        turn.num_lookahead_tokens = 4
        draft = Draft(
            Tree.chain(2, (3, 4, 5)),
            "m",
            {n: torch.full((8,), 1 / 8) for n in range(3)},
            (1.0, first, first * 0.9, first * 0.8),
        )
        checked = policy.trim([turn], {0: [(0, draft)]})[0]
        assert checked.q is not None
        assert set(checked.q) == set(range(checked.num_drafted))
        lengths.append(checked.num_drafted)
    assert lengths[0] < lengths[1]


def test_claims_become_what_was_seen() -> None:
    calibration = Calibration()
    cell = cell_of(1, 0.9)
    assert calibration.chance(cell, 0.9) == pytest.approx(0.9)
    for i in range(200):
        calibration.observe(cell, 0.9, i % 5 == 0)
    assert calibration.chance(cell, 0.9) == pytest.approx(0.2, abs=0.05)
    assert calibration.chance(cell_of(2, 0.9), 0.9) == pytest.approx(0.9), "another depth is another matter"
    assert calibration.chance(cell_of(1, 0.4), 0.4) == pytest.approx(0.4), "so is another claim"


def test_a_request_has_a_factor_of_its_own() -> None:
    tally = Tally()
    for _ in range(60):
        tally.note(0.5, True)
    assert tally.factor > 1.4
    for _ in range(60):
        tally.note(0.5, False)
    assert tally.factor < 0.5


def test_drafts_are_joined_and_each_token_keeps_its_source() -> None:
    costs = CostTable({1: 1.0, 64: 1.0001})
    policy = AutoPolicy([Skilled(sometimes(1.0), name="a"), Skilled(sometimes(1.0), name="b")], costs)
    turn = _turn(8, temperature=0.0)
    policy.plan([turn])
    turn.num_lookahead_tokens = 8
    a = Draft(Tree((2, 3, 4), (-1, 0, 1)), "a", chances=(1.0, 0.8, 0.6))
    b = Draft(Tree((2, 3, 5, 6), (-1, 0, 1, 0)), "b", chances=(1.0, 0.7, 0.4, 0.2))
    joined = policy.trim([turn], {0: [(0, a), (1, b)]})[0]
    paths = {
        tuple(joined.tree.tokens[n] for n in joined.tree.ancestors(node)): joined.source_of(node)
        for node in range(1, 5)
    }
    assert paths == {(2, 3): "a", (2, 3, 4): "a", (2, 3, 5): "b", (2, 6): "b"}


def test_where_only_chains_may_be_checked_only_a_chain_is() -> None:
    policy = AutoPolicy([Skilled(sometimes(1.0))], CostTable({1: 1.0, 64: 1.0001}), has_trees=False)
    turn = _turn(8, temperature=0.0)
    policy.plan([turn])
    turn.num_lookahead_tokens = 8
    tree = Draft(Tree((2, 3, 4, 5, 6), (-1, 0, 0, 1, 2)), "a", chances=(1.0, 0.4, 0.5, 0.3, 0.45))
    assert policy.trim([turn], {0: [(0, tree)]})[0].tree == Tree.chain(2, (4, 6))


def test_a_model_is_not_asked_where_a_free_draft_promises_more() -> None:
    free = Skilled(lambda request, position: position % 40 < 20, None, 0.02, name="free")
    model = Skilled(sometimes(0.7), None, 0.3, is_free=False, name="model")
    world = auto(CPU, free, model)
    request, asked = world.new_request(), {True: 0, False: 0}
    while request.num_tokens < 1600:
        is_free_right, before = request.num_tokens % 40 < 16, model.num_asked
        free.claim = 0.95 if is_free_right else 0.05
        world.step([request])
        asked[is_free_right] += model.num_asked - before
    assert asked[True] < 0.3 * asked[False]
    assert speed(world) > 1.5


def test_both_together_are_not_slower_than_either() -> None:
    def made(*names: str) -> float:
        known = {
            "free": Skilled(sometimes(0.5), 0.5, 0.02, name="free"),
            "model": Skilled(
                lambda r, p: sometimes(0.6)(r, p + 10**6), 0.6, 0.3, is_free=False, name="model"
            ),
        }
        world = auto(CPU, *(known[name] for name in names))
        for _ in range(20):  # of few requests some are luckier than others
            world.run(1, 200)
        return speed(world)

    assert made("free", "model") > 0.97 * max(made("free"), made("model"))


def test_a_sampled_draft_stands_alone_and_nobody_is_asked_after_it() -> None:
    drafters = [
        Skilled(sometimes(1), name="free"),
        *(Skilled(sometimes(1), is_free=False, name=name) for name in "ab"),
    ]
    policy, turn = AutoPolicy(drafters, CostTable(FLAT)), _turn(4)
    plan = policy.plan([turn])
    turn.num_lookahead_tokens = 4
    assert [len(asks) for asks in plan.asks] == [1, 1, 1]
    assert policy.order == (0, 1, 2)
    free = Draft(Tree.chain(2, (7, 8)), "free", chances=(1.0, 0.01, 0.001))
    drawn = Draft(Tree.chain(2, (3, 4)), "a", {n: torch.full((8,), 1 / 8) for n in range(2)}, (1.0, 0.9, 0.8))
    policy.heard(0, plan.asks[0], [free], 0.0)
    assert policy.reconsider(1, plan.asks[1], [turn]) == plan.asks[1]
    policy.heard(1, plan.asks[1], [drawn], 0.0)
    assert policy.reconsider(2, plan.asks[2], [turn]) == []
    checked = policy.trim([turn], {0: [(0, free), (1, drawn)]})[0]
    assert checked.source == "a"
    assert checked.q is not None


def test_a_long_success_is_doubted_after_a_few_mistakes() -> None:
    tally = Tally()
    for _ in range(200):
        tally.note(0.9, True)
    assert tally.factor > 1
    for _ in range(5):
        tally.note(0.9, False)
    assert tally.factor < 0.5


def test_mistakes_that_were_to_be_expected_are_not_held_against_it() -> None:
    tally = Tally()
    for i in range(300):
        tally.note(0.2, i % 5 == 0)
    assert 0.6 < tally.factor < 1.4


def test_sums_by_source_and_depth() -> None:
    stats = SpecStats()
    tree = Draft(Tree((1, 2, 3, 4), (-1, 0, 0, 2)), "a", sources=("a", "a", "b", "b"))
    stats.record(tree, (2, 3), 3)
    stats.record(Draft(Tree.chain(1, (2, 3)), "a"), (1,), 2)
    stats.record_plain()
    assert (stats.num_steps, stats.num_tokens, stats.num_drafted, stats.num_accepted, stats.num_own) == (
        3,
        6,
        5,
        3,
        3,
    )
    assert stats.drafted_by_source == {"a": 3, "b": 2}
    assert stats.accepted_by_source == {"a": 1, "b": 2}
    assert stats.lengths == {3: 1, 2: 1, 0: 1}
    assert (stats.drafted_at, stats.accepted_at) == ([2, 2], [2, 1])
    assert stats.by_source["a"].acceptance == [0.5, 0.0]
    assert stats.by_source["b"].acceptance == [1.0, 1.0]


def test_a_drafter_that_is_never_right_is_reported_once() -> None:
    suspicion = Suspicion()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(3 * AFTER):
            suspicion.note("head", False)
            suspicion.note("ngram", i % 20 == 0)
    assert [str(warning.message).split(" times")[0] for warning in caught] == ["the drafter head was right 0"]


def test_a_model_that_does_not_pay_for_so_many_requests_sleeps_and_wakes_when_they_leave() -> None:
    head = Skilled(
        lambda request, position: position % 8 < 5, claim=0.62, seconds=0.4, is_free=False, length=4
    )
    world = auto(CPU, head)
    requests = [world.new_request() for _ in range(8)]
    for _ in range(100):
        world.step(requests)
    before = head.num_asked
    plan = world.policy.plan([ScheduledRequest(request, 1, draft_limit=64) for request in requests])
    assert plan.asleep == {0}
    assert not plan.asks or not plan.asks[0]
    for _ in range(100):
        world.step(requests)
    assert head.num_asked == before
    for _ in range(40):
        world.step(requests[:1])
    assert not world.policy.plan([ScheduledRequest(requests[0], 1, draft_limit=64)]).asleep
    assert head.num_asked > before + 30


def test_a_sleeping_model_is_woken_now_and_then() -> None:
    """Wrong at first, so that it is put to sleep before it is ever asked; right since long when it is
    woken.
    """
    head = Skilled(lambda request, position: position > 300, None, seconds=0.4, is_free=False, length=4)
    world = auto(FLAT, head)
    requests = [world.new_request() for _ in range(8)]
    for _ in range(480):
        world.step(requests)
    assert head.num_asked == 0
    for _ in range(320):
        world.step(requests)
    assert head.num_asked > 8 * 200, "and then it pays"
