"""The command line: `paceline VERB`. Each verb is one module; heavy imports happen when a verb runs, so `--help` is quick.

Exit status: 0 done, 1 a check found a difference, 2 something the user can mend (one line on stderr), 130 interrupted.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline.cli import chat, console, demo, generate, models, verify
from paceline.errors import PacelineError


class _Verbs(TyperGroup):
    """Turns what a user can mend into one line, for every verb alike."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PacelineError as error:
            console.print_error(error)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


app = typer.Typer(
    name="paceline",
    cls=_Verbs,
    no_args_is_help=True,
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
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    pass


app.command(rich_help_panel="Run")(demo.demo)
app.command(rich_help_panel="Run")(generate.generate)
app.command(rich_help_panel="Run")(chat.chat)
app.command(rich_help_panel="Inspect")(models.models)
app.command(rich_help_panel="Inspect")(verify.verify)
