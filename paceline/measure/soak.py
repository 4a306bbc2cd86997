"""`paceline bench soak`: a server kept busy and hurt, by many clients, clients that leave, an engine that is
killed, faults of every kind (faults.py), or a SIGTERM under load. Passed when every request ended or failed
clearly, no block is held at the end, memory did not keep growing and the event loop was never late by 50 ms.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from paceline.core.options import nearest, require
from paceline.measure import faults, faults_engine, faults_ranks, faults_wire
from paceline.measure.endpoint import Endpoint, Refused
from paceline.measure.faults_files import ANSWERED, LEFT, LOST, REFUSED
from paceline.measure.load import CHAT, Figures, Job, Record, ask, metrics
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
BUSY = ("num_requests_running", "num_requests_waiting")
LEGEND = """memory: MB of the server and of its engine after a tenth, at half time and at the end;
first_token_p99_s: in the first and the last tenth; late: samples of the event loop's lag above 50 ms.
"""


class Run:
    num_turns: int | None = None  # how long a server takes to recover is what is measured
    server: Server

    def __init__(self, asked: Soak) -> None:
        if asked.faults is not None:
            asked = replace(asked, what="faults", count=asked.faults)
        require(asked.what in KINDS, "what is to be soaked", asked.what, nearest(asked.what, list(KINDS)))
        if asked.what == "faults":
            self.num_turns = asked.count
            options = f"{faults_wire.SERVER_OPTIONS} {asked.server_options}"
            asked = replace(asked, server_options=options, may_lag=True)  # bodies of 2 MB take their time
        self.asked, self.records = asked, list[Record]()
        self.outcomes = Counter[str]()  # of the requests: ok, left, or an error's code

    def report(self, tell: Tell) -> dict[str, Any]:
        tell("starting the server", 0)
        with our_server(self.asked.model, self.asked.server_options) as self.server:
            tell(self.asked.what, 0)
            self.tell = tell
            return asyncio.run(self._report())

    async def _report(self) -> dict[str, Any]:
        report = await KINDS[self.asked.what](self)
        if self.asked.what not in ("sigterm", "faults"):
            figures = await self._settled()
            lag = {"samples": int(figures["event_loop_lag_seconds_count"])}  # over the server's whole life
            for ms in (50, 10):
                below = figures[f"event_loop_lag_seconds_bucket:{ms / 1000:g}"]
                lag[f"late_{ms}ms"] = lag["samples"] - int(below)
            used, is_prompt = figures["kv_cache_blocks_used"], lag["late_50ms"] == 0 or self.asked.may_lag
            report |= {"blocks_used": used, "blocks": figures["kv_cache_blocks"], "event_loop_lag": lag}
            report["exit"] = await asyncio.to_thread(self.server.stop)
            report["is_ok"] &= used == 0 and not self.outcomes["hung"] and is_prompt
        times = [record.arrivals[0] for record in self.records if record.arrivals]
        first = round(median(times), 3) if times else None
        return {"what": self.asked.what, **report, "outcomes": +self.outcomes, "first_token_p50_s": first}

    async def load(self) -> dict[str, Any]:
        until, memory, started = asyncio.Event(), [], time.monotonic()
        work = asyncio.create_task(self._clients(until))
        while time.monotonic() - started < self.asked.seconds:
            await asyncio.sleep(min(self.asked.seconds / 20, 5.0))
            engine = int((await metrics(self.server.endpoint))["engine_pid"])
            memory.append((_resident_mb(self.server.process.pid), _resident_mb(engine)))
        until.set()
        await work
        num_tokens = sum(record.num_tokens for record in self.records)
        rate = round(num_tokens / (time.monotonic() - started), 1)
        early, half, last = memory[len(memory) // 10], memory[len(memory) // 2], memory[-1]
        is_flat = all(b <= a * 1.05 + 8 for a, b in zip(half, last, strict=True))
        is_ok = is_flat and set(+self.outcomes) == {"ok"}
        waits = [record.arrivals[0] for record in self.records if record.arrivals] or [np.inf]
        tenth = max(1, len(waits) // 10)
        p99 = [round(float(np.percentile(some, 99)), 3) for some in (waits[:tenth], waits[-tenth:])]
        report = {"tokens_per_second": rate, "memory_mb": (early, half, last)}
        return report | {"first_token_p99_s": p99, "is_ok": is_ok}

    async def disconnects(self) -> dict[str, Any]:
        source, gate = random.Random(0), asyncio.Semaphore(self.asked.clients)

        async def leave(number: int) -> None:
            body = json.dumps(_body(source) | LONG | {"stream": number % 3 != 0}).encode()
            async with gate, self.server.endpoint.asked("POST", CHAT, body) as response:
                if number % 2:
                    await asyncio.wait_for(response.reader.read(200), HANGS_S)
                await asyncio.sleep(source.random() * 0.2)
            self.outcomes["left"] += 1

        await asyncio.gather(*(leave(number) for number in range(self.asked.count)))
        left = time.monotonic()
        counted = (await self._settled())["client_disconnects"]
        return {"settled_after_s": round(time.monotonic() - left, 2), "counted": counted, "is_ok": True}

    async def kills(self) -> dict[str, Any]:
        until, endpoint, outcomes = asyncio.Event(), self.server.endpoint, self.outcomes
        work = asyncio.create_task(self._clients(until, **LONG))
        for _ in range(self.asked.count):
            await asyncio.sleep(1.0)
            while not (now := await metrics(endpoint))["num_requests_running"]:
                await asyncio.sleep(0.02)
            os.kill(int(now["engine_pid"]), signal.SIGKILL)
            async with asyncio.timeout(HANGS_S):
                while (await metrics(endpoint))["engine_pid"] == now["engine_pid"]:
                    await asyncio.sleep(0.01)
            while await _refusal(endpoint, "/ready"):
                await asyncio.sleep(0.1)
        await asyncio.sleep(2.0)
        until.set()
        await work
        restarts = (await self._settled())["engine_restarts"]
        is_known = set(+outcomes) <= {"ok", "engine_lost", "engine_unavailable"} and outcomes["ok"] > 0
        return {"restarts": restarts, "is_ok": is_known and restarts == self.asked.count}

    async def faults(self) -> dict[str, Any]:
        endpoint, shared = self.server.endpoint, set(os.listdir("/dev/shm"))
        before_all = faults_ranks.orphans()
        body = _body(random.Random(0)) | {"temperature": 0, "max_tokens": 24}
        before, memory = await self._one(body), list[float]()

        def tell(name: str) -> None:
            memory.append(_resident_mb(self.server.process.pid))
            self.tell(self.asked.what, 1)

        given = self.asked.model, self.asked.count, self.asked.clients, self.asked.seed, tell
        kinds = await faults.rage(endpoint, *given)
        for _ in range(2):  # the first may meet an engine whose end was not seen yet
            await faults_engine.ready(endpoint)
            if (after := await self._one(body)).error is None:
                break
        figures, half = await self._settled(), memory[len(memory) // 2]
        processes = faults_engine.descendants(self.server.process.pid)
        strays = faults_ranks.orphans() - before_all
        status = await asyncio.to_thread(self.server.stop)
        left = {
            "processes": not await faults_engine.gone(processes),
            "ranks": sorted(strays),
            "port": not await _refusal(endpoint, "/health"),
            "shared_memory": sorted(set(os.listdir("/dev/shm")) - shared),
            "blocks": figures["kv_cache_blocks_used"],
        }
        is_same = before.error is None is after.error and before.num_tokens == after.num_tokens
        is_flat, num_lost = memory[-1] <= half * 1.05 + 8, sum(found[LOST] for found in kinds.values())
        report = {"lost": num_lost, "left_behind": left, "memory_mb": (half, memory[-1]), "status": status}
        report |= {"kinds": kinds, "restarts": figures["engine_restarts"], "answers_after": is_same}
        if num_lost:
            report["errors"] = _errors(self.server.log)
        return report | {
            "is_ok": not (num_lost or any(left.values())) and is_same and is_flat and status == 0
        }

    async def sigterm(self) -> dict[str, Any]:
        source, num_taken = random.Random(0), 0.0
        work = asyncio.gather(*(self._one(_body(source) | LONG) for _ in range(self.asked.clients)))
        while num_taken < self.asked.clients:  # running, waiting or done
            await asyncio.sleep(0.02)
            now = await metrics(self.server.endpoint)
            num_taken = sum(now.get(name, 0) for name in (*BUSY, "request_success"))
        status = await asyncio.to_thread(self.server.stop)
        await work
        return {"status": status, "is_ok": status == 0 and set(+self.outcomes) == {"ok"}}

    async def _clients(self, until: asyncio.Event, **more: Any) -> None:
        """Each asking again and again; more: what their bodies hold besides."""

        async def client(number: int) -> None:
            source = random.Random(number)
            while not until.is_set():
                record = await self._one(_body(source) | more)
                if record.error is not None:
                    await asyncio.sleep(0.1)  # as a client would that was told to come back later

        await asyncio.gather(*(client(number) for number in range(self.asked.clients)))

    async def _one(self, body: dict[str, Any]) -> Record:
        record = Record("", 0.0, 0.0)
        job = Job("", CHAT, {**body, "stream_options": {"include_usage": True}})
        await ask(self.server.endpoint, HANGS_S, job, record, time.perf_counter())
        self.records.append(record)
        self.outcomes["ok" if record.error is None else record.code or "connection"] += 1
        return record

    async def _settled(self) -> Figures:
        """The figures once nothing runs any more, or after SETTLES_S."""
        end = time.monotonic() + SETTLES_S
        while True:
            now = await metrics(self.server.endpoint)
            if not any(now[name] for name in (*BUSY, "kv_cache_blocks_used")) or time.monotonic() > end:
                return now
            await asyncio.sleep(0.1)


KINDS = {"load": Run.load, "disconnects": Run.disconnects, "kills": Run.kills, "sigterm": Run.sigterm}
KINDS["faults"] = Run.faults


def _body(source: random.Random) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": source.choice(PROMPTS)}], "stream": True}
    sampling = {"temperature": source.choice((0, 0.8)), "seed": source.randint(0, 1000)}
    return {**asked, **sampling, "max_tokens": source.randint(8, 96)}


async def _refusal(endpoint: Endpoint, path: str) -> str:
    """Why it is refused; empty where it is not."""
    try:
        await endpoint.get(path)
    except Refused as error:
        return str(error)
    return ""


def _errors(log: Path) -> list[str]:
    """What a server has logged of errors, each once, with how often and where."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if '"trace": ' in line]
    found = Counter(f"{line['event']}: {line['error']} at {line['trace'][-1:]}" for line in lines)
    return [f"{count} x {what}" for what, count in found.most_common()]


def _resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def tables(report: dict[str, Any]) -> list[Table]:
    outcomes = ", ".join(f"{count} {name}" for name, count in report["outcomes"].items())
    hidden = ("outcomes", "kinds", "errors", *ORIGIN)
    rows = [(name, str(value)) for name, value in report.items() if name not in hidden]
    title = f"soak, {report['what']}: {'passed' if report['is_ok'] else 'FAILED'}"
    made = [Table(title, ("figure",), ("value",), [("requests", outcomes), *rows])]
    columns = (ANSWERED, REFUSED, LEFT, LOST)
    for_kinds, strange = list[tuple[str, ...]](), list[str]()
    for name, found in report.get("kinds", {}).items():
        counts = [found.get(each, 0) for each in columns]
        for_kinds.append((name, *map(str, (sum(counts), *counts))))
        strange += [f"{name}, fault {each}" for each in found if each not in columns]
    notes = (*strange, *report.get("errors", ()))
    return [*made, Table("faults", ("kind",), ("sent", *columns), for_kinds, notes)] if for_kinds else made
