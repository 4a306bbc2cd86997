"""Keeps a server busy and hurts it: many clients, clients that leave, an engine that is killed, a SIGTERM
under load.

    python scripts/serve_soak.py load --clients 64 --seconds 600
    python scripts/serve_soak.py disconnects --count 1000
    python scripts/serve_soak.py kills --count 20 --clients 16
    python scripts/serve_soak.py sigterm --clients 16

Each starts its own server (other options go to `paceline serve`), prints one JSON object, and exits 1 if a
request neither ended nor failed clearly, a block is still held at the end, memory kept growing, or the event
loop was late by 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HANGS_S = 120.0  # a request that takes longer is said to hang
LONG = {"max_tokens": 200, "ignore_eos": True}  # still being written when something happens
PROMPTS = [
    "Say it again: the rider in front breaks the wind for the whole line, and the line goes faster on the same power.",
    "Why is the sky blue?",
    "Write a short story about a river that forgot where the sea is.",
    "Count from one to twenty in words.",
    "Translate to French: the bicycle is leaning against the wall of the old house.",
]


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @classmethod
    def start(cls, model: str, options: list[str]) -> Server:
        log = Path(tempfile.mkstemp(suffix=".log")[1])
        code = "from paceline.cli.entry import main; raise SystemExit(main())"
        command = [sys.executable, "-c", code, "serve", model, "--port", "0", *options]
        with log.open("wb") as stderr:
            process = subprocess.Popen(command, stderr=stderr)
        server = cls(process, 0, log)
        server._wait_for(r'"event": "engine ready"', 300)
        found = re.search(r'"url": "http://[^"]*:(\d+)"', log.read_text())
        assert found is not None
        server.port = int(found[1])
        return server

    def _wait_for(self, pattern: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not re.search(pattern, self.log.read_text()):
            if self.process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the server did not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.1)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(HANGS_S)


@dataclass
class Tally:
    """What became of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    first: list[float] = field(default_factory=list)
    hung: int = 0


async def request(
    port: int, path: str, body: dict[str, Any] | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    return reader, writer


async def get(port: int, path: str) -> str:
    reader, writer = await request(port, path)
    text = (await reader.read()).decode()
    writer.close()
    return text


async def metrics(port: int) -> dict[str, float]:
    """Every sample of /metrics, by its name with labels other than the model's."""
    found = {}
    for line in (await get(port, "/metrics")).splitlines():
        if line.startswith(("paceline:", "process_")):
            name, _, value = line.rpartition(" ")
            found[
                re.sub(r'model_name="[^"]*",?|\{model_name="[^"]*"\}|,?model_name="[^"]*"', "", name).replace(
                    "{}", ""
                )
            ] = float(value)
    return found


def a_body(random_: random.Random, is_stream: bool) -> dict[str, Any]:
    greedy = random_.random() < 0.5
    return {
        "messages": [{"role": "user", "content": random_.choice(PROMPTS)}],
        "max_tokens": random_.randint(8, 96),
        "temperature": 0 if greedy else 0.8,
        "seed": random_.randint(0, 1000),
        "stream": is_stream,
        "stream_options": {"include_usage": True} if is_stream else None,
    }


async def one(port: int, body: dict[str, Any], tally: Tally) -> None:
    """One request to its end, and what that was: ok, an error by its status, or a broken connection."""
    started = time.monotonic()
    try:
        async with asyncio.timeout(HANGS_S):
            reader, writer = await request(port, "/v1/chat/completions", body)
            status = int((await reader.readline()).split()[1])
            text = b""
            while line := await reader.readline():
                if line.startswith(b"data:") and b"data:" not in text:
                    tally.first.append(time.monotonic() - started)
                text += line
            writer.close()
    except TimeoutError:
        tally.hung += 1
        tally.outcomes["hung"] += 1
        return
    except (ConnectionError, IndexError, asyncio.IncompleteReadError):
        tally.outcomes["connection"] += 1
        return
    is_complete = b"[DONE]" in text if body["stream"] else b'"usage"' in text
    error = re.search(rb'"error":\{.*?"code":"(\w+)"', text)
    found = re.findall(rb'"completion_tokens":(\d+)', text)
    tally.num_tokens += int(found[-1]) if found else 0
    tally.outcomes[
        "ok"
        if status == 200 and is_complete and not error
        else error[1].decode()
        if error
        else f"broken {status}"
    ] += 1


async def clients(port: int, count: int, until: asyncio.Event, tally: Tally, **more: Any) -> None:
    """So many, each asking again and again; more: what their bodies hold besides."""

    async def client(number: int) -> None:
        random_ = random.Random(number)
        while not until.is_set():
            before = tally.outcomes["ok"]
            await one(port, a_body(random_, is_stream=random_.random() < 0.7) | more, tally)
            if tally.outcomes["ok"] == before:
                await asyncio.sleep(0.1)  # as a client would that was told to come back later

    await asyncio.gather(*(client(number) for number in range(count)))


def resident(pid: int) -> float:
    """MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def settled(port: int, seconds: float = 60.0) -> dict[str, float]:
    """The figures once nothing runs any more, or after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        now = await metrics(port)
        busy = (
            now["paceline:num_requests_running"]
            + now["paceline:num_requests_waiting"]
            + now["paceline:kv_cache_blocks_used"]
        )
        if not busy or time.monotonic() > end:
            return now
        await asyncio.sleep(0.1)


async def taken(port: int, count: int) -> None:
    """Until so many requests are running, waiting or done."""
    while True:
        now = await metrics(port)
        done = sum(value for name, value in now.items() if name.startswith("paceline:request_success_total"))
        if now["paceline:num_requests_running"] + now["paceline:num_requests_waiting"] + done >= count:
            return
        await asyncio.sleep(0.02)


def lag(figures: dict[str, float]) -> dict[str, Any]:
    """How late the event loop was over the server's whole life; the worst is known as a bound only."""
    prefix = "paceline:event_loop_lag_seconds"
    total = figures[f"{prefix}_count"]
    below = {
        float(found[1]): value
        for name, value in figures.items()
        if (found := re.match(rf'{prefix}_bucket.*le="([^"]+)"', name))
    }
    return {
        "samples": int(total),
        "late_50ms": int(total - below[0.05]),
        "share_below_10ms": round(below[0.01] / total, 5),
        "all_below_s": min(bound for bound, count in below.items() if count == total),
    }


async def load(server: Server, args: argparse.Namespace, tally: Tally) -> dict[str, Any]:
    until, memory = asyncio.Event(), []
    work = asyncio.create_task(clients(server.port, args.clients, until, tally))
    started = time.monotonic()
    while time.monotonic() - started < args.seconds:
        await asyncio.sleep(min(args.seconds / 20, 5.0))
        engine = int((await metrics(server.port))["paceline:engine_pid"])
        memory.append((resident(server.process.pid), resident(engine)))
    until.set()
    await work
    seconds = time.monotonic() - started
    half, last = memory[len(memory) // 2], memory[-1]
    is_flat = all(b <= a * 1.05 + 8 for a, b in zip(half, last, strict=True))
    rate = tally.num_tokens / seconds
    return {
        "tokens_per_second": round(rate, 1),
        "memory_half_mb": half,
        "memory_end_mb": last,
        "is_ok": is_flat and set(tally.outcomes) == {"ok"},
    }


async def disconnects(server: Server, args: argparse.Namespace, tally: Tally) -> dict[str, Any]:
    random_, gate = random.Random(0), asyncio.Semaphore(args.clients)

    async def leave(number: int) -> None:
        async with gate:
            body = a_body(random_, is_stream=number % 3 != 0) | LONG
            reader, writer = await request(server.port, "/v1/chat/completions", body)
            if number % 2:
                await asyncio.wait_for(reader.read(200), HANGS_S)
            await asyncio.sleep(random_.random() * 0.2)
            writer.transport.abort()
            tally.outcomes["left"] += 1

    await asyncio.gather(*(leave(number) for number in range(args.count)))
    left = time.monotonic()
    now = await settled(server.port)
    return {
        "settled_after_s": round(time.monotonic() - left, 2),
        "counted": now["paceline:client_disconnects_total"],
        "is_ok": True,
    }


async def kills(server: Server, args: argparse.Namespace, tally: Tally) -> dict[str, Any]:
    until = asyncio.Event()
    work = asyncio.create_task(clients(server.port, args.clients, until, tally, **LONG))
    for number in range(args.count):
        await asyncio.sleep(1.0)
        while not (now := await metrics(server.port))["paceline:num_requests_running"]:
            await asyncio.sleep(0.02)
        os.kill(int(now["paceline:engine_pid"]), signal.SIGKILL)
        async with asyncio.timeout(HANGS_S):  # a dead engine is not healthy, as soon as it is noticed
            while "503" not in (await get(server.port, "/health")).splitlines()[0]:
                await asyncio.sleep(0.01)
        while "200 OK" not in (await get(server.port, "/ready")).splitlines()[0]:
            await asyncio.sleep(0.1)
        print(f"kill {number + 1}: {dict(tally.outcomes)}", file=sys.stderr)
    await asyncio.sleep(2.0)
    until.set()
    await work
    now = await settled(server.port)
    is_clear = set(tally.outcomes) <= {"ok", "engine_lost", "engine_unavailable"} and tally.outcomes["ok"] > 0
    return {
        "restarts": now["paceline:engine_restarts_total"],
        "is_ok": is_clear and now["paceline:engine_restarts_total"] == args.count,
    }


async def sigterm(server: Server, args: argparse.Namespace, tally: Tally) -> dict[str, Any]:
    random_ = random.Random(0)
    bodies = [a_body(random_, is_stream=number % 2 == 0) | LONG for number in range(args.clients)]
    work = asyncio.gather(*(one(server.port, body, tally) for body in bodies))
    await taken(server.port, args.clients)
    server.process.send_signal(signal.SIGTERM)
    await work
    status = await asyncio.to_thread(server.process.wait, HANGS_S)
    return {"status": status, "is_ok": status == 0 and set(tally.outcomes) == {"ok"}}


async def run(args: argparse.Namespace, options: list[str]) -> bool:
    server = Server.start(args.model, options)
    tally, report = Tally(), {}
    try:
        report = await globals()[args.what](server, args, tally)
        if args.what != "sigterm":
            figures = await settled(server.port)
            report |= {
                "blocks_used": figures["paceline:kv_cache_blocks_used"],
                "blocks": figures["paceline:kv_cache_blocks_total"],
            }
            report["event_loop_lag"] = lag(figures)
            is_prompt = report["event_loop_lag"]["late_50ms"] == 0 or args.may_lag
            report["is_ok"] &= report["blocks_used"] == 0 and tally.hung == 0 and is_prompt
            report["exit"] = server.stop()
    finally:
        if server.process.poll() is None:
            server.process.kill()
    first = sorted(tally.first)
    report |= {
        "outcomes": dict(tally.outcomes),
        "first_token_p50_s": round(first[len(first) // 2], 3) if first else None,
    }
    print(json.dumps({"what": args.what, **report}))
    return bool(report["is_ok"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("load", "disconnects", "kills", "sigterm"))
    parser.add_argument("--model", default="default")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument(
        "--may-lag",
        action="store_true",
        help="do not fail for a late event loop: others use this machine, too",
    )
    args, options = parser.parse_known_args()
    return 0 if asyncio.run(run(args, options)) else 1


if __name__ == "__main__":
    sys.exit(main())
