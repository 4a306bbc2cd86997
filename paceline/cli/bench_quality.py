"""`paceline bench quality`: what the small weights cost in quality, as perplexity on a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console, options, parsing
from paceline.cli.bench_console import new_table, telling
from paceline.core.errors import ConfigError


def quality(
    model: options.Model = "default",
    dtypes: Annotated[str, typer.Option(help="Precisions, separated by commas.")] = "float32,int8,int4",
    text: Annotated[Path | None, typer.Option(help="Your text file instead of the shipped one.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the report to this file.")
    ] = None,
) -> None:
    """Perplexity of the same model in several precisions, on contexts of 512 tokens: lower is better.

    Weights and activations are rounded as they are when text is generated. The change is against float32.
    """
    from paceline.measure import plan as planning
    from paceline.measure.quality import read_text, run

    parsing.check_target("--json", json_file)
    names = [row.variant for row in planning.our_rows(dtypes, [planning.PLAIN])]
    if not names:
        raise ConfigError("--dtypes is none, so there is nothing to measure; name float32, int8 or int4")
    words = read_text(text)
    with telling(None) as tell:
        report = run(model, names, words, tell)
    table = new_table(
        f"perplexity, contexts of {report['context']} tokens", ("dtype",), ("perplexity", "change", "tokens")
    )
    for row in report["rows"]:
        change = "-" if row["change"] is None else f"{row['change']:+.2%}"
        table.add_row(row["dtype"], f"{row['perplexity']:.3f}", change, str(row["tokens"]))
    console.stdout().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
