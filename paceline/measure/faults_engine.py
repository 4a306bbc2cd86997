"""What is done to the engine while it answers: signals, a limit on its memory, a full disk for all the server
writes. Invariant: afterwards the limits are what they were, and the server is ready again within WITHIN_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from paceline.measure.endpoint import Endpoint, Refused
from paceline.measure.faults_wire import WITHIN_S, Fault
from paceline.measure.load import metrics

SPARE_BYTES = -(2**22), 2**25  # least and most that an engine may get beyond what it holds
LONG = [{"role": "user", "content": "the line goes faster " * 200}]


async def engine_pid(endpoint: Endpoint) -> int:
    return int((await metrics(endpoint))["engine_pid"])


async def ready(endpoint: Endpoint) -> None:
    async with asyncio.timeout(WITHIN_S):
        while True:
            with contextlib.suppress(Refused):
                await endpoint.get("/ready")
                return
            await asyncio.sleep(0.1)


async def hurt(fault: Fault, act: Callable[[int], Awaitable[None]]) -> str:
    """A request under way while something is done to the engine, given by its process id."""
    async with fault.hurting:
        asking = asyncio.create_task(fault.sent(fault.message(stream=True, max_tokens=200)))
        await asyncio.sleep(fault.source.random() * 0.3)
        with contextlib.suppress(ProcessLookupError, KeyError):
            await act(await engine_pid(fault.endpoint))
        found = await asking
        await ready(fault.endpoint)
        return found


async def paused(fault: Fault) -> str:
    async def act(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(fault.source.random())
        os.kill(pid, signal.SIGCONT)

    return await hurt(fault, act)


def signalled(number: int) -> Callable[[Fault], Awaitable[str]]:
    async def act(pid: int) -> None:
        os.kill(pid, number)

    return lambda fault: hurt(fault, act)


async def starved(fault: Fault) -> Sequence[str]:
    """Requests that need memory, a new grammar among them, while the engine gets hardly any more."""
    async with fault.hurting:
        pid, longest = await engine_pid(fault.endpoint), fault.source.randrange(1, 10**6)
        more = ({"n": 4}, {"messages": LONG, "n": 4}, {"guided_regex": f"[a-z]{{1,{longest}}}"})
        with limited(pid, resource.RLIMIT_DATA, _data_bytes(pid) + fault.source.randint(*SPARE_BYTES)):
            found = await asyncio.gather(*(fault.sent(fault.message(**each)) for each in more))
        await ready(fault.endpoint)
        return found


async def on_a_full_disk(fault: Fault) -> str:
    """The engine is killed, and the next one and the server's log have no room on any disk."""

    async def act(pid: int) -> None:
        server = dict(parents_of_all())[pid]
        with limited(server, resource.RLIMIT_FSIZE, 0):
            os.kill(pid, signal.SIGKILL)
            while (now := await engine_pid(fault.endpoint)) == pid:
                await asyncio.sleep(0.05)
            await ready(fault.endpoint)
        lift(now, resource.RLIMIT_FSIZE)

    return await hurt(fault, act)


@contextlib.contextmanager
def limited(pid: int, what: int, most: int) -> Iterator[None]:
    """A process with a limit, which is what it was afterwards; one that has ended needs none."""
    before = resource.RLIM_INFINITY, resource.RLIM_INFINITY
    with contextlib.suppress(ProcessLookupError):
        before = resource.prlimit(pid, what)
        resource.prlimit(pid, what, (most, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, what, before)


def lift(pid: int, what: int) -> None:
    """As far as the process could itself."""
    resource.prlimit(pid, what, (resource.prlimit(pid, what)[1],) * 2)


def _data_bytes(pid: int) -> int:
    """What a limit on data counts."""
    with contextlib.suppress(OSError):  # it has just ended
        if found := re.search(r"^VmData:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M):
            return int(found[1]) * 1024
    return 0


def descendants(pid: int) -> set[int]:
    """All processes below this one."""
    parents = dict(parents_of_all())
    below, found = {pid}, set[int]()
    while below:
        below = {child for child, parent in parents.items() if parent in below}
        found |= below
    return found


def parents_of_all() -> Iterator[tuple[int, int]]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            yield int(path.parent.name), int(path.read_text().rsplit(")", 1)[1].split()[1])


def is_there(pid: int) -> bool:
    """One that has ended and was not waited for has no command any more."""
    with contextlib.suppress(OSError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    return False


async def gone(pids: set[int], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while any(map(is_there, pids)):
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.1)
    return True
