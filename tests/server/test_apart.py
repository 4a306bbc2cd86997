"""Two servers, one that reads prompts and one that writes: the text of one server alone, whatever becomes of the
first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.core.errors import ConfigError
from paceline.measure.faults_engine import descendants
from paceline.server.config import ServerConfig
from paceline.server.handover import HELD_S
from tests.make_models import tiny_hf, tiny_tokenizer
from tests.server.harness import Server, as_stranger, start_server

PREFILL_KEY = "the-key-of-the-prefill-server"
WORDS = "The rider in front breaks the wind, and the others draft behind, mile after mile. "
TOOK, FAILED = "paceline:handovers_total", "paceline:handovers_failed_total"
DRAFTERS = ("--speculative-config", '{"method": ["ngram", "suffix"]}')


def pair(folder: Path, url: str, *flags: str, key: str = PREFILL_KEY) -> Server:
    """A decode server that has prompts read at this address."""
    more = ("--role", "decode", "--prefill", url, "--prefill-api-key", key, "--prefill-min-tokens", "32")
    return start_server(str(folder), *DRAFTERS, *more, "--prefill-timeout", "60", *flags)


def prefill_server(folder: Path) -> Server:
    return start_server(
        str(folder), *DRAFTERS, "--role", "prefill", "--api-key", PREFILL_KEY, key=PREFILL_KEY
    )


@pytest.fixture(scope="module")
def prefill(wide_folder: Path) -> Iterator[Server]:
    server = prefill_server(wide_folder)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def decode(wide_folder: Path, prefill: Server) -> Iterator[Server]:
    server = pair(wide_folder, prefill.url)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def alone(wide_folder: Path) -> Iterator[Server]:
    server = start_server(str(wide_folder), *DRAFTERS)
    yield server
    server.kill()


def answer(server: Server, text: str, **options: Any) -> tuple[str, int]:
    """What the openai client is told, and how much of the prompt was there already."""
    model = server.client.models.list().data[0].id
    found = server.client.completions.create(model=model, prompt=text, max_tokens=24, **options)
    assert found.usage is not None
    assert found.usage.prompt_tokens_details is not None
    return found.choices[0].text, found.usage.prompt_tokens_details.cached_tokens or 0


def files_of(server: Server) -> list[str]:
    """What its processes hold open that has no name."""
    found = []
    for pid in descendants(server.process.pid) | {server.process.pid}:
        for each in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                found.append(os.readlink(each))
            except OSError:
                continue
    return [name for name in found if "memfd:paceline" in name]


def wait_until_released(server: Server) -> None:
    """Sooner than it would forget what is never fetched."""
    end = time.monotonic() + HELD_S - 5
    while files_of(server):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 1, "seed": 5}], ids=["greedy", "seeded"]
)
def test_the_text_is_that_of_one_server(
    options: dict[str, Any], prefill: Server, decode: Server, alone: Server
) -> None:
    before, prompt = decode.metrics()[TOOK], f"{sorted(options)} " + WORDS * 10
    text, num_found = answer(decode, prompt, **options)
    assert num_found > 100  # it was read elsewhere
    assert (text, 0) == answer(alone, prompt, **options)
    now = decode.figures_when(lambda now: now[TOOK] == before + 1, "a handover")
    assert now[FAILED] == 0
    assert prefill.settled()["paceline:kv_cache_blocks_used"] == 0
    text, _ = answer(decode, prompt, **options)  # its own by now
    assert decode.metrics()[TOOK] == before + 1
    wait_until_released(prefill)


def test_short_prompts_are_read_here(decode: Server, alone: Server) -> None:
    before = decode.metrics()[TOOK]
    assert answer(decode, "the wind", temperature=0) == answer(alone, "the wind", temperature=0)
    assert decode.metrics()[TOOK] == before


def test_many_at_once(prefill: Server, decode: Server, alone: Server) -> None:
    prompts = [f"{number}: " + WORDS * (4 + number) for number in range(6)]
    found: dict[int, tuple[str, int]] = {}

    def ask(number: int) -> None:
        found[number] = answer(decode, prompts[number], temperature=1, seed=number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, prompt in enumerate(prompts):
        assert found[number][0] == answer(alone, prompt, temperature=1, seed=number)[0]
        assert found[number][1] > 32
    wait_until_released(prefill)


def test_the_door_has_a_key_and_exists_where_it_was_asked_for(prefill: Server, decode: Server) -> None:
    body = {"tokens": [1, 2, 3], "identity": {}, "parts": {}}
    assert as_stranger("POST", f"{prefill.url}/handover", json=body).status_code == 401
    assert prefill.post("/handover", **body).status_code == 400  # of another kind
    assert "not of one kind" in prefill.post("/handover", **body).text
    assert prefill.post("/handover", tokens="x", identity={}, parts={}).status_code == 400
    assert decode.post("/handover", **body).status_code == 404
    assert prefill.http.delete("/handover/nothing").status_code == 200


def test_over_the_network_as_well(wide_folder: Path, prefill: Server, alone: Server) -> None:
    """By an address that is not this machine's loopback by name, all bytes go over TCP."""
    server = pair(wide_folder, prefill.url.replace("127.0.0.1", "127.0.0.2"))
    try:
        # 127.0.0.2 is not listened on: a relay stands for the network, and tears one connection midway
        relay = Relay(int(prefill.url.rpartition(":")[2]))
        with relay:
            prompt = "over the network " + WORDS * 12
            text, num_found = answer(server, prompt, temperature=0)
            assert num_found > 100
            assert text == answer(alone, prompt, temperature=0)[0]
            assert relay.num_bytes > 10_000
            relay.most_bytes = 2_000
            torn = "torn " + WORDS * 12
            text, num_found = answer(server, torn, temperature=0)
            assert num_found == 0
            assert text == answer(alone, torn, temperature=0)[0]
            assert server.figures_when(lambda now: now[FAILED] == 1, "a failure")[TOOK] == 1
        wait_until_released(prefill)
    finally:
        server.kill()


class Relay:
    """From 127.0.0.2 to a server on 127.0.0.1, up to so many bytes of an answer."""

    def __init__(self, port: int) -> None:
        self.port, self.num_bytes, self.most_bytes = port, 0, 2**40
        self._listener = socket.create_server(("127.0.0.2", port))
        self._listener.settimeout(0.2)
        self._is_over = threading.Event()
        self._work = threading.Thread(target=self._accept)

    def __enter__(self) -> None:
        self._work.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._work.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_over.is_set():
            with contextlib.suppress(TimeoutError):
                ours, _ = self._listener.accept()
                with ours, socket.create_connection(("127.0.0.1", self.port)) as theirs:
                    asking = threading.Thread(target=self._carry, args=(ours, theirs, 2**40))
                    asking.start()
                    self._carry(theirs, ours, self.most_bytes)
                    asking.join()

    def _carry(self, source: socket.socket, target: socket.socket, most: int) -> None:
        sent = 0
        with contextlib.suppress(OSError):
            while sent < most and (data := source.recv(min(65_536, most - sent))):
                target.sendall(data)
                sent += len(data)
                self.num_bytes += len(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def test_another_model_is_refused_in_words(prefill: Server, tmp_path: Path, alone: Server) -> None:
    tiny_hf(tmp_path, "llama", max_position_embeddings=4096, num_hidden_layers=1)
    tiny_tokenizer(tmp_path)
    server = pair(tmp_path, prefill.url)
    try:
        assert answer(server, WORDS * 10, temperature=0)[1] == 0  # answered all the same
        assert server.wait_until("prefill and decode are not of one kind: the model is")
    finally:
        server.kill()


def test_a_wrong_key_costs_nothing_but_time(prefill: Server, wide_folder: Path) -> None:
    server = pair(wide_folder, prefill.url, key="not-the-key")
    try:
        assert answer(server, WORDS * 10, temperature=0)[1] == 0
        assert server.wait_until("it answered 401")
        log = server.log.read_text(encoding="utf-8")
        assert "not-the-key" not in log
    finally:
        server.kill()


def test_a_prefill_server_that_stops_and_one_that_is_killed(wide_folder: Path, alone: Server) -> None:
    first = prefill_server(wide_folder)
    server = pair(wide_folder, first.url, "--prefill-timeout", "10")
    try:
        assert answer(server, "before " + WORDS * 9, temperature=0)[1] > 100
        (engine,) = descendants(first.process.pid)
        os.kill(engine, signal.SIGSTOP)
        began = time.monotonic()
        hung = "hung " + WORDS * 9
        assert answer(server, hung, temperature=0) == (answer(alone, hung, temperature=0)[0], 0)
        assert time.monotonic() - began > 9  # it was waited for
        now = server.figures_when(lambda now: now[FAILED] == 1, "a failure")
        os.kill(engine, signal.SIGCONT)
        first.kill()
        for number in range(3):
            gone = f"gone {number} " + WORDS * 9
            assert answer(server, gone, temperature=0) == (answer(alone, gone, temperature=0)[0], 0)
        now = server.metrics()
        assert now[TOOK] == 1
        log = server.log.read_text(encoding="utf-8")
        assert log.count("prefill server does not serve") == 1
        assert server.settled()["paceline:num_requests_running"] == 0
    finally:
        server.kill()
        first.kill()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"role": "reader"}, "role is 'reader'"),
        ({"role": "decode"}, "--prefill ADDRESS"),
        ({"prefill": "http://127.0.0.1:1"}, "--role decode"),
        ({"role": "decode", "prefill": "127.0.0.1:8001"}, "http://127.0.0.1:8001"),
        ({"role": "decode", "prefill": "http://a:b"}, "http://127.0.0.1:8001"),
        ({"role": "prefill", "host": "0.0.0.0"}, "--api-key-file"),
        ({"prefill_timeout": 0.0}, "prefill_timeout"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ServerConfig(**settings)


def test_keys_are_not_logged() -> None:
    config = ServerConfig(role="decode", prefill="http://127.0.0.1:8001", prefill_api_key=PREFILL_KEY)
    assert PREFILL_KEY not in str(config.to_log())
    assert httpx.URL(config.prefill or "").port == 8001
