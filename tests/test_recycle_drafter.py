"""Token recycling: the table holds what was likeliest after each token, and drafts grow from it, the best
chance first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline import SamplingParams
from paceline.core.errors import ConfigError
from paceline.core.tree import Tree
from paceline.core.types import Draft, Request, Seen, Verdict
from paceline.drafters.base import DrafterContext, empty
from paceline.drafters.recycle import RANKS, Recycle
from paceline.drafters.registry import create, parse
from tests.laws.harness import VOCAB, RandomCheckpoint, engine_with, executor, prompts, request_of, run


def drafter(**options: Any) -> Recycle:
    kind, config = parse({"method": "recycle", "num_speculative_tokens": 8, "min_token_prob": 0.0, **options})

    def load(source: Any) -> Any:
        raise AssertionError("recycling needs no other model")

    made = create(kind, config, DrafterContext(executor(4), RandomCheckpoint(), None, load))
    assert isinstance(made, Recycle)
    return made


def request_at(token: int, **fields: Any) -> Request:
    return Request("r", SamplingParams(), [1, token], 1, seed=0, **fields)


def row(*best: int) -> list[int]:
    """Eight tokens, these first."""
    return [*best, *(t for t in range(VOCAB) if t not in best)][:8]


def show(recycle: Recycle, token: int, best: Sequence[int], chosen: int, times: int = 1) -> None:
    """A pass with an empty draft after `token`: `best` were likeliest, and `chosen` was said."""
    for _ in range(times):
        request = request_at(token)
        recycle.observe(
            [Seen(request, 1, empty(request), Verdict((0,), (chosen,)), torch.tensor([row(*best)]), {})]
        )


def draft_of(recycle: Recycle, token: int, budget: int = 8, **fields: Any) -> Draft:
    (draft,) = recycle.propose([request_at(token, **fields)], [budget])
    return draft


def test_it_drafts_what_was_likeliest_last_time() -> None:
    recycle = drafter(tree=False)
    assert draft_of(recycle, 10).num_drafted == 0
    show(recycle, 10, [11, 12], 11)
    show(recycle, 11, [13], 13)
    show(recycle, 10, [12, 11], 12)  # the newest row replaces the older
    show(recycle, 12, [11], 11)
    assert draft_of(recycle, 10).tree.tokens == (10, 12, 11, 13)
    assert draft_of(recycle, 10, budget=1).tree.tokens == (10, 12)
    assert draft_of(recycle, 10, stop_ids=frozenset({11})).tree.tokens == (10, 12, 11)


def test_a_tree_takes_the_best_chances() -> None:
    recycle = drafter()
    show(recycle, 10, [11, 12, 13], 11)
    show(recycle, 11, [14, 15], 14)
    tree, chances = draft_of(recycle, 10, budget=4).tree, draft_of(recycle, 10, budget=4).chances
    assert chances is not None
    assert list(chances) == sorted(chances, reverse=True)
    assert tree.tokens == (10, 11, 12, 14, 13)  # ranks 0, 1, 0 then 0 (0.31² < 0.10), 2
    assert tree.parents == (-1, 0, 0, 1, 0)
    assert chances[1:3] == pytest.approx(RANKS[:2])
    sure = draft_of(drafter_like(recycle, min_token_prob=0.2), 10)
    assert sure.tree.tokens == (10, 11)


def drafter_like(recycle: Recycle, **options: Any) -> Recycle:
    """Another with the same table."""
    other = drafter(**options)
    other._successors[:] = recycle._successors
    return other


def test_rejected_nodes_teach_too() -> None:
    recycle = drafter(tree=False)
    request = request_at(10)
    draft = Draft(Tree.chain(10, [20, 21]))
    top = torch.tensor([row(30), row(31), row(32)])
    recycle.observe(
        [Seen(request, 1, draft, Verdict((0,), (30,), 2), top, {}), Seen(request, 5, None, None, None, {})]
    )
    assert [draft_of(recycle, t).tree.tokens[1] for t in (10, 20, 21)] == [30, 31, 32]


def test_chances_follow_what_is_seen() -> None:
    recycle = drafter()
    show(recycle, 10, [11], 11)
    show(recycle, 20, [21], 21)
    show(recycle, 10, [11], 11, times=30)  # always right
    show(recycle, 20, [21], 22, times=30)  # never
    right, wrong = (draft_of(recycle, t).chances for t in (10, 20))
    assert right is not None
    assert wrong is not None
    assert right[1] > 0.8
    assert wrong[1] < 0.15


def test_the_table_does_not_grow_and_serves_every_request() -> None:
    recycle = drafter()
    size = recycle.num_bytes
    engine = engine_with(recycle)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    for i, prompt in enumerate(prompts(6)):
        run(engine, [request_of(prompt, replace(params, seed=i))])
    assert recycle.num_bytes == size
    assert engine.totals.num_accepted > 0


@pytest.mark.parametrize(
    ("option", "value"), [("min_token_prob", 2), ("min_token_prob", "high"), ("tree", "yes")]
)
def test_a_wrong_option_is_named(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{option} is {value!r}"):
        parse({"method": "recycle", option: value})
