"""Where the terminal's words go: data to stdout, all about the work (progress, errors, hints) to stderr.
Invariant: unstyled text reaches a pipe or a file byte for byte; rich, which expands tabs and drops control
characters, only styles, and leaves colours out where the stream is not a terminal or NO_COLOR is set.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from paceline.core.errors import ConfigError
from paceline.measure.results import Table, Tell

ESCAPES = {0x1B: None, 0x9B: None}  # what begins a command to a terminal


def stdin() -> TextIO:
    """UTF-8 whatever the locale; bytes that are not become surrogates, which `as_prompt` refuses by name."""
    if sys.stdin is None or sys.stdin.closed:
        raise ConfigError("stdin is closed; pipe text into it, or give the prompt as an argument")
    if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    return sys.stdin


def stdout(is_recorded: bool = False, is_quiet: bool = False) -> Console:
    """A recorded console can be saved as a picture; a quiet one shows nothing, for those who want JSON."""
    return Console(highlight=False, record=is_recorded, quiet=is_quiet)


def stderr() -> Console:
    return Console(stderr=True, highlight=False)


def hint(text: str) -> None:
    stderr().print(text, style="dim", markup=False)


def write(console: Console, text: str, style: str | None = None) -> None:
    """Text as it is: no markup, no wrapping, no line end."""
    if console.quiet:
        return
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


@contextmanager
def telling(num_turns: int | None) -> Iterator[Tell]:
    """A progress bar on stderr. `num_turns` None: not known beforehand."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr()) as progress:
        task = progress.add_task("starting", total=num_turns)
        is_terminal, said = progress.console.is_terminal, set[str]()

        def tell(what: str, num_done: int) -> None:
            progress.update(task, description=what, advance=num_done)
            if not is_terminal and what not in said:
                said.add(what)
                write(progress.console, f"{what}\n")  # a log gets a line where a terminal gets a bar

        yield tell


def show(screen: Console, table: Table) -> None:
    """Columns of words, then columns of numbers; long words may fold where the terminal is narrow."""
    look: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
    made = RichTable(title=table.title, title_justify="left", **look)
    for name in table.names:  # several columns of words hold short ones, which should stay whole
        made.add_column(name, overflow="fold", no_wrap=len(table.names) > 2)
    for name in table.numbers:
        made.add_column(name, justify="right", overflow="fold")
    before: Sequence[str] = ()
    for row in table.rows:  # a name is written once for all its rows
        names = tuple(row[: len(table.names)])
        is_repeated = bool(names) and names == before
        made.add_row(*(("",) * len(names) if is_repeated else names), *row[len(table.names) :])
        before = names
    if table.rows:
        screen.print(made)
    for note in table.notes:
        write(screen, f"{note}\n", style="yellow")
