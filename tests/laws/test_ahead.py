"""Where a pass goes on after `forward` has returned, the next is launched before the caller has seen what the
last one said: nothing else may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.core.params import SamplingParams
from paceline.core.types import Request
from paceline.engine.engine import Engine
from paceline.engine.policy.base import FixedPolicy
from tests.laws.harness import DEVICE, engine_with, prompts, request_of, run
from tests.laws.test_engine_laws import DRAFTER_NAMES, expected, make

MIXED = (
    SamplingParams(temperature=0.0, max_tokens=18),
    SamplingParams(temperature=0.9, seed=5, max_tokens=18, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=6, top_k=20, logprobs=2, max_tokens=12, ignore_eos=True),
)


class Asynchronous:
    """A backend that says that its passes go on after `forward` has returned, and has no bursts without a
    head.
    """

    is_async = True

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def burst(self, *_: Any) -> None:
        return None


def ahead(engine: Engine, decoder: Any = None) -> Engine:
    """The same engine over such a backend. decoder: instead of its own."""
    executor = engine.executor
    executor.backend = Asynchronous(executor.backend)
    executor.decoder = decoder or executor.decoder
    policy = None if isinstance(engine.policy, FixedPolicy) else engine.policy
    return Engine(executor, engine.drafter, engine.config, policy)


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
    forward = engine.executor.forward

    def counted(*arguments: Any, **options: Any) -> Any:
        launched.append(len(request.output))
        return forward(*arguments, **options)

    engine.executor.forward = counted  # type: ignore[method-assign]
    said = 0
    while engine.has_work:
        said += sum(len(emission.tokens) for emission in engine.step())
        assert len(launched) == min(said + 1, 6), "one pass is on its way while there is more to say"
    # Of passes that really run by themselves, a second is on its way when the first has said nothing yet.
    assert launched == ([0, 1, 2, 3, 4, 5] if DEVICE.type == "cpu" else [0, 1, 1, 2, 3, 4])


def check_stopped(engine: Engine, requests: Sequence[Request], when: int) -> None:
    """After `when` steps the second is stopped: it emits nothing more, and the others emit all."""
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
    assert engine.executor.kv.num_used == 0
    assert requests[1].num_output == length
    assert [request.output for request in others] == [expected(request) for request in others]


def test_a_request_stopped_while_its_pass_runs_is_gone_and_no_other() -> None:
    for when in range(6):
        params = SamplingParams(temperature=0.7, seed=1, max_tokens=16, ignore_eos=True)
        requests = [request_of(prompt, params, seed=i) for i, prompt in enumerate(prompts(4, seed=23))]
        engine = ahead(make("draft_model", max_num_seqs=3, max_num_batched_tokens=16))
        check_stopped(engine, requests, when)


def test_a_pass_whose_requests_all_were_stopped_harms_no_later_one() -> None:
    engine = ahead(engine_with(None))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    first, second = (request_of(prompt, params) for prompt in prompts(2, seed=24))
    engine.add(first)
    engine.step()
    engine.abort(first)
    assert not engine.has_work
    run(engine, [second])
    assert second.output == expected(second)
