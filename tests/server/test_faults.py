"""The engine is killed, clients leave, the server is told to stop: every request ends, no block stays
held.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.loaders import hub
from paceline.measure.faults import KINDS, RANKS
from paceline.measure.faults_engine import descendants, gone, is_there
from paceline.measure.faults_wire import HARD
from tests.make_models import tiny_hf, tiny_tokenizer
from tests.server.harness import CODE, STARTS_S, WAIT_S, Server, as_stranger, launch, start_server

# Without drafts, so that it runs for many seconds: tests do something meanwhile, and a busy machine is slow
# to do it.
LONG: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": 800,
    "ignore_eos": True,
    "temperature": 0,
    "speculative": "off",
}


SLOW: dict[str, Any] = {"prompt": "x", **HARD[-1]}


@pytest.fixture
def own_server() -> Iterator[Server]:
    hub.resolve("default", progress=False)
    server = start_server("default", "--drain-timeout", "300")
    yield server
    server.kill()


def soak(path: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-c", CODE, "bench", "soak", *arguments, "--may-lag", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    report: dict[str, Any] = json.loads(path.read_text())
    return report


class Asking(threading.Thread):
    """A request in the background."""

    def __init__(self, server: Server, is_stream: bool) -> None:
        super().__init__(daemon=True)
        self.server, self.is_stream = server, is_stream
        self.begun = threading.Event()
        self.status, self.text = 0, ""
        self.start()

    def run(self) -> None:
        with httpx.stream(
            "POST", f"{self.server.url}/v1/completions", json={**LONG, "stream": self.is_stream}, timeout=300
        ) as answer:
            self.status = answer.status_code
            for line in answer.iter_lines():
                self.text += line + "\n"
                self.begun.set()


def test_a_killed_engine_fails_its_requests_clearly_and_comes_back(own_server: Server) -> None:
    stream, whole = Asking(own_server, True), Asking(own_server, False)
    assert stream.begun.wait(WAIT_S)
    own_server.wait_until_taken(2)
    os.kill(int(own_server.metrics()["paceline:engine_pid"]), signal.SIGKILL)
    end = time.monotonic() + WAIT_S
    while (health := own_server.http.get("/health")).status_code == 200:  # at once: it will be well again
        assert time.monotonic() < end
    refused = own_server.post("/v1/completions", **LONG)
    stream.join(WAIT_S)
    whole.join(WAIT_S)
    assert not stream.is_alive()
    assert not whole.is_alive()
    events = [line for line in stream.text.splitlines() if line]
    assert events[-1] == "data: [DONE]"
    error = json.loads(events[-2].removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == ("engine_lost", "service_unavailable_error")
    assert whole.status == 503
    assert json.loads(whole.text)["error"]["code"] == "engine_lost"
    assert (health.status_code, health.json()["status"]) == (503, "restarting")
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    own_server.wait_until_ready()
    assert own_server.http.get("/health").json()["engine_restarts"] == 1
    now = own_server.metrics()
    assert (now["paceline:engine_restarts_total"], now["paceline:engine_up"]) == (1, 1)
    assert own_server.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200
    own_server.settled()


def test_sigterm_lets_running_requests_finish(own_server: Server) -> None:
    running = [Asking(own_server, True), Asking(own_server, False)]
    assert running[0].begun.wait(WAIT_S)
    own_server.wait_until_taken(2)
    own_server.process.send_signal(signal.SIGTERM)
    own_server.wait_until('"event": "draining"')
    refused = as_stranger("POST", f"{own_server.url}/v1/completions", json=LONG)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert as_stranger("GET", f"{own_server.url}/ready").status_code == 503
    assert as_stranger("GET", f"{own_server.url}/health").status_code == 200
    assert own_server.process.wait(300) == 0
    for asking in running:
        asking.join(WAIT_S)
        assert asking.status == 200
    assert running[0].text.endswith("data: [DONE]\n\n")
    assert json.loads(running[1].text)["usage"]["completion_tokens"] == LONG["max_tokens"]


def test_a_second_sigterm_cuts_off(own_server: Server) -> None:
    running = Asking(own_server, True)
    assert running.begun.wait(WAIT_S)
    engine = int(own_server.metrics()["paceline:engine_pid"])
    own_server.process.send_signal(signal.SIGTERM)
    own_server.wait_until('"event": "draining"')  # two signals that come at once are one
    own_server.process.send_signal(signal.SIGTERM)
    assert own_server.process.wait(WAIT_S) == 1
    running.join(WAIT_S)
    assert '"code":"draining"' in running.text
    assert not Path(f"/proc/{engine}").exists()


def test_an_engine_does_not_outlive_its_server(own_server: Server) -> None:
    engine = int(own_server.metrics()["paceline:engine_pid"])
    own_server.process.kill()
    own_server.process.wait(WAIT_S)
    end = time.monotonic() + WAIT_S
    while is_there(engine):
        assert time.monotonic() < end, "the engine is still there"
        time.sleep(0.05)


@pytest.mark.slow
def test_clients_that_leave_hold_no_blocks(tmp_path: Path) -> None:
    report = soak(tmp_path / "r.json", "disconnects", "--count", "48", "--clients", "12")
    assert report["outcomes"] == {"left": 48}
    assert report["blocks_used"] == 0
    assert (
        report["counted"] >= 12
    )  # of the sixteen that left a stream in its middle; the others may be gone before the server sees them


@pytest.mark.slow
def test_kills_under_load(wide_folder: Path, tmp_path: Path) -> None:
    options = ("--count", "2", "--clients", "4", "--model", str(wide_folder))
    report = soak(tmp_path / "r.json", "kills", *options)
    assert report["restarts"] == 2
    assert report["outcomes"]["engine_lost"] >= 1


@pytest.mark.slow
def test_sigterm_under_load(wide_folder: Path, tmp_path: Path) -> None:
    options = ("--clients", "12", "--model", str(wide_folder), "--server-options", "--drain-timeout 300")
    assert soak(tmp_path / "r.json", "sigterm", *options)["status"] == 0


@pytest.mark.slow
def test_faults_of_every_kind_lose_nothing(wide_folder: Path, tmp_path: Path) -> None:
    options = ("--faults", "30", "--seed", "3", "--model", str(wide_folder))
    report = soak(tmp_path / "r.json", *options)
    assert report["lost"] == 0
    assert not any(report["left_behind"].values())
    assert set(report["kinds"]) == set(KINDS)


@pytest.mark.slow
def test_faults_of_ranks_lose_nothing(tmp_path: Path) -> None:
    """Twice each, with what else is done to a server of two ranks."""
    folder = tmp_path / "model"
    tiny_hf(
        folder,
        "llama",
        max_position_embeddings=4096,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
    )
    tiny_tokenizer(folder)
    options = ("--faults", "30", "--seed", "3", "--model", str(folder), "--server-options", "-tp 2")
    report = soak(tmp_path / "r.json", *options)
    assert report["lost"] == 0
    assert not any(report["left_behind"].values())
    assert set(RANKS) < set(report["kinds"])
    assert report["restarts"] >= len(RANKS) - 1


@pytest.mark.slow
@pytest.mark.parametrize("option", ["-tp", "-pp"])
def test_a_stopped_rank_does_not_outlive_its_engine(wide_folder: Path, option: str) -> None:
    """A process that is stopped does not see that the engine is gone."""
    server = start_server(str(wide_folder), option, "2")
    try:
        engine = int(server.metrics()["paceline:engine_pid"])
        (rank,) = descendants(engine)
        os.kill(rank, signal.SIGSTOP)
        os.kill(engine, signal.SIGKILL)
        assert asyncio.run(gone({rank}, WAIT_S))
        server.figures_when(lambda now: now["paceline:engine_pid"] != engine, "another engine")
        server.wait_until_ready()
        assert server.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200
    finally:
        server.kill()


@pytest.mark.slow
def test_an_engine_that_hangs_while_it_starts_is_replaced(wide_folder: Path) -> None:
    """It has not said that it is ready, and never will; one that takes its time says that it lives."""
    server = start_server(str(wide_folder), "--engine-timeout", "4")
    try:
        first = int(server.metrics()["paceline:engine_pid"])
        os.kill(first, signal.SIGKILL)
        while (second := int(server.metrics()["paceline:engine_pid"])) == first:
            time.sleep(0.01)
        os.kill(second, signal.SIGSTOP)
        server.wait_until('"event": "engine does not answer"')
        server.figures_when(lambda now: now["paceline:engine_pid"] not in (first, second), "a third engine")
        server.wait_until_ready()
        assert not Path(f"/proc/{second}").exists()
        assert server.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200
    finally:
        server.kill()


def test_a_killed_engine_leaves_no_grammar_behind(wide_folder: Path) -> None:
    """It would take minutes to compile, and the process that would have ended it is gone."""
    server = start_server(str(wide_folder))
    try:
        assert server.post("/v1/completions", prompt="x", max_tokens=1, guided_regex="a").status_code == 200
        asking = threading.Thread(target=server.post, args=("/v1/completions",), kwargs=SLOW, daemon=True)
        below = descendants(server.process.pid)
        asking.start()
        time.sleep(0.3)
        os.kill(int(server.metrics()["paceline:engine_pid"]), signal.SIGKILL)
        asking.join(WAIT_S)
        assert asyncio.run(gone(below, WAIT_S))
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/no/such/model.gguf"], "no model"),
        (["default", "--speculative-config", '{"method": "nobody"}'], "method is 'nobody'"),
        (["default", "--speculative-config", '{"method": "synthetic"}'], "knows answers beforehand"),
        (["default", "--max-num-seqs", "0"], "max_num_seqs is 0"),
        (["default", "--ssl-certfile", "/no/cert", "--ssl-keyfile", "/no/key"], "cannot be used"),
        (["default", "--host", "203.0.113.7"], "cannot be listened on"),
    ],
    ids=["model", "method", "benchmarks' method", "engine option", "certificate", "address"],
)
def test_what_cannot_start_says_why_and_exits_2(arguments: list[str], words: str) -> None:
    import re

    server = launch(*arguments)
    assert server.process.wait(STARTS_S) == 2
    last = server.log.read_text(encoding="utf-8").strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert re.search(words, last)
