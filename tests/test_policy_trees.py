"""Chains or trees in bursts: the better one by what rounds took and gained, whatever the text."""

from __future__ import annotations

import random

from paceline.core.tree import Tree
from paceline.core.types import Draft, ScheduledRequest, Verdict
from paceline.engine.policy.auto import AutoPolicy
from paceline.engine.policy.cost import CostTable
from paceline.engine.policy.trees import AGAIN, Trees
from paceline.heads.rows import TreeShape
from paceline.runtime.record import StepRecord
from tests.simulation import Skilled, World

SMALL, LARGE = TreeShape(4, 5, 15), TreeShape(8, 8, 63)
CHOICES = (None, SMALL, LARGE)


def played(
    seconds: dict[TreeShape | None, float], gains: dict[TreeShape | None, float]
) -> list[TreeShape | None]:
    """Bursts of ten rounds on texts that go well or badly."""
    trees, chosen, noise = Trees(), list[TreeShape | None](), random.Random(3)
    for _ in range(4 * AGAIN):
        chosen.append(trees.choose(CHOICES))
        of_chain = noise.uniform(1.2, 4.0)
        for _ in range(10):
            took = seconds[chosen[-1]] * noise.uniform(0.95, 1.05)
            trees.note(chosen[-1], took, of_chain * gains[chosen[-1]], of_chain)
    return chosen


def test_each_is_tried_and_the_best_is_kept() -> None:
    gains = {None: 1.0, SMALL: 1.12, LARGE: 1.3}
    for slow, best in ((1.05, LARGE), (1.2, SMALL), (2.0, None)):
        chosen = played({None: 1.0, SMALL: 1.0 + (slow - 1.0) / 3, LARGE: slow * 1.1}, gains)
        assert set(chosen[:3]) == set(CHOICES)
        assert chosen.count(best) >= len(chosen) - 3 * 5
        assert all(chosen[AGAIN + 3 :].count(each) >= 2 for each in CHOICES)


def test_what_could_not_begin_is_not_chosen_again_at_once() -> None:
    trees = Trees()
    assert [trees.choose(CHOICES) for _ in CHOICES] == list(CHOICES)
    trees.note(SMALL, 1.0, 3.0, 2.0)
    assert trees.choose(CHOICES) is SMALL


def test_the_policy_learns_from_rounds_of_bursts() -> None:
    """A tree's round took as long as a chain's and emitted three tokens, of which its likeliest path had the
    first: a chain would have emitted two."""
    policy = AutoPolicy([Skilled(lambda *_: True, 0.8, 0.1, is_free=False)], CostTable({1: 1.0, 64: 1.2}))
    request = World(policy, {1: 1.0, 64: 1.2}).new_request()
    chosen, draft = [], Draft(Tree((0, 5, 6, 7, 8), (-1, 0, 1, 1, 3)), policy.drafters[0].name)
    for _ in range(3):
        scheduled = [ScheduledRequest(request, 1, draft_limit=8)]
        policy.plan(scheduled)
        chosen.append(policy.tree(4, [SMALL]))
        verdict = Verdict((0, 1, 3), (5, 7, 9), 4) if chosen[-1] else Verdict((0, 1), (5, 7), 4)
        path = draft.cut(draft.tree.first_path())
        record = StepRecord(scheduled, [draft], [verdict], {0: [(0, path)]}, {0: (4, None)}, is_in_place=True)
        record.tree, record.seconds, record.verdicts = chosen[-1], 1.2, {0: verdict}
        policy.observe(record)
    assert chosen == [None, SMALL, SMALL]
    assert policy._trees[1]._tokens[SMALL][0] == 1.5 * policy._trees[1]._tokens[SMALL][1]
    assert policy.tree(4, []) is None
