"""`paceline models`: what can be run here, and fetching what cannot yet."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from paceline.cli import console
from paceline.cli.options import JSON_HELP, MAIN
from paceline.core.options import option


@dataclass(frozen=True, kw_only=True)
class Models:
    """List the default model and every model in the caches, with sizes and paths.

    Examples:

      paceline models

      paceline models --fetch default
    """

    fetch: str | None = option(None, MAIN, "Fetch this first: default, or a Hugging Face name.")
    json: bool = option(False, MAIN, JSON_HELP)


def models(asked: Models) -> None:
    from paceline.loaders import hub

    if asked.fetch is not None:
        hub.resolve(asked.fetch)
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
