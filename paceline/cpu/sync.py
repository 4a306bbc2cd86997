"""Threads that run a whole pass side by side meet at barriers between its steps.

Invariant: nobody passes a barrier before all have come. Waiting is spinning, since steps take microseconds;
after a while the core is offered to others. All threads must really run at once, which `roll_call` finds out
before a pass relies on it.
"""

from __future__ import annotations

import time
import warnings
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from paceline.cpu.compile import kernel, piece
from paceline.cpu.lanes import INT32, INT64, Emitter

BYTES = 256  # of a barrier's memory: the number of arrivals and the number of meetings, far apart
SPINS = 10_000  # turns before the core is offered to others
PATIENCE = 1000  # times that a roll call offers its core before it gives up
# for so long it is called again: on a busy machine a thread may be late, and one that is not there never
# comes
LATE_S = 0.5


def _pointer(builder: Any, at: Any) -> Any:
    return builder.inttoptr(at, INT64.as_pointer())


@intrinsic
def arrive(_context: Any, at: Any) -> Any:
    """Add one to the integer at this address; returns what it was."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, arguments[0]), ir.Constant(INT64, 1), "acq_rel")

    return types.int64(types.int64), generate


@intrinsic
def look(_context: Any, at: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_pointer(builder, arguments[0]), "acquire", 8, typ=INT64)

    return types.int64(types.int64), generate


@intrinsic
def publish(_context: Any, at: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _pointer(builder, arguments[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def offer_core(_context: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        return Emitter(builder).call("sched_yield", INT32, [])

    return types.int32(), generate


@piece
def barrier(at, threads):  # type: ignore[no-untyped-def]
    if threads == 1:
        return
    meeting = look(at + BYTES // 2)
    if arrive(at) == threads - 1:
        publish(at, 0)
        publish(at + BYTES // 2, meeting + 1)
        return
    spins = 0
    while look(at + BYTES // 2) == meeting:
        spins += 1
        if spins == SPINS:
            offer_core()
            spins = 0


@kernel(parallel=True)
def _call_roll(at, threads):  # type: ignore[no-untyped-def]
    for _ in prange(threads):
        arrive(at)
        for _patience in range(PATIENCE):
            if look(at) >= threads:
                arrive(at + BYTES // 2)  # saw everybody
                break
            offer_core()


@cache
def roll_call(threads: int) -> bool:
    """Whether this many threads are given to a kernel at once. A limit on OpenMP's threads, for instance,
    gives fewer.
    """
    until = time.monotonic() + LATE_S
    while not _all_come(threads):
        if time.monotonic() > until:
            _warn(threads)
            return False
    return True


def _all_come(threads: int) -> bool:
    memory = np.zeros(BYTES // 8, np.int64)
    _call_roll(memory.ctypes.data, threads)
    return int(memory[BYTES // 16]) == threads


def num_threads() -> int:
    """How many threads a pass may use."""
    threads: int = numba.get_num_threads()
    return threads if threads == 1 or roll_call(threads) else 1


def _warn(threads: int) -> None:
    message = f"{threads} threads were asked for and not all run at once, so one is used: look for a limit such as OMP_THREAD_LIMIT"
    warnings.warn(message, RuntimeWarning, stacklevel=2)
