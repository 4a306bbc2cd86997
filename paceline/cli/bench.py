"""`paceline bench`: Paceline and its peers on the same prompts. Alone it runs the comparison; sub-commands
measure single parts.

Options are the dataclasses of measure/options.py, the work is done in paceline/measure/; here are the
progress bar, the tables and the exit status.
"""

from __future__ import annotations

from typing import Any

import typer

from paceline.cli import console, parsing
from paceline.cli.bench_console import show, telling
from paceline.cli.fields import as_command, with_fields
from paceline.core.errors import ConfigError
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
    from paceline.measure.tables import module_of

    parsing.check_target("--json", asked.json)
    folder = getattr(asked, "plot", None)
    if folder is not None:
        plots.check(folder)
    module = module_of(verb)
    plan = module.prepare(asked)
    with telling(module.num_turns(plan)) as tell:
        report = results.described(verb, module.run(plan, tell))
    if asked.json is not None:
        results.write(asked.json, report)
    screen = console.stdout()
    for table in module.tables(report):
        show(screen, table)
    console.write(screen, module.LEGEND, style="dim")
    for path in plots.draw(verb, report, folder) if folder is not None else ():
        console.write(console.stderr(), f"drawn: {path}\n")
    if report.get("is_interrupted"):
        raise typer.Exit(INTERRUPTED)
    if not report.get("is_ok", True):
        raise typer.Exit(1)


def _compare(ctx: typer.Context, **chosen: Any) -> None:
    if ctx.invoked_subcommand is None:
        measured("compare", options.Compare(**chosen))
        return
    for name in chosen:  # an option before the sub-command would be read by none
        source = ctx.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{option} stands before {ctx.invoked_subcommand}; write it after the sub-command's name"
            )


def _tables(asked: options.Tables) -> None:
    from paceline.measure import tables

    for path in tables.run(asked):
        console.write(console.stderr(), f"wrote {path}\n")


def _verb(name: str) -> Any:
    return as_command(VERBS[name], lambda asked: measured(name, asked))


app.callback()(with_fields(_compare, options.Compare, {"ctx": typer.Context}))
for _name in VERBS:
    app.command(_name)(_verb(_name))
app.command("tables")(as_command(options.Tables, _tables))
