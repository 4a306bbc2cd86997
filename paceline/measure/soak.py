"""`paceline bench soak`: a server kept busy and hurt, by many clients, clients that leave, an engine that is
killed, or a SIGTERM under load.

Invariant: a soak is passed when every request ended or failed clearly, no block is held at the end, memory
did not keep growing and the event loop was never late by 50 ms.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.options import nearest
from paceline.measure.endpoint import Endpoint, Refused
from paceline.measure.load import Job, Record, ask
from paceline.measure.options import Soak
from paceline.measure.processes import Server, our_server
from paceline.measure.results import ORIGIN, Table, Tell

HANGS_S = 120.0  # a request that takes longer is said to hang
SETTLES_S = 60.0  # until nothing runs any more
LONG = {"max_tokens": 200, "ignore_eos": True}  # still being written when something happens
PROMPTS = (
    "Say it again: the rider in front breaks the wind for the whole line, and the line goes faster.",
    "Why is the sky blue?",
    "Write a short story about a river that forgot where the sea is.",
    "Count from one to twenty in words.",
)
CHAT = "/v1/chat/completions"
LEGEND = "memory: MB of the server and of its engine; late: samples of the event loop's lag above 50 ms.\n"
Figures = dict[str, float]


@dataclass
class Tally:
    """What became of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)  # ok, or an error's code
    num_tokens: int = 0
    first: list[float] = field(default_factory=list)  # seconds to the first piece

    def add(self, record: Record) -> None:
        self.outcomes["ok" if record.error is None else record.code or "connection"] += 1
        self.num_tokens += record.num_tokens
        self.first += record.arrivals[:1]


def prepare(asked: Soak) -> Soak:
    if asked.what not in KINDS:
        raise ConfigError(f"soak {asked.what!r}: {nearest(asked.what, list(KINDS))}")
    return asked


def num_turns(asked: Soak) -> None:
    """How long a server takes to recover is what is measured."""


def run(asked: Soak, tell: Tell) -> dict[str, Any]:
    tell("starting the server", 0)
    with our_server(asked.model, asked.server_options) as server:
        return asyncio.run(_run(server, asked, tell))


async def _run(server: Server, asked: Soak, tell: Tell) -> dict[str, Any]:
    tally = Tally()
    tell(asked.what, 0)
    report = await KINDS[asked.what](server, asked, tally)
    if asked.what != "sigterm":
        figures = await _settled(server.endpoint)
        lag, used = _lag(figures), figures["kv_cache_blocks_used"]
        is_prompt = lag["late_50ms"] == 0 or asked.may_lag
        report |= {"blocks_used": used, "blocks": figures["kv_cache_blocks_total"]}
        report |= {"event_loop_lag": lag, "exit": await asyncio.to_thread(server.stop)}
        report["is_ok"] &= used == 0 and not tally.outcomes["hung"] and is_prompt
    first = round(median(tally.first), 3) if tally.first else None
    return {"what": asked.what, **report, "outcomes": +tally.outcomes, "first_token_p50_s": first}


async def _load(server: Server, asked: Soak, tally: Tally) -> dict[str, Any]:
    until, memory, started = asyncio.Event(), [], time.monotonic()
    work = asyncio.create_task(_clients(server.endpoint, asked.clients, until, tally))
    while time.monotonic() - started < asked.seconds:
        await asyncio.sleep(min(asked.seconds / 20, 5.0))
        engine = int((await _metrics(server.endpoint))["engine_pid"])
        memory.append((_resident_mb(server.process.pid), _resident_mb(engine)))
    until.set()
    await work
    rate = round(tally.num_tokens / (time.monotonic() - started), 1)
    half, last = memory[len(memory) // 2], memory[-1]
    is_flat = all(b <= a * 1.05 + 8 for a, b in zip(half, last, strict=True))
    held = {"memory_half_mb": half, "memory_end_mb": last}
    return {"tokens_per_second": rate, **held, "is_ok": is_flat and set(+tally.outcomes) == {"ok"}}


async def _disconnects(server: Server, asked: Soak, tally: Tally) -> dict[str, Any]:
    source, gate = random.Random(0), asyncio.Semaphore(asked.clients)

    async def leave(number: int) -> None:
        body = json.dumps(_body(source) | LONG | {"stream": number % 3 != 0}).encode()
        async with gate, server.endpoint.asked("POST", CHAT, body) as (_, reader):
            if number % 2:
                await asyncio.wait_for(reader.read(200), HANGS_S)
            await asyncio.sleep(source.random() * 0.2)
        tally.outcomes["left"] += 1

    await asyncio.gather(*(leave(number) for number in range(asked.count)))
    left = time.monotonic()
    counted = (await _settled(server.endpoint))["client_disconnects_total"]
    return {"settled_after_s": round(time.monotonic() - left, 2), "counted": counted, "is_ok": True}


async def _kills(server: Server, asked: Soak, tally: Tally) -> dict[str, Any]:
    until, endpoint = asyncio.Event(), server.endpoint
    work = asyncio.create_task(_clients(endpoint, asked.clients, until, tally, **LONG))
    for _ in range(asked.count):
        await asyncio.sleep(1.0)
        while not (now := await _metrics(endpoint))["num_requests_running"]:
            await asyncio.sleep(0.02)
        os.kill(int(now["engine_pid"]), signal.SIGKILL)
        async with asyncio.timeout(HANGS_S):  # a dead engine is not healthy, as soon as it is noticed
            while "503" not in await _refusal(endpoint, "/health"):
                await asyncio.sleep(0.01)
        while await _refusal(endpoint, "/ready"):
            await asyncio.sleep(0.1)
    await asyncio.sleep(2.0)
    until.set()
    await work
    restarts = (await _settled(endpoint))["engine_restarts_total"]
    known = set(+tally.outcomes) <= {"ok", "engine_lost", "engine_unavailable"}
    return {"restarts": restarts, "is_ok": known and tally.outcomes["ok"] > 0 and restarts == asked.count}


async def _sigterm(server: Server, asked: Soak, tally: Tally) -> dict[str, Any]:
    source = random.Random(0)
    work = asyncio.gather(*(_one(server.endpoint, _body(source) | LONG, tally) for _ in range(asked.clients)))
    num_taken = 0.0
    while num_taken < asked.clients:  # running, waiting or done
        await asyncio.sleep(0.02)
        now = await _metrics(server.endpoint)
        done = sum(value for name, value in now.items() if name.startswith("request_success_total"))
        num_taken = now["num_requests_running"] + now["num_requests_waiting"] + done
    status = await asyncio.to_thread(server.stop)
    await work
    return {"status": status, "is_ok": status == 0 and set(+tally.outcomes) == {"ok"}}


KINDS: dict[str, Callable[[Server, Soak, Tally], Awaitable[dict[str, Any]]]]
KINDS = {"load": _load, "disconnects": _disconnects, "kills": _kills, "sigterm": _sigterm}


def _body(source: random.Random) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": source.choice(PROMPTS)}], "stream": True}
    sampling = {"temperature": source.choice((0, 0.8)), "seed": source.randint(0, 1000)}
    return {**asked, **sampling, "max_tokens": source.randint(8, 96)}


async def _clients(endpoint: Endpoint, count: int, until: asyncio.Event, tally: Tally, **more: Any) -> None:
    """`count` of them, each asking again and again; more: what their bodies hold besides."""

    async def client(number: int) -> None:
        source = random.Random(number)
        while not until.is_set():
            before = tally.outcomes["ok"]
            await _one(endpoint, _body(source) | more, tally)
            if tally.outcomes["ok"] == before:
                await asyncio.sleep(0.1)  # as a client would that was told to come back later

    await asyncio.gather(*(client(number) for number in range(count)))


async def _one(endpoint: Endpoint, body: dict[str, Any], tally: Tally) -> None:
    record = Record("", 0.0, 0.0)
    body = {**body, "stream_options": {"include_usage": True}}
    await ask(endpoint, HANGS_S, Job("", CHAT, body), record, time.perf_counter())
    tally.add(record)


async def _metrics(endpoint: Endpoint) -> Figures:
    """Every sample of /metrics, by its name with labels other than the model's."""
    found = {}
    for line in (await endpoint.get("/metrics")).decode().splitlines():
        if line.startswith("paceline:"):
            name, _, value = line.removeprefix("paceline:").rpartition(" ")
            name = re.sub(r'model_name="[^"]*",?|,model_name="[^"]*"', "", name).replace("{}", "")
            found[name] = float(value)
    return found


async def _refusal(endpoint: Endpoint, path: str) -> str:
    """Why it is refused; empty where it is not."""
    try:
        await endpoint.get(path)
    except Refused as error:
        return str(error)
    return ""


def _resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def _settled(endpoint: Endpoint) -> Figures:
    """The figures once nothing runs any more, or after SETTLES_S."""
    busy = ("num_requests_running", "num_requests_waiting", "kv_cache_blocks_used")
    end = time.monotonic() + SETTLES_S
    while True:
        now = await _metrics(endpoint)
        if not any(now[name] for name in busy) or time.monotonic() > end:
            return now
        await asyncio.sleep(0.1)


def _lag(figures: Figures) -> dict[str, Any]:
    """How late the event loop was over the server's whole life."""
    total = figures["event_loop_lag_seconds_count"]
    found = (re.match(r'event_loop_lag_seconds_bucket.*le="([^"]+)"', name) for name in figures)
    below = {float(match[1]): figures[match.string] for match in found if match}
    return {
        "samples": int(total),
        "late_50ms": int(total - below[0.05]),
        "late_10ms": int(total - below[0.01]),
    }


def tables(report: dict[str, Any]) -> list[Table]:
    outcomes = ", ".join(f"{count} {name}" for name, count in report["outcomes"].items())
    rows = [(name, str(value)) for name, value in report.items() if name not in ("outcomes", *ORIGIN)]
    title = f"soak, {report['what']}: {'passed' if report['is_ok'] else 'FAILED'}"
    return [Table(title, ("figure",), ("value",), [("requests", outcomes), *rows])]
