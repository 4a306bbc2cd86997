"""Trees grown with a model: the best nodes of all, read with as few rows as a chain allows, from a cache that
follows the text.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.sampling import choose, noise_of
from paceline.core.types import Draft, Request
from paceline.drafters import registry
from paceline.drafters.draft_model import DraftModel
from paceline.runtime.executor import LocalExecutor
from tests.laws.grammar import NoEqualRests
from tests.laws.tables import Table, TableDecoder, ready, table_drafter, table_runner
from tests.laws.test_accept_exact import table
from tests.passes import ancestors

VOCAB, END = 5, 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=99)


def request_of(tokens: list[int], params: SamplingParams = GREEDY, **fields: Any) -> Request:
    return Request("r", params, tokens, 2, seed=params.seed or 0, **fields)


def drafter_of(runner: LocalExecutor, **options: Any) -> DraftModel:
    made = table_drafter(
        {"method": "draft_model", "model": "m", **options}, table_runner(table(1), VOCAB), {"m": runner}
    )
    assert isinstance(made, DraftModel)
    return made


def paths_of(draft: Draft) -> dict[tuple[int, ...], float]:
    assert draft.chances is not None
    tree = draft.tree
    return {
        tuple(tree.tokens[a] for a in ancestors(tree.parents, n)[1:]): draft.chances[n]
        for n in range(1, len(tree.tokens))
    }


def best_paths(logits_of: Table, text: list[int], count: int, depth: int) -> dict[tuple[int, ...], float]:
    """All paths up to a depth by their probability, the best `count` of them."""
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for path in itertools.chain.from_iterable(
        itertools.product(range(VOCAB), repeat=d) for d in range(1, depth + 1)
    ):
        row = logits_of([*text, *path[:-1]]).astype(np.float64)
        chances[path] = chances[path[:-1]] * float(
            np.exp(row - row.max())[path[-1]] / np.exp(row - row.max()).sum()
        )
    del chances[()]
    return dict(sorted(chances.items(), key=lambda item: -item[1])[:count])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 3))
def test_a_wide_tree_holds_the_likeliest_paths_of_all(salt: int, nodes: int, depth: int) -> None:
    text, model = [3, 1, 2], table(salt)
    drafter = drafter_of(table_runner(model, VOCAB), tree_width=5, tree_depth=depth)
    (draft,) = drafter.propose([request_of(text)], [nodes])
    expected = best_paths(model, text, nodes, depth)
    assert paths_of(draft) == pytest.approx(expected)


def test_a_chain_reads_one_row_a_token_and_nothing_twice() -> None:
    runner = table_runner(table(1), VOCAB)
    drafter, request = drafter_of(runner), request_of([3, 1, 2])
    (draft,) = drafter.propose([request], [4])
    assert draft.tree.is_chain
    assert draft.num_drafted == 4
    assert decoder_of(runner).num_rows == [3, 1, 1, 1]
    request.tokens += [
        *draft.tree.tokens[1:4],
        (draft.tree.tokens[4] + 1) % VOCAB,
    ]  # three accepted, another in place of the fourth
    decoder_of(runner).num_rows.clear()
    drafter.propose([request], [2])
    assert decoder_of(runner).num_rows == [1, 1]


def decoder_of(runner: LocalExecutor) -> TableDecoder:
    assert isinstance(runner.decoder, TableDecoder)
    return runner.decoder


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 6), st.data())
def test_the_cache_follows_the_text_through_trees(
    salt: int, width: int, nodes: int, data: st.DataObject
) -> None:
    """Round after round the text goes down some branch and then its own way; a drafter that starts afresh
    there says the same.
    """
    model = table(salt)
    runner, request = table_runner(model, VOCAB), request_of([3, 1, 2])
    drafter = drafter_of(runner, tree_width=width)
    for _ in range(4):
        (draft,) = drafter.propose([request], [nodes])
        (fresh,) = drafter_of(table_runner(model, VOCAB), tree_width=width).propose([request], [nodes])
        assert draft == fresh
        node = data.draw(st.integers(0, draft.num_drafted))
        request.tokens += [
            *(draft.tree.tokens[a] for a in ancestors(draft.tree.parents, node)[1:]),
            data.draw(st.integers(0, VOCAB - 1)),
        ]
    drafter.release(request)
    assert runner.kv.num_used == 0


def test_an_accepted_branch_off_the_trunk_is_not_read_again() -> None:
    runner, request = table_runner(table(1), VOCAB), request_of([3, 1, 2])
    drafter = drafter_of(runner, tree_width=2, tree_depth=2)
    (draft,) = drafter.propose([request], [6])
    assert decoder_of(runner).num_rows == [3, 2], "both children of the root are read on"
    second = draft.tree.children()[0][1]
    request.tokens += [draft.tree.tokens[second], 0]
    drafter.propose([request], [1])
    assert decoder_of(runner).num_rows == [3, 2, 1]


def test_a_seed_is_used_to_guess_what_the_target_will_draw() -> None:
    """A draft model equal to the target guesses every draw, as a chain and as the first branch of a tree."""
    params = SamplingParams(temperature=1.5, seed=8, max_tokens=99)
    model, request, drawn = table(2), request_of([3, 1, 2], params), []  # type: Table, Request, list[int]
    for _ in range(3):
        row = torch.from_numpy(model([*request.tokens, *drawn]))
        drawn.append(choose(request, row, request.num_tokens + len(drawn), noise_of(request)))
    (chain,) = drafter_of(table_runner(model, VOCAB)).propose([request], [3])
    (tree,) = drafter_of(table_runner(model, VOCAB), tree_width=3).propose([request], [16])
    assert chain.q is None
    assert tree.q is None
    assert list(chain.tree.tokens[1:]) == drawn == list(tree.tree.tokens[1:4])


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(max_tokens=99), SamplingParams(seed=1, max_tokens=99)], ids=str
)
def test_paths_end_where_the_text_would_and_chances_only_fall(params: SamplingParams) -> None:
    for salt in range(20):
        request = request_of([3, 1, 2], params, stop_ids=frozenset({END}))
        (draft,) = drafter_of(table_runner(table(salt), VOCAB), tree_width=2).propose([request], [7])
        tree, chances = draft.tree, draft.chances
        assert chances is not None
        assert chances[0] == 1.0
        assert all(tree.tokens[p] != END or p == 0 for p in tree.parents[1:])
        assert all(chances[n] <= chances[p] for n, p in enumerate(tree.parents) if n)


def test_candidates_below_the_threshold_are_dropped_and_sampled_ones_end_the_draft() -> None:
    runner = table_runner(table(1), VOCAB)
    (all_of_it,) = drafter_of(runner).propose([request_of([3, 1, 2])], [4])
    assert all_of_it.chances is not None
    sure = all_of_it.chances[2]
    (draft,) = drafter_of(runner, confidence_threshold=sure).propose([request_of([3, 1, 2])], [4])
    assert draft.tree.tokens == all_of_it.tree.tokens[:3]
    for seed in range(20):
        sampled = Request("r", SamplingParams(max_tokens=99), [3, 1, 2], 2, seed=seed)
        (draft,) = drafter_of(table_runner(table(1), VOCAB), confidence_threshold=0.2).propose([sampled], [6])
        assert draft.chances is not None
        assert draft.num_drafted >= 1
        assert all(chance >= 0.2 for chance in draft.chances[:-1])
        assert draft.num_drafted == 6 or draft.chances[-1] < 0.2


def test_sampled_trees_branch_at_the_root_or_nowhere() -> None:
    shapes = set()
    for salt in range(60):
        request = Request("r", SamplingParams(max_tokens=99, temperature=0.5), [3, 1, 2], 2, seed=salt)
        (draft,) = drafter_of(table_runner(table(salt), VOCAB), tree_width=2).propose([request], [4])
        assert draft.num_drafted == 4
        assert draft.q is not None
        children = draft.tree.children()
        assert set(draft.q) == {n for n, below in enumerate(children) if below}
        assert len(children[0]) == 2 or draft.tree.is_chain
        shapes.add(draft.tree.parents)
    assert len(shapes) > 2, "the shape follows the model"


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(max_tokens=99), SamplingParams(seed=1, max_tokens=99)], ids=str
)
def test_a_grammar_holds_along_every_branch_and_is_left_where_it_was(params: SamplingParams) -> None:
    grammar = NoEqualRests(VOCAB)
    grammar.advance(2)
    request = request_of([3, 1, 2], params, constraint=grammar)
    (draft,) = drafter_of(table_runner(table(3), VOCAB), tree_width=2).propose([request], [6])
    assert grammar.output == [2]
    assert draft.num_drafted >= 4
    assert all(
        draft.tree.tokens[n] % 3 != draft.tree.tokens[p] % 3 for n, p in enumerate(draft.tree.parents) if n
    )


def test_early_exit_writes_only_where_the_target_will_write_again() -> None:
    target = table_runner(table(1), VOCAB, {1: table(3)})
    drafter = table_drafter(
        {"method": "early_exit", "num_layers": 1, "tree_width": 2, "num_speculative_tokens": 4}, target, {}
    )
    request = request_of([3, 1, 2])
    ready(target, request, 4)
    before, blocks = ([data[:, :2].clone() for data in target.memory.parts], list(request.cache.blocks))
    (draft,) = drafter.propose([request], [4])
    assert draft.num_drafted == 4
    assert request.cache.num_cached == 2
    assert request.cache.blocks == blocks
    assert all((data[:, :2] == old).all() for data, old in zip(target.memory.parts, before, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"tree_width": 0},
        {"tree_width": True},
        {"tree_depth": 0},
        {"confidence_threshold": 1.0},
        {"confidence_threshold": "x"},
    ],
)
def test_bad_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        registry.parse({"method": "early_exit", **options})
