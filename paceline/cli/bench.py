"""The verbs that measure: `paceline bench` (alone it compares Paceline and its peers; sub-commands measure
single parts), `tune` and `plan`. Options are the dataclasses of measure/options.py, the work is done in
paceline/measure/; here are the progress bar, the tables and the exit status.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import typer

from paceline.cli import console
from paceline.cli.options import as_command, check_target, write_result
from paceline.measure import options

VERBS: dict[str, type] = {"decode": options.Decode, "batch": options.Batch, "step": options.Step}
VERBS |= {"kernels": options.Kernels, "quality": options.Quality}
VERBS |= {"serve": options.Serve, "soak": options.Soak}
INTERRUPTED = 130
app = typer.Typer(invoke_without_command=True)


def measured(verb: str, asked: Any) -> None:
    """Run a verb: every mistake a user can mend is refused before anything is started."""
    from paceline.measure import plots, results

    check_target("--json", asked.json)
    target: Path | None = getattr(asked, "plot", None)
    is_file = verb == "tune"  # the other verbs draw several pictures into a folder
    if target is not None:
        plots.check(None if is_file else target)
        check_target("--plot", target if is_file else None)
    module = results.module_of(verb)
    run = module.Run(asked)
    with console.telling(run.num_turns) as tell:
        report = results.described(verb, run.report(tell))
    if asked.json is not None:
        write_result(asked.json, json.dumps(report, indent=1) + "\n")
    screen = console.stdout()
    for table in module.tables(report):
        console.show(screen, table)
    console.write(screen, module.LEGEND, style="dim")
    _draw(verb, report, target)
    if report.get("is_interrupted") or not report.get("is_ok", True):
        raise typer.Exit(INTERRUPTED if report.get("is_interrupted") else 1)


def tune(asked: options.Tune) -> None:
    measured("tune", asked)


def plan(asked: options.Paper) -> None:
    from paceline.measure import plan as planning
    from paceline.measure import plots

    if asked.plot is not None:
        plots.check()
        check_target("--plot", asked.plot)
    with console.stderr().status("measuring this machine"):
        report = planning.report_of(asked)
    if asked.json:
        console.write_json(console.stdout(), report)
    else:
        for table in planning.tables(report):
            console.show(console.stdout(), table)
    _draw("plan", report, asked.plot)


def _draw(verb: str, report: dict[str, Any], target: Path | None) -> None:
    from paceline.measure import plots

    for path in plots.draw(verb, report, target) if target is not None else ():
        console.write(console.stderr(), f"drawn: {path}\n")


def _tables(asked: options.Tables) -> None:
    from paceline.measure import tables

    for path in tables.run(asked):
        console.write(console.stderr(), f"wrote {path}\n")


app.callback()(as_command(partial(measured, "compare"), options.Compare))
for _name, _options in VERBS.items():
    app.command(_name)(as_command(partial(measured, _name), _options))
app.command("tables")(as_command(_tables))
