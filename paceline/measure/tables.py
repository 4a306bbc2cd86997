"""`paceline bench tables`: the tables of documents, made anew from the results beside them and from plans.

Invariant: a document changes between its markers alone.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.measure import plan
from paceline.measure.options import Paper, Tables
from paceline.measure.results import VERBS, Table, module_of

MARKED = re.compile(r"(<!-- table:([\w.-]+)(?: (\d+))? -->\n).*?(<!-- end -->)", re.S)
PLANNED = re.compile(r"(<!-- plan:(\{.+?\}) -->\n).*?(<!-- end -->)", re.S)


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

    return PLANNED.sub(_planned, MARKED.sub(table, text))


def _planned(found: re.Match[str]) -> str:
    """The layouts that `paceline plan` compares, and how to ask for them."""
    given = json.loads(found[2])
    options = [f"--{name.replace('_', '-')} {value}" for name, value in given.items() if name != "model"]
    table = plan.tables(plan.report_of(Paper(**given)))[-1]
    command, title = " ".join(["paceline plan", given["model"], *options]), table.title.capitalize()
    notes = "\n".join(table.notes)
    return f"{found[1]}\n{title} (`{command}`)\n\n{markdown(table)}\n{notes}\n\n{found[3]}"


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
