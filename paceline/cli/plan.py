"""`paceline plan`: what drafting could gain for a model on a machine, worked out from its shape and the
machine's limits alone. The arithmetic is in measure/roofline.py and measure/plan.py.
"""

from __future__ import annotations

from paceline.cli import console, parsing
from paceline.cli.bench_console import show
from paceline.cli.options import as_command
from paceline.measure.options import Paper


def _plan(asked: Paper) -> None:
    from paceline.measure import plan as planning
    from paceline.measure import plots

    if asked.plot is not None:
        plots.check()
        parsing.check_target("--plot", asked.plot)
    planning.check(asked)
    with console.stderr().status("measuring this machine"):
        report = planning.report_of(asked)
    if asked.json:
        console.write_json(console.stdout(), report)
    else:
        for table in planning.tables(report):
            show(console.stdout(), table)
    for path in plots.draw("plan", report, asked.plot) if asked.plot is not None else ():
        console.write(console.stderr(), f"drawn: {path}\n")


plan = as_command(Paper, _plan)
plan.__name__ = "plan"
