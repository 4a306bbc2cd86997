"""A policy decides time, never text: here its time, where a clock is added up. Never slower than
plain decoding, near the best where drafters are good, quick to notice change.

That texts stay what they are is tested in tests/laws: engines with this policy emit what the reference emits.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import pairwise

import pytest
import torch

from paceline.core.tree import Tree
from paceline.core.types import Draft, Request, ScheduledRequest
from paceline.engine.policy.auto import AutoPolicy
from paceline.engine.policy.base import FixedPolicy
from paceline.engine.policy.cost import CostTable
from paceline.engine.policy.switch import CREDIT, FIRST_OFF, MOST_OFF, NUM_PLAIN, Switch
from paceline.engine.stats import AFTER, SpecStats, Suspicion
from paceline.measure.roofline import speedup
from tests.passes import ancestors
from tests.simulation import CPU, FLAT, STEEP, TABLES, Skilled, World, auto, sometimes

CHEAP = {1: 1.0, 64: 1.0001}


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
    world = auto(TABLES[table], Skilled(sometimes(0), claim, 0.02 if is_free else 0.5, is_free=is_free))
    for _ in range(3):
        world.run(1, 128)
    assert world.speed() >= 0.985
    for _ in range(9):
        world.run(1, 128)
    assert world.speed() >= 0.99, "in the long run"


@pytest.mark.parametrize("table", TABLES)
def test_a_drafter_that_is_always_right_is_near_the_bound(table: str) -> None:
    world = auto(TABLES[table], Skilled(sometimes(1)))
    for _ in range(3):
        world.run(1, 128)
    assert world.speed() >= 0.98 * bound(TABLES[table], 8)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("is_free", [True, False])
@pytest.mark.parametrize("table", ["cpu", "flat"])
def test_what_is_between_is_never_slower_and_near_the_best_fixed_length(
    table: str, is_free: bool, share: float
) -> None:
    """The best fixed length is known only afterwards, and here no request differs from another."""
    cost = 0.02 if is_free else 0.5
    world = auto(TABLES[table], Skilled(sometimes(share), None, cost, is_free=is_free))
    for _ in range(5):
        world.run(1, 200)
    fixed = []
    for k in (0, 1, 2, 3, 4, 8):
        one = World(FixedPolicy(Skilled(sometimes(share), None, cost, is_free=is_free), k), TABLES[table])
        for _ in range(5):
            one.run(1, 200)
        fixed.append(one.speed())
    assert world.speed() >= 0.98
    assert world.speed() >= 0.98 * max(fixed)


@pytest.mark.parametrize("num_requests", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("table", TABLES)
def test_never_slower_in_a_batch(table: str, share: float, num_requests: int) -> None:
    """A free drafter takes its time for each request, one after the other."""
    world = auto(TABLES[table], Skilled(sometimes(share), 0.8, 0.02))
    world.run(num_requests, 150)
    assert world.speed(num_requests) >= 0.98


@pytest.mark.parametrize("num_requests", [1, 4, 16])
def test_a_model_drafts_for_a_batch_as_for_one(num_requests: int) -> None:
    """What drafting takes is borne by all whom it is done for."""
    world = auto(FLAT, Skilled(sometimes(0.7), 0.7, 0.3, is_free=False))
    world.run(num_requests, 200)
    assert world.speed(num_requests) > 1.5
    wrong = auto(FLAT, Skilled(sometimes(0), 0.8, 0.3, is_free=False))
    wrong.run(num_requests, 200)
    assert wrong.speed(num_requests) >= 0.98


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.6, 0.9])
def test_bursts_that_do_not_tell_what_drafting_takes_are_never_slower(share: float) -> None:
    world = auto(FLAT, Skilled(sometimes(share), 0.8, 0.15, is_free=False))
    world.is_burst = True
    for _ in range(4):
        world.run(1, 150)
    assert world.speed() >= 0.98
    if share >= 0.6:
        assert world.speed() > 1.9
        assert world.policy._known[0].seconds(1).pass_seconds(8) == pytest.approx(8 * 0.15, rel=0.1)  # type: ignore[attr-defined]


def test_the_hosts_work_counts() -> None:
    """Drafts whose pass would pay, but each step with one waits for the host: the switch sees it."""

    class Waiting(World):
        def step(self, requests: list[Request]) -> object:  # type: ignore[override]
            self.host = 0.0 if self.policy._switches and self.policy.plan_is_plain(requests) else 6.0  # type: ignore[attr-defined]
            return super().step(requests)

    policy = AutoPolicy([Skilled(sometimes(0.3), 0.9, 0.02)], CostTable(FLAT))
    policy.plan_is_plain = lambda requests: bool(policy._switches[len(requests)].plain_steps)  # type: ignore[attr-defined]
    world = Waiting(policy, FLAT)
    world.run(1, 1500)
    assert world.num_tokens * CostTable(FLAT).pass_seconds(1) / world.seconds >= 0.96


def test_a_fixed_length_loses_where_the_policy_does_not() -> None:
    """That the tests above can fail: four tokens always, from a drafter that is right one time in three."""
    world = World(FixedPolicy(Skilled(sometimes(0.33), None, 0.02), 4), CPU)
    world.run(8, 100)
    assert world.speed(8) < 0.5


@pytest.mark.parametrize("is_free", [True, False])
def test_it_recovers_when_the_text_changes(is_free: bool) -> None:
    """Right up to 600 tokens, then wrong for 600, then right: the last part is about as fast as the first."""
    drafter = Skilled(
        lambda _, position: not 600 <= position < 1200, None, 0.02 if is_free else 0.3, is_free=is_free
    )
    world, marks = auto(CPU, drafter), []
    request = world.new_request()
    while request.num_tokens < 1800:
        world.step([request])
        marks.append((request.num_tokens, world.seconds))
    took = [
        max(s for n, s in marks if n <= end) - min(s for n, s in marks if n > begin)
        for begin, end in pairwise((4, 600, 1200, 1800))
    ]
    plain = CostTable(CPU).pass_seconds(1) * 600
    assert plain / took[0] > 2.4
    assert plain / took[1] > 0.94
    assert plain / took[2] > 0.75 * plain / took[0]


def test_a_model_that_was_wrong_in_a_batch_is_found_when_it_is_right() -> None:
    head = Skilled(lambda _, position: position > 300, None, 0.4, is_free=False, length=4)
    world = auto(FLAT, head)
    requests = [world.new_request() for _ in range(8)]
    for _ in range(280):
        world.step(requests)
    assert head.num_asked < 100
    for _ in range(320):
        world.step(requests)
    assert head.num_asked > 8 * 200


def test_a_wrong_profile_is_not_believed_for_long() -> None:
    """It says that rows are free; they are not."""
    for share, claim, least in ((0.0, 0.9, 0.97), (0.5, None, 1.3)):
        world = auto(CPU, Skilled(sometimes(share), claim, 0.02), profile={1: 5.1, 2: 5.1, 16: 5.2})
        world.run(1, 2000)
        assert world.speed() >= least


def test_the_confident_request_gets_the_nodes() -> None:
    """Two requests, one drafter: right for one of them, wrong for the other."""
    world = auto(CPU, Skilled(lambda request, _: int(request.id) % 2 == 0, None, 0.02))
    world.run(2, 300)
    checked = sorted(world.checked.values())
    assert checked[0] < 0.1 * checked[1]
    assert world.speed(2) > 1.2


def test_of_two_drafters_the_better_is_followed() -> None:
    world = auto(
        CPU, Skilled(sometimes(0.8), None, 0.02, name="good"), Skilled(sometimes(0.0), 0.9, 0.2, name="bad")
    )
    world.run(1, 800)
    alone = auto(CPU, Skilled(sometimes(0.8), None, 0.02))
    alone.run(1, 800)
    assert world.speed() > 0.95 * alone.speed()


def test_nothing_is_drafted_where_no_draft_can_pay() -> None:
    drafter = Skilled(sometimes(1.0), None, 0.02)
    world = auto(STEEP, drafter)
    world.run(4, 50)
    assert drafter.num_asked == 0
    table = {1: 1.0, 2: 1.05, 4: 4.0, 8: 8.0}
    world = auto(table, drafter)
    requests = [world.new_request() for _ in range(4)]
    for _ in range(40):
        world.step(requests)
    assert drafter.num_asked == 0
    for _ in range(NUM_PLAIN + 1):
        world.step(requests[:1])
    assert drafter.num_asked == 1, "when the others have left, it can"


def test_a_model_is_not_asked_where_a_match_is_worth_more() -> None:
    free = Skilled(lambda _, position: position % 40 < 20, None, 0.02, name="free")
    model = Skilled(sometimes(0.7), None, 0.3, is_free=False, name="model")
    world = auto(CPU, model, free)
    request, asked = world.new_request(), {True: 0, False: 0}
    while request.num_tokens < 1600:
        is_free_right, before = request.num_tokens % 40 < 16, model.num_asked
        free.claim = 0.95 if is_free_right else 0.05
        world.step([request])
        asked[is_free_right] += model.num_asked - before
    assert asked[True] < 0.1 * asked[False]
    assert world.speed() > 1.7


def test_both_together_are_not_slower_than_either() -> None:
    def made(*names: str) -> float:
        known = {
            "free": Skilled(sometimes(0.5), 0.5, 0.02, name="free"),
            "model": Skilled(
                lambda r, p: sometimes(0.6)(r, p + 10**6), 0.6, 0.3, is_free=False, name="model"
            ),
        }
        world = auto(CPU, *(known[name] for name in names))
        for _ in range(10):  # of few requests some are luckier than others
            world.run(1, 200)
        return world.speed()

    assert made("free", "model") > 0.97 * max(made("free"), made("model"))


def planned(policy: AutoPolicy, request: Request, room: int = 8) -> ScheduledRequest:
    """After the plain steps that come first, as the engine makes them; slots are reserved."""
    world = World(policy, policy.costs.seconds)
    for _ in range(NUM_PLAIN):
        assert world.step([request]).is_plain
    scheduled = ScheduledRequest(request, 1, draft_limit=room)
    assert any(policy.plan([scheduled]).asks)
    scheduled.num_lookahead_tokens = room
    return scheduled


def request_of(**params: object) -> Request:
    return World(FixedPolicy(None, 0), CHEAP).new_request(**params)  # type: ignore[arg-type]


@pytest.mark.parametrize("own", [0.01, 0.3, 0.99])
def test_a_sampled_token_never_decides_whether_it_is_itself_checked(own: float) -> None:
    policy = AutoPolicy([Skilled(sometimes(0.6), is_free=False)], CostTable({1: 1.0, 2: 1.3, 3: 1.7, 8: 4.0}))
    request = request_of(temperature=1.0)
    one = planned(policy, request, 4)
    q = {n: torch.full((8,), 1 / 8) for n in range(3)}
    draft = Draft(Tree.chain(request.tokens[-1], (3, 4, 5)), "m", q, (1.0, own, 0.9 * own, 0.1 * own))
    assert policy.choose([one], {0: [(0, draft)]})[0] is draft, "all of it is checked, and as it was drawn"


def test_how_much_is_asked_for_does_not_depend_on_what_is_drawn() -> None:
    model = Skilled(sometimes(0.6), 0.7, 0.1, is_free=False)
    world = auto(FLAT, model)
    request = world.new_request(temperature=1.0)
    for _ in range(60):
        record = world.step([request])
        if not record.is_plain and record.answers:
            assert record.drafts[0] is record.answers[0][0][1]
            assert record.drafts[0].q is not None
    assert world.num_checked > 60


def test_a_sampled_draft_stands_alone_and_nothing_is_asked_after_it() -> None:
    names = [("free", True), ("a", False), ("b", False)]
    drafters = [Skilled(sometimes(1), is_free=is_free, name=name) for name, is_free in names]
    policy, request = AutoPolicy(drafters, CostTable(FLAT)), request_of(temperature=1.0)
    one = planned(policy, request, 4)
    root, asks = request.tokens[-1], [(0, 2)]
    free = Draft(Tree.chain(root, (7, 8)), "free", chances=(1.0, 0.01, 0.001))
    q = {n: torch.full((8,), 1 / 8) for n in range(2)}
    drawn = Draft(Tree.chain(root, (3, 4)), "a", q, (1.0, 0.9, 0.8))
    assert policy.replan(1, asks, [one], {0: [(0, free)]}, False) == asks
    answers = {0: [(0, free), (1, drawn)]}
    assert policy.replan(2, asks, [one], answers, False) == []
    assert policy.choose([one], answers)[0] is drawn


def test_drafts_are_joined_and_each_token_keeps_its_source() -> None:
    policy = AutoPolicy([Skilled(sometimes(1.0), name=name) for name in "ab"], CostTable(CHEAP))
    request = request_of()
    one = planned(policy, request)
    root = request.tokens[-1]
    a = Draft(Tree((root, 3, 4), (-1, 0, 1)), "a", chances=(1.0, 0.8, 0.6))
    b = Draft(Tree((root, 3, 5, 6), (-1, 0, 1, 0)), "b", chances=(1.0, 0.7, 0.4, 0.2))
    joined = policy.choose([one], {0: [(0, a), (1, b)]})[0]
    paths = {
        tuple(joined.tree.tokens[n] for n in ancestors(joined.tree.parents, node)[1:]): joined.source_of(node)
        for node in range(1, 5)
    }
    assert paths == {(3,): "a", (3, 4): "a", (3, 5): "b", (6,): "b"}


def test_no_more_nodes_are_checked_than_slots_are_reserved() -> None:
    policy, request = AutoPolicy([Skilled(sometimes(1.0))], CostTable(CHEAP)), request_of()
    one = planned(policy, request)
    one.num_lookahead_tokens = 2
    draft = Draft(Tree.chain(request.tokens[-1], (3, 4, 5, 6)), "a", chances=(1.0, 0.9, 0.9, 0.9, 0.9))
    assert policy.choose([one], {0: [(0, draft)]})[0].num_drafted == 2


@pytest.mark.parametrize("is_free", [True, False])
def test_a_request_is_drafted_for_by_the_method_it_names(is_free: bool) -> None:
    named = Skilled(sometimes(0.9), None, 0.02, is_free=is_free, name="named")
    other = Skilled(sometimes(1.0), None, 0.02, is_free=is_free, name="other")
    world = auto(FLAT, other, named)
    request = world.new_request(speculative_method="named")
    for _ in range(100):
        world.step([request])
    assert named.num_asked > 90
    assert other.num_asked == 0


def test_a_request_that_refuses_drafts_gets_none() -> None:
    policy = AutoPolicy([Skilled(sometimes(1.0))], CostTable(FLAT))
    world = World(policy, FLAT)
    requests = [world.new_request() for _ in range(2)]
    for _ in range(NUM_PLAIN):
        world.step(requests)
    plan = policy.plan([ScheduledRequest(r, 1, draft_limit=n) for r, n in zip(requests, (0, 3), strict=True)])
    assert list(plan.nodes) == [1]
    assert 0 < plan.nodes[1] <= 3


def test_reading_a_prompt_is_no_step_of_plain_decoding() -> None:
    policy = AutoPolicy([Skilled(sometimes(1))], CostTable(CPU))
    prompt = World(policy, CPU).new_request(900)
    prompt.cache.num_cached = 0
    plan = policy.plan([ScheduledRequest(prompt, 512)])
    assert (plan.asks, plan.plain_steps) == ((), 0)
    assert policy._switches == {}
    plan = policy.plan([ScheduledRequest(prompt, 900)])
    assert not any(plan.asks)
    assert plan.plain_steps == 0, "heads are shown the prompt, whether or not drafting is off"


def test_where_no_time_is_told_drafts_are_made_all_the_same() -> None:
    """A clock that says nothing must not end the plain steps that come first never."""
    policy = AutoPolicy([Skilled(sometimes(1.0))], CostTable(FLAT))

    class Untimed(World):
        def step(self, requests: list[Request]) -> object:  # type: ignore[override]
            observe = policy.observe

            def untimed(record: object) -> None:
                record.seconds = record.pass_seconds = None  # type: ignore[attr-defined]
                observe(record)  # type: ignore[arg-type]
                record.seconds = 1.0  # type: ignore[attr-defined]

            policy.observe = untimed  # type: ignore[method-assign]
            try:
                return super().step(requests)
            finally:
                policy.observe = observe  # type: ignore[method-assign]

    world = Untimed(policy, FLAT)
    world.run(1, NUM_PLAIN + 20)
    assert world.num_checked > 100


def test_a_released_request_leaves_nothing_behind() -> None:
    world = auto(FLAT, Skilled(sometimes(0.5)))
    world.run(3, 20)
    assert world.policy._factors == {}  # type: ignore[attr-defined]


def trial(switch: Switch, tokens: float, expected: float = 2.0) -> int:
    """Drafted steps until it is off, at most 100."""
    for step in range(100):
        if switch.plain_steps:
            return step
        switch.note_drafted(1.0, expected, tokens)
    return 100


def plain(switch: Switch) -> None:
    while switch.plain_steps:
        switch.note_plain(1.0)


def test_a_switch_that_loses_is_off_twice_as_long_each_time() -> None:
    switch = Switch()
    assert switch.plain_steps == NUM_PLAIN
    plain(switch)
    offs = []
    for _ in range(10):
        assert trial(switch, 1.0) <= CREDIT + 1
        offs.append(switch.plain_steps)
        plain(switch)
    assert offs == [min(FIRST_OFF << n, MOST_OFF) for n in range(10)]
    assert trial(switch, 3.0) == 100, "it wins,"
    assert trial(switch, 1.0) > 5, "may lose what it has won,"
    assert switch.plain_steps == FIRST_OFF, "and starts over"


def test_the_rest_of_a_burst_that_failed_counts_no_more() -> None:
    switch = Switch()
    plain(switch)
    trial(switch, 1.0, 8.0)
    for _ in range(10):
        switch.note_drafted(1.0, 8.0, 1.0)
    assert switch.plain_steps == FIRST_OFF


def test_a_pause_of_the_process_does_not_end_drafting() -> None:
    switch = Switch()
    plain(switch)
    for number in range(60):
        switch.note_drafted(1000.0 if number % 10 == 0 else 1.0, 1.5, 2.0)
        assert not switch.plain_steps


def test_dear_steps_of_one_drafter_are_not_charged_to_another() -> None:
    """Matches that the host drafts take three times what is expected and pay; a head's rounds pay, too."""
    switch = Switch()
    plain(switch)
    for _ in range(20):
        for _ in range(8):
            switch.note_drafted(3.0, 1.5, 8.0)
        for _ in range(8):
            switch.note_drafted(0.6, 1.7, 2.0)
        assert not switch.plain_steps


def test_steps_that_take_longer_than_expected_are_seen() -> None:
    switch = Switch()
    plain(switch)
    for _ in range(10):
        switch.note_drafted(2.5, 1.2, 2.0)
    assert switch.plain_steps, "two and a half times as long as pass and draft should take"


def test_sums_by_source_and_depth() -> None:
    stats = SpecStats()
    tree = Draft(Tree((1, 2, 3, 4), (-1, 0, 0, 2)), "a", sources=("a", "a", "b", "b"))
    stats.record(tree, (2, 3), 3)
    stats.record(Draft(Tree.chain(1, (2, 3)), "a"), (1,), 2)
    stats.record_plain()
    stats.settle()
    counts = (stats.num_steps, stats.num_tokens, stats.num_drafted, stats.num_accepted, stats.num_own)
    assert counts == (3, 6, 5, 3, 3)
    by_source = {name: (each.num_drafted, each.num_accepted) for name, each in stats.by_source.items()}
    assert by_source == {"a": (3, 1), "b": (2, 2)}
    assert stats.lengths == {3: 1, 2: 1, 0: 1}
    assert (stats.drafted_at, stats.accepted_at) == ([2, 2], [2, 1])
    assert stats.by_source["a"].acceptance_per_position == [0.5, 0.0]
    assert stats.by_source["b"].acceptance_per_position == [1.0, 1.0]


def test_a_drafter_that_is_never_right_is_reported_once() -> None:
    suspicion = Suspicion()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(3 * AFTER):
            suspicion.note("head", False)
            suspicion.note("ngram", i % 20 == 0)
    assert [str(warning.message).split(" times")[0] for warning in caught] == ["the drafter head was right 0"]
