"""KV events over a real socket: who reads them knows what the prefix cache holds."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from paceline.core.errors import ConfigError
from paceline.core.types import BLOCK_SIZE, Cached
from paceline.runtime.kv_cache import KvCache
from paceline.scale.kv_events import Publisher, _number
from tests.server.harness import WAIT_S, start_server


class Reader:
    """A subscriber as routers have them."""

    def __init__(self, place: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.connect(place)
        self.socket.subscribe(b"")
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}  # by hash: the one before, the tokens
        self.next: int | None = 0  # None: any

    def read(self, seconds: float) -> None:
        """All that comes until nothing does for so long."""
        while self.socket.poll(seconds * 1000):
            topic, number, data = self.socket.recv_multipart()
            assert topic == b""
            found = int.from_bytes(number, "big")
            assert self.next in (None, found)
            self.next = found + 1
            _time, events, rank = msgpack.unpackb(data)
            assert rank == 0
            for kind, *fields in events:
                {"BlockStored": self.store, "BlockRemoved": self.remove, "AllBlocksCleared": self.clear}[
                    kind
                ](*fields)

    def store(self, hashes: list[int], parent: int | None, tokens: list[int], size: int, *more: Any) -> None:
        assert size == BLOCK_SIZE
        assert len(tokens) == size * len(hashes)
        for i, each in enumerate(hashes):
            assert each not in self.blocks
            self.blocks[each] = parent, tokens[i * size : (i + 1) * size]
            parent = each

    def remove(self, hashes: list[int], medium: None) -> None:
        for each in hashes:
            del self.blocks[each]

    def clear(self) -> None:
        self.blocks.clear()

    def cached(self, tokens: list[int]) -> int:
        """How much of a prompt is there, in tokens."""
        found, parent = 0, None
        while True:
            wanted = (parent, tokens[found : found + BLOCK_SIZE])
            following = [each for each, value in self.blocks.items() if value == wanted]
            if not following:
                return found
            parent, found = following[0], found + BLOCK_SIZE


@contextmanager
def reading(place: str) -> Iterator[Reader]:
    reader = Reader(place)
    try:
        yield reader
    finally:
        reader.socket.close(0)


def hear(publisher: Publisher, reader: Reader) -> None:
    """Messages of no number, which wait for no subscriber, until one is heard."""
    end = time.monotonic() + WAIT_S
    while not reader.socket.poll(20):
        assert time.monotonic() < end
        publisher._socket.send_multipart((b"", b"", b"once more"))
    publisher._socket.send_multipart((b"", b"", b"the last"))
    while reader.socket.recv_multipart()[2] != b"the last":
        pass


def read_until(reader: Reader, is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end
        reader.read(0.1)


def free_port() -> int:
    """Below Linux's own range, from which connections that are made meanwhile take theirs."""
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@pytest.mark.parametrize("seed", range(3))
def test_a_reader_knows_the_blocks_that_can_be_found(seed: int) -> None:
    kv, place, draw = KvCache(24), f"tcp://127.0.0.1:{free_port()}", random.Random(seed)
    publisher, held = Publisher(place, kv), list[Cached]()
    with reading(place) as reader:
        hear(publisher, reader)
        for _ in range(300):
            if held and draw.random() < 0.5:
                kv.free(held.pop(draw.randrange(len(held))))
            tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 6)) for _ in range(BLOCK_SIZE)]
            tokens = [token for token in tokens[::BLOCK_SIZE] for _ in range(BLOCK_SIZE)] + [9]
            cached = Cached()
            kv.adopt_prefix(cached, tokens)
            if kv.reserve(cached, len(tokens)):
                kv.commit(cached, cached.num_cached, range(len(tokens) - cached.num_cached), tokens)
                held.append(cached)
            else:
                kv.free(cached)
            publisher.publish()
        kv.check(held)
        read_until(reader, lambda: reader.next == publisher._number)
        assert publisher._number > 10
        assert reader.blocks.keys() == {_number(name) for name in kv._by_name}
    with pytest.raises(ConfigError, match="cannot be listened on"):
        Publisher(place, kv)
    publisher._socket.close(0)


def test_a_server_says_what_it_caches(wide_folder: Path) -> None:
    place = f"tcp://127.0.0.1:{free_port()}"
    server = start_server(str(wide_folder), "--kv-events", place)
    try:
        with reading(place) as reader:
            reader.next = None
            end = time.monotonic() + WAIT_S
            while not reader.socket.poll(200):  # the first messages wait for no subscriber
                assert time.monotonic() < end
                server.post("/v1/completions", prompt=f"{time.monotonic()} " * 20, max_tokens=1)
            prompt = "In a paceline, cyclists ride one behind the other. " * 6
            tokens = server.post("/tokenize", prompt=prompt).json()["tokens"]
            asked = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
            server.post("/v1/completions", **asked)
            known = (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert known > 0
            read_until(reader, lambda: reader.cached(tokens[:-1]) == known)
            usage = server.post("/v1/completions", **asked).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == known
    finally:
        server.kill()
