"""Where a drafter and the target run several rounds by themselves, nothing but the number of steps may
change.

The drafters are those of fakes.py; what a device would do is done here, pass by pass: drafts for the text as
it will be, over slots that the engine has reserved, and a choice after every node.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from paceline.core.accept import follow
from paceline.core.errors import ModelError
from paceline.core.params import SamplingParams
from paceline.core.sampling import choose, noise_of
from paceline.core.tree import Tree
from paceline.core.types import Cached, Draft, FinishReason, Needs, Request, Round, Seen, Segment
from paceline.engine.engine import Engine
from paceline.runtime.executor import LocalExecutor
from tests.laws.fakes import AlwaysRight, AlwaysWrong, Fake, Ragged, Random
from tests.laws.harness import engine_with, prompts, request_of, run
from tests.laws.test_engine_laws import expected
from tests.laws.test_flights import MIXED, ahead, check_stopped

LENGTH = 3


@dataclass
class Done:
    """Rounds that are over before they begin to be waited for."""

    next_round: Callable[[], Round]
    num_left: int
    said: list[Round] = field(default_factory=list)
    is_first: bool = False

    def hidden(self, number: int) -> dict[int, torch.Tensor]:
        return {}

    def __len__(self) -> int:
        return len(self.said)

    def more(self) -> None:
        assert self.num_left, "slots are reserved for so many rounds"
        self.num_left -= 1
        self.said.append(self.next_round())

    def round(self, number: int) -> Round:
        return self.said[number]


class Flying:
    """A fake that can do without the host."""

    needs, is_free, most_rounds, is_weighing = Needs(), False, 4, False

    def __init__(self, inner: Fake, may: Callable[[], bool] = lambda: True) -> None:
        self.inner, self.name, self.may = inner, inner.name, may
        self.runner: LocalExecutor | None = None
        self.flown: list[Done] = []
        self.break_at = -1  # the position after which logits are not finite
        self.shown: dict[str, int] = {}  # tokens with K/V, as of the last look

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return self.inner.propose(requests, budgets)

    def round_length(self, requests: Sequence[Request], most: int) -> int:
        return (
            LENGTH
            if most >= LENGTH and all(request.pick is not None for request in requests) and self.may()
            else 0
        )

    def fly(self, requests: Sequence[Request], count: int, *rest: object) -> Done:
        ghosts = [
            replace(r, tokens=list(r.tokens), cache=Cached(list(r.cache.blocks), r.cache.num_cached))
            for r in requests
        ]
        done = Done(lambda: self._round(ghosts), count)
        for _ in range(min(2, count)):
            done.more()
        self.flown.append(done)
        return done

    @property
    def flights(self) -> list[int]:
        """Rounds that were sent, by flight."""
        return [len(done) for done in self.flown]

    def _round(self, ghosts: Sequence[Request]) -> Round:
        assert self.runner is not None
        drafts = [self.inner.draft(ghost, LENGTH).tree.tokens[1:] for ghost in ghosts]
        chains = [[*tokens, *[5] * (LENGTH - len(tokens))] for tokens in drafts]
        segments = [
            Segment([g.tokens[-1], *tokens], g.cache, None, LENGTH + 1)
            for g, tokens in zip(ghosts, chains, strict=True)
        ]
        rows = iter(self.runner.forward(segments).logits.clone())
        picked = [
            [self._choose(ghost, next(rows), len(ghost.tokens) + i) for i in range(LENGTH + 1)]
            for ghost in ghosts
        ]
        for ghost, tokens, choices in zip(ghosts, chains, picked, strict=True):
            verdict = follow(
                Draft(Tree.chain(ghost.tokens[-1], tokens)), [max(token, 0) for token in choices]
            )
            assert verdict is not None
            ghost.tokens.extend(verdict.tokens)
            ghost.cache.num_cached += len(verdict.tokens)
        return Round(chains, [[0.5**i for i in range(1, LENGTH + 1)] for _ in ghosts], picked)

    def _choose(self, ghost: Request, logits: torch.Tensor, position: int) -> int:
        return -1 if position == self.break_at else choose(ghost, logits, position, noise_of(ghost))

    def land(self, requests: Sequence[Request], said: Round, number: int) -> list[Draft]:
        return [
            Draft(Tree.chain(request.tokens[-1], tokens), self.name, None, (1.0, *each))
            for request, tokens, each in zip(requests, said.tokens, said.chances, strict=True)
        ]

    def observe(self, seen: Sequence[Seen]) -> None:
        for one in seen:
            assert one.verdict is None or one.request.cache.num_cached - self.shown.get(
                one.request.id, 0
            ) >= len(one.verdict.path)
            self.shown[one.request.id] = one.request.cache.num_cached

    def release(self, request: Request) -> None:
        self.shown.pop(request.id, None)


def flying(
    inner: type[Fake], may: Callable[[], bool] = lambda: True, **limits: object
) -> tuple[Engine, Flying]:
    drafter = Flying(inner(), may)
    engine = ahead(engine_with(drafter, **limits))  # type: ignore[arg-type]
    drafter.runner = engine.executor
    return engine, drafter


@pytest.mark.parametrize("is_auto", [False, True])
@pytest.mark.parametrize("inner", [AlwaysRight, AlwaysWrong, Ragged, Random])
def test_texts_are_the_reference_loops(inner: type[Fake], is_auto: bool) -> None:
    """Requests come and go, one of them needs the host for each token, and every other time a flight is not
    to be had.
    """
    mixed = [MIXED[kind] for kind in (1, 1, 0, 1, 2)]
    requests = [
        request_of(prompt, params, seed=i)
        for i, (prompt, params) in enumerate(zip(prompts(5, seed=31), mixed, strict=True))
    ]
    turns = itertools.cycle((True, True, False))
    engine, drafter = flying(
        inner, lambda: next(turns), max_num_seqs=2, max_num_batched_tokens=24, is_auto=is_auto
    )
    run(engine, requests)
    assert [request.output for request in requests] == [expected(request) for request in requests]
    assert len(drafter.flights) >= 2 or (is_auto and inner is not AlwaysRight)
    assert engine.totals.num_steps > len(drafter.flights)


def test_flights_are_as_long_as_they_can_be_of_use() -> None:
    engine, drafter = flying(AlwaysRight)
    request = request_of(
        prompts(1, seed=32)[0],
        SamplingParams(temperature=0.0, max_tokens=1 + 5 * (LENGTH + 1) + 2, ignore_eos=True),
    )
    run(engine, [request])
    assert drafter.flights == [4, 2]  # the last goes two tokens too far
    assert engine.totals.num_steps == 1 + 6


@pytest.mark.parametrize("inner", [AlwaysRight, Ragged])
def test_whoever_ends_within_a_flight_has_no_part_in_the_rest(inner: type[Fake]) -> None:
    """By an end token, a stop token, its length or the end of the context, two at a time."""
    endings = [
        SamplingParams(temperature=0.8, seed=s, max_tokens=m, stop_token_ids=(9, 11))
        for s, m in itertools.product(range(4), (5, 40))
    ]
    for limit in (48, 53):
        requests = [
            request_of(prompt, params, seed=i)
            for i, (prompt, params) in enumerate(zip(prompts(8, seed=33), endings, strict=True))
        ]
        engine, drafter = flying(inner, max_num_seqs=2, max_model_len=limit)
        run(engine, requests)
        for request in requests:
            text = expected(request)[: limit - request.num_prompt]
            assert request.output == text
        assert {request.finish_reason for request in requests} == {FinishReason.STOP, FinishReason.LENGTH}
        assert max(drafter.flights) > 1


def test_where_blocks_are_few_steps_are_usual_and_nobody_is_lost() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    requests = [request_of(prompt, params) for prompt in prompts(4, low=20, seed=34)]
    engine, drafter = flying(Ragged, num_blocks=9, max_num_seqs=3, max_model_len=80)
    run(engine, requests)
    assert [request.output for request in requests] == [expected(request) for request in requests]
    assert engine.scheduler.num_preemptions > 0
    assert drafter.flights


def test_who_is_stopped_in_flight_is_gone_and_nobody_else() -> None:
    for when in range(1, 9):
        params = SamplingParams(temperature=0.7, seed=1, max_tokens=24, ignore_eos=True)
        requests = [request_of(prompt, params, seed=i) for i, prompt in enumerate(prompts(3, seed=35))]
        engine, _ = flying(Ragged, max_num_seqs=2)
        check_stopped(engine, requests, when)


def test_logits_that_are_not_finite_end_their_request_alone() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    long, short = (request_of(prompt, params) for prompt in ([3, 9, 4, 8, 12, 30, 2], [5, 6]))
    engine, drafter = flying(AlwaysRight, max_num_seqs=2)
    drafter.break_at = 22  # the shorter does not come so far
    for request in (long, short):
        engine.add(request)
    while engine.has_work:
        engine.step()
        engine.check()
    assert isinstance(long.error, ModelError)
    assert long.output == expected(long)[: long.num_output]
    assert short.output == expected(short)
    assert engine.executor.kv.pool.num_used == 0


def test_a_watch_that_comes_while_rounds_are_flown_sees_the_steps_after_them() -> None:
    engine, drafter = flying(AlwaysRight)
    request = request_of(
        prompts(1, seed=36)[0], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    )
    engine.add(request)
    engine.step()
    seen: list[object] = []
    engine.watch = seen.append
    while engine.has_work:
        engine.step()
    assert request.output == expected(request)
    assert drafter.flights == [4]
    assert seen
