"""Choices that the kernels make themselves, and the walk along them: the same as looking at the logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.accept import accept, follow
from paceline.core.params import SamplingParams
from paceline.core.sampling import choose, noise_of
from paceline.core.tree import Tree, join
from paceline.core.types import Cached, Draft, Pick, Request, Segment
from paceline.cpu.compile import kernel
from paceline.cpu.lanes import address
from paceline.cpu.top import BLOCK, first_largest
from paceline.cpu.top import choose as choose_largest
from tests.laws.harness import VOCAB, executor, prompts
from tests.passes import ancestors


@kernel
def _pick(row: Any, places: Any) -> Any:
    """As forward.py does, one part after the other."""
    for part in range(len(places)):
        places[part] = first_largest(
            address(row), len(row) * part // len(places), len(row) * (part + 1) // len(places)
        )
    return choose_largest(address(row), places)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 5 * BLOCK), st.integers(1, 5), st.integers(0, 2**31), st.sampled_from([2, 30, 10**6]))
def test_the_first_largest_wins_and_what_is_not_finite_is_seen(
    width: int, parts: int, seed: int, levels: int
) -> None:
    rng = np.random.default_rng(seed)
    row = rng.integers(-levels, levels, width).astype(np.float32)
    for odd in (-np.inf, np.nan, np.inf):
        row[rng.random(width) < rng.choice([0.0, 0.02, 0.3, 1.0], p=[0.7, 0.1, 0.1, 0.1])] = odd
    best = int(row.argmax())
    assert _pick(row, np.zeros(parts, np.int64)) == (best if np.isfinite(row[best]) else -1)


@pytest.mark.parametrize("dtype", ["int8", "int4", "float32"])
def test_a_pass_picks_what_its_logits_say(dtype: str) -> None:
    target = executor(dtype=dtype)
    segments, expected = [], []
    picks = Pick(0.0, 0), Pick(8.0, 1), Pick(20.0, 2**64 - 1, 20, 0.9, 0.01), Pick(0.0, 0)
    for prompt, pick in zip(prompts(4), picks, strict=True):
        cached = Cached()
        assert target.kv.reserve(cached, len(prompt))
        segments.append(Segment(prompt, cached, None, 3, pick))
    output = target.forward(segments)
    for row, logits in enumerate(output.logits[:, :VOCAB]):
        prompt, (temperature, seed, top_k, top_p, min_p) = [*segments[row // 3].tokens], picks[row // 3]
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        request = Request("r", params, prompt, len(prompt), seed)
        expected.append(choose(request, logits, len(prompt) - 2 + row % 3, noise_of(request)))
    assert output.picked == expected
    assert expected != output.logits[:, :VOCAB].argmax(1).tolist()
    assert target.forward([*segments[:3], segments[3]._replace(pick=None)]).picked is None


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    tokens, parents = [0], [-1]
    for _ in range(draw(st.integers(0, 8))):
        edge = draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, 3))
        if edge not in zip(parents, tokens, strict=True):
            parents.append(edge[0])
            tokens.append(edge[1])
    return Tree(tuple(tokens), tuple(parents))


@settings(max_examples=300, deadline=None)
@given(trees(), st.integers(0, 2**31), st.sets(st.integers(0, 8)))
def test_following_choices_is_the_rule(tree: Tree, seed: int, broken: set[int]) -> None:
    request = Request("r", SamplingParams(temperature=0.0), [5, 0], 2, 0)
    draft, logits = (
        Draft(tree, "x"),
        torch.randn(len(tree.tokens), 4, generator=torch.Generator().manual_seed(seed)),
    )
    picked = [9, *logits.argmax(1).tolist()]  # another request's comes first
    expected = accept(request, draft, logits)
    assert follow(draft, picked, 1) == expected
    left = [-1 if node in broken else token for node, token in enumerate(picked[1:])]
    # up to the first node after which nothing could be chosen: what comes of that is the next pass's to say
    sound = next((i for i, node in enumerate(expected.path) if node in broken), len(expected.path))
    cut = expected._replace(path=expected.path[:sound], tokens=expected.tokens[:sound])
    assert follow(draft, left) == (cut if sound else None)


@settings(max_examples=200, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=4))
def test_joined_trees_hold_every_path_once(some: list[Tree]) -> None:
    tokens, parents, places = join(some)
    joined = Tree(tuple(tokens), tuple(parents))

    def path(tree: Tree, node: int) -> tuple[int, ...]:
        return tuple(tree.tokens[n] for n in ancestors(tree.parents, node))

    for tree, where in zip(some, places, strict=True):
        assert [path(tree, node) for node in range(len(tree.tokens))] == [
            path(joined, place) for place in where
        ]
    assert {place for where in places for place in where} == set(range(len(tokens)))
