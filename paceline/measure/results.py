"""Reports: the figures of a verb with machine, versions, command and date, and the tables that each verb's
module makes of them. Invariant: a report is JSON as it is, and names its verb: what a document shows of a
result on disk (measure/tables.py) is what the screen showed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import import_module
from typing import Any, NamedTuple

from paceline import __version__
from paceline.cpu.cores import usable_cores

OVERALL = "overall"  # the task that stands for all of them
ORIGIN = ("verb", "command", "date", "machine", "versions")  # fields of every report
Tell = Callable[[str, int], None]  # what is being done, and how many turns have just been finished
Columns = dict[str, str]  # heading -> a record's field and its form, such as "{tau:.2f}"
# Verbs whose reports are tables, each a module: Run(options) refuses what a user can mend, its num_turns is
# for a progress bar (None: not known), report(tell) measures; tables(report) and LEGEND are what is shown.
VERBS = ("compare", "decode", "batch", "step", "kernels", "quality", "serve", "soak", "tune")


def described(verb: str, report: dict[str, Any]) -> dict[str, Any]:
    """The report with where it is from."""
    versions = {"paceline": __version__, "python": platform.python_version()}
    for name in ("torch", "numba", "numpy", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    command = shlex.join(["paceline", *sys.argv[1:]])
    date = datetime.now(UTC).date().isoformat()
    cpu = platform.processor() or "unknown"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        told = subprocess.run(["env", "LC_ALL=C", "lscpu"], capture_output=True, text=True, timeout=10)
        found = re.search(r"^Model name:\s*(.+)", told.stdout, re.M)
        cpu = found[1].strip() if found is not None else cpu
    machine = {"cpu": cpu, "cores": usable_cores(count_siblings=True), "system": platform.system()}
    # Of a device that this process has used: asking for another's name would start a driver.
    torch = sys.modules.get("torch")
    has_gpu = torch is not None and torch.accelerator.is_available()
    gpu = str(torch.get_device_module().get_device_name()) if torch and has_gpu else None
    machine |= {"architecture": platform.machine(), "gpu": gpu}
    origin = {"verb": verb, "command": command, "date": date, "machine": machine, "versions": versions}
    return {**origin, **report}


class Table(NamedTuple):
    title: str
    names: Sequence[str]  # columns of words
    numbers: Sequence[str]  # columns of figures
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()  # lines below it


def cell(value: float | str | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def table_of(title: str, names: Sequence[str], columns: Columns, records: Sequence[dict[str, Any]]) -> Table:
    """A row for each record: its fields `names` as they are, then its figures."""
    rows = []
    for record in records:
        fields = [(form, record[form[1:-1].partition(":")[0]]) for form in columns.values()]
        figures = ["-" if value is None else form.format(**record) for form, value in fields]
        rows.append([*(str(record[name]) for name in names), *figures])
    return Table(title, names, tuple(columns), rows)


def module_of(verb: str) -> Any:
    return import_module(f"paceline.measure.{verb}")
