"""`paceline bench soak --faults N`: clients that vanish at every stage, bodies that are not what they should
be, slow ones, bursts, hard grammars (faults_wire.py); an engine that is stopped, hung, killed, without memory
or without a disk (faults_engine.py); its ranks, killed, stopped, slow or torn off (faults_ranks.py); files
that are cut, changed or too large for the disk (faults_files.py); many at once. Invariant: a fault is made
from a seed and a number, and each kind comes at least once. Every request is answered, refused in words, or
was left by its own client; what is none of these is lost, and a fault in the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.measure.endpoint import Endpoint
from paceline.measure.faults_engine import on_a_full_disk, paused, ready, signalled, starved
from paceline.measure.faults_files import ANSWERED, LEFT, LOST, REFUSED, Files
from paceline.measure.faults_ranks import has_ranks, killed, on_a_rank, slow, stopped, torn
from paceline.measure.faults_wire import BODY_TIMEOUT_S, HARD, Fault, bad_body

BURST = 24
BESIDE = 8  # times as many that only wait, as others, at the same time
Acting = Callable[[Fault], Awaitable[str | Sequence[str]]]


async def _burst(fault: Fault) -> Sequence[str]:
    return await asyncio.gather(*(fault.sent(fault.message(stream=True, max_tokens=8)) for _ in range(BURST)))


def _body(fault: Fault) -> Awaitable[str]:
    body = bad_body(fault.source)
    return fault.sent(fault.head(len(body)) + body)


def _length(fault: Fault) -> Awaitable[str]:
    body, source = fault.body(), fault.source
    wrong = source.choice((len(body) + 50, len(body) // 2, -1, "x", "1e3", f"{len(body)}, 7", "9" * 30))
    return fault.sent(fault.head(wrong) + body)


def _pieces(data: bytes) -> list[bytes]:
    size = -(-len(data) // 5)
    return [data[start : start + size] for start in range(0, len(data), size)]


class Kind(NamedTuple):
    weight: float  # how often, of about 100
    act: Acting
    allowed: tuple[str, ...] = (ANSWERED, REFUSED)  # what may become of it
    only_waits: bool = False


OVER_S = 1.5 * BODY_TIMEOUT_S
KINDS = {
    "leaves at once": Kind(6, lambda f: f.left(b""), (LEFT,)),
    "leaves in headers": Kind(7, lambda f: f.left(f.cut(f.head(9))), (LEFT,)),
    "leaves in body": Kind(7, lambda f: f.left(f.head(500) + f.cut(f.body())), (LEFT,)),
    "leaves in the queue": Kind(9, lambda f: f.left(f.message(max_tokens=200)), (LEFT,)),
    "leaves in a stream": Kind(9, lambda f: f.left(f.message(stream=True, max_tokens=200), True), (LEFT,)),
    "a bad body": Kind(25, _body, (REFUSED,)),
    "a wrong length": Kind(8, _length, (REFUSED,)),
    "reads slowly": Kind(4, lambda f: f.sent(f.message(stream=True), reads=0.05), only_waits=True),
    "writes slowly": Kind(4, lambda f: f.sent(*_pieces(f.message()), pause=0.2), only_waits=True),
    "writes too slowly": Kind(3, lambda f: f.sent(f.head(90), b"{", pause=OVER_S), (REFUSED,), True),
    "dribbles headers": Kind(
        3, lambda f: f.sent(*_pieces(f.head(90)[:-4]), pause=OVER_S / 5), (REFUSED,), True
    ),
    "a burst": Kind(1, _burst),
    "a hard grammar": Kind(1, lambda f: f.sent(f.message(**f.source.choice(HARD))), only_waits=True),
    "engine paused": Kind(1, paused),
    "engine hung": Kind(0.15, signalled(signal.SIGSTOP)),
    "engine killed": Kind(0.6, signalled(signal.SIGKILL)),
    "engine out of memory": Kind(0.3, starved),
    "a full disk": Kind(0.15, on_a_full_disk),
    "a cache on a full disk": Kind(1, lambda f: f.files.ask("written", f.source), only_waits=True),
    "a damaged model": Kind(1, lambda f: f.files.ask("opened", f.source), only_waits=True),
    "nothing": Kind(10, lambda f: f.sent(f.message())),
}

# Where the server has ranks, and often: each costs a start of the engine, but for a slow one.
RANKS = {
    "rank killed": Kind(8, on_a_rank(killed, True)),
    "rank stopped": Kind(1, on_a_rank(stopped, True)),
    "rank slow": Kind(8, on_a_rank(slow, False)),
    "rank torn off": Kind(8, on_a_rank(torn, True)),
}


async def rage(
    endpoint: Endpoint, model: str, count: int, clients: int, seed: int, tell: Callable[[str], None]
) -> Counts:
    """So many faults, some at the same time; by kind what became of the requests."""
    source, kinds = random.Random(seed), KINDS
    if await has_ranks(endpoint):  # the limit that stands for a full disk forbids what ranks share, too
        kinds = {name: kind for name, kind in {**RANKS, **KINDS}.items() if name != "a full disk"}
    names = [*kinds, *source.choices(list(kinds), [kind.weight for kind in kinds.values()], k=count)][:count]
    source.shuffle(names)
    counts: Counts = {name: Counter() for name in names}
    polling, hurting = asyncio.Lock(), asyncio.Lock()  # a hundred that poll would slow an engine's start
    gates = (asyncio.Semaphore(clients), asyncio.Semaphore(BESIDE * clients))

    async def one(number: int, name: str, files: Files, gate: asyncio.Semaphore) -> None:
        fault = Fault(endpoint, random.Random(f"{seed}/{number}"), hurting, files)
        if fault.source.random() < 0.8:  # most find a server that would answer
            async with polling:
                await ready(endpoint)
        found = await kinds[name].act(fault)
        for one in [found] if isinstance(found, str) else found:
            is_usual = one in kinds[name].allowed
            counts[name][one if is_usual else LOST] += 1
            if not is_usual:
                counts[name][f"{number}: {one}"] += 1
        tell(name)
        gate.release()

    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Files(model, Path(folder))) as files:
        async with asyncio.TaskGroup() as group:
            for number, name in enumerate(names):
                gate = gates[kinds[name].only_waits]
                await gate.acquire()
                group.create_task(one(number, name, files, gate))
    return counts


Counts = dict[str, Counter[str]]
