"""Where the terminal's words go. Data is written to stdout, everything about the work (progress, errors,
hints) to stderr.

Invariant: unstyled text reaches a pipe or a file byte for byte; rich, which expands tabs and drops control
characters, only styles. Rich leaves colours out by itself when the stream is not a terminal or NO_COLOR is
set.
"""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING, Any, TextIO

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

ESCAPES = {0x1B: None, 0x9B: None}  # what begins a command to a terminal


def prepare_streams() -> None:
    """A character that the stream cannot write becomes a question mark, not a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def stdin() -> TextIO:
    """UTF-8 whatever the locale; bytes that are not become surrogates, which `as_prompt` refuses by name."""
    if sys.stdin is None or sys.stdin.closed:
        remedy = "pipe text into it, or give the prompt as an argument"
        raise ConfigError(f"stdin is closed, so nothing can be read from it; {remedy}")
    if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    return sys.stdin


def stdout(is_recorded: bool = False) -> Console:
    """A recorded console can be saved as a picture."""
    from rich.console import Console

    return Console(highlight=False, record=is_recorded)


def stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def has_colours(console: Console) -> bool:
    return console.record or (console.color_system is not None and not console.no_color)


def write(console: Console, text: str, style: str | None = None) -> None:
    """Text as it is: no markup, no wrapping, no line end."""
    if console.record or (style is not None and console.color_system is not None):
        console.print(text, style=style, end="", markup=False, emoji=False, soft_wrap=True)
        return
    console.file.write(text.translate(ESCAPES) if console.is_terminal else text)
    console.file.flush()


def write_json(console: Console, value: Any) -> None:
    """One line. A stream that is not UTF-8 gets escapes, so that nothing is lost."""
    is_utf8 = (getattr(console.file, "encoding", None) or "utf-8").lower().replace("-", "").startswith("utf8")
    write(console, json.dumps(value, ensure_ascii=not is_utf8) + "\n")


def print_error(error: Exception | str) -> None:
    """One line, however the message was written."""
    console = stderr()
    write(console, "error: ", style="bold red")
    write(console, " ".join(str(error).split()).translate(ESCAPES) + "\n", style="red")
