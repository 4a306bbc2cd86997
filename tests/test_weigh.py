"""The weigher against all choices written out; calibration against drafters whose skill is known."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.tree import Tree
from paceline.core.types import Draft, Verdict
from paceline.core.weigh import (
    AGREED,
    ALONE,
    BINS,
    CONTRADICTED,
    DEPTHS,
    MARGIN,
    NUM_CELLS,
    SURE,
    acceptance,
    best_count,
    cell_of,
)
from paceline.engine.policy.calibration import UNSAID, Answer, Calibration, Factor, joined

PROBABILITIES = st.floats(0.0, 1.0)


@given(st.lists(PROBABILITIES, max_size=12), st.lists(st.floats(0.0, 2.0), min_size=12, max_size=12))
def test_the_best_count_is_the_best_of_all_for_costs_with_steps(
    scores: list[float], rises: list[float]
) -> None:
    scores = sorted(scores, reverse=True)
    added = [sum(rises[:n]) for n in range(len(scores) + 1)]
    rates = [(1 + sum(scores[:n])) / (1 + added[n]) for n in range(len(scores) + 1)]
    count, gained = best_count(scores, len(scores), 1.0, 1.0, added)
    assert gained == pytest.approx(sum(scores[:count]))
    assert rates[count] == pytest.approx(max(rates)) or (count == 0 and max(rates) <= MARGIN * (1 + 1e-9))


def test_costs_with_steps_are_looked_at_beyond_the_first_drop() -> None:
    """One node more costs a second pass, seven more cost nothing further."""
    scores = [0.9**i for i in range(1, 8)]
    assert best_count(scores, 1, 1.0, 1.0, [0.0, 1.0])[0] == 0
    assert best_count(scores, 7, 1.0, 1.0, [0.0] + [1.0] * 7)[0] == 7


def test_nothing_is_checked_where_nothing_pays() -> None:
    assert best_count([1.0] * 4, 4, 1.0, 1.0, [0.0, 1.0, 2.0, 3.0, 4.0]) == (0, 0.0)
    assert best_count([], 0, 1.0, 1.0, [0.0]) == (0, 0.0)
    assert best_count([MARGIN - 1.001], 1, 1.0, 1.0, [0.0, 0.0]) == (0, 0.0), "less than the margin"


@given(st.integers(1, 99), PROBABILITIES, st.sampled_from((ALONE, AGREED, CONTRADICTED)))
def test_cells_are_told_apart_by_depth_claim_and_agreement(depth: int, claim: float, agreement: int) -> None:
    cell = cell_of(depth, claim, agreement)
    assert 0 <= cell < NUM_CELLS
    assert cell % BINS == min(int(claim * BINS), BINS - 1) or claim * BINS % 1 < 0.01
    assert cell // BINS == min(depth, DEPTHS) - 1 + DEPTHS * agreement


@given(PROBABILITIES, PROBABILITIES, st.floats(0.0, 4.0), st.floats(0.0, 4.0))
def test_acceptance_is_a_probability_and_grows_with_the_factor(
    claim: float, seen: float, a: float, b: float
) -> None:
    low, high = (acceptance(claim, seen, factor) for factor in sorted((a, b)))
    assert 0.0 <= low <= high + 1e-12 <= SURE + 1e-9
    assert acceptance(claim, seen, 1.0) == min(seen, SURE)
    assert acceptance(claim, -1.0, 1.0) == min(claim, SURE), "with nothing seen, a claim is taken at its word"


def test_claims_become_what_was_seen() -> None:
    calibration, cell = Calibration(), cell_of(1, 0.9, ALONE)
    assert calibration.rates[cell] == -1.0
    for i in range(200):
        calibration.observe(cell, 0.9, i % 5 == 0)
    assert calibration.rates[cell] == pytest.approx(0.2, abs=0.05)
    others = {cell_of(2, 0.9, ALONE), cell_of(1, 0.4, ALONE), cell_of(1, 0.9, AGREED)}
    assert all(calibration.rates[other] == -1.0 for other in others), "another depth, claim, agreement"


def test_a_text_that_changes_is_followed() -> None:
    calibration, cell = Calibration(), cell_of(1, 0.9, ALONE)
    for is_hit in [True] * 500 + [False] * 300:
        calibration.observe(cell, 0.9, is_hit)
    assert calibration.rates[cell] < 0.1


def test_survival_before_anything_is_drafted() -> None:
    assert Calibration().survival(1.0, 3) == pytest.approx([UNSAID, UNSAID**2, UNSAID**3])
    assert Calibration((0.8, 0.5)).survival(1.0, 3) == pytest.approx([0.8, 0.4, 0.2]), "as measured elsewhere"
    assert Calibration((0.8,)).survival(0.5, 2) == pytest.approx([0.4, 0.16]), "a request of its own kind"
    seen = Calibration((0.8,))
    for i in range(400):
        seen.observe(cell_of(1, 0.9, ALONE), 0.9, i % 4 == 0)
    assert seen.survival(1.0, 1)[0] == pytest.approx(0.25, abs=0.05)


def test_a_request_has_a_factor_of_its_own() -> None:
    factor = Factor()
    assert factor.value == 1.0
    for _ in range(60):
        factor.note(0.5, True)
    assert factor.value > 1.4
    for _ in range(60):
        factor.note(0.5, False)
    assert factor.value < 0.5


def test_a_long_success_is_doubted_after_a_few_mistakes() -> None:
    factor = Factor()
    for _ in range(200):
        factor.note(0.9, True)
    assert factor.value > 1
    for _ in range(5):
        factor.note(0.9, False)
    assert factor.value < 0.5


def test_mistakes_that_were_to_be_expected_are_not_held_against_it() -> None:
    factor = Factor()
    for i in range(300):
        factor.note(0.2, i % 5 == 0)
    assert 0.6 < factor.value < 1.4


def answer_of(draft: Draft, number: int = 0) -> Answer:
    return Answer(number, draft, Calibration(), Factor())


def test_what_was_not_checked_is_judged_by_what_was_emitted() -> None:
    answer = answer_of(Draft(Tree((1, 2, 3, 4), (-1, 0, 1, 2)), "a", chances=(1.0, 0.9, 0.8, 0.7)))
    answer.learn(None, Verdict((0,), (2, 3, 9)))
    rates = [answer.calibration.rates[cell] for cell in answer.cells[1:]]
    assert rates[0] > 0.9
    assert rates[1] > 0.8
    assert rates[2] < 0.7, "the third was reached, and wrong"
    answer = answer_of(Draft(Tree.chain(1, (2, 3)), "a"))
    answer.learn(None, Verdict((0,), (7,)))
    assert answer.calibration.rates[answer.cells[2]] == -1.0, "of what comes after a mistake nothing is known"


def test_a_sampled_draft_is_judged_by_what_was_checked_alone() -> None:
    q = {0: torch.full((8,), 1 / 8)}
    draft = Draft(Tree.chain(1, (2,)), "a", q, (1.0, 0.5))
    answer = answer_of(draft)
    answer.learn(None, Verdict((0,), (2,)))
    assert answer.calibration.rates[answer.cells[1]] == -1.0, "its token was emitted, but not through it"
    answer.learn(draft, Verdict((0,), (2,)))
    assert answer.calibration.rates[answer.cells[1]] < 0.5, "it was rejected, and drawn again"
    answer = answer_of(draft)
    answer.learn(draft, Verdict((0, 1), (2, 3)))
    assert answer.calibration.rates[answer.cells[1]] > 0.5


def test_agreement_and_contradiction_have_cells_of_their_own() -> None:
    one = answer_of(Draft(Tree.chain(1, (2, 3)), "a", chances=(1.0, 0.6, 0.5)), 0)
    two = answer_of(Draft(Tree((1, 2, 5), (-1, 0, 1)), "b", chances=(1.0, 0.7, 0.3)), 1)
    for _ in range(50):
        two.calibration.observe(cell_of(2, 0.3 / 0.7, CONTRADICTED), 0.4, False)
    draft, scores = joined([one, two])
    assert draft.tree == Tree((1, 2, 3, 5), (-1, 0, 1, 1))
    assert [cell // (BINS * DEPTHS) for cell in one.cells[1:]] == [AGREED, CONTRADICTED]
    assert scores[1] == pytest.approx(0.7), "of those that agree, the one believed more"
    assert scores[2] == pytest.approx(0.7 * 0.5 / 0.6)
    assert scores[3] < 0.1
    assert joined([one])[1] is one.scores
