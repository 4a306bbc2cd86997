"""Prompt lookup drafts what followed the same words before, as far as it trusts the match."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import SamplingParams
from paceline.proposers.ngram import Ngram, NgramConfig
from paceline.types import Request


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
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10]),  # seven match, three is the most that was asked for
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
