"""`paceline models`: what can be run here, and fetching what cannot yet. `paceline export`: a head of ours in
a format that other engines read.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

import typer
from rich.table import Table

from paceline.cli import console
from paceline.cli.options import JSON_HELP, MAIN, MODEL_HELP
from paceline.core.options import option

DEFAULT_VERIFIER = "HuggingFaceTB/SmolLM2-135M-Instruct"  # where the default model comes from


@dataclass(frozen=True, kw_only=True)
class Models:
    """List the default model and every model in the caches, with sizes and paths.

    Examples:

      paceline models

      paceline models --fetch default

      paceline models --check Qwen/Qwen3-0.6B"""

    check: str | None = option(
        None, MAIN, "Say whether and how this model would run here; fetches no weights."
    )
    fetch: str | None = option(None, MAIN, "Fetch this first: default, or a Hugging Face name.")
    json: bool = option(False, MAIN, JSON_HELP)


def models(asked: Models) -> None:
    from paceline.loaders import hub

    if asked.fetch is not None:
        hub.resolve(asked.fetch)
    if asked.check is not None:
        return _check(asked.check, asked.json)
    found, screen = hub.local_models(), console.stdout()
    if asked.json:
        return console.write_json(screen, [{**model._asdict(), "path": str(model.path)} for model in found])
    table = Table("model", "kind", "size")
    table.add_column("path", overflow="fold")
    for model in found:
        place = str(model.path) if model.is_here else "[dim]fetched on first use[/dim]"
        table.add_row(model.name, model.kind, f"{model.bytes / 1e6:,.0f} MB", place)
    screen.print(table)
    return console.hint("Also runs: --model with a .gguf file, a safetensors folder, or a Hugging Face name.")


def _check(model: str, as_json: bool) -> None:
    from paceline.measure import check

    report, screen = check.report_of(model), console.stdout()
    if as_json:
        console.write_json(screen, report)
    else:
        for table in check.tables(report):
            console.show(screen, table)
    if not report["runs"]:
        raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a head as other engines read it.

    vLLM takes the result as "model" of its speculative_config, with method eagle3, medusa, dflash, or dspark
    for a DFlash head with a Markov head.

    Examples:

      paceline export ./head --format vllm -o ./head-vllm

      paceline export ./head -m ./my-model --format speculators -o ./speculator"""

    head: str = option(MISSING, MAIN, "The folder of a head: eagle, medusa or dflash.", is_argument=True)
    out: Path = option(MISSING, MAIN, "Where it is written.", "-o")
    format: str = option("vllm", MAIN, "speculators (eagle, dflash), vllm (all), or eagle (its authors').")
    target: str = option("default", MAIN, MODEL_HELP, "-m")
    verifier: str | None = option(None, MAIN, "What the other engine calls the target, if not the same.")


def export(asked: Export) -> None:
    from paceline.loaders import hub
    from paceline.loaders.checkpoint import open_checkpoint
    from paceline.loaders.heads import export_head, open_head

    checkpoint = open_checkpoint(asked.target)
    head = open_head(asked.head, checkpoint, ("eagle", "medusa", "dflash"))
    usual = DEFAULT_VERIFIER if asked.target.lower() in hub.DEFAULT_ALIASES else checkpoint.name
    name = asked.verifier or usual
    export_head(head, checkpoint, asked.format, asked.out, name)
    size = (asked.out / "model.safetensors").stat().st_size
    what = f"{head.config.kind} head for {name} in the {asked.format} format"
    console.stderr().print(f"{what}: {asked.out} ({size / 1e6:.1f} MB)")
