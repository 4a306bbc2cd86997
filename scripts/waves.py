"""Requests that decode together, timed while all of them do; shared by the scripts that measure batches.

From when the last of them has its first token to when the first of them ends: whoever is ahead leaves room
that the next request would take, and a wave that is running out of requests says nothing about so many at
once.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from paceline import LLM, SamplingParams
from paceline.engine.engine import Engine


class Wave(NamedTuple):
    speed: float  # tokens a second while all were running
    texts: list[list[int]]
    # nothing was recorded or compiled meanwhile, which happens once in a process's life and takes longer than
    # a wave
    is_clean: bool


def wave(llm: LLM, engine: Engine, prompts: list[list[int]], params: SamplingParams) -> Wave:
    llm.engine = engine
    requests = [request for prompt in prompts for request in llm._requests(prompt, params)]
    llm._add(requests)
    while any(request.num_output == 0 for request in requests):
        llm._pump()
    before, num_recorded, started = (
        sum(request.num_output for request in requests),
        engine.runner.num_recordings,
        time.perf_counter(),
    )
    while not any(request.is_finished for request in requests):
        llm._pump()
    speed = (sum(request.num_output for request in requests) - before) / (time.perf_counter() - started)
    is_clean = engine.runner.num_recordings == num_recorded
    while not all(request.is_finished for request in requests):
        llm._pump()
    for request in requests:
        llm._drop(request)
    return Wave(speed, [request.output for request in requests], is_clean)
