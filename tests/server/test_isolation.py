"""The exception of one request ends that one with an error; the others say what they would say without it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.api.intake import Intake
from paceline.core.types import FinishReason, Request
from paceline.server.isolation import InternalError, Isolation, OutOfMemory, unexpected

PROMPTS = ("one two one two", "the cat and the dog", "abc abc abc", "numbers: 1 2 3 1 2")
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)
DIGITS = SamplingParams(temperature=0.8, seed=5, max_tokens=24, structured_outputs={"regex": "[0-9]{12,20}"})  # type: ignore[arg-type]


@pytest.fixture(
    scope="module", params=["auto", {"method": "ngram", "num_speculative_tokens": 3}, None], ids=str
)
def llm(request: pytest.FixtureRequest, wide_folder: Path) -> Iterator[LLM]:
    with LLM(str(wide_folder), speculative_config=request.param, max_model_len=256, progress=False) as made:
        yield made


def run(
    llm: LLM, params: list[SamplingParams], spoil: Any = None
) -> tuple[list[Request], dict[str, list[int]]]:
    """All prompts at once; `spoil` may break something in the requests. Returns what was emitted of each."""
    intake = Intake(llm.tokenizer, llm.checkpoint.config.vocab_size, llm.engine.config.max_model_len)
    isolation = Isolation(llm.engine, intake)
    pairs = zip(PROMPTS, params, strict=True)
    requests = [r for text, p in pairs for r in intake.requests(intake.encode(text).tokens, p)]
    if spoil is not None:
        spoil(requests)
    emitted: dict[str, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        isolation.add(request)
    while llm.engine.has_work:
        for emission in isolation.step():
            emitted[emission.request.id] += emission.tokens
    llm.engine.check()
    assert llm.engine.executor.kv.num_used == 0
    assert all(request.is_finished for request in requests)
    return requests, emitted


class Broken:
    """In the place of a detokenizer: fails at a given token, when the request has been changed already."""

    has_stops = True

    def __init__(self, number: int) -> None:
        self.left = number

    def push(self, token: int) -> bool:
        self.left -= 1
        if self.left <= 0:
            raise OverflowError("int too big to convert")
        return False


class Mine(int):
    """In the place of a token id: fails when it is compared, once its request has a few tokens."""

    request: Request

    def __eq__(self, other: object) -> bool:
        if self.request.num_output > 4:
            raise RuntimeError("cannot be compared")
        return False

    __hash__ = int.__hash__


@pytest.mark.parametrize("at", [1, 7], ids=["first token", "seventh token"])
def test_one_that_fails_while_it_is_changed(llm: LLM, at: int) -> None:
    params = [PARAMS, PARAMS, DIGITS, PARAMS]
    expected = list(run(llm, params)[1].values())

    def spoil(requests: list[Request]) -> None:
        requests[1].text_stop = Broken(at)

    requests, emitted = run(llm, params, spoil)
    assert isinstance(requests[1].error, InternalError)
    assert requests[1].finish_reason is FinishReason.ERROR
    for index in (2, 3):  # the first may have been changed by the same step, its tokens unsaid
        assert requests[index].error is None
        assert emitted[requests[index].id] == expected[index]


def test_one_that_fails_before_anything_is_changed(llm: LLM) -> None:
    params = [PARAMS, DIGITS, PARAMS, PARAMS]
    expected = list(run(llm, params)[1].values())

    def spoil(requests: list[Request]) -> None:
        mine = Mine(3)
        mine.request = requests[2]
        requests[2].bad_sequences = ((mine, 5),)

    requests, emitted = run(llm, params, spoil)
    assert [request.error is None for request in requests] == [True, True, False, True]
    assert [emitted[requests[i].id] for i in (0, 1, 3)] == [expected[i] for i in (0, 1, 3)]
    assert list(run(llm, params)[1].values()) == expected


def test_an_engine_that_can_do_nothing_any_more_raises(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine, "step", fail)
        with pytest.raises(RuntimeError, match="the device is gone"):
            run(llm, [PARAMS] * 4)
    llm.engine.set_aside()


def test_too_little_memory_is_told_apart() -> None:
    with pytest.raises(RuntimeError) as torch_says:
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(MemoryError) as numpy_says:
        np.empty(2**60, np.uint8)
    for error in (torch_says.value, numpy_says.value, OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))):
        assert isinstance(unexpected(error), OutOfMemory)
    assert isinstance(unexpected(RuntimeError("the device is gone")), InternalError)


def test_an_error_in_other_words_is_told_apart_where_memory_lacks() -> None:
    """In a process of its own, whose limit leaves less than a step may need."""
    script = """
import resource, re
from pathlib import Path
from paceline.server.isolation import unexpected
held = int(re.search(r"VmData:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + 2**25, resource.RLIM_INFINITY))
print(type(unexpected(RuntimeError("could not create a primitive"))).__name__)
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(type(unexpected(RuntimeError("could not create a primitive"))).__name__)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["OutOfMemory", "InternalError"]
