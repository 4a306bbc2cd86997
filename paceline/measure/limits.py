"""What the machine can do at best, measured: reading a buffer larger than any cache, integer dot products and
float multiply-adds in registers, all threads at once. Invariant: each limit is the fastest of several runs of
a loop that does nothing else, so no kernel can honestly pass it.
"""

from __future__ import annotations

import os
import timeit
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import prange, types

from paceline.cpu.compile import VARIANT
from paceline.cpu.lanes import INT32, LANES, Emitter, bytes_, floats, instruction
from paceline.cpu.matmul import WIDTH
from paceline.cpu.sync import GROUP_NAP, NAP, SPINS, cross, num_threads
from paceline.cpu.sync import TURNS as SPINNING
from paceline.measure.roofline import THIS, Hardware, Link

BUFFER_BYTES = 512 * 2**20
LINE = 64
LINES_A_TURN = 4
WEIGHTS, INPUTS = 2, 6  # registers of the dot products: every pair is a sum of its own
FLOAT_SUMS = (6, 12)  # sums of sixteen lanes, which suit 32 registers of four lanes and 32 of sixteen
TURNS = 4_000_000
RUNS = 15
# Of ranks that share memory (cpu/layer.py): barriers of a layer, for each of its exchanges (layout.py).
BARRIERS = 9 / 4
MEETINGS, WORDS = 200, 8_192  # barriers that are timed, and numbers that are exchanged at each of them
MOST_BY_CACHES = 16  # times the speed of memory, for one core: what another core has written comes no faster
COPIED_BYTES, SIDE = 2**31, 8192  # on a GPU


def _over_threads(loop: Any) -> Any:
    """A kernel that runs the loop in each thread, over its share of the memory at `at`."""

    # Not kept on disk as the kernels of cpu/ are: they compile in a second or two and are run once.
    @numba.njit(nogil=True, error_model="numpy", parallel=True)
    def run(at, stride, turns, out, threads):  # type: ignore[no-untyped-def]
        for part in prange(threads):
            out[part] = loop(at + np.int64(part) * stride, turns)

    return run


def _mixture(builder: Any, slots: list[Any]) -> Any:
    """One number of all sums, which have lanes of 32 bits: a loop returns it, so that no turn is left out."""
    sums = [builder.load(slot) for slot in slots]
    whole = ir.VectorType(INT32, sums[0].type.count)
    mixed = reduce(builder.xor, [builder.bitcast(each, whole) for each in sums])
    lanes = [builder.extract_element(mixed, ir.Constant(INT32, i)) for i in range(whole.count)]
    return reduce(builder.xor, lanes)


@instruction(types.int32)
def _reading(emit: Emitter, at: Any, turns: Any) -> Any:
    """LINES_A_TURN lines a turn, in order."""
    builder, kind = emit.builder, ir.VectorType(INT32, LINE // 4)
    mixed = [emit.variable(kind([0] * kind.count)) for _ in range(LINES_A_TURN)]
    with emit.loop(turns) as turn:
        here = emit.offset(at, emit.times(turn, LINE * LINES_A_TURN))
        for i, slot in enumerate(mixed):
            line = emit.load(emit.offset(here, LINE * i), kind)
            builder.store(builder.xor(builder.load(slot), line), slot)
    return _mixture(builder, mixed)


@instruction(types.int32)
def _dots(emit: Emitter, at: Any, turns: Any) -> Any:
    """WEIGHTS * INPUTS integer dot products a turn."""
    builder, kind, ints = emit.builder, bytes_(4 * WIDTH), ir.VectorType(INT32, WIDTH)
    operands = [emit.load(emit.offset(at, LINE * i), kind) for i in range(WEIGHTS + INPUTS)]
    weights, inputs = [emit.variable(each) for each in operands[:WEIGHTS]], operands[WEIGHTS:]
    sums = [[emit.variable(ints([0] * WIDTH)) for _ in inputs] for _ in weights]
    with emit.loop(turns):
        for weight, its_sums in zip(weights, sums, strict=True):
            now = builder.load(weight)
            for slot, each in zip(its_sums, inputs, strict=True):
                builder.store(emit.dot(VARIANT, builder.load(slot), now, each), slot)
            if VARIANT == "plain":  # products of what does not change would be moved out of the loop
                builder.store(builder.add(now, kind([1] * kind.count)), weight)
    return _mixture(builder, [slot for its_sums in sums for slot in its_sums])


def _multiply_adds(count: int) -> Any:
    """`count` sums of sixteen lanes, one multiply-add each a turn."""

    @instruction(types.int32)
    def loop(emit: Emitter, at: Any, turns: Any) -> Any:
        weight, each = (emit.load(emit.offset(at, LINE * i), floats(LANES)) for i in range(2))
        sums = [emit.variable(emit.constant(float(i), LANES)) for i in range(count)]
        with emit.loop(turns):
            for slot in sums:
                emit.accumulate(slot, weight, each)
        return _mixture(emit.builder, sums)

    return loop


def measure() -> Hardware:
    """The CPU this runs on. Takes a few seconds, most of them for compiling."""
    threads = num_threads()
    out, operands = np.zeros(threads, np.int32), np.ones(1024, np.float32)
    share = BUFFER_BYTES // threads // 4096 * 4096
    buffer = np.ones(BUFFER_BYTES // 8, np.int64)  # written to: untouched pages are all one page of zeros
    at, small, lines = buffer.ctypes.data, operands.ctypes.data, share // (LINE * LINES_A_TURN)
    read, multiply = _over_threads(_reading), _over_threads(_dots)
    bandwidth = share * threads / _fastest(lambda: read(at, share, lines, out, threads))
    # A multiply-add is two operations.
    turns = 2.0 * threads * TURNS
    ints = turns * WEIGHTS * INPUTS * 4 * WIDTH / _fastest(lambda: multiply(small, 0, TURNS, out, threads))
    adds = {count: _over_threads(_multiply_adds(count)) for count in FLOAT_SUMS}
    times = {n: _fastest(partial(add, small, 0, TURNS, out, threads)) for n, add in adds.items()}
    floating = max(turns * LANES * n / seconds for n, seconds in times.items())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Hardware(THIS, bandwidth, floating, floating, memory, ints, threads)


@numba.njit(nogil=True, error_model="numpy")
def _meet(group, own, other, words, turns):  # type: ignore[no-untyped-def]
    """One of two ranks: write some numbers, meet the other, read what it has written."""
    total = 0
    for turn in range(turns):
        for i in range(words):
            own[i] = turn + i
        cross(group, 2)
        for i in range(words):
            total += other[i]
        cross(group, 2)
    return total


def measure_ranks(machine: Hardware) -> Hardware:
    """With what one thread reads while others rest, and what ranks that share memory need to meet."""
    share, out = BUFFER_BYTES // 4096 * 4096, np.zeros(1, np.int32)
    buffer, read = np.ones(BUFFER_BYTES // 8, np.int64), _over_threads(_reading)
    at, lines = buffer.ctypes.data, share // (LINE * LINES_A_TURN)
    lone = share / _fastest(lambda: read(at, share, lines, out, 1))
    words, rows = np.zeros(512, np.int64), np.zeros((2, WORDS), np.int64)
    words[SPINNING // 8], words[NAP // 8 + 1], group = SPINS, GROUP_NAP, words.ctypes.data

    def seconds(count: int) -> float:
        with ThreadPoolExecutor(2) as pool:
            return _fastest(lambda: [*pool.map(lambda own: _meet(
                group, rows[own], rows[1 - own], count, MEETINGS), (0, 1))]) / MEETINGS  # fmt: skip

    meeting = seconds(0)
    # On a busy machine the one may have waited longer than the other: caches are not that fast.
    least = rows[0].nbytes / (MOST_BY_CACHES * lone)
    bandwidth = rows[0].nbytes / max(seconds(WORDS) - meeting, least)
    return replace(machine, lone_bandwidth=lone, link=Link(bandwidth, BARRIERS * meeting / 2))


def of_device(device: torch.device) -> Hardware:
    """A GPU: bytes that a copy reads and writes, operations of products of large matrices."""
    wait, rates = torch.accelerator.synchronize, []
    for dtype in (torch.bfloat16, torch.float32):
        square = torch.randn((SIDE, SIDE), device=device, dtype=dtype)
        rates.append(2 * SIDE**3 / _fastest(partial(torch.matmul, square, square), wait))
    source, target = (torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    bandwidth = 2 * COPIED_BYTES / _fastest(partial(target.copy_, source), wait)
    memory = float(torch.get_device_module(device).get_device_properties(device).total_memory)
    return Hardware(THIS, bandwidth, rates[0], rates[1], memory)


def _fastest(run: Callable[[], object], wait: Callable[[], object] = lambda: None) -> float:
    """Seconds of the fastest run after a first one, which compiles."""
    times = timeit.repeat(lambda: (run(), wait()), repeat=RUNS + 1, number=1)
    return min(times[1:])
