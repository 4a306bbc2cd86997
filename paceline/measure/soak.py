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
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.options import nearest
from paceline.measure.endpoint import Endpoint, Refused, body_of
from paceline.measure.options import Soak
from paceline.measure.results import Tell
from paceline.measure.servers import Server, our_server
from paceline.measure.tables import Table

HANGS_S = 120.0  # a request that takes longer is said to hang
LONG = {"max_tokens": 200, "ignore_eos": True}  # still being written when something happens
PROMPTS = [
    "Say it again: the rider in front breaks the wind for the whole line, and the line goes faster.",
    "Why is the sky blue?",
    "Write a short story about a river that forgot where the sea is.",
    "Count from one to twenty in words.",
    "Translate to French: the bicycle is leaning against the wall of the old house.",
]
CHAT = "/v1/chat/completions"
LEGEND = "memory: MB of the server and of its engine; late: samples of the event loop's lag above 50 ms.\n"
Figures = dict[str, float]


@dataclass
class Tally:
    """What became of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    first: list[float] = field(default_factory=list)  # seconds to the first piece


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
        lag, used = _lag(figures), figures["paceline:kv_cache_blocks_used"]
        is_prompt = lag["late_50ms"] == 0 or asked.may_lag
        report |= {"blocks_used": used, "blocks": figures["paceline:kv_cache_blocks_total"]}
        report |= {"event_loop_lag": lag, "exit": await asyncio.to_thread(server.stop)}
        report["is_ok"] &= used == 0 and not tally.outcomes["hung"] and is_prompt
    first = sorted(tally.first)
    median = round(first[len(first) // 2], 3) if first else None
    return {"what": asked.what, **report, "outcomes": +tally.outcomes, "first_token_p50_s": median}


async def _load(server: Server, asked: Soak, tally: Tally) -> dict[str, Any]:
    until, memory = asyncio.Event(), []
    work = asyncio.create_task(_clients(server.endpoint, asked.clients, until, tally))
    started = time.monotonic()
    while time.monotonic() - started < asked.seconds:
        await asyncio.sleep(min(asked.seconds / 20, 5.0))
        engine = int((await _metrics(server.endpoint))["paceline:engine_pid"])
        memory.append((_resident_mb(server.process.pid), _resident_mb(engine)))
    until.set()
    await work
    rate = tally.num_tokens / (time.monotonic() - started)
    half, last = memory[len(memory) // 2], memory[-1]
    is_flat = all(b <= a * 1.05 + 8 for a, b in zip(half, last, strict=True))
    is_ok = is_flat and set(+tally.outcomes) == {"ok"}
    return {
        "tokens_per_second": round(rate, 1),
        "memory_half_mb": half,
        "memory_end_mb": last,
        "is_ok": is_ok,
    }


async def _disconnects(server: Server, asked: Soak, tally: Tally) -> dict[str, Any]:
    source, gate = random.Random(0), asyncio.Semaphore(asked.clients)

    async def leave(number: int) -> None:
        body = json.dumps(_body(source, is_stream=number % 3 != 0) | LONG).encode()
        async with gate, server.endpoint.asked("POST", CHAT, body) as (_, reader):
            if number % 2:
                await asyncio.wait_for(reader.read(200), HANGS_S)
            await asyncio.sleep(source.random() * 0.2)
        tally.outcomes["left"] += 1

    await asyncio.gather(*(leave(number) for number in range(asked.count)))
    left = time.monotonic()
    counted = (await _settled(server.endpoint))["paceline:client_disconnects_total"]
    return {"settled_after_s": round(time.monotonic() - left, 2), "counted": counted, "is_ok": True}


async def _kills(server: Server, asked: Soak, tally: Tally) -> dict[str, Any]:
    until, endpoint = asyncio.Event(), server.endpoint
    work = asyncio.create_task(_clients(endpoint, asked.clients, until, tally, **LONG))
    for _ in range(asked.count):
        await asyncio.sleep(1.0)
        while not (now := await _metrics(endpoint))["paceline:num_requests_running"]:
            await asyncio.sleep(0.02)
        os.kill(int(now["paceline:engine_pid"]), signal.SIGKILL)
        async with asyncio.timeout(HANGS_S):  # a dead engine is not healthy, as soon as it is noticed
            while "503" not in await _refusal(endpoint, "/health"):
                await asyncio.sleep(0.01)
        while await _refusal(endpoint, "/ready"):
            await asyncio.sleep(0.1)
    await asyncio.sleep(2.0)
    until.set()
    await work
    restarts = (await _settled(endpoint))["paceline:engine_restarts_total"]
    known = set(+tally.outcomes) <= {"ok", "engine_lost", "engine_unavailable"}
    return {"restarts": restarts, "is_ok": known and tally.outcomes["ok"] > 0 and restarts == asked.count}


async def _sigterm(server: Server, asked: Soak, tally: Tally) -> dict[str, Any]:
    source = random.Random(0)
    bodies = [_body(source, is_stream=number % 2 == 0) | LONG for number in range(asked.clients)]
    work = asyncio.gather(*(_one(server.endpoint, body, tally) for body in bodies))
    num_taken = 0.0
    while num_taken < asked.clients:  # running, waiting or done
        await asyncio.sleep(0.02)
        now = await _metrics(server.endpoint)
        done = sum(value for name, value in now.items() if name.startswith("paceline:request_success_total"))
        num_taken = now["paceline:num_requests_running"] + now["paceline:num_requests_waiting"] + done
    status = await asyncio.to_thread(server.stop)
    await work
    return {"status": status, "is_ok": status == 0 and set(+tally.outcomes) == {"ok"}}


KINDS: dict[str, Callable[[Server, Soak, Tally], Awaitable[dict[str, Any]]]] = {
    "load": _load,
    "disconnects": _disconnects,
    "kills": _kills,
    "sigterm": _sigterm,
}


def _body(source: random.Random, is_stream: bool) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": source.choice(PROMPTS)}],
        "max_tokens": source.randint(8, 96),
        "temperature": source.choice((0, 0.8)),
        "seed": source.randint(0, 1000),
        "stream": is_stream,
        "stream_options": {"include_usage": True} if is_stream else None,
    }


async def _clients(endpoint: Endpoint, count: int, until: asyncio.Event, tally: Tally, **more: Any) -> None:
    """`count` of them, each asking again and again; more: what their bodies hold besides."""

    async def client(number: int) -> None:
        source = random.Random(number)
        while not until.is_set():
            before = tally.outcomes["ok"]
            await _one(endpoint, _body(source, is_stream=source.random() < 0.7) | more, tally)
            if tally.outcomes["ok"] == before:
                await asyncio.sleep(0.1)  # as a client would that was told to come back later

    await asyncio.gather(*(client(number) for number in range(count)))


async def _one(endpoint: Endpoint, body: dict[str, Any], tally: Tally) -> None:
    """One request to its end, and what that was: ok, an error by its code, or a broken connection."""
    started, text = time.monotonic(), b""
    try:
        async with asyncio.timeout(HANGS_S), endpoint.asked("POST", CHAT, json.dumps(body).encode()) as (
            head, reader,
        ):  # fmt: skip
            async for part in body_of(head, reader):
                if not text and body["stream"]:
                    tally.first.append(time.monotonic() - started)
                text += part
    except TimeoutError:
        tally.outcomes["hung"] += 1
        return
    except Refused:
        tally.outcomes["connection"] += 1
        return
    is_complete = b"[DONE]" in text if body["stream"] else b'"usage"' in text
    error = re.search(rb'"error":\{.*?"code":"(\w+)"', text)
    found = re.findall(rb'"completion_tokens":(\d+)', text)
    tally.num_tokens += int(found[-1]) if found else 0
    if error:
        tally.outcomes[error[1].decode()] += 1
    else:
        tally.outcomes["ok" if head.status == 200 and is_complete else f"broken {head.status}"] += 1


async def _metrics(endpoint: Endpoint) -> Figures:
    """Every sample of /metrics, by its name with labels other than the model's."""
    found = {}
    for line in (await endpoint.get("/metrics")).decode().splitlines():
        if line.startswith(("paceline:", "process_")):
            name, _, value = line.rpartition(" ")
            found[re.sub(r'model_name="[^"]*",?|,model_name="[^"]*"', "", name).replace("{}", "")] = float(
                value
            )
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


async def _settled(endpoint: Endpoint, seconds: float = 60.0) -> Figures:
    """The figures once nothing runs any more, or after `seconds`."""
    busy = ("num_requests_running", "num_requests_waiting", "kv_cache_blocks_used")
    end = time.monotonic() + seconds
    while True:
        now = await _metrics(endpoint)
        if not any(now[f"paceline:{name}"] for name in busy) or time.monotonic() > end:
            return now
        await asyncio.sleep(0.1)


def _lag(figures: Figures) -> dict[str, Any]:
    """How late the event loop was over the server's whole life; the worst is known as a bound only."""
    prefix = "paceline:event_loop_lag_seconds"
    total = figures[f"{prefix}_count"]
    matches = ((re.match(rf'{prefix}_bucket.*le="([^"]+)"', name), value) for name, value in figures.items())
    below = {float(found[1]): value for found, value in matches if found}
    return {
        "samples": int(total),
        "late_50ms": int(total - below[0.05]),
        "share_below_10ms": round(below[0.01] / total, 5),
        "all_below_s": min(bound for bound, count in below.items() if count == total),
    }


def tables(report: dict[str, Any]) -> list[Table]:
    outcomes = ", ".join(f"{count} {name}" for name, count in report["outcomes"].items())
    hidden = ("outcomes", "verb", "command", "date", "machine", "versions")
    rows = [(name, str(value)) for name, value in report.items() if name not in hidden]
    title = f"soak, {report['what']}: {'passed' if report['is_ok'] else 'FAILED'}"
    return [Table(title, ("figure",), ("value",), [("requests", outcomes), *rows])]
