"""LLVM by hand: sixteen-lane arithmetic for the CPU kernels, on any processor.

Invariant: nothing here lets the compiler reorder floating-point arithmetic. Sums are chains of `llvm.fma`, so
a result depends on its operands and their order alone, never on the shape of the loop around it. Kernels take
addresses as integers, which are cheaper to pass than arrays; the functions that call them with tensors check
shapes and types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Parameter, Signature, signature
from time import CLOCK_MONOTONIC
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

INT32, INT64 = ir.IntType(32), ir.IntType(64)
FLOAT = ir.FloatType()
LOG2_E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
# 1.5 * 2**23: adding it rounds a small number, and leaves an integer in the low bits
MAGIC_BITS, MAGIC = 0x4B400000, 12582912.0
LANES = 16  # output rows in a tile; four NEON, two AVX2 or one AVX-512 register


def floats(width: int) -> ir.VectorType:
    return ir.VectorType(FLOAT, width)


def bytes_(width: int) -> ir.VectorType:
    return ir.VectorType(ir.IntType(8), width)


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

    def load(self, address: Any, kind: ir.Type) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=1)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=1)

    def zeros(self, width: int) -> Any:
        return ir.Constant(floats(width), [0.0] * width)

    def variable(self, value: Any) -> Any:
        """A mutable accumulator; LLVM promotes it to registers."""
        slot = cgutils.alloca_once(self.builder, value.type)
        self.builder.store(value, slot)
        return slot

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        suffix = f"v{a.type.count}f32" if isinstance(a.type, ir.VectorType) else "f32"
        return self.call(f"llvm.fma.{suffix}", a.type, [a, b, c])

    def accumulate(self, slot: Any, a: Any, b: Any) -> None:
        self.builder.store(self.fma(a, b, self.builder.load(slot)), slot)

    def splat(self, vector: Any, lane: int, width: int) -> Any:
        mask = ir.Constant(ir.VectorType(INT32, width), [lane] * width)
        return self.builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)

    def broadcast(self, scalar: Any, width: int) -> Any:
        return self.splat(self.builder.insert_element(self.zeros(width), scalar, self.first), 0, width)

    def spread(self, integer: Any, width: int) -> Any:
        """A 32-bit integer in every lane."""
        kind = ir.VectorType(INT32, width)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), integer, self.first)
        return self.splat(first, 0, width)

    def half(self, vector: Any, first: int) -> Any:
        """Half of the lanes of `vector`, from lane `first` on."""
        width = vector.type.count // 2
        mask = ir.Constant(ir.VectorType(INT32, width), list(range(first, first + width)))
        return self.builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)

    def total(self, vector: Any) -> Any:
        """The sum of all lanes, halves first: one fixed order."""
        while vector.type.count > 1:
            vector = self.builder.fadd(self.half(vector, 0), self.half(vector, vector.type.count // 2))
        return self.builder.extract_element(vector, self.first)

    def totals(self, vectors: list[Any]) -> Any:
        """The sums of four vectors of four lanes, neighbours first, as one vector."""
        while len(vectors) > 1:
            vectors = [self._add_neighbours(*pair) for pair in zip(vectors[::2], vectors[1::2], strict=True)]
        return vectors[0]

    def _add_neighbours(self, first: Any, second: Any) -> Any:
        kind = ir.VectorType(INT32, first.type.count)
        masks = [ir.Constant(kind, list(range(start, 2 * first.type.count, 2))) for start in (0, 1)]
        even, odd = (self.builder.shuffle_vector(first, second, mask) for mask in masks)
        return self.builder.fadd(even, odd)

    def add_fours(self, sums: Any, a: Any, b: Any) -> Any:
        """sums[i] + a[4i : 4i+4] * b[4i : 4i+4], of signed bytes: where no instruction does it."""
        lanes, wide = sums.type.count, ir.VectorType(INT32, a.type.count)
        products = self.builder.mul(self.builder.sext(a, wide), self.builder.sext(b, wide))
        for lane in range(4):
            mask = ir.Constant(ir.VectorType(INT32, lanes), [4 * i + lane for i in range(lanes)])
            each = self.builder.shuffle_vector(products, ir.Constant(wide, ir.Undefined), mask)
            sums = self.builder.add(sums, each)
        return sums

    def largest(self, vector: Any) -> Any:
        while vector.type.count > 1:
            low, high = self.half(vector, 0), self.half(vector, vector.type.count // 2)
            vector = self.builder.select(self.builder.fcmp_ordered(">", low, high), low, high)
        return self.builder.extract_element(vector, self.first)

    def prefetch(self, address: Any) -> None:
        pointer = self.builder.inttoptr(address, ir.IntType(8).as_pointer())
        flags = [ir.Constant(INT32, flag) for flag in (0, 3, 1)]  # read, into the nearest cache, data
        self.call("llvm.prefetch.p0", ir.VoidType(), [pointer, *flags])

    def constant(self, value: float, width: int) -> Any:
        return ir.Constant(floats(width), [float(np.float32(value))] * width)

    def exponential(self, x: Any) -> Any:
        """e ** x for x clamped to [-87, 88], within 2 units in the last place: 2 ** n times a polynomial."""
        builder, width = self.builder, x.type.count
        for function, limit in (("maxnum", -87.0), ("minnum", 88.0)):
            x = self.call(f"llvm.{function}.v{width}f32", x.type, [x, self.constant(limit, width)])
        rounding = self.constant(MAGIC, width)
        whole = builder.fsub(self.fma(x, self.constant(LOG2_E, width), rounding), rounding)
        rest = self.fma(whole, self.constant(-LN2_HIGH, width), x)
        rest = self.fma(whole, self.constant(-LN2_LOW, width), rest)
        series = self.constant(1 / 5040, width)
        for divisor in (720, 120, 24, 6, 2, 1, 1):
            series = self.fma(series, rest, self.constant(1 / divisor, width))
        ints = ir.VectorType(INT32, width)
        exponent = builder.add(builder.fptosi(whole, ints), ir.Constant(ints, [127] * width))
        power = builder.bitcast(builder.shl(exponent, ir.Constant(ints, [23] * width)), x.type)
        return builder.fmul(series, power)

    @contextmanager
    def loop(self, count: Any) -> Iterator[Any]:
        with cgutils.for_range(self.builder, count) as loop:
            yield loop.index

    def call(self, name: str, result: ir.Type, operands: list[Any]) -> Any:
        kind = ir.FunctionType(result, [operand.type for operand in operands])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), operands)


def instruction(
    result: types.Type = types.void, *, constants: int = 0, most: int = 0, operands: int = 0
) -> Any:
    """Decorates a function (emit, *operands) that writes the code of an instruction for kernels.

    Operands are 64-bit integers and floats. The first `constants` are known when a kernel is compiled. With
    `most`, the next one is a number from 1 to `most` at run time, and there is code for each. Both are
    Python's numbers where the code is written. `operands`: how many `write` takes as one starred parameter.
    """

    def decorate(write: Callable[..., Any]) -> Any:
        def typed(_context: Any, *kinds: Any) -> Any:
            is_float = [isinstance(types.unliteral(kind), types.Float) for kind in kinds[constants:]]
            rest_kinds = [types.float32 if each else types.int64 for each in is_float]

            def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
                fixed, rest = [kind.literal_value for kind in kinds[:constants]], arguments[constants:]
                if most:
                    _write_each(
                        builder, most, rest[0], lambda n: write(Emitter(builder), *fixed, n, *rest[1:])
                    )
                    return context.get_dummy_value()
                found = write(Emitter(builder), *fixed, *rest)
                return context.get_dummy_value() if found is None else found

            return result(*kinds[:constants], *rest_kinds), generate

        named = [p for p in signature(write).parameters.values() if p.kind is not Parameter.VAR_POSITIONAL]
        starred = [Parameter(f"operand_{i}", Parameter.POSITIONAL_OR_KEYWORD) for i in range(operands)]
        typed.__name__ = write.__name__
        typed.__signature__ = Signature([*named, *starred])  # type: ignore[attr-defined]
        return intrinsic(prefer_literal=True)(typed)

    return decorate


def _write_each(builder: Any, most: int, count: Any, write: Callable[[int], Any]) -> None:
    """Code for every count from 1 to `most`, of which the right one runs."""
    blocks = [builder.append_basic_block(f"count.{n}") for n in range(1, most + 1)]
    end = builder.append_basic_block("counted")
    switch = builder.switch(count, blocks[-1])
    for n, block in enumerate(blocks, 1):
        switch.add_case(ir.Constant(INT64, n), block)
        builder.position_at_end(block)
        write(n)
        builder.branch(end)
    builder.position_at_end(end)


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
seed_pointer = _pointer_to(types.uint64)


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
