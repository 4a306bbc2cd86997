"""Load on a server: when requests are due, what became of each, and the figures that follow. Open loop:
requests are due at times drawn beforehand, whether or not earlier ones have been answered, and time counts
from then, so a crowded client or a cap cannot hide waiting. At an infinite rate the cap alone paces them, and
time counts from the sending. Names are those of vLLM's benchmark: ttft, tpot, itl, e2el.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from paceline.core.errors import ConfigError
from paceline.measure.endpoint import Endpoint, Refused
from paceline.measure.options import Serve
from paceline.measure.prompts import Prompt

GOALS = ("ttft", "tpot", "e2el")
Goals = dict[str, float]  # name -> milliseconds
CHAT = "/v1/chat/completions"
SAMPLE = re.compile(r"^\w+:(\w+)(?:\{([^}]*)\})? (\S+)$", re.M)  # a line of /metrics
POSITION = re.compile(r'(?:position|le)="([^"]*)"')
DRAFTING = "spec_decode_num_"
Figures = dict[str, float]


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

    def latencies(self) -> dict[str, list[float]]:
        """In milliseconds: one value, none where it has no meaning, several for gaps between pieces."""
        first, total = (self.arrivals[0] if self.arrivals else self.end) - self.due, self.end - self.due
        further = [(total - first) / (self.num_tokens - 1)] if self.num_tokens > 1 else []
        gaps = [b - a for a, b in pairwise(self.arrivals)]
        seconds = {"ttft": [first], "tpot": further, "itl": gaps, "e2el": [total]}
        return {name: [1000 * value for value in values] for name, values in seconds.items()}

    def to_json(self) -> dict[str, Any]:
        """Without the text: it may be a user's own."""
        sent = {"prompt": self.prompt, "due_s": round(self.due, 6), "sent_s": round(self.sent, 6)}
        times = {f"{name}_ms": values for name, values in self.latencies().items() if name in GOALS}
        rounded = {name: round(values[0], 3) if values else None for name, values in times.items()}
        told = {"prompt_tokens": self.num_prompt, "output_tokens": self.num_tokens, "error": self.error}
        return {**sent, **rounded, **told, "finish_reason": self.finish}


def job_of(asked: Serve, model: str, extra: dict[str, Any], prompt: Prompt) -> Job:
    """`extra` goes into the body; null takes a field out."""
    said = {"messages": [{"role": "user", "content": prompt.text}]}
    body: dict[str, Any] = {"model": model, **(said if asked.endpoint == CHAT else {"prompt": prompt.text})}
    body |= {"max_tokens": asked.max_new_tokens, "temperature": asked.temperature, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "ignore_eos": asked.ignore_eos or None, **extra}
    kept = {name: value for name, value in body.items() if value is not None}
    return Job(prompt.id, asked.endpoint, kept)


def due_times(num: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Gaps are gamma-distributed: burstiness 1 is Poisson, less comes in bursts, more is more even."""
    if math.isinf(rate):
        return [0.0] * num
    source, scale = random.Random(seed), 1 / (rate * burstiness)
    gaps = [source.gammavariate(burstiness, scale) for _ in range(num - 1)]
    return list(accumulate(gaps, initial=0.0))


class Load(NamedTuple):
    server: Endpoint
    timeout_s: float
    ended: Callable[[Record], object]  # called with each request's record, in the order in which they end


async def run_level(load: Load, level: Level, jobs: Sequence[Job], due: Sequence[float] = ()) -> None:
    """due: left out, all at once. Cancelled, it gives up the requests that have not ended."""
    began = time.perf_counter()
    gate = asyncio.Semaphore(level.concurrency if level.concurrency is not None else len(jobs))

    async def one(job: Job, at: float) -> None:
        await asyncio.sleep(at - (time.perf_counter() - began))
        async with gate:
            sent = time.perf_counter() - began
            record = Record(job.prompt, sent if math.isinf(level.rate) else at, sent)
            await ask(load.server, load.timeout_s, job, record, began)
        load.ended(record)

    async with asyncio.TaskGroup() as group:
        for job, at in zip(jobs, due or [0.0] * len(jobs), strict=True):
            group.create_task(one(job, at))


async def ask(server: Endpoint, timeout_s: float, job: Job, record: Record, began: float) -> None:
    """One request, from sending to its end, into its record."""
    try:
        async with asyncio.timeout(timeout_s):
            async for event in server.events(job.path, job.body):
                now = time.perf_counter() - began
                for choice in event.get("choices") or ():
                    delta = choice.get("delta") or {}
                    said = delta.get("content") or delta.get("reasoning_content") or choice.get("text")
                    record.arrivals += [now] if said or delta.get("tool_calls") else []
                    record.finish, record.end = choice.get("finish_reason") or record.finish, now
                if isinstance(usage := event.get("usage"), dict):
                    record.num_tokens = usage.get("completion_tokens") or 0
                    record.num_prompt = usage.get("prompt_tokens") or 0
                    details = usage.get("prompt_tokens_details") or {}
                    record.num_cached = details.get("cached_tokens") or 0
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


def goals_of(text: str) -> Goals:
    """ "ttft:500,tpot:50" as milliseconds; "none" is no goal."""
    goals: Goals = {}
    for part in (each.strip() for each in text.split(",") if text != "none"):
        name, _, value = part.partition(":")
        with contextlib.suppress(ValueError):
            goals[name] = float(value)
        if name not in GOALS or not goals.get(name, -1.0) > 0:
            form = "write ttft:500,tpot:50,e2el:5000 (milliseconds, any of them) or none"
            raise ConfigError(f"--goodput holds {part!r}; {form}")
    return goals


def spread(values: Sequence[float], percents: Sequence[float]) -> Figures | None:
    """Mean and percentiles; None of nothing."""
    if not values:
        return None
    marks = zip(percents, np.percentile(values, percents), strict=True)
    return {"mean": round(fmean(values), 3)} | {f"p{p:g}": round(float(value), 3) for p, value in marks}


def level_report(
    level: Level, records: Sequence[Record], num_asked: int, percents: Sequence[float], goals: Goals
) -> dict[str, Any]:
    answered = [record for record in records if record.error is None]
    latencies = [record.latencies() for record in answered]
    spreads = dict[str, Figures | None]()
    for name in (*GOALS, "itl"):
        spreads[f"{name}_ms"] = spread([value for each in latencies for value in each[name]], percents)
    failures = Counter(record.error for record in records if record.error is not None)
    began = min((record.due for record in records), default=0.0)
    seconds = max((record.end for record in records), default=0.0) - began
    num_good = sum(all(v <= goals[name] for name in goals for v in each[name]) for each in latencies)
    prompts, outputs = (sum(getattr(r, name) for r in answered) for name in ("num_prompt", "num_tokens"))
    lag = 1000 * max((record.sent - record.due for record in records), default=0.0)

    def rate(count: int) -> float:
        return round(count / seconds, 4) if seconds > 0 else 0.0

    return {
        "load": str(level),
        "request_rate": None if math.isinf(level.rate) else level.rate,
        "max_concurrency": level.concurrency,
        "asked": num_asked,
        "completed": len(answered),
        "failed": len(records) - len(answered),
        "given_up": num_asked - len(records),
        "errors": dict(failures.most_common()),
        "duration_s": round(seconds, 4),
        "request_throughput": rate(len(answered)),
        "request_goodput": rate(num_good) if goals else None,
        "good_share": round(num_good / len(records), 4) if goals and records else None,
        "output_throughput": rate(outputs),
        "total_token_throughput": rate(outputs + prompts),
        "output_tokens": outputs,
        "prompt_tokens": prompts,
        "cached_prompt_tokens": sum(record.num_cached for record in answered),
        "tokens_counted_by": "server" if all(record.is_counted for record in answered) else "pieces of text",
        "peak_in_flight": peak_in_flight(records),
        "client_lag_ms": round(lag, 3),
        **spreads,
    }


def peak_in_flight(records: Sequence[Record]) -> int:
    """Most requests sent and not yet ended at one time."""
    changes = sorted([(record.sent, 1) for record in records] + [(record.end, -1) for record in records])
    return max(accumulate(change for _, change in changes), default=0)


async def metrics(server: Endpoint) -> Figures:
    """Figures by name, without prefix and _total; of a draft's position or a bucket as NAME:POSITION."""
    found = defaultdict[str, float](float)
    for name, labels, value in SAMPLE.findall((await server.get("/metrics")).decode("utf-8", "replace")):
        position = POSITION.search(labels)
        found[name.removesuffix("_total") + (f":{position[1]}" if position else "")] += float(value)
    return found


def difference(before: Figures, after: Figures) -> dict[str, Any] | None:
    """What was drafted and accepted in between; None where the server does not count: it is not zero then."""
    names = [name for name in after if name.startswith(DRAFTING)]
    grown = {name.removeprefix(DRAFTING): after[name] - before.get(name, 0.0) for name in names}
    if "drafts" not in grown:
        return None
    drafts, drafted, accepted = (grown.get(n, 0.0) for n in ("drafts", "draft_tokens", "accepted_tokens"))
    place = "accepted_tokens_per_pos:"  # also counted by drafter, under another name
    places = sorted(int(name.removeprefix(place)) for name in grown if name.startswith(place))
    by_place = [grown[f"{place}{i}"] for i in places]
    return {
        "num_drafts": int(drafts),
        "num_draft_tokens": int(drafted),
        "num_accepted_tokens": int(accepted),
        "acceptance_length": round(1 + accepted / drafts, 4) if drafts else None,
        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
        "per_position_acceptance_rates": [round(count / drafts, 4) for count in by_place if drafts],
    }
