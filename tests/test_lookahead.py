"""Lookahead: the window and the pool as one tree, refilled from the target's choices; the text is the laws'
matter.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.tree import Tree
from paceline.core.types import Draft, Request, Seen, Verdict
from paceline.drafters import registry
from paceline.drafters.lookahead import MAX_KEYS, Lookahead, LookaheadConfig, Pool
from tests.laws.harness import engine_with, run
from tests.laws.harness import request_of as engine_request
from tests.passes import ancestors

WIDE = {"max_window_size": 3, "max_ngram_size": 3, "max_verification_set_size": 2}
PARAMS = SamplingParams(temperature=0.0, max_tokens=99)


def request_of(tokens: list[int]) -> Request:
    return Request("r", PARAMS, tokens, 2, seed=0)


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens[a] for a in ancestors(tree.parents, n)[1:]) for n in range(1, len(tree.tokens))]


def drafter_of(window: int = 3, size: int = 3, count: int = 2, from_text: bool = False) -> Lookahead:
    return Lookahead(
        LookaheadConfig(
            max_window_size=window,
            max_ngram_size=size,
            max_verification_set_size=count,
            pool_from_text=from_text,
        )
    )


def show(drafter: Lookahead, request: Request, draft: Draft, choices: list[int], emitted: list[int]) -> None:
    request.tokens += emitted
    path = tuple(range(len(emitted)))
    drafter.observe(
        [
            Seen(
                request,
                1,
                draft,
                Verdict(path, tuple(emitted), draft.num_drafted),
                torch.tensor(choices)[:, None],
                {},
            )
        ]
    )


def test_the_window_is_a_trunk_with_a_branch_below_each_of_its_nodes() -> None:
    drafter, request = drafter_of(window=3, size=4), request_of([10, 11, 12, 13, 14, 15])
    (draft,) = drafter.propose([request], [99])
    columns = [(10, 11, 12), (11, 12, 13), (12, 13, 14)]
    trunk = (10, 11, 12)
    expected = {(*trunk[:j], *column[: level + 1]) for j, column in enumerate(columns) for level in range(3)}
    assert set(paths_of(draft.tree)) == expected
    assert len(paths_of(draft.tree)) == len(expected) < 9, (
        "column 0 is 10 11 12, and so is the trunk: equal siblings are one node"
    )


def test_each_column_takes_the_targets_choice_and_fills_the_pool() -> None:
    drafter, request = drafter_of(), request_of([10, 11, 12, 13, 14])
    (draft,) = drafter.propose([request], [99])
    paths = [(), *paths_of(draft.tree)]
    choices = [100 + n for n in range(len(paths))]
    after = dict(zip(paths, choices, strict=True))
    show(drafter, request, draft, choices, emitted=[after[()]])
    first, second, third = (
        after[p] for p in [(10, 11), (10, 11, 12), (10, 11, 12, 13)]
    )  # below trunk 10, 11, 12
    (draft,) = drafter.propose([request], [99])
    assert set(paths_of(draft.tree)) >= {(11, first), (11, 12, second), (11, 12, 13, third)}
    request.tokens.append(11)  # the n-gram 11 12 -> second begins with the last token now
    (draft,) = drafter.propose([request], [99])
    assert (12, second) in paths_of(draft.tree)


def test_the_window_moves_as_far_as_the_text_did() -> None:
    drafter, request = drafter_of(window=3, size=3), request_of([10, 11, 12, 13, 14])
    (draft,) = drafter.propose([request], [99])
    after = dict(zip([(), *paths_of(draft.tree)], range(100, 200), strict=False))
    show(drafter, request, draft, list(after.values()), emitted=[10, 50])
    (draft,) = drafter.propose([request], [99])
    columns = [(12, after[10, 11, 12]), (13, after[10, 11, 12, 13])]  # columns 1 and 2 are now the first two
    assert {columns[0], (12, *columns[1])} <= set(paths_of(draft.tree))


def test_the_budget_holds_and_n_grams_come_before_the_window() -> None:
    drafter, request = drafter_of(from_text=True), request_of([1, 2, 3, 1, 4, 5, 1])
    for budget in range(1, 12):
        (draft,) = drafter.propose([request], [budget])
        assert draft.num_drafted <= budget
        assert draft.chances is not None
        assert len(draft.chances) == len(draft.tree.tokens)
        if budget >= 2:
            assert (4, 5) in paths_of(draft.tree), "the latest n-gram after 1"


def test_paths_end_with_the_text() -> None:
    request = request_of([1, 2, 3, 1])
    request.stop_ids = frozenset({2})
    (draft,) = drafter_of(from_text=True).propose([request], [99])
    assert (2,) in paths_of(draft.tree)
    assert all(draft.tree.tokens[p] != 2 for p in draft.tree.parents[1:] if p)


def test_the_pool_is_bounded_and_forgets_the_oldest() -> None:
    pool = Pool(2)
    for first in range(MAX_KEYS + 10):
        for last in (7, 8, 9, 8):
            pool.add((first, 5, last))
    assert len(pool) == 2 * MAX_KEYS
    assert pool.after(9) == []
    assert pool.after(MAX_KEYS + 9) == [(5, 8), (5, 9)]


def test_drafts_from_a_window_are_accepted() -> None:
    """The random model soon repeats itself; then n-grams that only the window can have made are right."""
    engine = engine_with({"method": "lookahead", **WIDE, "pool_from_text": False}, num_speculative_tokens=10)
    rng = np.random.default_rng(0)
    requests = [
        engine_request(
            rng.integers(8, 48, 12).tolist(), SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        )
        for _ in range(4)
    ]
    run(engine, requests)
    assert engine.totals.num_accepted > 10
    assert not engine.drafter._states, "something is kept of requests that are gone"  # type: ignore[union-attr]


def test_options_are_checked_and_nodes_follow_from_them() -> None:
    assert LookaheadConfig().num_speculative_tokens == 2
    assert (
        LookaheadConfig(
            max_window_size=15, max_ngram_size=5, max_verification_set_size=15
        ).num_speculative_tokens
        == 120
    )
    for options in (
        {"max_window_size": 0},
        {"max_ngram_size": 1},
        {"max_verification_set_size": 99},
        {"pool_from_text": 1},
    ):
        with pytest.raises(ConfigError, match=next(iter(options))):
            registry.parse({"method": "lookahead", **options})
