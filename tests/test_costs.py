"""The formulas against sums written out and simulated draws; the cost model against passes it was not told
about.
"""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.types import Cached, Request, ScheduledRequest
from paceline.engine.policy.cost import CORRECT_EVERY, CostTable, Load
from paceline.engine.profile import VERSION, Profile
from paceline.engine.stats import WINDOW, Median
from paceline.measure.roofline import best_k, break_even_alpha, expected_tokens, speedup

MEASURED = {1: 5.1, 2: 5.5, 3: 6.2, 4: 7.6, 6: 10.9, 8: 14.0, 16: 27.0}


@given(st.floats(0, 0.999), st.integers(0, 40))
def test_expected_tokens_is_the_closed_form(alpha: float, k: int) -> None:
    assert expected_tokens(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))


def test_expected_tokens_is_what_draws_give() -> None:
    chance, alphas, k = random.Random(1), (0.9, 0.5, 0.7), 3
    total = 0
    for _ in range(40_000):
        length = next((i for i in range(k) if chance.random() >= alphas[i]), k)
        total += 1 + length
    assert total / 40_000 == pytest.approx(expected_tokens(alphas, k), rel=0.01)


def test_best_k_is_the_best_of_all() -> None:
    costs = CostTable(MEASURED)
    relative = [costs.pass_seconds(n) / costs.pass_seconds(1) for n in range(1, 18)]
    for alpha in (0.0, 0.05, 0.3, 0.6, 0.9, 1.0):
        gains = [speedup(alpha, k, 0.02, relative[k]) for k in range(17)]
        assert gains[best_k(alpha, 0.02, lambda n: relative[n - 1], 16)] == max(gains)
    assert best_k(0.01, 0.02, lambda n: relative[n - 1], 16) == 0


def test_break_even_alpha_breaks_even() -> None:
    alpha = break_even_alpha(3, 0.1, 1.5)
    assert alpha is not None
    assert speedup(alpha, 3, 0.1, 1.5) == pytest.approx(1, abs=1e-6)
    assert break_even_alpha(1, 1.0, 1.5) is None


@given(st.lists(st.floats(1.0, 7.9), min_size=1, max_size=60))
def test_a_running_median_is_the_median_of_the_last_ones(numbers: list[float]) -> None:
    running = Median(0.0)
    for number in numbers:
        running.add(number)
    last = sorted(numbers[-WINDOW:])
    assert running.value == last[(len(last) - 1) // 2]


def test_a_timing_that_waited_for_a_compiler_is_soon_forgotten_and_a_lasting_change_is_not() -> None:
    running = Median(1.0)
    running.add(1000.0)
    assert running.value == 8.0
    running.add(1.0)
    assert running.value == 1.0
    for _ in range(15):
        running.add(5.0)
    assert running.value == 5.0


def test_costs_are_the_profiles_at_its_points_and_between_them() -> None:
    costs = CostTable(MEASURED, per_request_token=0.002, per_row_token=0.001)
    assert [costs.pass_seconds(n) for n in MEASURED] == list(MEASURED.values())
    assert costs.pass_seconds(5) == pytest.approx((7.6 + 10.9) / 2)
    assert costs.pass_seconds(32) == pytest.approx(27 + 16 * 13 / 8)
    assert costs.pass_seconds(3, 100, 300) == pytest.approx(6.2 + 0.2 + 0.3)


@given(st.dictionaries(st.integers(1, 64), st.floats(0.001, 10.0), min_size=1))
def test_a_pass_never_gets_cheaper_with_more_rows(seconds: dict[int, float]) -> None:
    base = CostTable(seconds).base(200)[1:]
    assert base == sorted(base)


@pytest.mark.parametrize("factor", [0.25, 3.0])
def test_a_profile_of_another_machine_is_corrected(factor: float) -> None:
    """The real machine is faster or slower by a factor, and disturbed one time in five."""
    costs, chance = CostTable(MEASURED), random.Random(2)
    for _ in range(20 * CORRECT_EVERY):
        rows = chance.choice([1, 2, 4, 8])
        costs.observe(MEASURED[rows] * factor * (4.0 if chance.random() < 0.2 else 1.0), rows)
    for rows in (1, 2, 3, 4, 6, 8, 16):
        assert costs.pass_seconds(rows) == pytest.approx(MEASURED[rows] * factor, rel=0.1)


def test_a_wrong_shape_is_corrected_where_it_was_seen() -> None:
    costs = CostTable({1: 5.0, 2: 5.0, 4: 5.0, 8: 5.0})
    for i in range(20 * CORRECT_EVERY):
        rows = (1, 4)[i % 2]
        costs.observe(MEASURED[rows], rows)
    assert costs.pass_seconds(4) / costs.pass_seconds(1) == pytest.approx(7.6 / 5.1, rel=0.05)


def test_a_row_count_not_seen_for_long_follows_the_others() -> None:
    """A busy hour: passes over 4 rows were slow then. Later only single rows are seen, and they are quick
    again.
    """
    costs = CostTable(MEASURED)
    for i in range(10 * CORRECT_EVERY):
        costs.observe(3 * MEASURED[(1, 4)[i % 2]], (1, 4)[i % 2])
    for _ in range(100 * CORRECT_EVERY):
        costs.observe(MEASURED[1], 1)
    assert costs.pass_seconds(4) == pytest.approx(MEASURED[4], rel=0.1)


def test_a_profile_survives_json() -> None:
    costs = CostTable(MEASURED, 0.002, 0.001)
    again = CostTable(**json.loads(json.dumps(costs.to_json())))
    assert [again.pass_seconds(n, 50, 70) for n in range(1, 40)] == [
        costs.pass_seconds(n, 50, 70) for n in range(1, 40)
    ]


SLOPES = {"per_request_token": 0, "per_row_token": 0}


@pytest.mark.parametrize(
    "data",
    [
        {},
        SLOPES,
        *(
            {"seconds": s, **SLOPES}
            for s in ({}, [1], {"1": "x"}, {"0": 1.0}, {"1": -1}, {"1": float("nan")})
        ),
    ],
)
def test_a_spoilt_profile_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="profile"):
        Profile.from_json({"version": VERSION, "costs": data, "drafters": {}})


def test_what_was_learned_stays_out_of_the_profile_and_of_a_fresh_table() -> None:
    costs = CostTable(MEASURED)
    for _ in range(2 * CORRECT_EVERY):
        costs.observe(10.0, 1)
    assert costs.pass_seconds(1) == pytest.approx(10.0)
    assert costs.to_json() == CostTable(MEASURED).to_json()
    assert CostTable(**costs.to_json()).pass_seconds(1) == MEASURED[1]


def test_a_draft_is_a_fixed_part_and_one_for_each_token() -> None:
    cost = CostTable({1: 1.0, 5: 3.0})
    for i in range(300):
        cost.observe(0.5 + 0.2 * (1 + i % 4), 1 + i % 4)
    assert [cost.pass_seconds(n) for n in range(1, 5)] == pytest.approx([0.7, 0.9, 1.1, 1.3], rel=0.02)
    cost.observe(50.0, 2)
    assert cost.pass_seconds(2) < 1.2, "one that took very long is not believed"


def test_a_busy_machine_makes_drafts_no_dearer_than_passes() -> None:
    """Of both most timings count: one in four that takes ten times as long changes neither."""
    cost, costs = CostTable({1: 0.4, 5: 1.2}), CostTable({1: 1.0})
    for i in range(300):
        slow = 10.0 if i % 4 == 0 else 1.0
        cost.observe(slow * (0.1 + 0.1 * (1 + i % 3)), 1 + i % 3)
        costs.observe(slow, 1)
    assert costs.pass_seconds(1) == pytest.approx(1.0)
    assert cost.pass_seconds(2) == pytest.approx(0.3, rel=0.05)


def test_a_load_is_the_pass_without_drafts() -> None:
    costs = CostTable(MEASURED, per_request_token=0.01, per_row_token=0.001)
    speaking = [
        ScheduledRequest(Request(str(i), SamplingParams(), [1] * 11, 11, 0, cache=Cached([], 10)), 1)
        for i in range(2)
    ]
    load = Load.of(speaking, costs, 8)
    assert (load.rows, load.speaking, load.cached, load.is_decoding) == (2, 2, 20, True)
    assert load.seconds == pytest.approx(5.5 + 20 * 0.011)
    assert load.token_seconds == load.seconds / 2
    assert load.with_nodes(2) == (4, 20, 40)
    assert load.added(2, [0.0, 1.5, 2.5]) == pytest.approx(
        [0.0, 6.2 - 5.5 + 0.01 + 0.75, 7.6 - 5.5 + 0.02 + 1.25]
    )
    reading = ScheduledRequest(Request("p", SamplingParams(), [1] * 100, 100, 0), 50)
    both = Load.of([*speaking, reading], costs, 8)
    assert not both.is_decoding
    assert both.seconds == load.seconds, "a prompt's chunk is not theirs to pay"
    assert both.rows == 52
