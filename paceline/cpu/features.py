"""Which instructions multiply small integers here: "sdot" (aarch64 dot product), "vnni" (x86) or "plain" (any
processor).

Invariant: every variant computes the same integers, so it changes the time and not a bit of the result.
PACELINE_CPU names one instead of the best; an instruction the processor lacks is refused.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from llvmlite import binding

from paceline.core.errors import ConfigError

VARIANTS = ("sdot", "vnni", "plain")


def available() -> list[str]:
    """Best first."""
    has = dict(binding.get_host_cpu_features())
    found = []
    if platform.machine() in ("aarch64", "arm64") and _has_arm_dot_product():
        found.append("sdot")
    if has.get("avxvnni") or (has.get("avx512vnni") and has.get("avx512vl")):
        found.append("vnni")
    return [*found, "plain"]


def _has_arm_dot_product() -> bool:
    """LLVM lists few features of ARM processors; it knows the others by the processor's name, so that must be
    known to it.
    """
    if sys.platform == "darwin":
        return True
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return "asimddp" in flags and binding.get_host_cpu_name() != "generic"


def choose(wanted: str | None) -> str:
    usable = available()
    if wanted and wanted not in usable:
        raise ConfigError(f"PACELINE_CPU is {wanted!r}; this processor can use {' or '.join(usable)}")
    return wanted or usable[0]


VARIANT = choose(os.environ.get("PACELINE_CPU"))
