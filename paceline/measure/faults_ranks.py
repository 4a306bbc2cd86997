"""What is done to the processes that hold a part of the model each, while the engine answers: one is killed,
stopped for ever or for a moment, or its connection to the engine is torn. Invariant: afterwards the server is
ready again within WITHIN_S, and no process of a group that was given up is left.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

from paceline.measure.endpoint import Endpoint
from paceline.measure.faults_engine import descendants, engine_pid, gone, hurt, parents_of_all, ready
from paceline.measure.faults_files import LOST
from paceline.measure.faults_wire import Fault

MODULES = (b"paceline.runtime.rank", b"paceline.runtime.stage")  # followed by the number of their socket
MOST_SLOW_S = 2.0
PIDFD_GETFD = 438  # Linux's system call on every processor


def ranks() -> Iterator[tuple[int, int]]:
    """Every rank and stage of this machine: its process, and the number of its socket there."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError, ValueError, IndexError):
            words = path.read_bytes().split(b"\0")
            module = next((word for word in words if word in MODULES), None)
            if module is not None:
                yield int(path.parent.name), int(words[words.index(module) + 1])


def orphans() -> set[int]:
    """Ranks whose engine is gone."""
    parents = dict(parents_of_all())
    return {pid for pid, _ in ranks() if parents.get(pid) == 1}


async def has_ranks(endpoint: Endpoint) -> bool:
    return not descendants(await engine_pid(endpoint)).isdisjoint(pid for pid, _ in ranks())


def on_a_rank(
    act: Callable[[Fault, int, int], Awaitable[None]], is_lost: bool
) -> Callable[[Fault], Awaitable[str]]:
    """act: does something to a process with a socket of that number. is_lost: the group must be given up."""

    async def hurting(fault: Fault) -> str:
        group = set[int]()

        async def do(pid: int) -> None:
            below = descendants(pid)
            group.update(below)
            found = sorted(each for each in ranks() if each[0] in below)
            if found:  # else the engine is about to be started
                await act(fault, *fault.source.choice(found))

        said = await hurt(fault, do)
        if is_lost:  # that may not be seen before the next pass
            await fault.sent(fault.message())
            await ready(fault.endpoint)
            if not await gone(group):
                return f"{LOST}: processes {sorted(group)} are left"
        return said

    return hurting


async def killed(fault: Fault, pid: int, number: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def stopped(fault: Fault, pid: int, number: int) -> None:
    os.kill(pid, signal.SIGSTOP)


async def slow(fault: Fault, pid: int, number: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(fault.source.random() * MOST_SLOW_S)
    os.kill(pid, signal.SIGCONT)


async def torn(fault: Fault, pid: int, number: int) -> None:
    """As if the network between them were gone: both ends read the end of the connection."""
    process = os.pidfd_open(pid)
    try:
        ours = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, number, 0)
    finally:
        os.close(process)
    if ours < 0:
        raise OSError(ctypes.get_errno(), "the socket of a rank cannot be had")
    with socket.socket(fileno=ours) as link, suppress(OSError):  # it may be closed by now
        link.shutdown(socket.SHUT_RDWR)
