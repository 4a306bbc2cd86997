"""Stages on several machines find each other by torchrun's variables: every process runs the same command,
rank 0 listens at MASTER_ADDR, the others come and become stages.

Invariant: nothing that a stranger sends is read as a frame. Both sides first show that they know the key in
PACELINE_RANK_KEY (an HMAC over random numbers of both); without a key only loopback addresses are used.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import NamedTuple

from paceline.core.errors import ConfigError, RankError
from paceline.core.options import require
from paceline.runtime.link import Link

KEY = "PACELINE_RANK_KEY"
NAMES = ("RANK", "WORLD_SIZE", "MASTER_PORT")
MEETING_S = 300.0  # for all to come
GREETING_S, RETRY_S = 30.0, 0.2  # for one to prove itself; between two tries to come
NONCE, DIGEST = 32, 32
WHO = struct.Struct("<HH")  # rank and size


class Place(NamedTuple):
    rank: int
    size: int
    host: str
    port: int
    key: bytes


def place_of(variables: Mapping[str, str], size: int) -> Place | None:
    """None where they do not say that the stages are started from outside."""
    if size == 1 or "RANK" not in variables or "WORLD_SIZE" not in variables:
        return None
    numbers = []
    for name in NAMES:
        text = variables.get(name, "29500" if name == "MASTER_PORT" else "")
        require(text.isascii() and text.isdecimal() and int(text) < 2**16, name, text, "use a whole number")
        numbers.append(int(text))
    rank, world, port = numbers
    remedy = "start one process a stage, whose tensor-parallel ranks it starts itself; or unset RANK"
    require(world == size, "WORLD_SIZE", world, f"pipeline_parallel_size is {size}: {remedy}")
    require(rank < world, "RANK", rank, f"use 0 to {world - 1}")
    host, key = variables.get("MASTER_ADDR", "127.0.0.1"), variables.get(KEY, "").encode()
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        raise ConfigError(f"MASTER_ADDR is {host!r:.80}, which is not found; give rank 0's address") from None
    if not key and not ip_address(str(address).partition("%")[0]).is_loopback:
        what = f"MASTER_ADDR is {host!r:.80}, which others can reach"
        raise ConfigError(f"{what}; set {KEY} to the same secret for all ranks")
    # torchrun's own store listens at the port that it tells of
    is_taken = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(rank, world, str(address), port + is_taken, key)


def listen(place: Place) -> list[Link]:
    """Rank 0: the connections of all stages, in order."""
    found: dict[int, Link] = {}
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    try:
        server = socket.create_server((place.host, place.port), family=family)
    except OSError as error:
        why = f"{place.host} port {place.port} cannot be listened at ({error.strerror})"
        raise ConfigError(f"MASTER_ADDR: {why}; give an address of this machine and a free port") from None
    with server:
        end = time.monotonic() + MEETING_S
        while len(found) < place.size - 1:
            server.settimeout(max(end - time.monotonic(), 0.01))
            try:
                own, _ = server.accept()
            except TimeoutError:
                missing = [rank for rank in range(1, place.size) if rank not in found]
                what = f"no process has come with RANK {', '.join(map(str, missing))} in {MEETING_S:.0f} s"
                raise RankError(f"{what}; start the same command there") from None
            try:
                rank = _greet(own, place)
                is_wanted = 0 < rank < place.size and rank not in found
            except OSError:
                is_wanted = False
            if not is_wanted:
                own.close()
                continue
            found[rank] = Link(own)
    return [found[rank] for rank in range(1, place.size)]


def _greet(own: socket.socket, place: Place) -> int:
    """Which rank has come. An OSError: it does not know the key."""
    own.settimeout(GREETING_S)
    nonce = secrets.token_bytes(NONCE)
    own.sendall(nonce)
    answer = _read(own, WHO.size + NONCE + DIGEST)
    who, theirs, digest = answer[: WHO.size], answer[WHO.size : -DIGEST], answer[-DIGEST:]
    if not hmac.compare_digest(digest, _digest(place.key, b"stage", nonce, theirs, who)):
        raise ConnectionError("a stranger")
    rank, size = WHO.unpack(who)
    if size != place.size:
        raise ConnectionError("another number of stages")
    own.sendall(_digest(place.key, b"first", theirs, nonce))
    return int(rank)


def join(place: Place) -> Link:
    """Another rank: the connection to rank 0, which may come later than this process."""
    end = time.monotonic() + MEETING_S
    while True:
        with suppress(ConnectionRefusedError, TimeoutError):
            own = socket.create_connection((place.host, place.port), GREETING_S)
            break
        if time.monotonic() > end:
            what = f"rank 0 does not listen at {place.host} port {place.port}"
            raise RankError(f"{what}; start the same command there with RANK=0")
        time.sleep(RETRY_S)
    wrong = ConfigError(f"rank 0 and rank {place.rank} do not agree; give both the same {KEY} and WORLD_SIZE")
    try:
        nonce, ours, who = _read(own, NONCE), secrets.token_bytes(NONCE), WHO.pack(place.rank, place.size)
        own.sendall(who + ours + _digest(place.key, b"stage", nonce, ours, who))
        if not hmac.compare_digest(_read(own, DIGEST), _digest(place.key, b"first", ours, nonce)):
            raise wrong
    except OSError:
        raise wrong from None
    return Link(own)


def _digest(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def _read(own: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = own.recv(size - len(found))
        if not more:
            raise ConnectionError("the connection has ended")
        found += more
    return found
