"""The command line: `paceline VERB`. Heavy imports happen when a verb runs, so `--help` is quick. Exit
status: 0 done, 1 a check found a difference, 2 something the user can mend (one line on stderr), 130
interrupted.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import paceline
from paceline.cli import bench, console
from paceline.cli.demo import demo
from paceline.cli.explain import explain
from paceline.cli.generate import chat, generate, serve
from paceline.cli.models import export, models
from paceline.cli.options import as_command
from paceline.cli.train import train
from paceline.cli.verify import verify
from paceline.core.errors import PacelineError

# Typer carries a copy of click or uses click itself; the error it exports leads to the base class of either.
UsageError: Any = typer.BadParameter.__bases__[0]


class _Flags:
    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):  # a flag takes no value, so its help names no type
                param.display_type_rich = lambda ctx: None
        return params


class _Verb(_Flags, TyperCommand): ...


class _Verbs(_Flags, TyperGroup):
    """Turns what a user can mend into one line, for every verb alike."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):  # a character it cannot write becomes a question mark
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        try:
            status = super().main(*args, **{**kwargs, "prog_name": "paceline", "standalone_mode": False})
            sys.exit(status if isinstance(status, int) else 0)
        except UsageError as error:
            path = error.ctx.command_path if error.ctx is not None else "paceline"
            what = error.format_message().rstrip(".")
            console.print_error(f"{what}; `{path} --help` lists what can be given")
        except PacelineError as error:
            console.print_error(error)
        except OSError as error:
            # Else Python would try once more at exit to write what a full disk refused, and complain.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            where, why = error.filename or "a stream", error.strerror or error
            console.print_error(f"{where} cannot be read or written ({why}); choose another")
        except typer.Abort:
            sys.exit(130)
        sys.exit(2)


HELP = "Lossless speculative decoding: the same text, sooner.\n\nStart with [bold]paceline demo[/bold]."
SHOWN: dict[str, Any] = {"help": HELP, "rich_markup_mode": "rich", "pretty_exceptions_enable": False}
app = typer.Typer(name="paceline", cls=_Verbs, invoke_without_command=True, add_completion=False, **SHOWN)


@app.callback()
def _root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"paceline {paceline.__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


VERBS: dict[str, tuple[Any, ...]] = {"Run": (demo, generate, chat, serve), "Make": (train, export)}
VERBS["Inspect"] = (models, verify, bench.tune, bench.plan, explain)
for _panel, _verbs in VERBS.items():
    for _verb in _verbs:
        app.command(_verb.__name__, cls=_Verb, rich_help_panel=_panel)(as_command(_verb))
app.add_typer(bench.app, name="bench", rich_help_panel="Inspect")
