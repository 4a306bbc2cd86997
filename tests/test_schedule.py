"""The scheduler and the block pool under random schedules: the books balance after every step, and no text
changes.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.params import SamplingParams
from paceline.core.types import BLOCK_SIZE, FinishReason, Request
from paceline.drafters.draft_model import DraftModel
from tests.laws.fakes import Ragged
from tests.laws.harness import END, engine_with, model, prompts, request_of, run
from tests.laws.reference import reference_loop

NUM_STEPS = 2000


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(st.integers(0, 2**32))
def test_the_pool_balances_after_every_step_of_a_long_random_schedule(seed: int) -> None:
    chance = random.Random(seed)
    drafter = chance.choice(
        [
            {"method": "ngram", "prompt_lookup_min": 1},
            {"method": "early_exit"},
            {"method": "draft_model", "model": "1"},
        ]
    )
    engine = engine_with(drafter, num_blocks=14, max_num_batched_tokens=32)
    shared = prompts(1, low=40, high=60, seed=seed % 1000)[0]
    alive: list[Request] = []
    finished: list[Request] = []
    for _ in range(NUM_STEPS):
        if len(alive) < 8 and chance.random() < 0.3:
            alive += _arrivals(chance, shared)
            for request in alive:
                if request.arrival == 0:
                    engine.add(request)
        if alive and chance.random() < 0.05:
            engine.abort(chance.choice(alive))
            engine.check()
        engine.step()
        engine.check()
        finished += [r for r in alive if r.is_finished]
        alive = [r for r in alive if not r.is_finished]
    for request in alive:
        engine.abort(request)
    engine.check()
    assert engine.executor.kv.num_used == 0
    if isinstance(engine.drafter, DraftModel):
        assert engine.drafter.executor.kv.num_used == 0
    assert engine.scheduler.num_preemptions > 0
    whole = [request for request in finished if request.finish_reason is not FinishReason.ABORT]
    stopped = [request for request in finished if request.finish_reason is FinishReason.ABORT]
    assert len(whole) > 10
    for request in [*chance.sample(whole, 10), *chance.sample(stopped, min(4, len(stopped)))]:
        check_text(request, engine.config.max_model_len)


def check_text(request: Request, limit: int) -> None:
    """It is the reference's, to its end; of a request that was stopped, its beginning. limit: tokens of the
    context.
    """
    prompt = request.tokens[: request.num_prompt]
    text = reference_loop(model, prompt, request.params, request.seed, frozenset({END}))
    text = text[: limit - request.num_prompt]
    if request.finish_reason is FinishReason.ABORT:
        assert request.output == text[: request.num_output]
        return
    assert request.output == text
    has_ended = text[-1] == END
    assert request.finish_reason is (FinishReason.STOP if has_ended else FinishReason.LENGTH)


def test_a_text_that_ends_too_early_is_seen() -> None:
    request = request_of(prompts(1)[0], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    run(engine_with(None), [request])
    check_text(request, 1024)
    request.tokens.pop()
    with pytest.raises(AssertionError):
        check_text(request, 1024)


def _arrivals(chance: random.Random, shared: list[int]) -> list[Request]:
    """A request, or a few that share its prompt; prompts share beginnings."""
    prompt = shared[: chance.randint(1, len(shared))] + [
        chance.randint(8, 40) for _ in range(chance.randint(0, 20))
    ]
    count = chance.choice([1, 1, 3])
    params = SamplingParams(
        temperature=chance.choice([0.0, 1.0]),
        seed=chance.randint(0, 99),
        max_tokens=chance.randint(1, 60),
        n=count,
    )
    leader = request_of(prompt, params, priority=chance.randint(0, 2))
    return [
        leader,
        *(
            request_of(prompt, params, seed=i, leader=leader, priority=leader.priority)
            for i in range(1, count)
        ),
    ]


@pytest.mark.serial
def test_little_of_the_kv_memory_is_wasted() -> None:
    """Mixed lengths and drafts: between steps a request wastes at most the end of its last block."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    lengths = [40, 150, 390, 520, 270, 660, 185, 480]
    engine = engine_with(Ragged(), num_blocks=240, max_num_batched_tokens=512)
    for i, length in enumerate(lengths):
        engine.add(request_of(prompts(1, low=length, high=length, seed=i)[0], params))
    seen = []
    for _ in range(40):
        engine.step()
        caches = [request.cache for request in engine.scheduler.running]
        slots = len({block for cache in caches for block in cache.blocks}) * BLOCK_SIZE
        seen.append(1 - sum(cache.num_cached for cache in caches) / slots if slots else 0.0)
    waste = sum(seen) / len(seen)
    print(f"KV waste at mixed lengths: mean {waste:.1%}, worst {max(seen):.1%}")
    assert waste < 0.04


def test_a_request_that_fills_the_whole_cache_still_finishes() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
    engine = engine_with(Ragged(), num_blocks=4, max_num_batched_tokens=16)
    request = request_of(prompts(1, low=20, high=20)[0], params)
    engine.add(request)
    while engine.has_work:
        engine.step()
        engine.check()
    assert request.num_tokens == 64
    assert request.finish_reason == "length"
