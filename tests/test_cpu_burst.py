"""Rounds that a CPU makes in one go: draft for draft those of usual steps, weighed as the policy weighs,
whoever ends when.

Target and head are those of tests/calm.py. That texts are those of the reference loop is a law (tests/laws),
for every drafter.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from numba import carray
from paceline.cpu.flights import Craft, craft_at, weigh
from paceline.engine.calibrate import BINS, DEPTHS, STANDINGS, SURE, Asked, Record, Tally
from paceline.engine.choice import MARGIN
from paceline.engine.nodes import best_start

from paceline.core.errors import ModelError
from paceline.core.params import SamplingParams
from paceline.core.tree import Tree
from paceline.core.types import Draft, FinishReason, Request
from paceline.cpu import flights, rounds
from paceline.cpu.compile import kernel
from paceline.cpu.decoder import CpuDecoder
from paceline.cpu.lanes import double_pointer
from paceline.drafters import registry
from paceline.drafters.base import DrafterContext
from paceline.drafters.suffix_tree import SuffixTree
from paceline.engine import plan
from paceline.engine.commit import Emission
from paceline.engine.engine import Engine
from paceline.engine.policy.auto import AutoPolicy
from paceline.engine.policy.cost import CostTable
from paceline.runtime.device import cache_dtype
from paceline.runtime.executor import LocalExecutor
from paceline.runtime.kv_cache import KvCache
from tests.calm import CHANGING, STEADY, TARGET, TINY, agree, config_with, drafter_of, flights_of, head_folder
from tests.laws.harness import prompts, request_of, run

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    return head_folder(tmp_path_factory.mktemp("head"))


@cache
def decoder(dtype: str) -> CpuDecoder:
    return CpuDecoder.load(TARGET, dtype=dtype, use_cache=False)


def runner_of(dtype: str = "float32", num_blocks: int = 32) -> LocalExecutor:
    return Runner(decoder(dtype), KvCache(TINY, num_blocks, kept=cache_dtype(torch.device("cpu"), dtype)))


def pinned(head: str, steps: int, dtype: str = "float32", limit: int = 100) -> Engine:
    runner = runner_of(dtype)
    return Engine(runner, drafter_of(runner, head, steps), config_with(steps, limit))


def usual(
    head: str, steps: int, requests: Sequence[Request], dtype: str = "float32", limit: int = 100
) -> list[Emission]:
    engine = pinned(head, steps, dtype, limit)
    engine.policy.may_fly = lambda *_: False  # type: ignore[method-assign]
    return run(engine, requests)


def weighing(
    head: str, seconds: dict[int, float], num_blocks: int = 32, limit: int = 200
) -> tuple[Engine, list[Any]]:
    """Suffix matching beside the head, and a policy that believes in these costs; gets what each flight has
    said.
    """
    runner = runner_of(num_blocks=num_blocks)
    suffix = registry.create(*registry.parse({"method": "suffix", "num_speculative_tokens": 8}), None)  # type: ignore[arg-type]
    eagle = drafter_of(runner, head, 4)
    policy = AutoPolicy(
        [suffix, eagle], CostTable(seconds), known={"suffix": (1e-6, ()), "eagle": (1e-6, (0.8, 0.8))}
    )
    engine, flown, fly = Engine(runner, eagle, config_with(8, limit), policy), [], eagle.fly

    def noted(*arguments: Any) -> Any:
        flown.append(fly(*arguments))
        return flown[-1]

    eagle.fly = noted
    return engine, flown


CHEAP = {1: 1e-3, 8: 1.01e-3}  # seconds of passes by rows: sixteen rounds in one go


@pytest.mark.parametrize(("steps", "dtype"), [(3, "float32"), (1, "int8"), (7, "int8"), (4, "int4")])
def test_rounds_are_usual_steps(steps: int, dtype: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for prompt in (CHANGING, STEADY):
        ours, theirs = (request_of(prompt, GREEDY) for _ in range(2))
        engine = pinned(head, steps, dtype)
        counts = flights_of(engine, monkeypatch)
        agree(run(engine, [ours]), usual(head, steps, [theirs], dtype), ours, theirs)
        assert max(counts) > 2
        assert engine.totals.num_accepted >= 2


def test_longer_drafts_than_the_head_can_read_back_are_made_in_usual_steps(head: str) -> None:
    engine, request = pinned(head, rounds.LONGEST + 1), request_of(CHANGING, GREEDY)
    assert engine.policy.drafters[0].most_rounds == 0  # type: ignore[attr-defined]
    run(engine, [request])


def test_drawn_tokens_are_left_to_the_host(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, request = (
        pinned(head, 3),
        request_of(CHANGING, SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)),
    )
    counts = flights_of(engine, monkeypatch)
    run(engine, [request])
    assert not counts


def test_whoever_ends_within_a_flight_says_no_more(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a token, by the end of the context, by its length; every second flight is a usual step."""
    for params, limit in (
        (SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=(31,)), 100),
        (GREEDY, 24),
        (GREEDY, 100),
    ):
        for prompt in (CHANGING, STEADY):
            ours, theirs = (request_of(prompt, params) for _ in range(2))
            engine, may = pinned(head, 2, limit=limit), cycle((True, False))
            monkeypatch.setattr(engine.policy, "may_fly", lambda *_, may=may: next(may))
            agree(run(engine, [ours]), usual(head, 2, [theirs], limit=limit), ours, theirs)
            assert ours.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


def test_who_may_be_ended_by_words_does_not_fly_far(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class At:
        """Words that are said when a text has so many tokens."""

        def __init__(self, length: int) -> None:
            self.left = length

        def push(self, token: int) -> bool:
            self.left -= 1
            return self.left == 0

    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=("words",))
    ours, theirs = (request_of(CHANGING, params, text_stop=At(9)) for _ in range(2))
    engine = pinned(head, 2)
    counts = flights_of(engine, monkeypatch)
    agree(run(engine, [ours]), usual(head, 2, [theirs]), ours, theirs)
    assert (ours.finish_reason, ours.num_output) == (FinishReason.STOP, 9)
    assert max(counts) == 2


def test_drafts_are_weighed_and_the_text_is_plain(head: str) -> None:
    """Both are checked sometimes, and what one of them has read is not lost while the other is believed."""
    whose: set[int] = set()
    for seconds in (CHEAP, {1: 1e-3, 2: 1.1e-3, 4: 2.5e-3, 8: 6e-3}):
        for i, prompt in enumerate((CHANGING, STEADY, *prompts(4, seed=3))):
            ours, theirs = (
                request_of(prompt, SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True))
                for _ in range(2)
            )
            engine, flown = weighing(head, seconds)
            run(engine, [ours])
            run(Engine(runner_of(), None, config_with(0, 200)), [theirs])
            assert ours.output == theirs.output, f"prompt {i}"
            assert max(map(len, flown)) > 3
            whose |= {row[flights.WHO] for flight in flown for row in flight._ring}
    assert {flights.OTHER, flights.HEAD} <= whose


def test_suffix_matching_flies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a policy that weighs; pinned, it drafts the trees it was asked for."""
    options = registry.parse({"method": "suffix", "num_speculative_tokens": 12})
    ours, theirs, third = (
        request_of(CHANGING, SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True))
        for _ in range(3)
    )
    run(Engine(runner_of(), None, config_with(0, 200)), [theirs])
    for policy, request in ((True, ours), (False, third)):
        runner = runner_of()
        suffix = registry.create(*options, DrafterContext(runner, TARGET, None, lambda *_: None))  # type: ignore[arg-type]
        auto = AutoPolicy([suffix], CostTable(CHEAP), known={"suffix": (1e-6, ())}) if policy else None
        engine = Engine(runner, suffix, config_with(12, 200), auto)
        counts = flights_of(engine, monkeypatch)
        run(engine, [request])
        assert request.output == theirs.output
        assert bool(counts) is policy
        assert engine.totals.num_accepted > 10


def test_a_suffix_tree_that_must_grow_ends_the_flight(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.drafters.suffix_tree.FIRST_SIZE", 64)
    grown: list[int] = []
    grow = SuffixTree.grow

    def noted(tree: SuffixTree) -> None:
        grown.append(tree.size)
        grow(tree)

    monkeypatch.setattr(SuffixTree, "grow", noted)
    ours, theirs = (
        request_of(CHANGING, SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True))
        for _ in range(2)
    )
    engine, flown = weighing(head, CHEAP)
    run(engine, [ours])
    run(Engine(runner_of(), None, config_with(0, 200)), [theirs])
    assert ours.output == theirs.output
    assert grown
    assert any(1 < len(flight) < rounds.MOST_ROUNDS for flight in flown[:-1]), (
        "one that ended before its time"
    )


def test_logits_that_are_not_finite_end_their_request(head: str) -> None:
    engine, ours, theirs = pinned(head, 2), request_of(CHANGING, GREEDY), request_of(CHANGING, GREEDY)
    run(Engine(runner_of(), None, config_with(0, 100)), [theirs])
    engine.add(ours)
    engine.step()
    assert ours.num_output == 1
    engine.executor.kv.values[:, ours.cache.blocks[0] * 16 : ours.cache.blocks[0] * 16 + 4] = float("nan")
    engine.step()
    assert isinstance(ours.error, ModelError)
    assert ours.output == theirs.output[: ours.num_output]
    assert engine.executor.kv.pool.num_used == 0


def test_who_arrives_is_served_when_the_flight_is_over_and_few_blocks_are_shared(head: str) -> None:
    texts = []
    for make in (
        lambda: weighing(head, CHEAP, num_blocks=10, limit=120)[0],
        lambda: Engine(runner_of(), None, config_with(0, 120)),
    ):
        engine = make()
        first, second, third = (request_of(prompt, GREEDY) for prompt in (CHANGING, STEADY, CHANGING))
        engine.add(first)
        engine.step()
        engine.step()
        engine.add(second)
        engine.step()
        engine.check()
        run(engine, [third])
        texts.append([request.output for request in (first, second, third)])
    assert texts[0] == texts[1]


def test_a_flight_is_no_longer_than_a_listener_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "LONGEST_FLIGHT", 0.1)
    assert [plan.rounds_within(seconds) for seconds in (0.006, 0.03, 0.2)] == [16, 3, 1]
    policy = plan.FixedPolicy(None, 3)
    policy.replayed((), (), Draft(Tree.chain(1)), {}, 0.0, 0.02)
    assert policy.course(0, None, 3).num_rounds == 5


@kernel
def _weigh(at, chances_at, num, table_at, factor, standing, spent, out_at):  # type: ignore[no-untyped-def]
    from_kernel = weigh(
        craft_at(at), carray(double_pointer(chances_at), num), num, table_at, factor, standing, spent
    )
    out = carray(double_pointer(out_at), 2)
    out[0], out[1] = from_kernel


def test_drafts_are_weighed_as_the_policy_weighs_them() -> None:
    draw, length = random.Random(5), 6
    for _ in range(200):
        record, tally, costs = (
            Record(False, 1e-3),
            Tally(),
            CostTable({1: 1.0, 2: 1.1, 4: 1.1 + draw.random(), 8: 3.0 + draw.random()}),
        )
        for _ in range(60):
            record.calibration.observe(
                draw.randrange(BINS * DEPTHS * STANDINGS), draw.random(), draw.random() < 0.6
            )
        tally.factor = draw.choice((0.6, 1.0, 1.7))
        chances = np.cumprod([draw.random() ** 0.3 for _ in range(length)])
        one, standing = (
            Asked(Draft(Tree.chain(1, range(2, 2 + length)), "head", None, (1.0, *chances)), record, tally),
            draw.randrange(3),
        )
        if standing:
            one.compare(standing)
        base, each = costs.base(length + 1), 0.01
        count, gained, added = best_start(one.scores[1:], 1.0, base[1], base, 1, each, MARGIN)
        table = np.array(record.calibration.table())
        settings = np.array((base[1], MARGIN, 0.0, SURE, 1.0, 1.0))
        steps, out = np.array([base[1 + n] - base[1] + n * each for n in range(length + 1)]), np.zeros(2)
        craft = array("q", [0] * len(Craft._fields))
        fields = {
            "settings": settings.ctypes.data,
            "added": steps.ctypes.data,
            "length": length,
            "bins": BINS,
            "depths": DEPTHS,
        }
        for name, value in fields.items():
            craft[Craft._fields.index(name)] = value
        _weigh(
            craft.buffer_info()[0],
            chances.ctypes.data,
            length,
            table.ctypes.data,
            tally.factor,
            standing,
            0.0,
            out.ctypes.data,
        )
        assert (out[0], out[1]) == (count, pytest.approx(gained * base[1] - added))
