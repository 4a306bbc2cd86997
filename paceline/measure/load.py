"""Load on a server: when requests are due, what became of each, and the figures that follow.

Open loop: requests are due at times drawn beforehand (a Poisson process), whether or not earlier ones have
been answered, and time counts from when a request was due, so that a crowded client or a cap on requests in
flight cannot hide waiting. At an infinite rate the cap alone paces them (closed loop), and time counts from
when a request is sent. Latencies are of requests that were answered; goodput counts only those that met every
goal. Names are those of vLLM's benchmark: ttft, tpot, itl, e2el, in milliseconds. Invariant: the same seed
gives the same times.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError
from paceline.measure.endpoint import Endpoint, Refused

LATENCIES = ("ttft", "tpot", "itl", "e2el")
GOALS = ("ttft", "tpot", "e2el")
Goals = dict[str, float]  # name -> milliseconds
COUNTED = "drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos"
LINE = re.compile(rf"^\w+:spec_decode_num_({COUNTED})(?:_total)?(\{{[^}}]*\}})? ([0-9.e+]+)$", re.M)
POSITION = re.compile(r'position="(\d+)"')
Counters = dict[str, float]


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
    more even."""
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


def goals_of(text: str) -> Goals:
    """ "ttft:500,tpot:50" as milliseconds; "none" is no goal."""
    goals: Goals = {}
    for part in text.split(",") if text != "none" else ():
        name, _, value = part.strip().partition(":")
        try:
            goals[name] = float(value)
        except ValueError:
            goals[name] = -1.0
        if name not in GOALS or not goals[name] > 0:
            form = "write ttft:500,tpot:50,e2el:5000 (milliseconds, any of them) or none"
            raise ConfigError(f"--goodput holds {part.strip()!r}; {form}")
    return goals


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two values on either side, in proportion."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def latency_of(record: Record, name: str) -> list[float]:
    """In milliseconds: one value, none where it has no meaning, several for gaps between pieces of text."""
    if name == "itl":
        return [1000 * (b - a) for a, b in pairwise(record.arrivals)]
    seconds = {"ttft": record.first_s, "e2el": record.total_s, "tpot": record.token_s}[name]
    return [] if seconds is None else [1000 * seconds]


def is_good(record: Record, goals: Goals) -> bool:
    return record.error is None and all(
        value <= goals[name] for name in goals for value in latency_of(record, name)
    )


def level_report(
    level: Level, records: Sequence[Record], num_asked: int, percents: Sequence[float], goals: Goals
) -> dict[str, Any]:
    answered = [record for record in records if record.error is None]
    failures = Counter(record.error for record in records if record.error is not None)
    began = min((record.due for record in records), default=0.0)
    seconds = max((record.end for record in records), default=0.0) - began
    num_good = sum(is_good(record, goals) for record in answered)
    prompts, outputs = (sum(getattr(r, name) for r in answered) for name in ("num_prompt", "num_tokens"))
    lag = 1000 * max((record.sent - record.due for record in records), default=0.0)
    return {
        "load": str(level),
        "request_rate": None if level.rate == float("inf") else level.rate,
        "max_concurrency": level.concurrency,
        "asked": num_asked,
        "completed": len(answered),
        "failed": len(records) - len(answered),
        "given_up": num_asked - len(records),
        "errors": dict(failures.most_common()),
        "duration_s": round(seconds, 4),
        "request_throughput": _rate(len(answered), seconds),
        "request_goodput": _rate(num_good, seconds) if goals else None,
        "good_share": round(num_good / len(records), 4) if goals and records else None,
        "output_throughput": _rate(outputs, seconds),
        "total_token_throughput": _rate(outputs + prompts, seconds),
        "output_tokens": outputs,
        "prompt_tokens": prompts,
        "cached_prompt_tokens": sum(record.num_cached for record in answered),
        "tokens_counted_by": "server" if all(record.is_counted for record in answered) else "pieces of text",
        "peak_in_flight": peak_in_flight(records),
        "client_lag_ms": round(lag, 3),
        **{f"{name}_ms": _spread(answered, name, percents) for name in LATENCIES},
    }


def record_json(record: Record) -> dict[str, Any]:
    """Without the text: it may be a user's own."""
    times: dict[str, float | None] = {"due_s": round(record.due, 6), "sent_s": round(record.sent, 6)}
    for name in GOALS:
        times[f"{name}_ms"] = next((round(value, 3) for value in latency_of(record, name)), None)
    counts = {"prompt_tokens": record.num_prompt, "output_tokens": record.num_tokens}
    return {"prompt": record.prompt, **times, **counts, "finish_reason": record.finish, "error": record.error}


def peak_in_flight(records: Sequence[Record]) -> int:
    """Most requests sent and not yet ended at one time."""
    changes = sorted([(record.sent, 1) for record in records] + [(record.end, -1) for record in records])
    peak = now = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 4) if seconds > 0 else 0.0


def _spread(records: Sequence[Record], name: str, percents: Sequence[float]) -> dict[str, float] | None:
    values = [value for record in records for value in latency_of(record, name)]
    if not values:
        return None
    found = {f"p{percent:g}": round(percentile(values, percent), 3) for percent in percents}
    return {"mean": round(fmean(values), 3), **found}


def counters_of(metrics: str) -> Counters:
    """Speculation as a server's own counters tell it; vLLM and Paceline write the same names. Empty where
    there are none: its speculation is then unknown, not zero."""
    found: Counters = {}
    for name, labels, value in LINE.findall(metrics):
        position = POSITION.search(labels)
        key = f"{name}:{position[1]}" if position else name
        found[key] = found.get(key, 0.0) + float(value)
    return found


def difference(before: Counters, after: Counters) -> dict[str, Any] | None:
    """What was drafted and accepted in between; None where the server does not count."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    if "drafts" not in grown:
        return None
    drafts, drafted, accepted = (grown.get(n, 0.0) for n in ("drafts", "draft_tokens", "accepted_tokens"))
    places = sorted(int(name.partition(":")[2]) for name in grown if ":" in name)
    by_place = [grown[f"accepted_tokens_per_pos:{i}"] for i in places]
    return {
        "num_drafts": int(drafts),
        "num_draft_tokens": int(drafted),
        "num_accepted_tokens": int(accepted),
        "acceptance_length": round(1 + accepted / drafts, 4) if drafts else None,
        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
        "per_position_acceptance_rates": [round(count / drafts, 4) for count in by_place if drafts],
    }
