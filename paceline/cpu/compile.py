"""How kernels are compiled: without the interpreter lock, cached on disk beside the sources or in the user's
cache folder.

Invariant: a cached kernel is used only if neither a source file of this folder nor the chosen instruction set
has changed. Numba looks at the file of the function alone, but our kernels are built from pieces in several
files.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from struct import pack, unpack
from typing import Any

import numba
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from paceline.cpu.features import VARIANT

SOURCES = (
    VARIANT,
    *(
        (path.name, path.stat().st_mtime_ns, path.stat().st_size)
        for path in sorted(Path(__file__).parent.glob("*.py"))
    ),
)


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


def numbers(fields: Iterable[float]) -> array[int]:
    """What a kernel is given the address of; floats as the bits of doubles. A hundred numbers in tuples would
    take longer to hand over than a layer to compute: after a pass the host's caches are cold."""
    return array("q", [unpack("q", pack("d", x))[0] if isinstance(x, float) else int(x) for x in fields])


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
