"""Bursts of a CPU, made in one compiled call: draft for draft those of usual steps, weighed as by the policy.

Target and head are those of tests/calm.py. That texts are those of the reference loop is a law (tests/laws),
for every drafter.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from numba import carray

from paceline.cli.verify_distribution import chi_square_p_value
from paceline.core.errors import ModelError
from paceline.core.params import SamplingParams
from paceline.core.tree import Tree
from paceline.core.types import Cached, Draft, FinishReason, Request, ScheduledRequest, Segment
from paceline.core.weigh import ALONE, NUM_CELLS, best_count
from paceline.cpu import burst
from paceline.cpu.backend import CpuBackend
from paceline.cpu.burst import CpuBurst
from paceline.cpu.burst_kernel import (
    HEAD,
    MATCH,
    SOURCE,
    BurstCall,
    HeadPart,
    TargetPart,
    WeightsPart,
    call_at,
    weigh,
)
from paceline.cpu.compile import kernel, numbers, size_of
from paceline.cpu.decoder import CpuDecoder
from paceline.cpu.lanes import double_pointer
from paceline.cpu.suffix_tree import SuffixTree
from paceline.drafters import registry
from paceline.drafters.base import DrafterContext
from paceline.engine import engine as engine_module
from paceline.engine.commit import Emission
from paceline.engine.engine import Engine
from paceline.engine.policy.calibration import Answer, Calibration, Factor
from paceline.engine.policy.cost import CostTable, Load
from paceline.engine.stats import Median
from paceline.heads.rows import Matcher
from paceline.runtime.executor import KvMemory, LocalExecutor
from paceline.runtime.record import StepRecord
from tests.calm import (
    CHANGING,
    STEADY,
    TARGET,
    TINY,
    Launched,
    agree,
    burst_every_second_time,
    bursts_of,
    config_with,
    drafter_of,
    head_folder,
)
from tests.laws.harness import Untimed, prompts, request_of, run
from tests.laws.reference import distribution

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
BACKEND = CpuBackend(use_cache=False)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    return head_folder(tmp_path_factory.mktemp("head"))


@cache
def decoder(dtype: str) -> CpuDecoder:
    return BACKEND.load(TARGET, dtype)


def executor_of(dtype: str = "float32", num_blocks: int = 32) -> LocalExecutor:
    memory = KvMemory(TINY, num_blocks, "cpu", BACKEND.kv_format(dtype, "auto"))
    return LocalExecutor(BACKEND, decoder(dtype), memory)


def pinned(head: str, steps: int, dtype: str = "float32", limit: int = 100) -> Engine:
    executor = executor_of(dtype)
    return Engine(executor, drafter_of(executor, head, steps), config_with(steps, limit))


def usual(
    head: str, steps: int, requests: Sequence[Request], dtype: str = "float32", limit: int = 100
) -> list[Emission]:
    engine = pinned(head, steps, dtype, limit)
    engine.policy.drafters[0].burst_backend = None
    launched = bursts_of(engine)
    said = run(engine, requests)
    assert not launched
    return said


def run_plainly(request: Request, limit: int = 200, dtype: str = "float32") -> list[int]:
    """By usual steps."""
    engine = Engine(executor_of(dtype), None, config_with(0, limit))
    engine.watch = lambda *_: None
    run(engine, [request])
    return request.output


def weighing(
    head: str, seconds: dict[int, float], num_blocks: int = 32, limit: int = 200
) -> tuple[Engine, list[Launched]]:
    """Suffix matching beside the head, and a policy that believes in these costs; gets every burst."""
    executor = executor_of(num_blocks=num_blocks)
    suffix = registry.create(*registry.parse({"method": "suffix", "num_speculative_tokens": 8}), None)  # type: ignore[arg-type]
    eagle = drafter_of(executor, head, 4)
    known = {"suffix": (1e-6, ()), "eagle": (1e-6, (0.8, 0.8))}
    policy = Untimed([suffix, eagle], CostTable(seconds), known=known)
    engine = Engine(executor, eagle, config_with(8, limit), policy)
    return engine, bursts_of(engine)


CHEAP = {1: 1e-3, 8: 1.01e-3}  # seconds of passes by rows


@pytest.mark.parametrize(("steps", "dtype"), [(3, "float32"), (1, "int8"), (7, "int8"), (4, "int4")])
def test_rounds_are_usual_steps(steps: int, dtype: str, head: str) -> None:
    for prompt in (CHANGING, STEADY):
        ours, theirs = (request_of(prompt, GREEDY) for _ in range(2))
        engine = pinned(head, steps, dtype)
        launched = bursts_of(engine)
        agree(run(engine, [ours]), usual(head, steps, [theirs], dtype), ours, theirs)
        assert max(len(one.burst) for one in launched) > 2
        assert engine.totals.num_accepted >= 2


def test_longer_drafts_than_the_head_can_read_back_are_made_in_usual_steps(head: str) -> None:
    engine, request = pinned(head, burst.LONGEST + 1), request_of(CHANGING, GREEDY)
    launched = bursts_of(engine)
    run(engine, [request])
    assert request.output == run_plainly(request_of(CHANGING, GREEDY))
    assert not launched


SAMPLED = [
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 6, "min_p": 0.01},
]


@pytest.mark.parametrize("has_seed", [True, False])
@pytest.mark.parametrize("options", SAMPLED)
def test_rounds_draw_what_usual_steps_draw(options: dict[str, Any], has_seed: bool, head: str) -> None:
    """Also without a seed: every token is the target's own draw at its position."""
    accepted = 0
    for seed, prompt in ((3, CHANGING), (2**64 - 5, STEADY)):
        params = SamplingParams(max_tokens=40, ignore_eos=True, seed=seed if has_seed else None, **options)
        ours, theirs, plain = (request_of(prompt, params, seed=seed) for _ in range(3))
        engine = pinned(head, 3, "int8")
        launched = bursts_of(engine)
        agree(run(engine, [ours]), usual(head, 3, [theirs], "int8"), ours, theirs)
        assert ours.output == run_plainly(plain, dtype="int8")
        assert max(len(one.burst) for one in launched) > 2
        accepted += engine.totals.num_accepted
    assert accepted > 5


def test_unseeded_bursts_have_the_targets_distribution(head: str) -> None:
    """The joint law of three tokens that one burst draws, most of them drafted; only the noise differs."""
    params = SamplingParams(temperature=1.2, top_k=3, max_tokens=4, ignore_eos=True)
    engine = pinned(head, 3)
    launched, counts = bursts_of(engine), Counter[tuple[int, ...]]()
    for i in range(1200):
        request = request_of(CHANGING, params, seed=7919 * i + 13)
        run(engine, [request])
        counts[tuple(request.output)] += 1
    assert len(launched) >= 1200
    assert 0 < engine.totals.num_accepted < engine.totals.num_drafted
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(params.max_tokens):
        grown = {}
        for output, mass in law.items():
            for token, share in enumerate(distribution(logits_after, CHANGING, list(output), params)):
                if share > 0:
                    grown[(*output, token)] = mass * float(share)
        law = grown
    assert chi_square_p_value(counts, law) > 1e-3


def logits_after(tokens: Sequence[int]) -> np.ndarray:
    executor, cached = executor_of(), Cached()
    assert executor.kv.reserve(cached, len(tokens))
    return executor.forward([Segment(tokens, cached)]).logits[0].numpy()


def test_a_request_that_ends_within_a_burst_emits_no_more(head: str) -> None:
    """By a token, by the end of the context, by its length; every second burst is a usual step."""
    for params, limit in (
        (SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=(31,)), 100),
        (GREEDY, 24),
        (GREEDY, 100),
    ):
        for prompt in (CHANGING, STEADY):
            ours, theirs = (request_of(prompt, params) for _ in range(2))
            engine = pinned(head, 2, limit=limit)
            burst_every_second_time(engine.policy.drafters[0])
            launched = bursts_of(engine)
            agree(run(engine, [ours]), usual(head, 2, [theirs], limit=limit), ours, theirs)
            assert ours.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert launched


def test_bursts_of_a_request_with_stop_strings_are_short(head: str) -> None:
    class At:
        """A stop string that is complete when a text has this many tokens."""

        has_stops = True

        def __init__(self, length: int) -> None:
            self.left = length

        def push(self, token: int) -> bool:
            self.left -= 1
            return self.left == 0

    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=("words",))
    ours, theirs = (request_of(CHANGING, params, text_stop=At(9)) for _ in range(2))
    engine = pinned(head, 2)
    launched = bursts_of(engine)
    agree(run(engine, [ours]), usual(head, 2, [theirs]), ours, theirs)
    assert (ours.finish_reason, ours.num_output) == (FinishReason.STOP, 9)
    assert max(one.given.num_rounds for one in launched) == 2


def test_drafts_are_weighed_and_the_text_is_plain(head: str) -> None:
    """Both are checked sometimes, and what one of them has read is not lost while the other is believed."""
    checked: set[int] = set()
    for seconds in (CHEAP, {1: 1e-3, 2: 1.1e-3, 4: 2.5e-3, 8: 6e-3}):
        for i, prompt in enumerate((CHANGING, STEADY, *prompts(4, seed=3))):
            ours, theirs = (request_of(prompt, LONG) for _ in range(2))
            engine, launched = weighing(head, seconds)
            run(engine, [ours])
            assert ours.output == run_plainly(theirs), f"prompt {i}"
            bursts = [one.burst for one in launched if one.given.feeds or one.given.matcher]
            assert max(map(len, bursts)) > 3
            checked |= {row[SOURCE] for each in bursts for row in ring_of(each)}
    assert {MATCH, HEAD} <= checked


def ring_of(made: object) -> list[list[int]]:
    """What the kernel wrote about each round."""
    assert isinstance(made, CpuBurst)
    return made.ring


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("has_policy", [True, False])
def test_a_drafter_without_a_model_bursts_alone(has_policy: bool, method: str) -> None:
    options = registry.parse({"method": method, "num_speculative_tokens": 12})
    ours, theirs = (request_of(CHANGING, LONG) for _ in range(2))
    executor = executor_of()
    drafter = registry.create(*options, DrafterContext(executor, TARGET, None, lambda *_: None))  # type: ignore[arg-type]
    auto = Untimed([drafter], CostTable(CHEAP), known={method: (1e-6, ())}) if has_policy else None
    engine = Engine(executor, drafter, config_with(12, 200), auto)
    launched = bursts_of(engine)
    run(engine, [ours])
    assert ours.output == run_plainly(theirs)
    assert any(one.given.matcher is not None and len(one.burst) > 1 for one in launched)
    assert engine.totals.num_accepted > 10


def test_plain_decoding_is_a_burst_without_drafts() -> None:
    for dtype in ("float32", "int8"):
        ours, theirs = (request_of(CHANGING, LONG) for _ in range(2))
        engine = Engine(executor_of(dtype), None, config_with(0, 200))
        launched = bursts_of(engine)
        run(engine, [ours])
        slow = Engine(executor_of(dtype), None, config_with(0, 200))
        slow.watch = lambda *_: None  # it is shown every step, so that there are no bursts
        others = bursts_of(slow)
        run(slow, [theirs])
        assert ours.output == theirs.output
        assert sum(len(one.burst) for one in launched) == LONG.max_tokens - 1, (
            "a token a round, after the prompt's"
        )
        assert len(launched) < 20
        assert not others


def test_a_suffix_tree_that_must_grow_ends_the_burst(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cpu.suffix_tree.FIRST_SIZE", 64)
    grown: list[int] = []
    grow = SuffixTree.grow

    def noted(tree: SuffixTree) -> None:
        grown.append(tree.size)
        grow(tree)

    monkeypatch.setattr(SuffixTree, "grow", noted)
    ours, theirs = (request_of(CHANGING, LONG) for _ in range(2))
    engine, launched = weighing(head, CHEAP)
    run(engine, [ours])
    assert ours.output == run_plainly(theirs)
    assert grown
    assert any(1 < len(one.burst) < one.given.num_rounds for one in launched[:-1]), (
        "one that ended before its time"
    )


def test_logits_that_are_not_finite_end_their_request(head: str) -> None:
    engine, ours, theirs = pinned(head, 2), request_of(CHANGING, GREEDY), request_of(CHANGING, GREEDY)
    run_plainly(theirs)
    engine.add(ours)
    engine.step()
    assert ours.num_output == 1
    engine.executor.memory.parts[1][:, ours.cache.blocks[0] * 16 : ours.cache.blocks[0] * 16 + 4] = float(
        "nan"
    )
    engine.step()
    assert isinstance(ours.error, ModelError)
    assert ours.output == theirs.output[: ours.num_output]
    assert engine.executor.kv.num_used == 0


def test_an_arrival_is_served_when_the_burst_is_over_and_few_blocks_are_shared(head: str) -> None:
    texts = []
    for make in (
        lambda: weighing(head, CHEAP, num_blocks=10, limit=120)[0],
        lambda: Engine(executor_of(), None, config_with(0, 120)),
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


def test_a_burst_is_no_longer_than_an_arrival_may_wait(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "BURST_SECONDS", 0.1)

    def num_rounds(engine: Engine, is_streamed: bool = False) -> int:
        request = request_of(CHANGING, LONG, is_streamed=is_streamed)
        engine.add(request)
        launched = bursts_of(engine)
        while not launched:
            engine.step()
        engine.abort(request)
        engine.step()  # the rest of the burst lands, of no request
        return launched[0].given.num_rounds

    engine = pinned(head, 2)
    for seconds, count, streamed in ((0.006, 16, 6), (0.03, 3, 1), (0.2, 1, 1)):
        engine._round_seconds = Median(seconds)
        assert num_rounds(engine) == count
        engine._round_seconds = Median(seconds)
        assert num_rounds(engine, is_streamed=True) == streamed  # a reader waits 40 ms at most
    engine._round_seconds = Median(0.03)
    for _ in range(20):  # as if the device had measured these rounds
        engine._land(StepRecord([], [], [], seconds=0.019))
    assert num_rounds(engine) == 5


@kernel
def _weigh(at, reach_at, num, rates_at, factor, agreement, spent, out_at):  # type: ignore[no-untyped-def]
    reach = carray(double_pointer(reach_at), num)
    from_kernel = weigh(call_at(at), reach, num, rates_at, factor, agreement, spent)
    out = carray(double_pointer(out_at), 2)
    out[0], out[1] = from_kernel


def test_drafts_are_weighed_as_the_policy_weighs_them() -> None:
    draw, length, seen = random.Random(5), 6, set()
    zeros: list[Any] = [(0,) * size_of(kind) for kind in (TargetPart, HeadPart, Matcher)]
    for _ in range(200):
        calibration, factor = Calibration(), Factor()
        costs = CostTable(
            {1: 1.0, 2: 1.1, 4: 1.1 + draw.random(), 8: 3.0 + draw.random()}, 0.0, draw.random() / 50
        )
        for _ in range(60):
            calibration.observe(draw.randrange(NUM_CELLS), draw.random(), draw.random() < 0.6)
        factor.value, spent = draw.choice((0.6, 1.0, 1.7)), draw.choice((0.0, 0.3))
        reach = np.cumprod([draw.random() ** 0.3 for _ in range(length)])
        draft = Draft(Tree.chain(1, range(2, 2 + length)), "head", None, (1.0, *reach))
        agreement = draw.randrange(3)

        load = load_of(costs, length)
        answer, scores = Answer(0, draft, calibration, factor), []
        for node in range(1, length + 1):
            chance = answer.acceptance(node, agreement if node == 1 else ALONE)
            scores.append(chance * (scores[-1] if scores else 1.0))
        added = load.added(length)
        count, gained = best_count(scores, length, load.speaking, load.seconds + spent, added)

        arrays = [np.array(each) for each in (added, calibration.rates, np.zeros(length))]
        more, rates, scratch = (each.ctypes.data for each in arrays)
        weights = WeightsPart(load.seconds, more, 0.0, rates, 1.0, rates, 1.0, scratch)
        call, out = numbers(BurstCall(*zeros, 0, weights, length, 1, 0, 0, 0, 0, 0)), np.zeros(2)
        _weigh(
            call.buffer_info()[0],
            reach.ctypes.data,
            length,
            rates,
            factor.value,
            agreement,
            spent,
            out.ctypes.data,
        )
        assert (out[0], out[1]) == (count, pytest.approx(gained * load.token_seconds - added[count]))
        seen.add(count)
    assert len(seen) > 3


def load_of(costs: CostTable, most_nodes: int) -> Load:
    """Of one request that decodes, with 30 tokens cached."""
    request = request_of([1] * 31, GREEDY)
    request.cache.num_cached = 30
    return Load.of([ScheduledRequest(request, 1)], costs, most_nodes)
