"""A plain pass that follows another before it has landed, with tokens that only the device knows: nothing but
the time may change.

What a device would do is done here: ids below zero are what the pass before picked. On a GPU it is left to
the GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.core.errors import ModelError
from paceline.core.noise import Noise, Purpose
from paceline.core.params import SamplingParams
from paceline.core.types import (
    Batch,
    Cached,
    Columns,
    FinishReason,
    Output,
    Pick,
    Request,
    ScheduledRequest,
    Segment,
)
from paceline.drafters.base import Drafter
from paceline.engine.engine import Engine
from paceline.engine.policy.auto import AutoPolicy
from paceline.engine.policy.base import Plan
from tests.laws.fakes import AlwaysRight, AlwaysWrong
from tests.laws.harness import DEVICE, engine_with, prompts, request_of, run
from tests.laws.test_ahead import ahead, check_stopped
from tests.laws.test_engine_laws import expected


class Device:
    """A decoder that picks tokens, and reads those of the pass before."""

    def __init__(self, decoder: Any, break_at: int = -1) -> None:
        self._decoder, self._break_at = decoder, break_at  # the position after which logits are not finite
        self.latest: list[int] = []
        self.logits = torch.empty(0)
        self.num_followers = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, batch: Batch, kv: Any, **options: Any) -> Output:
        self.logits.fill_(torch.nan)  # a pass overwrites those of the one before
        known = [
            token if token >= 0 else max(self.latest[-1 - token], 0) for token in batch.columns.input_ids
        ]
        self.num_followers += min(batch.columns.input_ids) < 0
        columns = Columns(known, *batch.columns[1:])
        output = self._decoder.forward(Batch(columns, batch.device, batch.picks), kv, **options)
        if batch.picks is None:
            return output._replace(picked=None)
        places = [columns.positions[row] + 1 for row in columns.rows]
        self.latest = [
            self._pick(*each)
            for each in zip(output.logits.double().cpu().numpy(), batch.picks, places, strict=True)
        ]
        self.logits = output.logits
        return output._replace(picked=self.latest)

    def _pick(self, logits: Any, pick: Any, place: int) -> int:
        if place == self._break_at:
            return -1
        return (
            Noise(pick.seed).draw(logits / pick.temperature, place, Purpose.TARGET)
            if pick.temperature
            else int(logits.argmax())
        )


class Counting:
    """A GPU, and how often it was given a pass after one that had not landed."""

    def __init__(self, decoder: Any) -> None:
        self._decoder, self.num_followers = decoder, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, batch: Batch, kv: Any, **options: Any) -> Output:
        self.num_followers += min(batch.columns.input_ids) < 0
        return self._decoder.forward(batch, kv, **options)


def on_device(
    drafter: Drafter | None = None, break_at: int = -1, **limits: Any
) -> tuple[Engine, Device | Counting]:
    engine = engine_with(drafter, **limits)
    decoder = engine.executor.decoder
    device = Counting(decoder) if DEVICE.type == "cuda" else Device(decoder, break_at)
    return ahead(engine, device), device


def many(count: int, seed: int, kinds: Sequence[SamplingParams]) -> list[Request]:
    return [
        request_of(prompt, kinds[i % len(kinds)], seed=i)
        for i, prompt in enumerate(prompts(count, seed=seed))
    ]


ENDINGS = [
    SamplingParams(temperature=t, seed=s, max_tokens=m, stop_token_ids=(9, 11))
    for t, s, m in itertools.product((0.0, 0.8), (3, None), (4, 17, 40))
]


def test_texts_are_the_reference_loops() -> None:
    """Requests come and go, by end tokens, stop tokens and lengths."""
    requests = many(16, 41, ENDINGS)
    engine, device = on_device(max_num_seqs=6, max_num_batched_tokens=48)
    run(engine, requests)
    assert [request.output for request in requests] == [expected(request) for request in requests]
    assert device.num_followers > 20


@pytest.mark.parametrize("drafter", [AlwaysWrong(), AlwaysRight()])
def test_plain_steps_between_trials_of_a_policy_follow_each_other(drafter: Drafter) -> None:
    requests = many(16, 41, [*ENDINGS[:2], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)])
    engine, device = on_device(drafter, is_auto=True, max_num_seqs=6, max_num_batched_tokens=48)
    policy, numbers = engine.policy, itertools.count()
    assert isinstance(policy, AutoPolicy)
    plan = policy.plan

    def planned(scheduled: Sequence[ScheduledRequest]) -> Plan:
        found = plan(scheduled)
        return found._replace(asks=(), plain_steps=4) if next(numbers) % 6 == 2 else found

    policy.plan = planned  # type: ignore[method-assign]
    run(engine, requests)
    assert [request.output for request in requests] == [expected(request) for request in requests]
    assert device.num_followers > 5
    assert engine.totals.num_drafted > 10


def test_passes_of_one_request_follow_each_other() -> None:
    """One is under way while the caller looks at what another has said, from the first to the last."""
    (request,) = many(1, 51, [SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)])
    engine, device = on_device()
    launched: list[int] = []
    forward = engine.executor.forward

    def counted(*arguments: Any, **options: Any) -> Output:
        launched.append(request.num_output)
        return forward(*arguments, **options)

    engine.executor.forward = counted  # type: ignore[method-assign]
    run(engine, [request])
    assert request.output == expected(request)
    assert device.num_followers == 18, "all but the prompt's pass and the one after it"
    assert launched == [0, 1, *range(1, 19)], "each before the one before it has landed"


def test_a_request_that_needs_the_host_is_not_followed() -> None:
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=30),
        SamplingParams(temperature=0.7, seed=6, logprobs=2, max_tokens=8),
    ]
    requests = many(4, 42, kinds)
    engine, device = on_device(max_num_seqs=4)
    run(engine, requests)
    assert [request.output for request in requests] == [expected(request) for request in requests]
    assert 0 < device.num_followers < 30, "only when those with logprobs have ended"


def test_a_drafter_that_is_always_asked_is_not_passed_over() -> None:
    requests = many(4, 43, [SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)])
    engine, device = on_device(AlwaysWrong(), max_num_seqs=4)
    run(engine, requests)
    assert device.num_followers == 0
    assert [request.output for request in requests] == [expected(request) for request in requests]


def test_no_pass_follows_where_another_has_used_the_model_meanwhile() -> None:
    """Its tokens lie where those of the pass before lay."""
    requests = many(4, 50, [SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)])
    engine, device = on_device(max_num_seqs=4)
    other = Cached()
    for request in requests:
        engine.add(request)
    for number in itertools.count():
        if not engine.has_work:
            break
        engine.step()
        if number % 3 == 1 and engine.executor.kv.reserve(other, 2):
            engine.executor.forward([Segment([5, 6], other, None, 2, Pick(0.0, 0))])
            engine.executor.kv.free(other)
    assert device.num_followers > 5
    assert [request.output for request in requests] == [expected(request) for request in requests]


def test_an_arrival_gets_the_free_seat_at_once() -> None:
    first, late = (
        many(3, 44, [SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)]),
        many(1, 45, ENDINGS)[0],
    )
    engine, device = on_device(max_num_seqs=4)
    for request in first:
        engine.add(request)
    while device.num_followers < 5:
        engine.step()
    engine.add(late)
    engine.step()  # lands what was under way, and nothing follows
    engine.step()
    assert late.cache.num_cached or late.num_output
    while engine.has_work:
        engine.step()
    assert [request.output for request in (*first, late)] == [expected(request) for request in (*first, late)]


def test_a_stopped_request_is_gone_and_no_other() -> None:
    for when in range(2, 9):
        requests = many(4, 46, [SamplingParams(temperature=0.7, seed=1, max_tokens=16, ignore_eos=True)])
        engine, _ = on_device(max_num_seqs=4)
        check_stopped(engine, requests, when)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU that breaks a row by itself is not to be had")
def test_a_broken_row_ends_its_own_request_alone() -> None:
    drawn = many(4, 47, [SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)])
    *others, broken = sorted(
        drawn, key=lambda request: request.num_prompt
    )  # the longest: it alone comes so far
    place = broken.num_prompt + 10
    requests = [
        broken,
        *(
            replace(request, params=replace(request.params, max_tokens=place - request.num_prompt))
            for request in others
        ),
    ]
    engine, device = on_device(break_at=place, max_num_seqs=4)
    run(engine, requests)
    assert device.num_followers > 5
    assert broken.finish_reason is FinishReason.ERROR
    assert isinstance(broken.error, ModelError)
    assert broken.num_output == 10
    assert [request.output for request in requests[1:]] == [expected(request) for request in requests[1:]]


def test_where_blocks_run_out_no_pass_follows_and_nothing_is_lost() -> None:
    requests = many(6, 48, [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)])
    engine, device = on_device(num_blocks=12, max_num_seqs=6)
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        engine.check()
    assert engine.scheduler.num_preemptions > 0
    assert device.num_followers > 0
    assert engine.executor.kv.num_used == 0
    assert [request.output for request in requests] == [expected(request) for request in requests]


def test_what_was_said_is_found_again() -> None:
    """Blocks get their names on the way, so that the next turn of a conversation need not be read again."""
    requests = many(2, 49, [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)])
    engine, device = on_device(max_num_seqs=2, enable_prefix_caching=True)
    run(engine, requests)
    assert device.num_followers > 30
    again = request_of(
        [*requests[0].tokens, 5], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    )
    run(engine, [again])
    assert again.num_prefix_hits >= requests[0].num_tokens - 17
    assert again.output == expected(again)
