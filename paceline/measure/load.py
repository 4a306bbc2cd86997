"""Load on a server: when requests are due, and what became of each.

Open loop: requests are due at times drawn beforehand (a Poisson process), whether or not earlier ones have
been answered, and time counts from when a request was due, so that a crowded client or a cap on requests in
flight cannot hide waiting. At an infinite rate the cap alone paces them (closed loop), and time counts from
when a request is sent. Invariant: the same seed gives the same times.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.measure.endpoint import Endpoint, Refused


class Level(NamedTuple):
    rate: float  # requests a second; infinite: as many as may be in flight
    concurrency: int | None  # most in flight; None: no cap

    def __str__(self) -> str:
        rate = "" if math.isinf(self.rate) else f"{self.rate:g} req/s"
        cap = "" if self.concurrency is None else f"{self.concurrency} in flight"
        return ", ".join(filter(None, (rate, cap))) or "all at once"


class Job(NamedTuple):
    prompt: str  # its id
    path: str
    body: dict[str, Any]


@dataclass(slots=True)
class Record:
    """One request. Times are seconds since the level began."""

    prompt: str
    due: float
    sent: float
    arrivals: list[float] = field(default_factory=list)  # of pieces of text
    end: float = 0.0
    num_tokens: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    is_counted: bool = True  # by the server; otherwise every piece of text counts as a token
    finish: str | None = None
    error: str | None = None
    code: str = ""  # of the server's own error

    @property
    def first_s(self) -> float:
        return (self.arrivals[0] if self.arrivals else self.end) - self.due

    @property
    def total_s(self) -> float:
        return self.end - self.due

    @property
    def token_s(self) -> float | None:
        """Seconds for each token after the first one."""
        return (self.total_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


def due_times(num: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Gaps are gamma-distributed with the rate's mean: burstiness 1 is Poisson, less comes in bursts, more is
    more even.
    """
    if math.isinf(rate):
        return [0.0] * num
    source, times = random.Random(seed), [0.0]
    for _ in range(num - 1):
        times.append(times[-1] + source.gammavariate(burstiness, 1 / (rate * burstiness)))
    return times[:num]


class Load(NamedTuple):
    """What a level is run with."""

    server: Endpoint
    timeout_s: float
    stop: asyncio.Event  # set: the requests that have not ended are given up and forgotten
    tell: Callable[[Record], None]


async def run_level(load: Load, level: Level, jobs: Sequence[Job], due: Sequence[float]) -> list[Record]:
    """The requests that ended, in the order in which they did."""
    began, records = time.perf_counter(), list[Record]()
    gate = asyncio.Semaphore(level.concurrency if level.concurrency is not None else len(jobs))

    async def one(job: Job, at: float) -> None:
        await asyncio.sleep(at - (time.perf_counter() - began))
        async with gate:
            sent = time.perf_counter() - began
            record = Record(job.prompt, sent if math.isinf(level.rate) else at, sent)
            await ask(load.server, load.timeout_s, job, record, began)
        records.append(record)
        load.tell(record)

    tasks = [asyncio.ensure_future(one(job, at)) for job, at in zip(jobs, due, strict=True)]
    everything: asyncio.Future[Any] = asyncio.gather(*tasks)
    stopped: asyncio.Future[Any] = asyncio.ensure_future(load.stop.wait())
    try:
        await asyncio.wait({everything, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if everything.done():
            everything.result()
    finally:
        for task in (*tasks, stopped):
            task.cancel()
        await asyncio.gather(everything, stopped, return_exceptions=True)
    return records


async def ask(server: Endpoint, timeout_s: float, job: Job, record: Record, began: float) -> None:
    """One request, from sending to its end, into its record."""
    try:
        async with asyncio.timeout(timeout_s):
            async for event in server.events(job.path, job.body):
                _take(event, record, time.perf_counter() - began)
        if record.finish is None:
            record.error = "the answer has no end"
    except Refused as error:
        record.error, record.code = str(error), error.code
    except TimeoutError:
        record.error, record.code = f"no end after {timeout_s:g} s", "hung"
    if record.error is not None or not record.end:
        record.end = time.perf_counter() - began
    record.is_counted = record.num_tokens > 0
    record.num_tokens = record.num_tokens or len(record.arrivals)


def _take(event: dict[str, Any], record: Record, now: float) -> None:
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        said = delta.get("content") or delta.get("reasoning_content") or choice.get("text")
        if said or delta.get("tool_calls"):
            record.arrivals.append(now)
        record.finish = choice.get("finish_reason") or record.finish
        record.end = now
    usage = event.get("usage")
    if isinstance(usage, dict):
        record.num_tokens = usage.get("completion_tokens") or 0
        record.num_prompt = usage.get("prompt_tokens") or 0
        record.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
