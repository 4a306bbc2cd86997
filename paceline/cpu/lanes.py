"""LLVM by hand: sixteen-lane arithmetic for the CPU kernels, on any processor.

Invariant: nothing here lets the compiler reorder floating-point arithmetic. Sums are chains of `llvm.fma`, so a result depends on
its operands and their order alone, never on the shape of the loop around it. Kernels take addresses as integers: that costs a
tenth of unboxing arrays, and their torch-facing callers  check shapes and types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

INT32, INT64 = ir.IntType(32), ir.IntType(64)
FLOAT = ir.FloatType()
LANES = 16  # output rows in a tile; four NEON, two AVX2 or one AVX-512 register


def floats(width: int) -> ir.VectorType:
    return ir.VectorType(FLOAT, width)


def bytes_(width: int) -> ir.VectorType:
    return ir.VectorType(ir.IntType(8), width)


class Emitter:
    """Writes instructions at the builder's position. Addresses are 64-bit integers; `+` on them is `offset`."""

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
        return self._call(f"llvm.fma.{suffix}", a.type, [a, b, c])

    def accumulate(self, slot: Any, a: Any, b: Any) -> None:
        self.builder.store(self.fma(a, b, self.builder.load(slot)), slot)

    def splat(self, vector: Any, lane: int, width: int) -> Any:
        mask = ir.Constant(ir.VectorType(INT32, width), [lane] * width)
        return self.builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)

    def broadcast(self, scalar: Any, width: int) -> Any:
        return self.splat(self.builder.insert_element(self.zeros(width), scalar, ir.Constant(INT32, 0)), 0, width)

    def half(self, vector: Any, first: int) -> Any:
        """Half of the lanes of `vector`, from lane `first` on."""
        width = vector.type.count // 2
        mask = ir.Constant(ir.VectorType(INT32, width), list(range(first, first + width)))
        return self.builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)

    def total(self, vector: Any) -> Any:
        """The sum of all lanes, halves first: one fixed order."""
        while vector.type.count > 1:
            vector = self.builder.fadd(self.half(vector, 0), self.half(vector, vector.type.count // 2))
        return self.builder.extract_element(vector, ir.Constant(INT32, 0))

    def prefetch(self, address: Any) -> None:
        pointer = self.builder.inttoptr(address, ir.IntType(8).as_pointer())
        flags = [ir.Constant(INT32, flag) for flag in (0, 1, 1)]  # read, low locality, data
        self._call("llvm.prefetch.p0", ir.VoidType(), [pointer, *flags])

    @contextmanager
    def loop(self, count: Any) -> Iterator[Any]:
        with cgutils.for_range(self.builder, count) as loop:
            yield loop.index

    def _call(self, name: str, result: ir.Type, operands: list[Any]) -> Any:
        kind = ir.FunctionType(result, [operand.type for operand in operands])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), operands)


def _pointer_to(kind: types.Type) -> Callable[..., Any]:
    @intrinsic  # type: ignore[untyped-decorator]
    def pointer(_context: Any, address: types.Type) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return pointer  # type: ignore[no-any-return]


float_pointer = _pointer_to(types.float32)  # for numba.carray
int_pointer = _pointer_to(types.int64)


@intrinsic  # type: ignore[untyped-decorator]
def address(_context: Any, array: types.Type) -> Any:
    """Where an array's data lies (`array.ctypes.data` would keep the function out of the disk cache)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(context.make_array(signature.args[0])(context, builder, arguments[0]).data, INT64)

    return types.int64(array), generate


@intrinsic  # type: ignore[untyped-decorator]
def fma(_context: Any, a: types.Type, b: types.Type, c: types.Type) -> Any:
    """a * b + c with one rounding, for scalars; loops over it vectorize without changing a bit."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return Emitter(builder).fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def power_of_two(_context: Any, exponent: types.Type) -> Any:
    """2 ** exponent for an int32 in [-126, 127], by writing the exponent bits."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        biased = builder.add(arguments[0], ir.Constant(INT32, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(INT32, 23)), FLOAT)

    return types.float32(types.int32), generate
