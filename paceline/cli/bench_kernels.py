"""`paceline bench kernels`: what checking n tokens costs, kernel by kernel and as a whole, beside what the
machine allows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import console, options, parsing
from paceline.cli.bench_console import new_table, telling
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.measure.kernels import Options

PASSES_SHOWN, KERNELS_SHOWN = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32), (1, 2, 4, 8, 16, 32)  # the file has all
NUMBERS = ("tokens", "ms", "×1", "±", "GB/s", "GMAC/s", "floor", "reached")
LEGEND = """×1: time relative to one token; ±: (slowest - fastest) / median; floor: the longer of two times, reading all weights and cached
tokens at the measured bandwidth and doing all multiply-adds at the measured rate; reached: its share of the time, 100 % is the limit.
"""


def kernels(
    model: options.Model = "default",
    dtypes: Annotated[str, typer.Option(help="Precisions, separated by commas.")] = "int8,float32,int4",
    peers: Annotated[
        str,
        typer.Option(
            help="llama.cpp, llama.cpp:Q8_0, :Q4_0, :F32 or :file, none, or auto: Q8_0 if installed."
        ),
    ] = "auto",
    context: Annotated[int, typer.Option(min=1, help="Cached tokens that every pass sees.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of everything; medians are reported.")] = 5,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the report to this file.")
    ] = None,
) -> None:
    """Time passes and kernels with 1 to 32 tokens, and say how far they are from the machine's limits.

    Limits are measured in the same run: reading memory, int8 dot products, float32 multiply-adds. A pass
    computes the logits of all its tokens, as checking a draft does; llama.cpp's are timed by its own clock
    while it reads prompts whose beginning it has cached, and compute the last token's only. A product runs
    over all layers of the model, so that its weights come from memory. Attention is what a pass takes longer
    over the context than over none. A prompt of 512 tokens is timed as well.
    """
    from paceline.measure.kernels import num_turns, run

    parsing.check_target("--json", json_file)
    chosen = _options(model, dtypes, peers, context, repeats)
    with telling(num_turns(chosen)) as tell:
        report = run(chosen, tell)
    _print(console.stdout(), report)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _options(model: str, dtypes: str, peers: str, context: int, repeats: int) -> Options:
    from paceline.measure import plan as planning
    from paceline.measure.kernels import Options, installed_peer

    names = tuple(row.variant for row in planning.our_rows(dtypes, [planning.PLAIN]))
    if not names:
        raise ConfigError("--dtypes is none, but the kernels are Paceline's own; name int8, float32 or int4")
    rows = installed_peer() if peers == "auto" else tuple(planning.peer_rows(peers, [planning.PLAIN], 1))
    for row in rows:
        if row.peer != "llama.cpp":
            raise ConfigError(
                f"--peers holds {row.peer}, whose passes cannot be timed alone; name llama.cpp, none or auto"
            )
        planning.peer_python(row.peer)
    return Options(model, names, rows, context, repeats)


def _print(screen: Console, report: dict[str, Any]) -> None:
    found = report["limits"]
    console.write(
        screen,
        f"limits of {found['threads']} threads: reading {found['read_gb_s']:.1f} GB/s, int8 {found['int8_gmac_s']:.0f} GMAC/s, "
        f"float32 {found['float32_gmac_s']:.0f} GMAC/s\n",
    )
    passes = [record for record in report["forward"] if record["context"]]
    prompts = [record for record in report["forward"] if not record["context"]]
    _print_table(
        screen, f"passes, {passes[0]['context']} tokens cached", ("engine", "dtype"), passes, PASSES_SHOWN
    )
    _print_table(screen, "prompts", ("engine", "dtype"), prompts, [record["tokens"] for record in prompts])
    _print_table(
        screen, "kernels, all layers together", ("kernel", "shape", "dtype"), report["kernels"], KERNELS_SHOWN
    )
    console.write(screen, LEGEND, style="dim")


def _print_table(
    screen: Console, title: str, names: Sequence[str], records: Sequence[dict[str, Any]], shown: Sequence[int]
) -> None:
    table = new_table(title, names, NUMBERS, folds=False)
    before = None
    for record in records:
        if record["tokens"] in shown:
            own = tuple(record[name] for name in names)
            table.add_row(*(own if own != before else ("",) * len(names)), *_cells(record))
            before = own
    screen.print(table)


def _cells(record: dict[str, Any]) -> list[str]:
    forms = {
        "ms": "{:.2f}",
        "ratio": "{:.2f}",
        "spread": "{:.0%}",
        "gb_s": "{:.1f}",
        "gmac_s": "{:.0f}",
        "floor_ms": "{:.2f}",
    }
    known = {**forms, "of_floor": "{:.0%}"}
    cells = ["-" if record[name] is None else form.format(record[name]) for name, form in known.items()]
    return [str(record["tokens"]), *cells]
