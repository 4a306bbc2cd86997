"""Prompt lookup drafts what followed the same words before, as far as it trusts the match."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline import SamplingParams
from paceline.core.types import Request
from paceline.drafters.ngram import Ngram, NgramConfig


def drafted(tokens: list[int], budget: int = 8, **options: Any) -> list[int]:
    request = Request("r", SamplingParams(), tokens, len(tokens), seed=0)
    (draft,) = Ngram(NgramConfig(**options)).propose([request], [budget])
    return list(draft.tree.tokens[1:])


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([5, 6, 7, 8, 9, 1, 5], [6]),  # one token matches: one is drafted
        ([5, 6, 7, 8, 9, 1, 5, 6], [7]),
        ([5, 6, 7, 8, 9, 1, 5, 6, 7], [8, 9]),
        ([3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7], [8, 9, 1]),
        (
            [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 2, 3, 4, 5, 6, 7],
            [8, 9, 10],
        ),  # seven match, three is the most that was asked for
        ([4, 5, 6, 9, 4, 5, 6, 8, 4, 5, 6], [8, 4]),  # of equally long matches the most recent
        ([1, 2, 3], []),
    ],
)
def test_a_draft_is_half_as_long_as_its_match(tokens: list[int], expected: list[int]) -> None:
    assert drafted(tokens) == expected


def test_a_shortest_match_that_was_asked_for_is_trusted_wholly() -> None:
    tokens = [5, 6, 7, 8, 9, 1, 5, 6]
    assert drafted(tokens, prompt_lookup_min=2) == [7, 8, 9]
    assert drafted(tokens, prompt_lookup_min=2, num_speculative_tokens=5) == [7, 8, 9, 1, 5]
    assert drafted(tokens, prompt_lookup_min=3) == []


def test_the_budget_cuts_a_draft() -> None:
    assert drafted([5, 6, 7, 8, 5, 6, 7], budget=1) == [8]


def test_a_match_that_overlaps_the_end_repeats() -> None:
    assert drafted([3, 4, 4, 4, 4], prompt_lookup_min=1) == [4, 4, 4]


def test_a_longer_match_has_a_better_chance() -> None:
    chances = []
    for match in (1, 3, 5):
        text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
        request = Request("r", SamplingParams(), text + text[5 - match : 5], len(text) + match, seed=0)
        (draft,) = Ngram(NgramConfig()).propose([request], [8])
        assert draft.chances is not None
        assert len(draft.chances) == len(draft.tree.tokens)
        assert sorted(draft.chances, reverse=True) == list(draft.chances)
        chances.append(draft.chances[1])
    assert 0.2 < chances[0] < chances[1] < chances[2] < 1


def test_text_that_was_shown_may_be_taken_back() -> None:
    """A stage shows guesses as text. Once they are gone, a draft is what it would have been without them."""
    drafter, rng, num_drafts = Ngram(NgramConfig(num_speculative_tokens=4)), np.random.default_rng(0), 0
    request = Request("r", SamplingParams(), rng.integers(0, 4, 200).tolist(), 200, seed=0)
    for _ in range(100):
        for _ in range(2):
            guesses = [*request.tokens, *rng.integers(0, 4, rng.integers(1, 9)).tolist()]
            drafter.propose([replace(request, tokens=guesses)], [4])
        request.tokens += guesses[request.num_tokens :][: rng.integers(0, 3)]  # some became text
        request.tokens.append(int(rng.integers(0, 4)))
        (draft,) = drafter.propose([request], [4])
        (fresh,) = Ngram(NgramConfig(num_speculative_tokens=4)).propose([request], [4])
        assert draft == fresh
        num_drafts += draft.num_drafted > 0
    assert num_drafts > 50
