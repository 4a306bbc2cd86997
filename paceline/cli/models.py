"""`paceline models`: what can be run here, and fetching what cannot yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import console, options

if TYPE_CHECKING:
    from paceline.loaders.hub import LocalModel


def models(
    fetch: Annotated[
        str | None, typer.Option(help="Fetch this first: default, or a Hugging Face name.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """List the default model and every model in the caches, with sizes and paths.

    Examples:

      paceline models

      paceline models --fetch default
    """
    from paceline.loaders import hub

    if fetch is not None:
        hub.resolve(fetch)
    found = hub.local_models()
    screen = console.stdout()
    if as_json:
        console.write_json(screen, [{**model._asdict(), "path": str(model.path)} for model in found])
    else:
        _print_table(found)
        more = "Also runs: --model with a .gguf file, a safetensors folder, or a Hugging Face name."
        console.stderr().print(more, style="dim")


def _print_table(found: list[LocalModel]) -> None:
    from rich.table import Table

    table = Table("model", "kind", "size")
    table.add_column("path", overflow="fold")
    for model in found:
        place = str(model.path) if model.is_here else "[dim]fetched on first use[/dim]"
        table.add_row(model.name, model.kind, f"{model.bytes / 1e6:,.0f} MB", place)
    console.stdout().print(table)
