"""A real server process on a free port, and the few things tests ask of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

STARTS_S = 300.0  # where kernels are compiled first, on a busy machine
WAIT_S = 120.0  # for all else: what has not happened by then will not
CODE = "from paceline.cli.entry import main; raise SystemExit(main())"


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    log: Path
    key: str = ""
    url: str = ""
    http: httpx.Client = field(init=False)
    client: openai.OpenAI = field(init=False)

    def wait_until(self, pattern: str, seconds: float = STARTS_S) -> re.Match[str]:
        """For a line in the log."""
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self.log.read_text(encoding="utf-8"))) is None:
            assert self.process.poll() is None, self.log.read_text(encoding="utf-8")[-3000:]
            assert time.monotonic() < end, f"no {pattern} in {self.log.read_text(encoding='utf-8')[-3000:]}"
            time.sleep(0.05)
        return found

    def connect(self, **options: Any) -> None:
        self.url = self.url or self.wait_until(r'"url": "([^"]+)"')[1]
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=WAIT_S, **options)
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0, timeout=WAIT_S
        )

    def close(self) -> None:
        """Our ends of the connections."""
        for client in ("http", "client"):
            if hasattr(self, client):
                getattr(self, client).close()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines()]

    def metrics(self) -> dict[str, float]:
        """Every sample by its name and labels, the model's left out."""
        found = {}
        for line in self.http.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[re.sub(r'model_name="[^"]*",?', "", name).replace(",}", "}").replace("{}", "")] = float(
                    value
                )
        return found

    def figures_when(self, is_so: Callable[[dict[str, float]], bool], what: str) -> dict[str, float]:
        """The figures, once they are so."""
        end = time.monotonic() + WAIT_S
        while not is_so(now := self.metrics()):
            assert time.monotonic() < end, f"waited in vain for {what}: {now}"
            time.sleep(0.02)
        return now

    def settled(self) -> dict[str, float]:
        """The figures once nothing runs; fails if something goes on running. They are a fifth of a second
        old: what has just begun may not be among them."""
        busy = ("num_requests_running", "num_requests_waiting", "kv_cache_blocks_used")
        return self.figures_when(lambda now: not any(now[f"paceline:{name}"] for name in busy), "all to end")

    def wait_until_taken(self, count: int) -> None:
        """Until `count` answers run or wait in the engine."""
        names = ("num_requests_running", "num_requests_waiting")
        self.figures_when(
            lambda now: sum(now[f"paceline:{name}"] for name in names) >= count, f"{count} requests at once"
        )

    def wait_until_ready(self, seconds: float = STARTS_S) -> None:
        end = time.monotonic() + seconds
        while self.http.get("/ready").status_code != 200:
            assert time.monotonic() < end, "the server did not become ready"
            time.sleep(0.05)

    def stop(self) -> int:
        self.close()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)

    def kill(self) -> None:
        self.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)


def as_stranger(method: str, url: str, **options: Any) -> httpx.Response:
    """Without a key, over a connection of its own."""
    return httpx.request(method, url, timeout=WAIT_S, **options)


def launch(model: str, *flags: str, environment: dict[str, str] | None = None) -> Server:
    """Start a server without waiting for anything."""
    log = Path(tempfile.mkstemp(suffix=".log", prefix="paceline-server-")[1])
    command = [sys.executable, "-c", CODE, "serve", model, "--port", "0", *flags]
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stderr=stderr, env={**os.environ, **(environment or {})})
    return Server(process, log)


def start_server(model: str, *flags: str, key: str = "", environment: dict[str, str] | None = None) -> Server:
    server = launch(model, *flags, environment=environment)
    server.key = key
    try:
        server.connect()
        server.wait_until_ready()
    except BaseException:
        server.kill()
        raise
    return server


def server_at(url: str, key: str = "") -> Server:
    """One that runs already, and is not ours to stop."""
    server = Server(None, Path(os.devnull), key, url)  # type: ignore[arg-type]
    server.connect()
    return server
