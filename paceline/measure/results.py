"""Reports: the figures of a verb with machine, versions, command and date, and their tables on screens and in
documents (`paceline bench tables` rewrites those of README.md and docs/results.md). Each verb's module turns
its report into tables, and a result on disk names its verb, so what a document shows is what the screen
showed. Invariant: a report is JSON as it is; a document changes between its markers alone.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from paceline import __version__
from paceline.core.errors import ConfigError
from paceline.measure.options import Tables

OVERALL = "overall"  # the task that stands for all of them
ORIGIN = ("verb", "command", "date", "machine", "versions")  # fields of every report
Tell = Callable[[str, int], None]  # what is being done, and how many turns have just been finished
Columns = dict[str, str]  # heading -> a record's field and its form, such as "{tau:.2f}"
# Verbs whose reports are tables, each a module: Run(options) refuses what a user can mend, its num_turns is
# for a progress bar (None: not known), report(tell) measures; tables(report) and LEGEND are what is shown.
VERBS = ("compare", "decode", "batch", "step", "kernels", "quality", "serve", "soak", "tune")
MARKED = re.compile(r"(<!-- table:([\w.-]+)(?: (\d+))? -->\n).*?(<!-- end -->)", re.S)


def num_threads() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


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
    machine = {"cpu": cpu, "cores": num_threads(), "system": platform.system()}
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


def markdown(table: Table) -> str:
    columns = [*table.names, *table.numbers]
    rules = ["---"] * len(table.names) + ["---:"] * len(table.numbers)
    lines = [columns, rules, *table.rows]
    return "".join("| " + " | ".join(str(part) for part in line) + " |\n" for line in lines)


def rewritten(text: str, folder: Path) -> str:
    """The document with its tables made anew from the results in `folder`."""

    def table(found: re.Match[str]) -> str:
        path, number = folder / f"{found[2]}.json", int(found[3] or 1)
        try:
            report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if report["verb"] not in VERBS:
                raise ValueError(f"made by {report['verb']!r}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            remedy = "write it with `paceline bench ... --json`"
            raise ConfigError(f"{path}: is no result ({error}); {remedy}") from None
        tables, machine = module_of(report["verb"]).tables(report), report["machine"]
        if not 1 <= number <= len(tables):
            raise ConfigError(f"table:{found[2]} {number}: the result has {len(tables)} tables")
        where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
        origin = f"`{report['command']}` ({where}, {report['date']})\n"
        return f"{found[1]}\n{markdown(tables[number - 1])}\n{origin}\n{found[4]}"

    return MARKED.sub(table, text)


def run(options: Tables) -> list[Path]:
    """The documents that have changed."""
    changed = []
    for path in (Path(name.strip()) for name in options.files.split(",")):
        if not path.is_file():
            raise ConfigError(f"--files holds {path}, and there is no such file; name documents with tables")
        before = path.read_text(encoding="utf-8")
        after = rewritten(before, options.results)
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed.append(path)
    return changed
