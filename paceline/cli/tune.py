"""`paceline tune`: measures what drafters cost and gain on the user's model and prompts, and keeps what
`auto` starts from. The work is done in measure/tune.py.
"""

from __future__ import annotations

from paceline.cli import console, parsing
from paceline.cli.bench_console import show, telling
from paceline.cli.fields import as_command
from paceline.measure.options import Tune


def _tune(asked: Tune) -> None:
    from paceline.measure import plots, results
    from paceline.measure import tune as measuring

    parsing.check_target("--json", asked.json)
    if asked.plot is not None:
        plots.check()
        parsing.check_target("--plot", asked.plot)
    plan = measuring.prepare(asked)
    with telling(measuring.num_turns(plan)) as tell:
        report = results.described("tune", measuring.run(plan, tell))
    for table in measuring.tables(report):
        show(console.stdout(), table)
    console.write(console.stdout(), measuring.LEGEND, style="dim")
    if asked.json is not None:
        results.write(asked.json, report)
    if asked.plot is not None:
        plots.save(asked.plot, lambda figure: plots.tuned(figure, report))
        console.write(console.stderr(), f"wrote {asked.plot}\n")
    path = report["profile"]
    where = f"saved {path}" if path else "not saved: the cache folder cannot be written"
    console.write(console.stderr(), f"{where}\n")


tune = as_command(Tune, _tune)
tune.__name__ = "tune"
