"""The command line: `paceline VERB`. Each verb is one module; heavy imports happen when a verb runs, so
`--help` is quick.

Exit status: 0 done, 1 a check found a difference, 2 something the user can mend (one line on stderr), 130
interrupted.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from paceline.cli import bench, console
from paceline.cli.options import with_options
from paceline.core.errors import PacelineError

# Typer carries a copy of click or uses click itself; the error it exports leads to the base class of either.
UsageError: Any = typer.BadParameter.__bases__[0]


class _Verb(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))


class _Verbs(TyperGroup):
    """Turns what a user can mend into one line, for every verb alike."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))

    def main(self, *args: Any, **kwargs: Any) -> Any:
        console.prepare_streams()
        sys.exit(self._status(*args, **{**kwargs, "prog_name": "paceline", "standalone_mode": False}))

    def _status(self, *args: Any, **kwargs: Any) -> int:
        try:
            status = super().main(*args, **kwargs)
            return status if isinstance(status, int) else 0
        except UsageError as error:
            path = error.ctx.command_path if error.ctx is not None else "paceline"
            what = error.format_message().rstrip(".")
            console.print_error(f"{what}; `{path} --help` lists what can be given")
        except PacelineError as error:
            console.print_error(error)
        except OSError as error:
            _forget_unwritten()
            where, why = error.filename or "a stream", error.strerror or error
            console.print_error(f"{where} cannot be read or written ({why}); choose another")
        except typer.Abort:
            return 130
        return 2


def _forget_unwritten() -> None:
    """Else Python would try once more at exit to write what a full disk refused, and complain in many
    lines."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _without_flag_types(params: list[Any]) -> list[Any]:
    """A flag takes no value, so its help names no type."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.display_type_rich = lambda ctx: None
    return params


app = typer.Typer(
    name="paceline",
    cls=_Verbs,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Lossless speculative decoding: the same text, sooner.\n\nStart with [bold]paceline demo[/bold].",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from paceline import __version__

        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


VERBS = {  # each a function in the module of its name
    "Run": ("demo", "generate", "chat", "serve"),
    "Make": ("train", "export"),
    "Inspect": ("models", "verify", "tune", "plan", "explain"),
}
for _panel, _names in VERBS.items():
    for _name in _names:
        _verb = getattr(importlib.import_module(f"paceline.cli.{_name}"), _name)
        app.command(cls=_Verb, rich_help_panel=_panel)(with_options(_verb))
app.add_typer(bench.app, name="bench", rich_help_panel="Inspect")
