"""What the verbs of `paceline bench` show: a progress bar on stderr, tables on stdout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.cli import console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

    from paceline.measure.results import Table

Tell = Callable[[str, int], None]  # what is being done, and how many turns have just been finished


@contextmanager
def telling(num_turns: int | None) -> Iterator[Tell]:
    """`num_turns` None: not known beforehand."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console.stderr()) as progress:
        task = progress.add_task("starting", total=num_turns)
        is_terminal, said = progress.console.is_terminal, set[str]()

        def tell(what: str, num_done: int) -> None:
            progress.update(task, description=what, advance=num_done)
            if not is_terminal and what not in said:
                said.add(what)
                console.write(progress.console, f"{what}\n")  # a log gets a line where a terminal gets a bar

        yield tell


def show(screen: Console, table: Table) -> None:
    is_short = len(table.names) > 2  # several columns of words hold short ones, which should stay whole
    made = new_table(table.title, table.names, table.numbers, folds=not is_short)
    before: Sequence[str] = ()
    for row in table.rows:  # a name is written once for all its rows
        names = tuple(row[: len(table.names)])
        is_repeated = bool(names) and names == before
        made.add_row(*(("",) * len(names) if is_repeated else names), *row[len(table.names) :])
        before = names
    if table.rows:
        screen.print(made)
    for note in table.notes:
        console.write(screen, f"{note}\n", style="yellow")


def new_table(title: str, names: Sequence[str], numbers: Sequence[str], folds: bool = True) -> RichTable:
    """Columns of words, then columns of numbers; long words may fold where the terminal is narrow."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for name in names:
        table.add_column(name, overflow="fold", no_wrap=not folds)
    for name in numbers:
        table.add_column(name, justify="right", overflow="fold")
    return table
