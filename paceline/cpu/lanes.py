"""LLVM by hand: sixteen-lane arithmetic for the CPU kernels, on any processor.

Invariant: nothing here lets the compiler reorder floating-point arithmetic. Sums are chains of `llvm.fma`, so
a result depends on its operands and their order alone. Kernels take addresses as integers, which are cheaper
to pass than arrays; the functions that call them with tensors check shapes and types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import Parameter, Signature, signature
from time import CLOCK_MONOTONIC
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from paceline.cpu.compile import UNSIGNED_FIRST

INT32, INT64 = ir.IntType(32), ir.IntType(64)
FLOAT = ir.FloatType()
LOG2_E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
# 1.5 * 2**23: adding it rounds a small number, and leaves an integer in the low bits
MAGIC_BITS, MAGIC = 0x4B400000, 12582912.0
LANES = 16  # output rows in a tile; four NEON, two AVX2 or one AVX-512 register


# types of vectors: functions of their width
floats, ints, bytes_ = (partial(ir.VectorType, kind) for kind in (FLOAT, INT32, ir.IntType(8)))


class Emitter:
    """Writes instructions at the builder's position. Addresses are 64-bit integers, added to by `offset`."""

    first = ir.Constant(INT32, 0)  # the index of a vector's first lane

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def const(self, value: int) -> Any:
        return ir.Constant(INT64, value)

    def offset(self, address: Any, *terms: Any) -> Any:
        for term in terms:
            address = self.builder.add(address, self.const(term) if isinstance(term, int) else term)
        return address

    def times(self, value: Any, factor: Any) -> Any:
        return self.builder.mul(value, self.const(factor) if isinstance(factor, int) else factor)

    def pointer(self, address: Any, kind: ir.Type = INT64) -> Any:
        return self.builder.inttoptr(address, kind.as_pointer())

    def load(self, address: Any, kind: ir.Type) -> Any:
        return self.builder.load(self.pointer(address, kind), align=1)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.pointer(address, value.type), align=1)

    def variable(self, value: Any) -> Any:
        """A mutable accumulator; LLVM promotes it to registers."""
        slot = cgutils.alloca_once(self.builder, value.type)
        self.builder.store(value, slot)
        return slot

    def memory(self, size: int) -> Any:
        """The address of bytes that live as long as the call of the function that asks."""
        room = cgutils.alloca_once(self.builder, ir.ArrayType(ir.IntType(8), size))
        room.align = 64
        return self.builder.ptrtoint(room, INT64)

    def math(self, name: str, *operands: Any) -> Any:
        """A function of LLVM's on floats or vectors of them."""
        kind = operands[0].type
        width, each = (f"v{kind.count}", kind.element) if isinstance(kind, ir.VectorType) else ("", kind)
        return self.call(f"llvm.{name}.{width}{each.intrinsic_name}", kind, list(operands))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.math("fma", a, b, c)

    def accumulate(self, slot: Any, a: Any, b: Any) -> None:
        self.builder.store(self.fma(a, b, self.builder.load(slot)), slot)

    def shuffle(self, order: Iterable[int], a: Any, b: Any = None) -> Any:
        """Lanes by their numbers, those of `b` after those of `a`."""
        lanes = list(order)
        other = ir.Constant(a.type, ir.Undefined) if b is None else b
        return self.builder.shuffle_vector(a, other, ints(len(lanes))(lanes))

    def splat(self, vector: Any, lane: int, width: int) -> Any:
        return self.shuffle([lane] * width, vector)

    def broadcast(self, scalar: Any, width: int) -> Any:
        empty = ir.Constant(ir.VectorType(scalar.type, width), ir.Undefined)
        return self.splat(self.builder.insert_element(empty, scalar, self.first), 0, width)

    def fold(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """All lanes put together by a function of two vectors, halves first: one fixed order."""
        while vector.type.count > 1:
            half = vector.type.count // 2
            vector = combine(*(self.shuffle(range(at, at + half), vector) for at in (0, half)))
        return self.builder.extract_element(vector, self.first)

    def total(self, vector: Any) -> Any:
        return self.fold(vector, self.builder.fadd)

    def totals(self, vectors: list[Any], add: Callable[[Any, Any], Any]) -> Any:
        """The sums of four vectors of four lanes, neighbours first, as one vector."""
        while len(vectors) > 1:
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [add(*(self.shuffle(range(at, 8, 2), *pair) for at in (0, 1))) for pair in pairs]
        return vectors[0]

    def dot(self, variant: str, total: Any, first: Any, second: Any) -> Any:
        """total[i] + first[4i : 4i+4] * second[4i : 4i+4], of signed bytes; UNSIGNED_FIRST: as it says."""
        if variant == "sdot":
            return self.call("llvm.aarch64.neon.sdot.v4i32.v16i8", total.type, [total, first, second])
        lanes, wide = total.type.count, ints(first.type.count)
        if variant in UNSIGNED_FIRST:
            return self.call(f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", total.type, [total, first, second])
        products = self.builder.mul(self.builder.sext(first, wide), self.builder.sext(second, wide))
        for lane in range(4):
            total = self.builder.add(total, self.shuffle(range(lane, 4 * lanes, 4), products))
        return total

    def round(self, x: Any, turns: Any, out: Any, scale_at: Any, sum_at: Any, unit: float = 1.0) -> None:
        """Sixteen floats a turn as int8, their scale times `unit`, and where it is wanted their sum."""
        builder, tops = self.builder, self.variable(self.constant(0.0, LANES))
        with self.loop(turns) as turn:
            value = self.load(self.offset(x, self.times(turn, 4 * LANES)), floats(LANES))
            builder.store(self.math("maximum", self.math("fabs", value), builder.load(tops)), tops)
        # unlike a comparison, it passes on what is not a number
        top = self.call(f"llvm.vector.reduce.fmaximum.v{LANES}f32", FLOAT, [builder.load(tops)])
        is_zero, limit = builder.fcmp_ordered("==", top, FLOAT(0.0)), FLOAT(127.0)
        factor = self.broadcast(builder.select(is_zero, FLOAT(0.0), builder.fdiv(limit, top)), LANES)
        total = self.variable(ints(LANES)([0] * LANES))
        with self.loop(turns) as turn:
            value = self.load(self.offset(x, self.times(turn, 4 * LANES)), floats(LANES))
            bits = builder.bitcast(self.fma(value, factor, self.constant(MAGIC, LANES)), ints(LANES))
            whole = builder.sub(bits, ints(LANES)([MAGIC_BITS] * LANES))
            builder.store(builder.add(builder.load(total), whole), total)
            self.store(builder.trunc(whole, bytes_(LANES)), self.offset(out, self.times(turn, LANES)))
        self.store(builder.fmul(builder.fdiv(top, limit), FLOAT(unit)), scale_at)
        if sum_at is not None:
            sums = [builder.load(total)]
            self.store(self.call(f"llvm.vector.reduce.add.v{LANES}i32", INT32, sums), sum_at)

    def halves(self, address: Any, width: int) -> Any:
        """Half-precision numbers, not negative, as floats 2**-112 times as large: their bits fit."""
        raw = self.load(address, ir.VectorType(ir.IntType(16), width))
        wide = self.builder.shl(self.builder.zext(raw, ints(width)), ints(width)([13] * width))
        return self.builder.bitcast(wide, floats(width))

    def prefetch(self, address: Any, nearness: int = 3) -> None:
        flags = [INT32(flag) for flag in (0, nearness, 1)]  # read, 3: into the nearest cache, data
        self.call("llvm.prefetch.p0", ir.VoidType(), [self.pointer(address, ir.IntType(8)), *flags])

    def constant(self, value: float, width: int) -> Any:
        return ir.Constant(floats(width), [float(np.float32(value))] * width)

    def exponential(self, x: Any) -> Any:
        """e ** x for x clamped to [-87, 88], within 2 units in the last place: 2 ** n times a polynomial."""
        builder, width = self.builder, x.type.count
        for function, limit in (("maxnum", -87.0), ("minnum", 88.0)):
            x = self.math(function, x, self.constant(limit, width))
        rounding = self.constant(MAGIC, width)
        whole = builder.fsub(self.fma(x, self.constant(LOG2_E, width), rounding), rounding)
        rest = self.fma(whole, self.constant(-LN2_HIGH, width), x)
        rest = self.fma(whole, self.constant(-LN2_LOW, width), rest)
        series = self.constant(1 / 5040, width)
        for divisor in (720, 120, 24, 6, 2, 1, 1):
            series = self.fma(series, rest, self.constant(1 / divisor, width))
        exponent = builder.add(builder.fptosi(whole, ints(width)), ints(width)([127] * width))
        power = builder.bitcast(builder.shl(exponent, ints(width)([23] * width)), x.type)
        return builder.fmul(series, power)

    @contextmanager
    def loop(self, count: Any) -> Iterator[Any]:
        with cgutils.for_range(self.builder, count) as loop:
            yield loop.index

    def for_each_count(self, most: int, count: Any, write: Callable[[int], Any]) -> None:
        """Code for every count from 1 to `most`, of which the right one runs."""
        blocks = [self.builder.append_basic_block(f"count.{n}") for n in range(1, most + 1)]
        end = self.builder.append_basic_block("counted")
        switch = self.builder.switch(count, blocks[-1])
        for n, block in enumerate(blocks, 1):
            switch.add_case(self.const(n), block)
            self.builder.position_at_end(block)
            write(n)
            self.builder.branch(end)
        self.builder.position_at_end(end)

    def call(self, name: str, result: ir.Type, operands: list[Any]) -> Any:
        kind = ir.FunctionType(result, [operand.type for operand in operands])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), operands)


def instruction(
    result: types.Type = types.void, constants: int = 0, most: int = 0, operands: int = 0,
    real: types.Type = types.float32,
) -> Any:  # fmt: skip
    """Decorates a function (emit, *operands) that writes the code of an instruction for kernels.

    Operands are 64-bit integers and `real`s. The first `constants` are known when a kernel is compiled. With
    `most`, the next one is a number from 1 to `most` at run time, and there is code for each. Both are
    Python's numbers where the code is written. `operands`: how many `write` takes as one starred parameter.
    """

    def decorate(write: Callable[..., Any]) -> Any:
        def typed(_context: Any, *kinds: Any) -> Any:
            is_float = [isinstance(types.unliteral(kind), types.Float) for kind in kinds[constants:]]
            rest_kinds = [real if each else types.int64 for each in is_float]

            def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
                fixed, rest = [kind.literal_value for kind in kinds[:constants]], arguments[constants:]
                emit = Emitter(builder)
                if most:
                    emit.for_each_count(most, rest[0], lambda n: write(emit, *fixed, n, *rest[1:]))
                    return context.get_dummy_value()
                found = write(emit, *fixed, *rest)
                return context.get_dummy_value() if found is None else found

            return result(*kinds[:constants], *rest_kinds), generate

        named = [p for p in signature(write).parameters.values() if p.kind is not Parameter.VAR_POSITIONAL]
        starred = [Parameter(f"operand_{i}", Parameter.POSITIONAL_OR_KEYWORD) for i in range(operands)]
        typed.__name__ = write.__name__
        typed.__signature__ = Signature([*named, *starred])  # type: ignore[attr-defined]
        return intrinsic(prefer_literal=True)(typed)

    return decorate


def _pointer_to(kind: types.Type) -> Callable[..., Any]:
    @intrinsic
    def pointer(_context: Any, address: types.Type) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return pointer


float_pointer = _pointer_to(types.float32)  # for numba.carray
int_pointer = _pointer_to(types.int64)
byte_pointer = _pointer_to(types.int8)
word_pointer = _pointer_to(types.int32)
double_pointer = _pointer_to(types.float64)


@intrinsic
def address(_context: Any, array: types.Type) -> Any:
    """Where an array's data lies (`array.ctypes.data` would keep the function out of the disk cache)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.ptrtoint(found.data, INT64)

    return types.int64(array), generate


@instruction(types.float32)
def fma(emit: Emitter, a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding, for scalars; loops over it vectorize without changing a bit."""
    return emit.fma(a, b, c)


@instruction(types.float64)
def seconds_now(emit: Emitter) -> Any:
    """Of a clock that only goes on."""
    builder, room = emit.builder, emit.variable(ir.Constant(ir.ArrayType(INT64, 2), [0, 0]))
    emit.call("clock_gettime", INT32, [ir.Constant(INT32, CLOCK_MONOTONIC), room])
    time = builder.load(room)
    seconds, nanoseconds = (builder.sitofp(builder.extract_value(time, i), ir.DoubleType()) for i in range(2))
    return builder.fadd(seconds, builder.fmul(nanoseconds, ir.Constant(ir.DoubleType(), 1e-9)))
