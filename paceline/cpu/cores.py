"""How many cores this process may use: what its affinity mask and its control groups leave of the machine.

Invariant: at least one, and no more than the threads the machine runs at once.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

CPUS, GROUPS, OWN_GROUPS = Path("/sys/devices/system/cpu"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores(count_siblings: bool) -> int:
    """Hardware threads of one core count once, or each with `count_siblings`: passes that wait for memory
    gain little from the second. A share of a core counts as a core."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {str(cpu) if count_siblings else _read(_siblings(cpu)) or str(cpu) for cpu in allowed}
    return max(1, min(len(cores), math.ceil(_quota())))


def asked_threads() -> int | None:
    """What the environment says. Numba reads its own variable, and not that of OpenMP."""
    for name in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS"):
        first = os.environ.get(name, "").partition(",")[0].strip()  # of nested regions
        if first.isdigit() and int(first):
            return int(first)
    return None


def _siblings(cpu: int) -> Path:
    return CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list"


def _quota() -> float:
    """Processor time that control groups allow, in cores: the least of the process's own and those above."""
    least = float(os.cpu_count() or 1)
    for line in _read(OWN_GROUPS).splitlines():  # "0::/group", or in version 1 "4:cpu,cpuacct:/group"
        kinds, _, group = line.partition(":")[2].partition(":")
        group_folder = GROUPS / kinds / group.lstrip("/")
        for folder in (group_folder, *group_folder.parents):
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if kinds else ("cpu.max",)
            limit = " ".join(_read(folder / name) for name in names).split()
            if len(limit) == 2 and all(part.isdigit() for part in limit):  # not "max", not -1
                least = min(least, int(limit[0]) / int(limit[1]))
    return least


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
