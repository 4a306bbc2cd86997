"""Where the terminal's words go. Data is written to stdout, everything about the work (progress, errors, hints) to stderr.

Rich leaves colours out by itself when the stream is not a terminal or NO_COLOR is set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def stdout(is_recorded: bool = False) -> Console:
    """A recorded console can be saved as a picture."""
    from rich.console import Console

    return Console(highlight=False, record=is_recorded)


def stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def write(console: Console, text: str, style: str | None = None) -> None:
    """Text as it is: no markup, no wrapping, no line end."""
    console.print(text, style=style, end="", markup=False, emoji=False, soft_wrap=True)


def print_error(error: Exception) -> None:
    """One line, however the message was written."""
    console = stderr()
    write(console, "error: ", style="bold red")
    write(console, " ".join(str(error).split()) + "\n", style="red")
