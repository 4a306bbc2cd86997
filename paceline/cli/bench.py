"""`paceline bench`: Paceline and its peers on the same prompts. Alone it runs the comparison; sub-commands
measure single parts.

Options are the dataclasses of measure/options.py, the work is done in paceline/measure/; here are the
progress bar, the tables and the exit status.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import console, parsing
from paceline.cli.bench_console import show, telling
from paceline.cli.options import Given, as_command, with_options
from paceline.core.errors import ConfigError
from paceline.core.options import options_of
from paceline.measure import options

VERBS = {
    "decode": options.Decode,
    "batch": options.Batch,
    "step": options.Step,
    "kernels": options.Kernels,
    "quality": options.Quality,
    "serve": options.Serve,
    "soak": options.Soak,
}
INTERRUPTED = 130
app = typer.Typer(invoke_without_command=True)


def measured(verb: str, asked: Any) -> None:
    """Run a verb: every mistake a user can mend is refused before anything is started."""
    from paceline.measure import plots, results

    parsing.check_target("--json", asked.json)
    target: Path | None = getattr(asked, "plot", None)
    is_file = verb == "tune"  # the other verbs draw several pictures into a folder
    if target is not None:
        plots.check(None if is_file else target)
        parsing.check_target("--plot", target if is_file else None)
    module = results.module_of(verb)
    run = module.Run(asked)
    with telling(run.num_turns) as tell:
        report = results.described(verb, run.report(tell))
    if asked.json is not None:
        asked.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    screen = console.stdout()
    for table in module.tables(report):
        show(screen, table)
    console.write(screen, module.LEGEND, style="dim")
    for path in plots.draw(verb, report, target) if target is not None else ():
        console.write(console.stderr(), f"drawn: {path}\n")
    if report.get("is_interrupted"):
        raise typer.Exit(INTERRUPTED)
    if not report.get("is_ok", True):
        raise typer.Exit(1)


def _compare(ctx: typer.Context, given: Annotated[Given, options_of(options.Compare)]) -> None:
    if ctx.invoked_subcommand is None:
        measured("compare", options.Compare(**given))
    elif given:  # an option before the sub-command would be read by none
        option, verb = "--" + next(iter(given)).replace("_", "-"), ctx.invoked_subcommand
        raise ConfigError(f"{option} stands before {verb}; write it after the sub-command's name")


def _tables(asked: options.Tables) -> None:
    from paceline.measure import results

    for path in results.run(asked):
        console.write(console.stderr(), f"wrote {path}\n")


_compare.__doc__ = options.Compare.__doc__
app.callback()(with_options(_compare))
for _name, _options in VERBS.items():
    app.command(_name)(as_command(_options, partial(measured, _name)))
app.command("tables")(as_command(options.Tables, _tables))
