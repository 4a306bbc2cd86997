"""How kernels are compiled: for which instructions, without the interpreter lock, cached on disk; and how
their arguments lie in memory.

Invariant: a cached kernel is used only if neither a source file of this folder nor the instruction set has
changed. Numba looks at the function's file alone, but kernels are built from pieces in several files.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from itertools import count
from pathlib import Path
from struct import pack, unpack
from subprocess import DEVNULL, Popen
from typing import Any, get_type_hints

import numba
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from paceline.core.errors import ConfigError

# Which instructions multiply small integers: of aarch64 (dot product), of x86 (tiles, dot product), or of any
# processor. Every variant computes the same integers, so it changes the time and not a bit of the result.
VARIANTS = ("sdot", "amx", "vnni", "plain")
UNSIGNED_FIRST = ("amx", "vnni")  # whose dot products multiply unsigned by signed bytes
FEATURES = dict(binding.get_host_cpu_features())


def may_use_tiles() -> bool:
    """AMX's registers are so large that a process asks Linux for them (arch_prctl, ARCH_REQ_XCOMP_PERM of the
    tiles' data), once before its threads use them."""
    has_tiles = sys.platform == "linux" and FEATURES.get("amx-tile") and FEATURES.get("amx-int8")
    return bool(has_tiles) and ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0


def available() -> list[str]:
    """Variants that this processor has, best first."""
    has, found = FEATURES, []
    if platform.machine() in ("aarch64", "arm64"):
        # LLVM lists few features of ARM processors; it knows the others by the processor's name
        is_known, listed = binding.get_host_cpu_name() != "generic", Path("/proc/cpuinfo")
        flags = listed.read_text().split() if is_known and listed.exists() else []
        if sys.platform == "darwin" or "asimddp" in flags:
            found.append("sdot")
    has_wide_dots = has.get("avx512vnni") and has.get("avx512vl")
    if has_wide_dots and may_use_tiles():
        found.append("amx")
    if has_wide_dots or has.get("avxvnni"):
        found.append("vnni")
    return [*found, "plain"]


def choose(wanted: str | None) -> str:
    """PACELINE_CPU names one instead of the best."""
    usable = available()
    if wanted and wanted not in usable:
        raise ConfigError(f"PACELINE_CPU is {wanted!r}; this processor can use {' or '.join(usable)}")
    return wanted or usable[0]


VARIANT = choose(os.environ.get("PACELINE_CPU"))
FILES = [*sorted(Path(__file__).parent.glob("*.py")), Path(__file__).parents[1] / "core" / "weigh.py"]
SOURCES = (VARIANT, *((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in FILES))
KERNELS: dict[str, Any] = {}  # that are cached on disk, by module and name
BESIDE: list[Popen[bytes]] = []  # processes that compile


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
    compiled._cache.save_overload = _if_it_fits(compiled._cache.save_overload)
    KERNELS[f"{function.__module__.rpartition('.')[2]}.{function.__name__}"] = compiled
    return compiled


def _if_it_fits(save: Callable[..., None]) -> Callable[..., None]:
    """On a full disk kernels are compiled anew in each process."""

    def save_or_not(*given: Any) -> None:
        with suppress(OSError):
            save(*given)

    return save_or_not


piece = numba.njit(nogil=True, error_model="numpy")  # a part of kernels, compiled into each of them
unrolled = numba.njit(inline="always")  # the same, for parts that get constants or kernels as arguments


def piece_named(name: str) -> Callable[[Callable[..., Any]], Any]:
    """A piece that is made more than once. Each needs a name of its own: kernels from the disk cache bring
    their pieces along and share those of equal names."""

    def decorate(function: Callable[..., Any]) -> Any:
        function.__qualname__ = name
        return piece(function)

    return decorate


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

    def load(context: Any, builder: Any, field: Any, at: Any, steps: Iterator[int]) -> Any:
        if field not in SCALARS:
            values = [load(context, builder, each, at, steps) for each in get_type_hints(field).values()]
            return context.make_tuple(builder, type_of(field), values)
        here, loaded = builder.add(at, at.type(next(steps))), ir.DoubleType() if field is float else at.type
        value = builder.load(builder.inttoptr(here, loaded.as_pointer()))
        return builder.icmp_signed("!=", value, at.type(0)) if field is bool else value

    @intrinsic
    def read(_context: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return load(context, builder, kind, arguments[0], count(0, 8))

        return type_of(kind)(types.int64), generate

    return read


def entry_of(compiled: Any, num_arguments: int) -> int:
    """Where a kernel of whole numbers begins, for `invoke`."""
    signature = (types.int64,) * num_arguments
    for process in BESIDE:  # whatever came of it: what is not on disk then is compiled here
        process.wait()
    compiled.compile(signature)
    found = compiled.overloads[signature]
    address: int = found.library.get_pointer_to_function(found.fndesc.llvm_func_name)
    return address


def compile_kernels(names: Iterable[str]) -> None:
    """Those that take whole numbers alone, by module and name."""
    for name in names:
        import_module(f"paceline.cpu.{name.partition('.')[0]}")
        entry_of(KERNELS[name], KERNELS[name].py_func.__code__.co_argcount)


def compile_beside(*names: str) -> None:
    """The same in a process of its own, of those that are not on disk yet; `entry_of` waits for it."""
    missing = [n for n in names if n in KERNELS and not KERNELS[n]._cache._cache_file._load_index()]
    if missing:
        program = f"from paceline.cpu.compile import compile_kernels as go; go({missing})"
        # -P: modules come from where they are installed, never from the folder this was started in
        BESIDE.append(Popen([sys.executable, "-P", "-c", program], stderr=DEVNULL))


def _invoker(result: types.Type) -> Callable[..., Any]:
    @intrinsic
    def invoke(_context: Any, entry: Any, numbers: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kinds, convention = tuple(signature.args[1]), context.call_conv
            callee = builder.inttoptr(arguments[0], convention.get_function_type(result, kinds).as_pointer())
            given = cgutils.unpack_tuple(builder, arguments[1])
            return convention.call_function(builder, callee, result, kinds, given)[1]

        return result(types.int64, numbers), generate

    return invoke


# Call a kernel from another by its entry: by its name it would be compiled once more into each that calls it,
# for half a minute.
invoke, invoke_for_number = _invoker(types.none), _invoker(types.int64)
