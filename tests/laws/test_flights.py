"""Where a pass runs by itself the next is launched before the caller has seen what the last one said: nothing
else may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.params import SamplingParams
from paceline.core.types import Request
from paceline.engine.engine import Engine
from tests.laws.fakes import AlwaysRight
from tests.laws.harness import engine_with, prompts, request_of, run
from tests.laws.test_engine_laws import DRAFTER_NAMES, expected, make

MIXED = (
    SamplingParams(temperature=0.0, max_tokens=18),
    SamplingParams(temperature=0.9, seed=5, max_tokens=18, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=6, top_k=20, logprobs=2, max_tokens=12, ignore_eos=True),
)


class ByItself:
    """A decoder that says it may be left alone."""

    runs_by_itself = True

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


def ahead(engine: Engine) -> Engine:
    engine.executor = replace(engine.executor, decoder=ByItself(engine.executor.decoder))
    return engine


@pytest.mark.parametrize("drafter", DRAFTER_NAMES)
def test_texts_are_the_reference_loops(drafter: str | None) -> None:
    requests = [request_of(prompt, MIXED[i % 3], seed=i) for i, prompt in enumerate(prompts(5, seed=21))]
    run(ahead(make(drafter, max_num_seqs=3, max_num_batched_tokens=24)), requests)
    assert [request.output for request in requests] == [expected(request) for request in requests]


def test_the_next_pass_is_launched_before_the_caller_sees_the_last() -> None:
    engine = ahead(engine_with(None))
    request = request_of(
        prompts(1, seed=22)[0], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    )
    engine.add(request)
    launched: list[int] = []
    forward = engine.executor.decoder._decoder.forward  # type: ignore[attr-defined]

    def counted(*arguments: Any, **options: Any) -> Any:
        launched.append(len(request.output))
        return forward(*arguments, **options)

    engine.executor.decoder.forward = counted  # type: ignore[method-assign]
    said = 0
    while engine.has_work:
        said += sum(len(emission.tokens) for emission in engine.step())
        assert len(launched) == min(said + 1, 6), "one pass is on its way while there is more to say"
    assert launched == [0, 1, 2, 3, 4, 5]


def test_a_draft_for_which_something_was_recorded_is_not_timed() -> None:
    """Every other draft: a recording takes hundreds of times as long, once, and would be believed."""
    engine = ahead(engine_with(AlwaysRight(), is_auto=True))
    decoder, drafter = engine.executor.decoder, engine.policy.drafters[0]
    decoder.capture = SimpleNamespace(num_recordings=0)  # type: ignore[attr-defined]
    propose, heard, times = drafter.propose, engine.policy.heard, []

    def recording(*arguments: Any) -> Any:
        decoder.capture.num_recordings += len(times) % 2  # type: ignore[attr-defined]
        return propose(*arguments)

    def listening(number: int, asks: Any, drafts: Any, seconds: float | None) -> None:
        times.append(seconds)
        heard(number, asks, drafts, seconds)

    drafter.propose, engine.policy.heard = recording, listening  # type: ignore[method-assign]
    request = request_of(
        prompts(1, seed=23)[0], SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True)
    )
    run(engine, [request])
    assert request.output == expected(request)
    assert len(times) > 1
    assert [seconds is None for seconds in times] == [i % 2 == 1 for i in range(len(times))]


def check_stopped(engine: Engine, requests: Sequence[Request], when: int) -> None:
    """After so many steps the second is stopped: it says nothing more, and the others say all."""
    others = [requests[0], *requests[2:]]
    for request in requests:
        engine.add(request)
    for _ in range(when):
        engine.step()
    length = requests[1].num_output
    engine.abort(requests[1])
    engine.check()
    assert not requests[1].cache.blocks
    while engine.has_work:
        assert all(emission.request is not requests[1] for emission in engine.step())
        engine.check()
    assert engine.executor.kv.pool.num_used == 0
    assert requests[1].num_output == length
    assert [request.output for request in others] == [expected(request) for request in others]


def test_who_is_stopped_while_its_pass_runs_is_gone_and_nobody_else() -> None:
    for when in range(6):
        params = SamplingParams(temperature=0.7, seed=1, max_tokens=16, ignore_eos=True)
        requests = [request_of(prompt, params, seed=i) for i, prompt in enumerate(prompts(4, seed=23))]
        engine = ahead(make("draft_model", max_num_seqs=3, max_num_batched_tokens=16))
        check_stopped(engine, requests, when)


def test_a_flight_whose_requests_all_were_stopped_harms_nobody_later() -> None:
    engine = ahead(engine_with(None))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    first, second = (request_of(prompt, params) for prompt in prompts(2, seed=24))
    engine.add(first)
    engine.step()
    engine.abort(first)
    assert not engine.has_work
    run(engine, [second])
    assert second.output == expected(second)
