"""Bursts of a GPU: the text is plain decoding's and the drafts are those of usual steps,
whichever request ends when.

Target and head are those of tests/calm.py. How engines fare with bursts is tested in tests/laws, where a pass
takes no second.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from paceline.core.params import SamplingParams
from paceline.core.types import FinishReason, Request
from paceline.cuda.advance import advance
from paceline.cuda.backend import CudaBackend
from paceline.cuda.burst import CudaBurstBackend
from paceline.engine.commit import Emission
from paceline.engine.engine import Engine
from paceline.engine.pending import PendingBurst
from paceline.models.decoder import Decoder
from paceline.runtime.backend import TorchBackend
from paceline.runtime.executor import KvMemory, LocalExecutor
from tests.calm import (
    CHANGING,
    STEADY,
    TARGET,
    TINY,
    agree,
    burst_every_second_time,
    bursts_of,
    config_with,
    drafter_of,
    head_folder,
)
from tests.cuda.recorders import capture_on
from tests.laws.harness import request_of, run
from tests.laws.test_ahead import ahead


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    return head_folder(tmp_path_factory.mktemp("head"))


@cache
def torch_target() -> Decoder:
    return Decoder.load(TARGET)


def engine_on(device: torch.device, head: str, steps: int, exact: bool = False, limit: int = 100) -> Engine:
    backend = CudaBackend(device, exact, capture_on(device))
    executor = LocalExecutor(backend, backend.load(TARGET, "float32"), KvMemory(TINY, 16, device))
    return ahead(Engine(executor, drafter_of(executor, head, steps), config_with(steps, limit)))


def usual(head: str, steps: int, requests: Sequence[Request], limit: int = 100) -> list[Emission]:
    """By usual steps, in plain torch."""
    executor = LocalExecutor(TorchBackend(torch.device("cpu")), torch_target(), KvMemory(TINY, 16))
    return run(Engine(executor, drafter_of(executor, head, steps), config_with(steps, limit)), requests)


GREEDY, DRAWN = {"temperature": 0.0}, {"temperature": 0.5, "seed": 4}


@pytest.mark.parametrize(
    ("steps", "count", "exact", "how"),
    [
        pytest.param(3, 4, False, GREEDY, marks=pytest.mark.slow),
        (1, 3, False, DRAWN),
        pytest.param(4, 2, True, GREEDY, marks=pytest.mark.slow),
    ],
)
def test_rounds_are_usual_steps(
    steps: int,
    count: int,
    exact: bool,
    how: dict[str, Any],
    head: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CudaBurstBackend, "most_rounds", count)
    params = SamplingParams(**how, max_tokens=14 if steps == 3 else 9, ignore_eos=True)
    ours, theirs = (request_of(CHANGING, params) for _ in range(2))
    engine = engine_on(device, head, steps, exact)
    launched = bursts_of(engine)
    agree(run(engine, [ours]), usual(head, steps, [theirs]), ours, theirs)
    assert max(one.given.num_rounds for one in launched) == count
    assert engine.totals.num_accepted >= 2


@pytest.mark.slow
def test_two_that_end_apart_and_usual_steps_between(
    head: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ends in the middle of a burst by a token, the other by the end of the context; every second burst
    is a usual step.
    """
    monkeypatch.setattr(CudaBurstBackend, "most_rounds", 2)
    params = SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=(31,))
    ours, theirs = ([request_of(prompt, params) for prompt in (CHANGING, STEADY)] for _ in range(2))
    engine = engine_on(device, head, 2, limit=24)
    launched = bursts_of(engine)
    burst_every_second_time(engine.policy.drafters[0])
    said, expected = run(engine, ours), usual(head, 2, theirs, limit=24)
    for one, other in zip(ours, theirs, strict=True):
        agree(said, expected, one, other)
    assert [one.finish_reason for one in ours] == [FinishReason.STOP, FinishReason.LENGTH]
    assert [one.given.num_rounds for one in launched[:2]] == [2, 2]


@pytest.mark.slow
def test_a_request_stopped_within_a_burst_is_gone_and_a_shape_is_recorded_once(
    head: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaBurstBackend, "most_rounds", 2)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    first, ours, theirs = (request_of(prompt, params) for prompt in (STEADY, CHANGING, CHANGING))
    engine = engine_on(device, head, 3)
    backend = engine.policy.drafters[0].burst_backend
    assert isinstance(backend, CudaBurstBackend)
    backend._recorded(1, None)
    num_recorded = len(backend._graphs._recordings)
    engine.add(first)
    engine.step()
    assert isinstance(engine._under_way[0][0], PendingBurst)
    engine.abort(first)
    engine.check()
    assert not first.cache.blocks
    agree(run(engine, [ours]), usual(head, 3, [theirs]), ours, theirs)
    assert first.num_output == 1
    assert len(backend._graphs._recordings) == num_recorded


def test_what_is_between_two_rounds(device: torch.device) -> None:
    """Two requests of three, the last of them broken; slots for it end where a round to come would lie."""
    steps, rows = 2, 3

    def column(numbers: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype, device=device)

    def batch(ids: list[int], prefix_lens: list[int], tables: list[list[int]]) -> dict[str, torch.Tensor]:
        return {
            "input_ids": column(ids), "positions": column([0] * 9), "slots": column([0] * 9),
            "starts": column([0, 3, 6, 6]), "prefix_lens": column(prefix_lens), "block_tables": column(tables).T.contiguous(),
            "masks": column([[0]] * 9, torch.int64),
        }  # fmt: skip

    picked = column([9, 5, 6, -1, 4, 4, 0, 0, 0], torch.int64)
    tables = [[7, 8, 9], [1, 2, 3], [0, 0, 0]]
    target = batch([1, 9, 7, 2, 3, 3, 0, 0, 0], [14, 31, 0], tables)
    target["places"] = column([0] * 9, torch.int64)
    chances = column([[0.5, 0.25, 0], [1, 0.5, 0]], torch.float32).view(torch.int32)
    results = torch.stack([column([[9, 3, 0], [7, 3, 0]]), chances])
    head = batch([0] * 9, [10, 30, 0], [[4], [5], [0]]) | {
        "written": column([0] * 9), "wanted": column([1, 5, 0], torch.int64),
        "places": column([15, 32, 0], torch.int64), "next_positions": column([[0] * 4]),
        "next_slots": column([[0] * 4]),
    }  # fmt: skip
    number = column([0, 0, 0])
    rounds = torch.full((2, rows, 3 * steps + 1), -9, dtype=torch.int32, device=device)
    target["limits"], head["limits"] = column([100, 34, 0]), column([16, 33, 0])
    advance(target, picked, head, (999, 888), results, number, rounds)
    assert number.tolist() == [1, 1, 0]
    assert rounds[0, 0].tolist()[:2] + rounds[0, 0].tolist()[4:] == [9, 7, 9, 5, 6]
    assert rounds[0, :2, 2:4].contiguous().view(torch.float32).tolist() == [[0.5, 1.0], [0.25, 0.5]]
    assert rounds[0, 1, 4:].tolist() == [-1, 4, 4]
    assert target["prefix_lens"].tolist() == [16, 32, 0]  # one accepted, none accepted
    assert target["positions"].tolist() == [16, 17, 18, 32, 33, 34, 0, 0, 0]
    assert target["places"].tolist() == [17, 18, 19, 33, 34, 35, 0, 0, 0]
    assert target["slots"].tolist() == [128, 129, 130, 48, 49, 999, 0, 0, 0]  # the last is not reserved
    assert target["input_ids"].tolist() == [5, 9, 7, 0, 3, 3, 0, 0, 0]  # what is not a token is not written
    assert head["input_ids"].tolist() == [9, 5, 6, 0, 4, 4, 0, 0, 0]
    assert head["prefix_lens"].tolist() == [12, 33, 0]
    assert head["wanted"].tolist() == [1, 3, 0]
    assert head["places"].tolist() == [17, 33, 0]
    assert head["positions"].tolist() == [12, 13, 14, 33, 34, 35, 0, 0, 0]
    assert head["written"].tolist()[:3] == head["slots"].tolist()[:3] == [76, 77, 78]
    assert head["next_positions"].tolist() == [[14, 34, 0, 0]]
    assert head["next_slots"].tolist()[0][:2] == [78, 888]


def test_nothing_is_recorded_while_requests_wait(head: str, device: torch.device) -> None:
    """Of one request and of several, plain, drafted and drawn, with options that need the host."""
    if device.type != "cuda":
        pytest.skip("an interpreted kernel is neither recorded nor loaded")
    engine = engine_on(device, head, 3)
    for kinds in ([GREEDY], [GREEDY, DRAWN, {"temperature": 0.7, "top_k": 5}], [DRAWN] * 5):
        params = [SamplingParams(**how, max_tokens=12, ignore_eos=True) for how in kinds]
        run(engine, [request_of(CHANGING, each) for each in params])
    assert engine.executor.backend.num_recordings == engine.num_recorded
