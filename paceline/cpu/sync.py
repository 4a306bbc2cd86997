"""Threads that run a whole pass side by side: which take part in it, and barriers between its steps.

A pass goes on with the threads that have come when its patience ends, since the runtime may give fewer than
asked for (OMP_DYNAMIC, OMP_THREAD_LIMIT) or one may be late. Invariant: no barrier is passed before all that
take part have come, and all that take part are running when the first step begins, so no pass waits for ever.
Waiting is spinning at first, since steps take microseconds, and then sleeping: where others use the cores,
too, a thread that spins keeps its core from the one it waits for. Of a parallel model's rank, the last thread
to come to a barrier meets those of the other ranks in memory that all have (parallel.py).
"""

from __future__ import annotations

import os
import platform
import sys
import warnings
from array import array
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import carray, prange, types

from paceline.core.errors import ConfigError
from paceline.cpu.compile import piece, unrolled
from paceline.cpu.cores import asked_threads, usable_cores
from paceline.cpu.lanes import INT32, INT64, Emitter, instruction, int_pointer, seconds_now

# Memory of a team, in bytes: arrivals at a barrier and barriers passed, far apart; the gate of a region: how
# many threads have come, and shifted by COUNTED, once that is settled, how many take part;
LINE, COUNTED = 128, 32
GATE = 2 * LINE
# what the first thread knows: its patience, how many regions in a row were short of threads, and the address
# of the lock of all regions, where the runtime can have one at a time;
PATIENCE, SHORT, LOCK = (GATE + LINE + 8 * i for i in range(3))
# how many threads sleep, how many turns one spins before, and how long it sleeps at most (a timespec).
ASLEEP, TURNS, NAP = (GATE + 2 * LINE + 8 * i for i in range(3))
# Then two lines for each thread: which memory it asks for while it waits, and where that ends (on x86, whose
# second-level caches are large); and, for four threads in one of them, how many of these have come to a
# barrier: a counter is handed from core to core, which takes the longer the more of them count at once.
OWN, FOUR, CAN_ASK = GATE + 3 * LINE, 4, platform.machine() in ("x86_64", "AMD64")
# Turns before a thread sleeps: fewer after each sleep, more after each wait without, so that threads never
# sleep on a quiet machine, and on a busy one soon leave their core to the thread they wait for. Waking one
# takes longer on x86 machines, which are mostly virtual and have more cores: turns for some 100 µs.
SPINS, LEAST_SPINS = (60_000, 15_000) if platform.machine() == "x86_64" else (10_000, 1_250)
NAP_NANOSECONDS = 1_000_000
# Linux's system call that sleeps while an integer is what it was; elsewhere the core is offered instead.
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0
FUTEX_WAIT, FUTEX_WAKE, PRIVATE = 0, 1, 128  # private: among the threads of one process
# Memory of a group of ranks begins as a team's does. Then: the number of the last order; whether a rank is
# lost: no barrier of ranks holds any more, and what is computed is of no use; and the last orders by their
# numbers, what is to be run in each: a rank may read one when rank 0 has given the next already. No rank is
# later than that, since all meet in a pass.
ORDER, BROKEN, ORDERS, NUM_ORDERS = OWN, OWN + LINE, OWN + 2 * LINE, 32
LOST_S, GROUP_NAP = 8.0, 50_000_000  # seconds at a barrier of ranks before one is lost; nanoseconds of a nap
MOST_PATIENCE, LEAST_PATIENCE = 10_000_000, 50_000  # nanoseconds: the least where threads did not come before
# More threads than cores would wait for each other's turns; siblings of a core are used if asked for.
CORES = min(usable_cores(asked_threads() is not None), asked_threads() or 1 << 30)
SIZE = OWN + 2 * LINE * CORES
NOTICED = 5  # regions in a row that were short of threads before it is said


class Share(NamedTuple):
    """What a thread does of a region: part number `part` of `threads`, or nothing if `part` is negative. Of
    the threads of several ranks every `ranks`-th is one rank's."""

    part: int
    threads: int
    sync: int  # address of a team's memory
    group: int  # address of the memory of a group of ranks; 0: there is none
    ranks: int


@instruction(types.int64)
def change(emit: Emitter, at: Any, by: Any) -> Any:
    """Add to the integer at this address; returns what it was."""
    return emit.builder.atomic_rmw("add", emit.pointer(at), by, "seq_cst")


@instruction(types.int64)
def look(emit: Emitter, at: Any) -> Any:
    return emit.builder.load_atomic(emit.pointer(at), "seq_cst", 8, typ=INT64)


@instruction()
def publish(emit: Emitter, at: Any, value: Any) -> None:
    emit.builder.store_atomic(value, emit.pointer(at), "seq_cst", 8)


@instruction(types.boolean)
def exchange(emit: Emitter, at: Any, old: Any, new: Any) -> Any:
    """Put `new` where `old` is; whether it was."""
    found = emit.builder.cmpxchg(emit.pointer(at), old, new, "acq_rel", "acquire")
    return emit.builder.extract_value(found, 1)


@instruction(types.int32)
def offer_core(emit: Emitter) -> Any:
    return emit.call("sched_yield", INT32, [])


@instruction(types.int64)
def threads_now(emit: Emitter) -> Any:
    """Numba's number of the calling thread. (Its own function for it keeps a kernel from the disk cache.)"""
    return emit.call("get_num_threads", INT64, [])


@instruction()
def use_threads(emit: Emitter, count: Any) -> None:
    emit.call("set_num_threads", ir.VoidType(), [emit.builder.trunc(count, INT32)])


@instruction(types.int64)
def futex(emit: Emitter, at: Any, operation: Any, value: Any, nap: Any) -> Any:
    return emit.call("syscall", INT64, [INT64(FUTEX), at, operation, value, nap])


@piece
def sleep_while(sync, at, value, kind):  # type: ignore[no-untyped-def]
    """Sleep while the 32 bits at this address are `value`, at most a nap; a caller looks again afterwards.
    kind: PRIVATE, or 0 for memory of several processes."""
    if FUTEX == 0:
        offer_core()
        return
    change(sync + ASLEEP, 1)
    futex(at, FUTEX_WAIT + kind, value, sync + NAP)
    change(sync + ASLEEP, -1)


@piece
def wake(sync, at, kind):  # type: ignore[no-untyped-def]
    """After the integer at this address has changed. A thread that sleeps was counted before it looked."""
    if look(sync + ASLEEP) > 0:
        futex(at, FUTEX_WAKE + kind, 2**31 - 1, 0)


@unrolled
def in_region(run, sync, threads, given):  # type: ignore[no-untyped-def]
    """run(share, given) in all threads that come, from a kernel that is parallel. The runtime is asked for no
    more: one without a part would spin on a core that another rank needs."""
    lock, most = look(sync + LOCK), threads_now()
    while lock != 0 and not exchange(lock, 0, 1):
        offer_core()
    publish(sync + GATE, 0)
    use_threads(min(threads, most))
    for part in prange(threads):
        share = join(sync, np.int64(part), threads)
        if share.part >= 0:
            run(share, given)
    use_threads(most)
    if lock != 0:
        publish(lock, 0)


@piece
def join(sync, part, threads):  # type: ignore[no-untyped-def]
    """The share of iteration `part` of a region of `threads`. The first that comes waits until all have, or
    its patience ends and the others come too late: nothing is left for them to do."""
    if threads == 1:
        return Share(part, 1, sync, 0, 1)
    gate, until = sync + GATE, 0.0
    place = change(gate, 1)
    if place == threads - 1:
        settle(sync, threads)
    spins, turns, come = 0, look(sync + TURNS), look(gate)
    while come >> COUNTED == 0:
        spins += 1
        if spins % turns == 0:
            now = seconds_now()
            until = until if until > 0.0 else now + look(sync + PATIENCE) * 1e-9
            if place == 0 and now > until:
                settle(sync, come)
            else:
                sleep_while(sync, gate + COUNTED // 8, 0, PRIVATE)
        come = look(gate)
    count = come >> COUNTED
    if place == 0:  # a runtime that gives fewer threads is waited for less the next time
        known, is_short = carray(int_pointer(sync + PATIENCE), 2), count < threads
        known[0] = max(known[0] // 4, LEAST_PATIENCE) if is_short else min(known[0] * 2, MOST_PATIENCE)
        known[1] = known[1] + 1 if is_short else 0
    if place >= count:
        return Share(-1, count, sync, 0, 1)
    return Share(part if count == threads else place, count, sync, 0, 1)


@piece
def settle(sync, come):  # type: ignore[no-untyped-def]
    """`come` threads take part, unless another has come or settled it meanwhile."""
    if exchange(sync + GATE, come, come | come << COUNTED):
        wake(sync, sync + GATE + COUNTED // 8, PRIVATE)


@piece
def in_row(share):  # type: ignore[no-untyped-def]
    """The number of this thread where those of a rank follow each other. A rank's threads together then have
    the same range of any items, however many threads there are."""
    return share.part % share.ranks * (share.threads // share.ranks) + share.part // share.ranks


@piece
def range_of(share, count):  # type: ignore[no-untyped-def]
    """The part of `count` items that is this thread's."""
    part = in_row(share)
    return count * part // share.threads, count * (part + 1) // share.threads


@instruction()
def ask_for(emit: Emitter, at: Any) -> None:
    emit.prefetch(at, 2)  # into the second-level cache


@piece
def wanted_by(share):  # type: ignore[no-untyped-def]
    """From where on and up to where this thread asks for memory while it waits."""
    return carray(int_pointer(share.sync + OWN + 2 * LINE * (share.part // share.ranks)), 2)


@piece
def is_last(at, count):  # type: ignore[no-untyped-def]
    """Count this thread in; whether it is the last of `count`."""
    is_last = change(at, 1) == count - 1
    if is_last:
        publish(at, 0)
    return is_last


@piece
def cross(group, ranks):  # type: ignore[no-untyped-def]
    """A barrier of ranks, to which one thread of each comes; one that waits in vain says that one is lost."""
    passed, until = group + LINE, 0.0
    number = look(passed)
    if is_last(group, ranks):
        publish(passed, number + 1)
        wake(group, passed, 0)
        return
    spins, turns, has_slept = 0, look(group + TURNS), False
    while look(passed) == number and look(group + BROKEN) == 0:
        spins += 1
        if spins == turns:
            now = seconds_now()
            until = until if until > 0.0 else now + LOST_S
            if now > until:
                publish(group + BROKEN, 1)
            sleep_while(group, passed, number & 0xFFFFFFFF, 0)
            spins, has_slept = 0, True
    if has_slept or turns < SPINS:
        publish(group + TURNS, max(turns // 2, LEAST_SPINS) if has_slept else min(turns * 2, SPINS))


@piece
def barrier(share):  # type: ignore[no-untyped-def]
    part, threads = share.part // share.ranks, share.threads // share.ranks
    if threads == 1:
        if share.group != 0:
            cross(share.group, share.ranks)
        return
    passed, wanted = share.sync + LINE, wanted_by(share)
    number, count, is_counted = look(passed), threads, True
    if count > FOUR:
        first, count = part // FOUR * FOUR, (count + FOUR - 1) // FOUR
        is_counted = is_last(share.sync + OWN + LINE * (2 * first + 1), min(FOUR, threads - first))
    if is_counted and is_last(share.sync, count):
        if share.group != 0:
            cross(share.group, share.ranks)
        publish(passed, number + 1)
        wake(share.sync, passed, PRIVATE)
        return
    spins, turns, has_slept = 0, look(share.sync + TURNS), False
    while look(passed) == number:
        if CAN_ASK and wanted[0] < wanted[1]:
            ask_for(wanted[0])
            wanted[0] += 64
        spins += 1
        if spins == turns:
            sleep_while(share.sync, passed, number & 0xFFFFFFFF, PRIVATE)
            spins, has_slept = 0, True
    if has_slept or turns < SPINS:
        publish(share.sync + TURNS, max(turns // 2, LEAST_SPINS) if has_slept else min(turns * 2, SPINS))


@piece
def order(group, b, w, logits):  # type: ignore[no-untyped-def]
    """Rank 0 tells the others what to run; without a pass, that a message waits for them."""
    number = look(group + ORDER) + 1
    given = carray(int_pointer(group + ORDERS), (NUM_ORDERS, 3))[number % NUM_ORDERS]
    given[0], given[1], given[2] = b, w, logits
    publish(group + ORDER, number)
    wake(group, group + ORDER, 0)


_lock = array("q", [0] * (2 * LINE // 8))  # in the middle of memory of its own, since all threads look at it
_state = {"has_started": False, "is_forked": False, "has_warned": False}
os.register_at_fork(after_in_child=lambda: _state.update(is_forked=_state["has_started"]))


class Team:
    """The memory by which the threads of one decoder's or head's passes find each other."""

    def __init__(self) -> None:
        num_threads()  # starts the runtime, which knows then what it is
        self._memory = array("q", [0] * ((SIZE + LINE) // 8))
        start = self._memory.buffer_info()[0]
        self.at = -(-start // LINE) * LINE
        self._first = (self.at - start) // 8
        self._memory[self._first + PATIENCE // 8] = MOST_PATIENCE
        self._memory[self._first + TURNS // 8] = SPINS
        self._memory[self._first + NAP // 8 + 1] = NAP_NANOSECONDS
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
    if numba.get_num_threads() > CORES:  # a number of the calling thread's
        numba.set_num_threads(CORES)
    threads: int = numba.get_num_threads()
    return threads
