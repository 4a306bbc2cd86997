"""Where a drafter and the target run several rounds without the host, nothing but the time may change.

The drafters are those of fakes.py; what a device would do is done here, pass by pass: drafts for the text as
it will be, over slots that the engine has reserved, and a choice after every node.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.core.accept import follow
from paceline.core.errors import ModelError
from paceline.core.params import SamplingParams
from paceline.core.sampling import choose, noise_of
from paceline.core.tree import Tree
from paceline.core.types import Batch, Cached, Draft, FinishReason, Request, Round, Seen, Segment
from paceline.drafters.base import Drafter
from paceline.engine.engine import Engine
from paceline.heads.rows import BurstInput, Feed, Sampler
from paceline.runtime.executor import LocalExecutor
from tests.laws.fakes import AlwaysRight, AlwaysWrong, Fake, Ragged, Random
from tests.laws.harness import engine_with, prompts, request_of, run
from tests.laws.test_ahead import MIXED, ahead, check_stopped
from tests.laws.test_engine_laws import expected

LENGTH = 3


class FakeBurst:
    """Rounds that are over before they begin to be waited for."""

    def __init__(self, backend: FakeBursts, ghosts: Sequence[Request], count: int) -> None:
        """ghosts: copies of the requests, which run ahead of them."""
        self._backend, self._ghosts, self.num_left = backend, ghosts, count
        self._said: list[Round] = []

    def hidden(self, number: int) -> dict[int, torch.Tensor]:
        return {}

    def __len__(self) -> int:
        return len(self._said)

    def more(self) -> None:
        assert self.num_left, "slots are reserved for no more rounds"
        self.num_left -= 1
        self._said.append(self._backend.next_round(self._ghosts))

    def round(self, number: int, roots: Sequence[int]) -> Round:
        """The drafts hang from the roots that the engine names."""
        said = self._said[number]
        drafts = [
            draft._replace(tree=Tree.chain(root, draft.tree.tokens[1:]))
            for root, draft in zip(roots, said.drafts, strict=True)
        ]
        return said._replace(drafts=drafts)


class FakeBursts:
    """What a device does without the host, done pass by pass with a drafter of fakes.py."""

    most_rounds, most_requests, is_weighing = 4, 8, False

    def __init__(self, inner: Fake) -> None:
        self.inner = inner
        self.executor: LocalExecutor | None = None
        self.launched: list[FakeBurst] = []
        self.break_at = -1  # the position after which logits are not finite

    def launch(self, batch: Batch, given: BurstInput) -> FakeBurst:
        requests: list[Request] = [feed.place for feed in given.feeds]
        ghosts = [
            replace(r, tokens=list(r.tokens), cache=Cached(list(r.cache.blocks), r.cache.num_cached))
            for r in requests
        ]
        self.limits = [g.cache.num_cached + room for g, room in zip(ghosts, given.rooms, strict=True)]
        burst = FakeBurst(self, ghosts, given.num_rounds)
        burst.more()
        self.launched.append(burst)
        return burst

    def next_round(self, ghosts: Sequence[Request]) -> Round:
        assert self.executor is not None
        for ghost, limit in zip(ghosts, self.limits, strict=True):  # it has ended, and nothing is kept of it
            ghost.cache.num_cached = min(ghost.cache.num_cached, limit - LENGTH - 1)
        found = [self.inner.draft(ghost, LENGTH).tree.tokens[1:] for ghost in ghosts]
        chains = [[*tokens, *[5] * (LENGTH - len(tokens))] for tokens in found]
        segments = [
            Segment([g.tokens[-1], *tokens], g.cache, None, LENGTH + 1)
            for g, tokens in zip(ghosts, chains, strict=True)
        ]
        rows = iter(self.executor.forward(segments).logits.clone())
        picked = [
            [self._choose(ghost, next(rows), len(ghost.tokens) + i) for i in range(LENGTH + 1)]
            for ghost in ghosts
        ]
        chances = tuple(0.5**i for i in range(LENGTH + 1))
        drafts = [
            Draft(Tree.chain(ghost.tokens[-1], tokens), self.inner.name, None, chances)
            for ghost, tokens in zip(ghosts, chains, strict=True)
        ]
        for ghost, draft, choices in zip(ghosts, drafts, picked, strict=True):
            verdict = follow(draft, [max(token, 0) for token in choices])
            assert verdict is not None
            ghost.tokens.extend(verdict.tokens)
            ghost.cache.num_cached += len(verdict.tokens)
        return Round(drafts, [follow(*each) for each in zip(drafts, picked, strict=True)])

    def _choose(self, ghost: Request, logits: torch.Tensor, position: int) -> int:
        return -1 if position == self.break_at else choose(ghost, logits, position, noise_of(ghost))


class Bursting(Drafter):
    """A fake that can do without the host."""

    def __init__(self, inner: Fake, may: Callable[[], bool] = lambda: True) -> None:
        self.inner, self.name, self.may = inner, inner.name, may
        self.burst_backend: FakeBursts = FakeBursts(inner)
        self.shown: dict[str, int] = {}  # tokens with K/V, when it was last shown something
        self.ended: list[int] = []  # requests of each round that was landed

    @property
    def bursts(self) -> list[int]:
        """Rounds that were sent, by burst."""
        return [len(burst) for burst in self.burst_backend.launched]

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return self.inner.propose(requests, budgets)

    def burst_length(self, requests: Sequence[Request], most: int) -> int:
        return LENGTH if most >= LENGTH and self.may() else 0

    def burst_feeds(self, requests: Sequence[Request], length: int) -> tuple[list[Feed], list[Sampler]]:
        assert length == LENGTH
        return [Feed(request, request.num_tokens, (), ()) for request in requests], []

    def end_round(self, requests: Sequence[Request], num_read: int | None) -> None:
        assert num_read is None
        self.ended.append(len(requests))

    def observe(self, seen: Sequence[Seen]) -> None:
        for one in seen:
            cached, before = one.request.cache.num_cached, self.shown.get(one.request.id, 0)
            assert one.verdict is None or cached - before >= len(one.verdict.path)
            self.shown[one.request.id] = cached

    def release(self, request: Request) -> None:
        self.shown.pop(request.id, None)


def bursting(
    inner: type[Fake], may: Callable[[], bool] = lambda: True, **limits: Any
) -> tuple[Engine, Bursting]:
    drafter = Bursting(inner(), may)
    engine = ahead(engine_with(drafter, **limits))
    drafter.burst_backend.executor = engine.executor
    return engine, drafter


@pytest.mark.parametrize("is_auto", [False, True])
@pytest.mark.parametrize("inner", [AlwaysRight, AlwaysWrong, Ragged, Random])
def test_texts_are_the_reference_loops(inner: type[Fake], is_auto: bool) -> None:
    """Requests come and go, one of them needs the host for each token, and every third time a burst is not
    to be had.
    """
    mixed = [MIXED[kind] for kind in (1, 1, 0, 1, 2)]
    requests = [
        request_of(prompt, params, seed=i)
        for i, (prompt, params) in enumerate(zip(prompts(5, seed=31), mixed, strict=True))
    ]
    turns = itertools.cycle((True, True, False))
    engine, drafter = bursting(
        inner, lambda: next(turns), max_num_seqs=2, max_num_batched_tokens=24, is_auto=is_auto
    )
    run(engine, requests)
    assert [request.output for request in requests] == [expected(request) for request in requests]
    assert len(drafter.bursts) >= 2 or (is_auto and inner is not AlwaysRight)
    assert engine.totals.num_steps > len(drafter.bursts)


def test_bursts_are_as_long_as_they_can_be_of_use() -> None:
    engine, drafter = bursting(AlwaysRight)
    request = request_of(
        prompts(1, seed=32)[0],
        SamplingParams(temperature=0.0, max_tokens=1 + 5 * (LENGTH + 1) + 2, ignore_eos=True),
    )
    run(engine, [request])
    assert drafter.bursts == [4, 2]  # the last goes two tokens too far
    assert engine.totals.num_steps == 1 + 6


@pytest.mark.parametrize("inner", [AlwaysRight, Ragged])
def test_a_request_that_ends_within_a_burst_has_no_part_in_the_rest(inner: type[Fake]) -> None:
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
        engine, drafter = bursting(inner, max_num_seqs=2, max_model_len=limit)
        run(engine, requests)
        for request in requests:
            text = expected(request)[: limit - request.num_prompt]
            assert request.output == text
        assert {request.finish_reason for request in requests} == {FinishReason.STOP, FinishReason.LENGTH}
        assert max(drafter.bursts) > 1


def test_where_blocks_are_few_steps_are_usual_and_nothing_is_lost() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    requests = [request_of(prompt, params) for prompt in prompts(4, low=20, seed=34)]
    engine, drafter = bursting(Ragged, num_blocks=9, max_num_seqs=3, max_model_len=80)
    run(engine, requests)
    assert [request.output for request in requests] == [expected(request) for request in requests]
    assert engine.scheduler.num_preemptions > 0
    assert drafter.bursts


def test_a_request_stopped_within_a_burst_is_gone_and_no_other() -> None:
    for when in range(1, 9):
        params = SamplingParams(temperature=0.7, seed=1, max_tokens=24, ignore_eos=True)
        requests = [request_of(prompt, params, seed=i) for i, prompt in enumerate(prompts(3, seed=35))]
        engine, _ = bursting(Ragged, max_num_seqs=2)
        check_stopped(engine, requests, when)


def test_logits_that_are_not_finite_end_their_request_alone() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    long, short = (request_of(prompt, params) for prompt in ([3, 9, 4, 8, 12, 30, 2], [5, 6]))
    engine, drafter = bursting(AlwaysRight, max_num_seqs=2)
    drafter.burst_backend.break_at = 22  # the shorter does not come so far
    for request in (long, short):
        engine.add(request)
    while engine.has_work:
        engine.step()
        engine.check()
    assert isinstance(long.error, ModelError)
    assert long.output == expected(long)[: long.num_output]
    assert short.output == expected(short)
    assert engine.executor.kv.num_used == 0


def test_a_watch_that_comes_within_a_burst_sees_the_steps_after_it() -> None:
    engine, drafter = bursting(AlwaysRight)
    request = request_of(
        prompts(1, seed=36)[0], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    )
    engine.add(request)
    engine.step()
    engine.step()
    seen: list[object] = []
    engine.watch = seen.append
    while engine.has_work:
        engine.step()
    assert request.output == expected(request)
    assert drafter.bursts == [2], "nothing was sent after it had come"
    assert seen
