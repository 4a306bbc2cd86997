"""How kernels are compiled: without the interpreter lock, cached on disk beside the sources or in the user's
cache folder.

Invariant: a cached kernel is used only if neither a source file of this folder nor the chosen instruction set
has changed. Numba looks at the file of the function alone, but our kernels are built from pieces in several
files.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from struct import pack, unpack
from typing import Any, get_type_hints

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from paceline.cpu.features import VARIANT

FILES = [*sorted(Path(__file__).parent.glob("*.py")), Path(__file__).parents[1] / "core" / "weigh.py"]
SOURCES = (VARIANT, *((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in FILES))


def kernel(function: Callable[..., None] | None = None, *, parallel: bool = False) -> Any:
    """Decorates a function that Python calls."""
    if function is None:
        return lambda decorated: kernel(decorated, parallel=parallel)
    compiled = numba.njit(nogil=True, error_model="numpy", parallel=parallel)(function)
    try:
        compiled.enable_caching()
    except RuntimeError:  # no folder can be written: compile anew in each process
        return compiled
    compiled._cache._cache_file._source_stamp = SOURCES
    return compiled


piece = numba.njit(nogil=True, error_model="numpy")  # a part of kernels, compiled into each of them
unrolled = numba.njit(inline="always")  # the same, for parts that get constants or kernels as arguments


# A call's arguments lie in memory as int64 numbers and kernels get their address: a hundred numbers in tuples
# would take longer to hand over than a layer to compute, since the host's caches are cold after a pass.
Struct = type[tuple[Any, ...]]  # a NamedTuple whose fields are int, float, bool or such NamedTuples
SCALARS = {int: types.int64, float: types.float64, bool: types.boolean}


def numbers(fields: Iterable[Any]) -> array[int]:
    """What `struct` reads: the bits of doubles for floats, a nested tuple's fields in its place."""
    found = array("q")
    for field in fields:
        if isinstance(field, tuple):
            found.extend(numbers(field))
        else:
            found.append(unpack("q", pack("d", field))[0] if isinstance(field, float) else int(field))
    return found


def size_of(kind: Struct) -> int:
    """How many numbers a struct has."""
    return sum(1 if field in SCALARS else size_of(field) for field in get_type_hints(kind).values())


def struct(kind: Struct) -> Any:
    """A function for kernels that reads a `kind` from the numbers at an address."""

    def type_of(field: Any) -> types.Type:
        if field in SCALARS:
            return SCALARS[field]
        return types.BaseTuple.from_types([type_of(each) for each in get_type_hints(field).values()], field)

    @intrinsic
    def read(_context: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return _read(context, builder, kind, type_of, arguments[0], count(0, 8))

        return type_of(kind)(types.int64), generate

    return read


def _read(
    context: Any, builder: Any, kind: Struct, type_of: Callable[..., Any], at: Any, bytes_in: Iterator[int]
) -> Any:
    values = []
    for field in get_type_hints(kind).values():
        if field not in SCALARS:
            values.append(_read(context, builder, field, type_of, at, bytes_in))
            continue
        here = builder.add(at, ir.Constant(at.type, next(bytes_in)))
        loaded = ir.DoubleType() if field is float else at.type
        value = builder.load(builder.inttoptr(here, loaded.as_pointer()))
        values.append(builder.icmp_signed("!=", value, at.type(0)) if field is bool else value)
    return context.make_tuple(builder, type_of(kind), values)


def entry_of(compiled: Any, num_arguments: int) -> int:
    """Where a kernel of whole numbers begins, for `invoke`."""
    signature = (types.int64,) * num_arguments
    compiled.compile(signature)
    found = compiled.overloads[signature]
    address: int = found.library.get_pointer_to_function(found.fndesc.llvm_func_name)
    return address


def _invoker(result: types.Type) -> Callable[..., Any]:
    @intrinsic
    def invoke(_context: Any, entry: Any, numbers: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kinds, convention = tuple(signature.args[1]), context.call_conv
            callee = builder.inttoptr(arguments[0], convention.get_function_type(result, kinds).as_pointer())
            return convention.call_function(
                builder, callee, result, kinds, cgutils.unpack_tuple(builder, arguments[1])
            )[1]

        return result(types.int64, numbers), generate

    return invoke


# Call a kernel from another by its entry: by its name it would be compiled once more into each that calls it,
# for half a minute.
invoke, invoke_for_number = _invoker(types.none), _invoker(types.int64)
