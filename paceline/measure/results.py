"""What every verb of `paceline bench` reports beside its figures: machine, versions, command and date.

Invariant: a report is JSON as it is, and says which verb made it, so that tables can be made from the file.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline import __version__

OVERALL = "overall"  # the task that stands for all of them
ORIGIN = ("verb", "command", "date", "machine", "versions")  # fields of every report
Tell = Callable[[str, int], None]  # what is being done, and how many turns have just been finished
PACKAGES = ("torch", "numba", "numpy", "triton")


def num_threads() -> int:
    is_known = sys.platform == "linux"
    return len(os.sched_getaffinity(0)) if is_known else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    described = {"cpu": _cpu_name(), "cores": num_threads(), "system": platform.system()}
    return {**described, "architecture": platform.machine(), "gpu": _gpu_name()}


def described(verb: str, report: dict[str, Any]) -> dict[str, Any]:
    """The report with where it is from."""
    versions = {"paceline": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    command = shlex.join(["paceline", *sys.argv[1:]])
    date = datetime.now(UTC).date().isoformat()
    origin = {"verb": verb, "command": command, "date": date, "machine": machine(), "versions": versions}
    return {**origin, **report}


def write(path: Path, report: dict[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _cpu_name() -> str:
    try:
        asked = {**os.environ, "LC_ALL": "C"}
        done = subprocess.run(["lscpu"], capture_output=True, text=True, timeout=10, env=asked)
        lines = done.stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name"))
    return next(names, platform.processor() or "unknown")


def _gpu_name() -> str | None:
    """Of a device that this process has used: asking for another's name would start a driver."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.accelerator.is_available():
        return None
    return str(torch.get_device_module().get_device_name())
