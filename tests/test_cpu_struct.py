"""Kernel arguments: what `numbers` writes, `struct` reads, whole numbers, floats, flags and nested ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from numba import njit

from paceline.cpu.compile import numbers, size_of, struct


class Inner(NamedTuple):
    first: int
    second: float


class Outer(NamedTuple):
    count: int
    inner: Inner
    is_set: bool
    scale: float
    other: Inner


OUTER = Outer(7, Inner(-3, 0.1), True, -2.5, Inner(1 << 60, 1e-300))
outer_at, inner_at = struct(Outer), struct(Inner)


@njit
def read_all(at):  # type: ignore[no-untyped-def]
    o = outer_at(at)
    return o.count, o.inner.first, o.inner.second, o.is_set, o.scale, o.other.first, o.other.second


@njit
def read_inner(at):  # type: ignore[no-untyped-def]
    inner = inner_at(at)
    return inner.first, inner.second


def test_a_struct_comes_back_field_by_field() -> None:
    memory = numbers(OUTER)
    assert read_all(memory.buffer_info()[0]) == (7, -3, 0.1, True, -2.5, 1 << 60, 1e-300)


def test_sizes_count_the_numbers_of_nested_structs() -> None:
    memory = numbers(OUTER)
    assert [size_of(Inner), size_of(Outer), len(memory)] == [2, 7, 7]
    before_other = size_of(Outer) - size_of(Inner)
    assert read_inner(memory.buffer_info()[0] + 8 * before_other) == (1 << 60, 1e-300)


def test_a_kernel_runs_where_no_file_can_be_written(tmp_path: Path) -> None:
    """As on a full disk: every write fails, and only the next process compiles once more."""
    source = "from paceline.cpu.compile import kernel\n\n\n@kernel\ndef one():\n    return 1\n"
    (tmp_path / "kernels.py").write_text(source)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
    for program in (f"{limit}; import kernels; assert kernels.one() == 1", "import kernels; kernels.one()"):
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
