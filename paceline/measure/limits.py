"""What the machine can do at best, measured: reading memory, integer dot products, float multiply-adds, all
threads at once.

Invariant: each limit is the fastest of several runs of a loop that does nothing else, so no kernel can
honestly pass it. Reading goes over a buffer far larger than any cache; the arithmetic stays in registers,
with enough sums to keep every unit busy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from paceline.cpu.dots import WIDTH, dot
from paceline.cpu.features import VARIANT
from paceline.cpu.lanes import INT32, LANES, Emitter, bytes_, floats
from paceline.cpu.sync import num_threads
from paceline.measure.roofline import THIS, Hardware

BUFFER_BYTES = 512 * 2**20
LINE = 64
LINES_A_TURN = 4
WEIGHTS, INPUTS = 2, 6  # registers of the dot products: every pair is a sum of its own
FLOAT_SUMS = (6, 12)  # sums of sixteen lanes, which suit 32 registers of four lanes and 32 of sixteen
TURNS = 4_000_000
RUNS = 15
COPIED_BYTES, SIDE = 2**31, 8192  # on a GPU


@intrinsic
def _read_lines(_context: Any, at: Any, turns: Any) -> Any:
    """Read LINES_A_TURN lines a turn, in order; returns a mixture of all of them, so that none can be left
    out.
    """

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit, kind = Emitter(builder), ir.VectorType(INT32, LINE // 4)
        mixed = [emit.variable(kind([0] * kind.count)) for _ in range(LINES_A_TURN)]
        with emit.loop(arguments[1]) as turn:
            here = emit.offset(arguments[0], emit.times(turn, LINE * LINES_A_TURN))
            for i, slot in enumerate(mixed):
                builder.store(
                    builder.xor(builder.load(slot), emit.load(emit.offset(here, LINE * i), kind)), slot
                )
        return _sum_of_lanes(builder, [builder.load(slot) for slot in mixed])

    return types.int32(types.int64, types.int64), generate


@intrinsic
def _dot_turns(_context: Any, at: Any, turns: Any) -> Any:
    """WEIGHTS * INPUTS integer dot products a turn."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit, kind, ints = Emitter(builder), bytes_(4 * WIDTH), ir.VectorType(INT32, WIDTH)
        operands = [emit.load(emit.offset(arguments[0], LINE * i), kind) for i in range(WEIGHTS + INPUTS)]
        weights, inputs = [emit.variable(each) for each in operands[:WEIGHTS]], operands[WEIGHTS:]
        sums = [[emit.variable(ints([0] * WIDTH)) for _ in inputs] for _ in weights]
        with emit.loop(arguments[1]):
            for weight, its_sums in zip(weights, sums, strict=True):
                now = builder.load(weight)
                for slot, each in zip(its_sums, inputs, strict=True):
                    builder.store(dot(emit, builder.load(slot), now, each), slot)
                if VARIANT == "plain":  # products of what does not change would be moved out of the loop
                    builder.store(builder.add(now, kind([1] * kind.count)), weight)
        return _sum_of_lanes(builder, [builder.load(slot) for its_sums in sums for slot in its_sums])

    return types.int32(types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def _fma_turns(_context: Any, count: Any, at: Any, turns: Any) -> Any:
    """`count` (a compile-time constant) sums of sixteen lanes, one multiply-add each a turn."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit, kind = Emitter(builder), floats(LANES)
        weight, each = (emit.load(emit.offset(arguments[1], LINE * i), kind) for i in range(2))
        sums = [emit.variable(emit.constant(float(i), LANES)) for i in range(count.literal_value)]
        with emit.loop(arguments[2]):
            for slot in sums:
                emit.accumulate(slot, weight, each)
        whole = ir.VectorType(INT32, LANES)
        return _sum_of_lanes(builder, [builder.bitcast(builder.load(slot), whole) for slot in sums])

    return types.int32(count, types.int64, types.int64), generate


def _sum_of_lanes(builder: Any, vectors: list[Any]) -> Any:
    mixed = vectors[0]
    for vector in vectors[1:]:
        mixed = builder.xor(mixed, vector)
    lanes = [builder.extract_element(mixed, ir.Constant(INT32, i)) for i in range(mixed.type.count)]
    total = lanes[0]
    for lane in lanes[1:]:
        total = builder.xor(total, lane)
    return total


# Not kept on disk as the kernels of cpu/ are: they compile in a second or two and are run once.
_compiled = numba.njit(nogil=True, error_model="numpy", parallel=True)


@_compiled
def _read(at, share, out, threads):  # type: ignore[no-untyped-def]
    for part in prange(threads):
        out[part] = _read_lines(at + part * share, share // (LINE * LINES_A_TURN))


@_compiled
def _multiply_ints(at, turns, out, threads):  # type: ignore[no-untyped-def]
    for part in prange(threads):
        out[part] = _dot_turns(at, turns)


@_compiled
def _multiply_floats_few(at, turns, out, threads):  # type: ignore[no-untyped-def]
    for part in prange(threads):
        out[part] = _fma_turns(6, at, turns)


@_compiled
def _multiply_floats_many(at, turns, out, threads):  # type: ignore[no-untyped-def]
    for part in prange(threads):
        out[part] = _fma_turns(12, at, turns)


def measure() -> Hardware:
    """The CPU this runs on. Takes a few seconds, most of them for compiling."""
    threads = num_threads()
    out, operands = np.zeros(threads, np.int32), np.ones(1024, np.float32)
    share = BUFFER_BYTES // threads // 4096 * 4096
    buffer = np.ones(BUFFER_BYTES // 8, np.int64)  # written to: untouched pages are all one page of zeros
    at, small = buffer.ctypes.data, operands.ctypes.data
    reading = _fastest(lambda: _read(at, share, out, threads))
    ints = _fastest(lambda: _multiply_ints(small, TURNS, out, threads))
    few = _fastest(lambda: _multiply_floats_few(small, TURNS, out, threads))
    many = _fastest(lambda: _multiply_floats_many(small, TURNS, out, threads))
    # A multiply-add is two operations.
    floats_a_second = 2.0 * threads * TURNS * LANES * max(FLOAT_SUMS[0] / few, FLOAT_SUMS[1] / many)
    ints_a_second = 2.0 * threads * TURNS * WEIGHTS * INPUTS * 4 * WIDTH / ints
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    bandwidth = share * threads / reading
    return Hardware(THIS, bandwidth, floats_a_second, floats_a_second, memory, ints_a_second, threads)


def of_device(device: torch.device) -> Hardware:
    """A GPU: bytes that a copy reads and writes, operations of products of large matrices."""
    source, target = (torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    bandwidth = 2 * COPIED_BYTES / _fastest(lambda: _waited(lambda: target.copy_(source)))
    rates: list[float] = []
    for dtype in (torch.bfloat16, torch.float32):
        square = torch.randn((SIDE, SIDE), device=device, dtype=dtype)
        product = _fastest(lambda square=square: _waited(lambda: square @ square))  # type: ignore[misc]
        rates.append(2 * SIDE**3 / product)
    memory = float(torch.get_device_module(device).get_device_properties(device).total_memory)
    return Hardware(THIS, bandwidth, rates[0], rates[1], memory)


def _waited(run: Callable[[], object]) -> None:
    run()
    torch.accelerator.synchronize()


def _fastest(run: Callable[[], None]) -> float:
    """Seconds of the fastest run after a first one, which compiles."""
    times = []
    for _ in range(RUNS + 1):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times[1:])
