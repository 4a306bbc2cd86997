"""Bounds: a queue that is full, a request that takes too long, prompts and answers that are too long."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.harness import WAIT_S, Server, as_stranger, start_server

# Without drafts: it must take longer than the server has patience, on any machine.
LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 4000, "temperature": 0}
OPTIONS: dict[str, Any] = {"ignore_eos": True, "speculative": "off"}


def test_a_full_queue_is_429_with_retry_after(limited_server: Server) -> None:
    rejected, left = (
        'paceline:requests_rejected_total{reason="queue_full"}',
        "paceline:client_disconnects_total",
    )
    before = limited_server.metrics()
    streams = [
        limited_server.client.completions.create(model="default", **LONG, extra_body=OPTIONS, stream=True)
        for _ in range(2)
    ]
    refused = limited_server.post("/v1/completions", prompt="x")
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "queue_full"
    with pytest.raises(openai.RateLimitError):
        limited_server.client.completions.create(model="default", prompt="x")
    assert limited_server.metrics()[rejected] == before.get(rejected, 0) + 2
    for stream in streams:
        stream.close()
    limited_server.figures_when(lambda now: now[left] == before[left] + 2, "both to be seen leaving")
    assert limited_server.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200
    limited_server.settled()


def test_a_request_that_takes_too_long_is_504(limited_server: Server) -> None:
    limited_server.settled()
    started = time.monotonic()
    whole = limited_server.post("/v1/completions", **LONG, **OPTIONS)
    assert whole.status_code == 504
    assert whole.json()["error"]["code"] == "request_timeout"
    assert time.monotonic() - started < 60
    limited_server.settled()
    with limited_server.http.stream(
        "POST", "/v1/completions", json={**LONG, **OPTIONS, "stream": True}
    ) as stream:
        events = [line for line in stream.iter_lines() if line]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "request_timeout"
    assert "choices" in json.loads(events[0].removeprefix("data: "))
    limited_server.settled()


def test_prompts_answers_and_bodies_have_limits(limited_server: Server) -> None:
    long = limited_server.post("/v1/completions", prompt="one two three four " * 30)
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert limited_server.post("/v1/completions", prompt="x", max_tokens=5000).status_code == 400
    assert limited_server.post("/v1/completions", prompt="x " * 20_000).status_code == 413
    assert limited_server.post("/v1/completions", prompt=["x"] * 5).status_code == 400  # max_choices
    assert limited_server.post("/v1/completions", prompt="x", guided_choice=["y" * 2000]).status_code == 400


def test_a_slow_reader_holds_up_nobody(tiny_server: Server) -> None:
    body = {
        "prompt": "In a paceline,",
        "max_tokens": 1500,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "logprobs": 20,
    }
    data = json.dumps(body).encode()
    host, port = tiny_server.url.removeprefix("http://").split(":")
    before = tiny_server.settled()["paceline:generation_tokens_total"]
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {tiny_server.key}\r\ncontent-type: application/json\r\n"
        slow.sendall(f"{head}connection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        tiny_server.figures_when(
            lambda now: now["paceline:generation_tokens_total"] > before, "its first words"
        )
        for _ in range(3):
            assert tiny_server.post("/v1/completions", prompt="x", max_tokens=8).status_code == 200
        tiny_server.settled()  # the engine is done with it although hardly anything was read
        received = bytearray()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)  # and now it reads quickly
        slow.settimeout(WAIT_S)
        while piece := slow.recv(2**16):
            received += piece
    assert received.count(b"[DONE]") == 1
    tokens = sum(
        len(json.loads(line[6:])["choices"][0]["logprobs"]["tokens"]) for line in _events(bytes(received))
    )
    assert tokens == 1500


def _events(received: bytes) -> list[bytes]:
    """The JSON of each event, chunked encoding taken off."""
    _, _, rest = received.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return [line for line in body.split(b"\n\n") if line.startswith(b"data: {")]


def test_many_at_once_are_all_answered(tiny_server: Server) -> None:
    answers: list[int] = []

    def ask(number: int) -> None:
        answers.append(
            tiny_server.post("/v1/completions", prompt=f"rider {number}", max_tokens=16, n=2).status_code
        )

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 32
    tiny_server.settled()


@pytest.fixture(scope="module")
def shared_server(wide_folder: Path) -> Iterator[Server]:
    """Two keys with one request at a time and few tokens a minute."""
    flags = ("--api-key", "one", "--api-key", "two", "--key-requests", "1", "--key-tokens", "40")
    server = start_server(str(wide_folder), *flags, key="one")
    yield server
    server.kill()


def ask(server: Server, key: str, **body: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"}
    return as_stranger("POST", f"{server.url}/v1/completions", json={"prompt": "x", **body}, headers=headers)


def test_a_key_has_its_share_and_no_more(shared_server: Server) -> None:
    host, port = shared_server.url.removeprefix("http://").split(":")
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer one\r\ncontent-length: 9\r\n\r\n{"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head)  # the rest of its body does not come yet
        end = time.monotonic() + WAIT_S
        while (busy := ask(shared_server, "one", max_tokens=1)).status_code == 200:
            assert time.monotonic() < end
        assert (busy.status_code, busy.json()["error"]["code"]) == (429, "key_busy")
        assert "retry-after" in busy.headers
        assert ask(shared_server, "two", max_tokens=1).status_code == 200
    while ask(shared_server, "one", max_tokens=1).status_code == 429:  # what was left early is given back
        assert time.monotonic() < end
        time.sleep(0.05)
    assert ask(shared_server, "two", max_tokens=60, ignore_eos=True).status_code == 200
    spent = ask(shared_server, "two", max_tokens=1)
    assert (spent.status_code, spent.json()["error"]["code"]) == (429, "key_tokens")
    assert as_stranger("GET", f"{shared_server.url}/health").status_code == 200


@pytest.mark.parametrize("is_second", [False, True], ids=["first", "second"])
def test_headers_that_do_not_come_are_given_up(limited_server: Server, is_second: bool) -> None:
    host, port = limited_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.settimeout(WAIT_S)
        if is_second:
            connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b" 200 " in connection.recv(4096)
        connection.sendall(b"GET /hea")
        received = b""
        while piece := connection.recv(4096):  # the end comes although nothing more is sent
            received += piece
    assert b" 408 " in received
