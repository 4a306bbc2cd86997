"""`paceline bench`: Paceline and its peers on the same prompts. Alone it runs the comparison; sub-commands
measure single parts.

The work is done in paceline/measure/; here are the options, the progress bar and the table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import console, options, parsing
from paceline.cli.bench_console import new_table, telling
from paceline.cli.bench_kernels import kernels
from paceline.cli.bench_quality import quality
from paceline.cli.bench_serve import serve
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from paceline.measure.measure import Result
    from paceline.measure.plan import Plan

app = typer.Typer(invoke_without_command=True)
app.command()(kernels)
app.command()(quality)
app.command()(serve)

OVERALL = "overall"
COLUMNS = ("tok/s", "±", "speedup", "τ", "α", "same", "TTFT", "TPOT", "e2e", "MB")
LEGEND = """tok/s, speedup: of decoding, after the first token; ±: (largest - smallest) / median of the repeats; τ: tokens a step;
α: share of drafted tokens accepted; same: answers equal to plain decoding's; TTFT, TPOT: milliseconds to the first token and for
each further one; e2e: tokens a second, reading the prompt included; MB: most memory the process held.
"""


@app.callback()
def bench(
    ctx: typer.Context,
    model: options.Model = "default",
    prompts: Annotated[
        Path | None,
        typer.Option(help="Your prompts (.jsonl as Spec-Bench has it, or .txt) instead of the shipped ones."),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Drafters, separated by commas, or auto; none is plain decoding.")
    ] = "none,auto,ngram",
    dtypes: Annotated[
        str, typer.Option(help="Our own engine in these precisions: int8, float32, int4; or none.")
    ] = "int8,float32",
    peers: Annotated[
        str,
        typer.Option(
            help="all, none, or names: llama.cpp, transformers, vllm; one file alone: llama.cpp:Q8_0, :Q4_0, :F32, :file."
        ),
    ] = "none",
    draft_model: options.DraftModel = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many prompts of each task.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    repeats: Annotated[
        int, typer.Option(min=1, help="Timed runs of every prompt; medians are reported.")
    ] = 3,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Requests in flight; above 1 the prompts of a task run together.")
    ] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the report to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw it into this folder: speedups, verify cost, acceptance.")
    ] = None,
) -> None:
    """Compare speeds: methods, precisions and peers, interleaved in one run.

    Every engine is a process of its own and gets the same token ids (of multi-turn prompts the first turn).
    An untimed plain run of ours says how long each answer is, at least 8 tokens and at most --max-new-tokens;
    then every engine writes exactly so many, greedily, with the end token ignored. Tokens/s counts the
    prompt's reading too. Speedup and identity are against the same engine's plain decoding. The first prompt
    of each task runs once more beforehand, untimed. Peers are installed by `make peers`.

    Examples:

      paceline bench --limit 2 --json report.json

      paceline bench --methods none,ngram,quantized --peers llama.cpp:Q8_0,transformers --plot plots
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return
    from paceline.measure import plots

    parsing.check_target("--json", json_file)
    plan = _plan(
        model, prompts, methods, dtypes, peers, draft_model, limit, max_new_tokens, repeats, concurrency
    )
    if plot is not None:
        plots.check(plot)
    result = _run(plan, with_curve=plot is not None)
    _print(console.stdout(), result)
    if json_file is not None:
        report: dict[str, Any] = {
            "machine": result.machine,
            "rows": result.rows,
            "notes": result.notes,
            "verify_cost": result.verify_cost,
        }
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for path in plots.draw(result, plot) if plot is not None else ():
        console.write(console.stderr(), f"drawn: {path}\n")


def _refuse_options(ctx: typer.Context) -> None:
    """An option before the sub-command would be read by nobody."""
    for name in ctx.params:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            option = "--json" if name == "json_file" else "--" + name.replace("_", "-")
            raise ConfigError(
                f"{option} stands before {ctx.invoked_subcommand}; write it after the sub-command's name"
            )


def _plan(
    model: str,
    prompts: Path | None,
    methods: str,
    dtypes: str,
    peers: str,
    draft_model: str | None,
    limit: int | None,
    max_new_tokens: int,
    repeats: int,
    concurrency: int,
) -> Plan:
    """Everything a user can get wrong is refused here, before a process is started."""
    from paceline.measure import plan as planning
    from paceline.measure import prompts as prompt_files

    chosen = prompt_files.load(prompts)
    chosen = prompt_files.first_of_each(chosen, limit) if limit is not None else chosen
    names = planning.methods_of(methods, draft_model)
    rows = planning.our_rows(dtypes, names) + planning.peer_rows(peers, names, concurrency)
    if not rows:
        raise ConfigError(
            "--dtypes and --peers are both none, so there is nothing to measure; name an engine"
        )
    for row in rows:
        planning.peer_python(row.peer)
    shortest = min(8, max_new_tokens)
    return planning.Plan(
        model, tuple(rows), tuple(chosen), draft_model, max_new_tokens, shortest, repeats, concurrency
    )


def _run(plan: Plan, with_curve: bool) -> Result:
    from paceline.measure import measure

    with telling(measure.num_turns(plan)) as tell:
        return measure.run(plan, tell, with_curve)


def _print(screen: Console, result: Result) -> None:
    """Speeds by task, then everything over all tasks."""
    for heading, name, form in (
        ("tokens/s", "tokens_per_second", "{:.1f}"),
        ("speedup over plain", "speedup", "{:.2f}"),
    ):
        screen.print(_by_task(result, f"{heading}, by task", name, form))
    overall = [row for row in result.rows if row["task"] == OVERALL]
    table = new_table(f"overall, {overall[0]['prompts']} prompts", ("engine", "method"), COLUMNS)
    for row in overall:
        table.add_row(row["engine"], row["method"], *_cells(row))
    screen.print(table)
    for engine, note in result.notes.items():
        console.write(screen, f"{engine}: {note}\n", style="yellow")
    console.write(screen, LEGEND, style="dim")


def _by_task(result: Result, title: str, name: str, form: str) -> Table:
    """Whatever there is more of goes down the page."""
    tasks = list(dict.fromkeys(row["task"] for row in result.rows))
    who = list(dict.fromkeys((row["engine"], row["method"]) for row in result.rows))
    cells = {(row["engine"], row["method"], row["task"]): _number(row, name, form) for row in result.rows}
    if len(who) >= len(tasks):
        table = new_table(title, ("engine", "method"), tasks)
        for engine, method in who:
            table.add_row(engine, method, *(cells[engine, method, task] for task in tasks))
        return table
    table = new_table(title, ("task",), [f"{engine}, {method}" for engine, method in who])
    for task in tasks:
        table.add_row(task, *(cells[engine, method, task] for engine, method in who))
    return table


def _number(row: dict[str, Any], name: str, form: str) -> str:
    return "-" if row[name] is None else form.format(row[name])


def _cells(row: dict[str, Any]) -> list[str]:
    same = "-" if row["identical"] is None else f"{row['identical']}/{row['prompts']}"
    speeds = [
        _number(row, "tokens_per_second", "{:.1f}"),
        _number(row, "spread", "{:.0%}"),
        _number(row, "speedup", "{:.2f}"),
    ]
    counts = [_number(row, "tau", "{:.2f}"), _number(row, "alpha", "{:.2f}"), same]
    times = [
        _number(row, "ttft_ms", "{:.0f}"),
        _number(row, "tpot_ms", "{:.1f}"),
        _number(row, "end_to_end_tokens_per_second", "{:.1f}"),
    ]
    return [*speeds, *counts, *times, _number(row, "peak_mb", "{:.0f}")]
