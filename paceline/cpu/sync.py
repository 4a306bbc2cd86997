"""Threads that run a whole pass side by side: which take part in it, and barriers between its steps.

A pass goes on with the threads that have come when its patience ends, since the runtime may give fewer than
asked for (OMP_DYNAMIC, OMP_THREAD_LIMIT) or one may be late. Invariant: no barrier is passed before all that
take part have come, and all that take part are running when the first step begins, so no pass waits for ever.
Waiting is spinning, since steps take microseconds; after a while the core is offered to others.
"""

from __future__ import annotations

import os
import warnings
from array import array
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import carray, prange, types

from paceline.core.errors import ConfigError
from paceline.cpu.compile import piece, unrolled
from paceline.cpu.lanes import INT32, INT64, Emitter, instruction, int_pointer, seconds_now

# Memory of a team, in bytes: arrivals at a barrier and barriers passed, far apart; the gate of a region: how
# many threads have come, and shifted by COUNTED, once that is settled, how many take part;
LINE, COUNTED = 128, 32
GATE = 2 * LINE
# and what the first thread knows: its patience, how many regions in a row were short of threads, and the
# address of the lock of all regions, where the runtime can have one at a time.
PATIENCE, SHORT, LOCK = (GATE + LINE + 8 * i for i in range(3))
SPINS = 10_000  # turns before the core is offered to others
MOST_PATIENCE, LEAST_PATIENCE = 10_000_000, 50_000  # nanoseconds: the least where threads did not come before
NOTICED = 5  # regions in a row that were short of threads before it is said


class Share(NamedTuple):
    """What a thread does of a region: part number `part` of `threads`, or nothing if `part` is negative."""

    part: int
    threads: int
    sync: int  # address of a team's memory


@instruction(types.int64)
def arrive(emit: Emitter, at: Any) -> Any:
    """Add one to the integer at this address; returns what it was."""
    return emit.builder.atomic_rmw("add", emit.pointer(at), INT64(1), "acq_rel")


@instruction(types.int64)
def look(emit: Emitter, at: Any) -> Any:
    return emit.builder.load_atomic(emit.pointer(at), "acquire", 8, typ=INT64)


@instruction()
def publish(emit: Emitter, at: Any, value: Any) -> None:
    emit.builder.store_atomic(value, emit.pointer(at), "release", 8)


@instruction(types.boolean)
def exchange(emit: Emitter, at: Any, old: Any, new: Any) -> Any:
    """Put `new` where `old` is; whether it was."""
    found = emit.builder.cmpxchg(emit.pointer(at), old, new, "acq_rel", "acquire")
    return emit.builder.extract_value(found, 1)


@instruction(types.int32)
def offer_core(emit: Emitter) -> Any:
    return emit.call("sched_yield", INT32, [])


@unrolled
def in_region(run, sync, threads, given):  # type: ignore[no-untyped-def]
    """run(share, given) in all threads that come, from a kernel that is parallel."""
    lock = look(sync + LOCK)
    while lock != 0 and not exchange(lock, 0, 1):
        offer_core()
    publish(sync + GATE, 0)
    for part in prange(threads):
        share = join(sync, np.int64(part), threads)
        if share.part >= 0:
            run(share, given)
    if lock != 0:
        publish(lock, 0)


@piece
def join(sync, part, threads):  # type: ignore[no-untyped-def]
    """The share of iteration `part` of a region of `threads`. The first that comes waits until all have, or
    its patience ends and the others come too late: nothing is left for them to do."""
    if threads == 1:
        return Share(part, 1, sync)
    gate, place, spins, until = sync + GATE, arrive(sync + GATE), 0, 0.0
    come = look(gate)
    while come >> COUNTED == 0:
        spins += 1
        is_over = come == threads
        if spins % SPINS == 0 and place == 0:
            now = seconds_now()
            until = until if until > 0.0 else now + look(sync + PATIENCE) * 1e-9
            is_over = now > until
        if spins % SPINS == 0:
            offer_core()
        if is_over:
            exchange(gate, come, come | come << COUNTED)
        come = look(gate)
    count = come >> COUNTED
    if place == 0:  # a runtime that gives fewer threads is waited for less the next time
        known, is_short = carray(int_pointer(sync + PATIENCE), 2), count < threads
        known[0] = max(known[0] // 4, LEAST_PATIENCE) if is_short else min(known[0] * 2, MOST_PATIENCE)
        known[1] = known[1] + 1 if is_short else 0
    if place >= count:
        return Share(-1, count, sync)
    return Share(part if count == threads else place, count, sync)


@piece
def range_of(share, count):  # type: ignore[no-untyped-def]
    """The part of `count` items that is this thread's."""
    return count * share.part // share.threads, count * (share.part + 1) // share.threads


@piece
def barrier(share):  # type: ignore[no-untyped-def]
    if share.threads == 1:
        return
    arrivals, passed = share.sync, share.sync + LINE
    number = look(passed)
    if arrive(arrivals) == share.threads - 1:
        publish(arrivals, 0)
        publish(passed, number + 1)
        return
    spins = 0
    while look(passed) == number:
        spins += 1
        if spins == SPINS:
            offer_core()
            spins = 0


_lock = array("q", [0] * (2 * LINE // 8))  # in the middle of memory of its own, since all threads look at it
_state = {"has_started": False, "is_forked": False, "has_warned": False}
os.register_at_fork(after_in_child=lambda: _state.update(is_forked=_state["has_started"]))


class Team:
    """The memory by which the threads of one decoder's or head's passes find each other."""

    def __init__(self) -> None:
        num_threads()  # starts the runtime, which knows then what it is
        self._memory = array("q", [0] * (LOCK // 8 + 1 + 2 * LINE // 8))
        start = self._memory.buffer_info()[0]
        self.at = -(-start // LINE) * LINE
        self._first = (self.at - start) // 8
        self._memory[self._first + PATIENCE // 8] = MOST_PATIENCE
        if numba.threading_layer() == "workqueue":  # it ends the process if two threads call it at once
            self._memory[self._first + LOCK // 8] = _lock.buffer_info()[0] + LINE

    def notice(self) -> None:
        """Before a pass: say once that threads did not come to the last ones."""
        if self._memory[self._first + SHORT // 8] >= NOTICED and not _state["has_warned"]:
            _state["has_warned"] = True
            asked = f"{numba.get_num_threads()} threads were asked for, fewer run at once and passes use"
            limits = "look for a limit such as OMP_THREAD_LIMIT or OMP_DYNAMIC, or for other work on"
            warnings.warn(f"{asked} those: {limits} these cores", RuntimeWarning, stacklevel=2)


def num_threads() -> int:
    """How many threads a pass asks for."""
    if _state["is_forked"]:
        cause = "this process was forked from one whose CPU kernels had already run, and their threads do not"
        remedy = "start it with multiprocessing's 'spawn' method, or fork before an LLM is made"
        raise ConfigError(f"{cause} survive a fork: {remedy}")
    _state["has_started"] = True
    threads: int = numba.get_num_threads()
    return threads
