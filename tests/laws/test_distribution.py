"""Unseeded sampling through the whole engine, drafting included, has the target's distribution: chi-square
against exact probabilities.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from paceline.cli.verify_distribution import chi_square_p_value
from paceline.core.accept import accept
from paceline.core.noise import Noise, Purpose
from paceline.core.params import SamplingParams
from paceline.core.tree import Tree
from paceline.core.types import Draft, Request
from paceline.drafters.reading import Reading
from paceline.drafters.staged import Staged
from tests.laws.fakes import guess
from tests.laws.harness import CONFIG, LLAMA, model, prompts, request_of, run
from tests.laws.reference import distribution
from tests.laws.test_engine_laws import make

PROMPT = prompts(1, low=6, high=14, seed=21)[0]
LENGTH = 3
TEMPERATURE = 8.0 if CONFIG is LLAMA else 16.0  # so high that there are many outcomes


def p_value_of(drafter: str | None, samples: int, **options: Any) -> float:
    """Of the joint law of the first tokens. By the clock a policy would draft now more, now less, and one run
    in a thousand be unlucky.
    """
    options = {"max_tokens": LENGTH, "allowed_token_ids": (3, 9, 14, 20), **options}
    params = SamplingParams(temperature=TEMPERATURE, ignore_eos=True, **options)
    engine = make(drafter, is_timed=False, max_num_seqs=64, max_num_batched_tokens=512)
    requests = [request_of(PROMPT, params, seed=7919 * i + 13) for i in range(samples)]
    run(engine, requests)
    if options["max_tokens"] > LENGTH:
        assert 0 < engine.totals.num_accepted < engine.totals.num_drafted, (
            "a test of drafts, without any to judge"
        )
    return chi_square_p_value(Counter(tuple(r.output) for r in requests), exact_law(params))


def exact_law(params: SamplingParams) -> dict[tuple[int, ...], float]:
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(params.max_tokens):
        grown = {}
        for output, mass in law.items():
            for token, share in enumerate(distribution(model, PROMPT, list(output), params)):
                if share > 0:
                    grown[(*output, token)] = mass * float(share)
        law = grown
    return law


@pytest.mark.parametrize(
    "drafter",
    [None, "ngram", "draft_model", "early_exit", "quantized", "RandomTree", "SampledChain", "SampledTree"],
)
def test_unseeded_sampling_has_the_targets_distribution(drafter: str | None) -> None:
    assert p_value_of(drafter, samples=1500) > 1e-3


@pytest.mark.parametrize(
    "options", [{"frequency_penalty": 1.0}, {"top_p": 0.8}, {"min_p": 0.2}, {"repetition_penalty": 1.5}]
)
def test_unseeded_sampling_with_options(options: dict[str, Any]) -> None:
    assert p_value_of("SampledChain", samples=1000, **options) > 1e-3


GROWN = [
    "draft_model",
    "draft_model_tree",
    "early_exit_tree",
    "early_exit_unsure",
    "quantized_tree",
    "SampledTree",
]
POLICED = [
    "auto early_exit_tree",
    "auto draft_model",
    "auto SampledTree",
    "auto hybrid",
]  # what is drawn is cut, by what came before it
COMPOSED = ["staged", "staged_tree", "staged_thrice", "hybrid", "hybrid_of_models"]
LONGER: dict[str, Any] = {
    "max_tokens": 5,
    "allowed_token_ids": (3, 9, 14),
}  # the first token has no draft, so three may be drafted at once


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [*GROWN, *COMPOSED, *POLICED])
def test_unseeded_sampling_with_longer_drafts(drafter: str) -> None:
    assert p_value_of(drafter, samples=800, **LONGER) > 1e-3


@pytest.mark.slow
def test_a_stage_that_shares_the_targets_noise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a seed of its own a stage draws with the same numbers as the coins that judge it."""
    begin = Staged._begin

    def broken(self: Staged, reading: Reading) -> Any:
        stage = begin(self, reading)
        stage.view.seed, stage.view.num_rounds = reading.request.seed, reading.request.num_rounds
        return stage

    monkeypatch.setattr(Staged, "_begin", broken)
    assert p_value_of("staged_tree", samples=2000, **LONGER) < 1e-6


def first_token_p_value(samples: int) -> float:
    """One drafted token, judged: p = (0, .55, .45), q = (.5, .45, .05), with the real noise."""
    p, q = torch.tensor([0.0, 0.55, 0.45]).log(), torch.tensor([0.5, 0.45, 0.05]).log()
    counts: Counter[int] = Counter()
    for seed in range(samples):
        request = Request("r", SamplingParams(), [0], 1, seed)
        token, row = guess(request, [], q)
        assert row is not None
        verdict = accept(request, Draft(Tree.chain(0, [token]), "", {0: row}), torch.stack([p, p]))
        counts[verdict.tokens[0]] += 1
    return chi_square_p_value(counts, {1: 0.55, 2: 0.45})


@pytest.mark.slow
def test_reuse_of_draft_noise_for_resampling_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break one thing, the stream that the redraw after a rejection uses, and the law moves: these tests can
    fail.
    """
    assert first_token_p_value(4000) > 1e-3
    draw = Noise.draw

    def broken(self: Noise, logits: np.ndarray, position: int, purpose: Purpose) -> int:
        return draw(self, logits, position, Purpose.DRAFT if purpose is Purpose.RESAMPLE else purpose)

    monkeypatch.setattr(Noise, "draw", broken)
    assert first_token_p_value(4000) < 1e-9
