"""`paceline plan`: what drafting could gain for a model on a machine, worked out from its shape and the
machine's limits alone. The arithmetic is in measure/roofline.py and measure/plan.py.
"""

from __future__ import annotations

from paceline.cli import console, parsing
from paceline.cli.bench_console import show
from paceline.cli.fields import as_command
from paceline.measure.options import Paper


def _plan(asked: Paper) -> None:
    from paceline.measure import plan as planning
    from paceline.measure import plots

    if asked.plot is not None:
        plots.check()
        parsing.check_target("--plot", asked.plot)
    planning.check(asked)
    with console.stderr().status("measuring this machine"):
        machine = planning.machine_of(asked)
    plan = planning.prepare(asked, machine)
    report = planning.report_of(plan)
    if asked.json:
        console.write_json(console.stdout(), report)
    else:
        for table in planning.tables(report):
            show(console.stdout(), table)
    if asked.plot is not None:
        on, ks = plan.target, range(max(*plan.ks, 8) + 1)
        title = f"{plan.name} on {on.hardware.name}, {on.dtype}, batch {on.batch}"
        speedup = plan.gains.speedup
        plots.save(asked.plot, lambda figure: plots.planned(figure, title, plan.alphas, ks, speedup))
        console.write(console.stderr(), f"wrote {asked.plot}\n")


plan = as_command(Paper, _plan)
plan.__name__ = "plan"
