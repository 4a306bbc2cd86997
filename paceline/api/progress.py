"""How many prompts of a batch are answered, on stderr: a bar of our own, or one that works as tqdm's does.

Invariant: without one nothing is imported and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.core.options import require

Show = Callable[[int], None]  # is told how many are done
WHAT = "Processed prompts"


@contextmanager
def progress(wanted: bool | Callable[..., Any], total: int) -> Iterator[Show | None]:
    """wanted: True, or what makes a bar when it is called with total and desc, as tqdm is."""
    require(isinstance(wanted, bool) or callable(wanted), "use_tqdm", wanted, "use True, False or a callable")
    if wanted is False:
        yield None
    elif wanted is True:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn(WHAT), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as screen:
            task = screen.add_task(WHAT, total=total)
            yield lambda done: screen.update(task, completed=done)
    else:
        bar, shown = wanted(total=total, desc=WHAT), 0

        def show(done: int) -> None:
            nonlocal shown
            bar.update(done - shown)
            shown = done

        try:
            yield show
        finally:
            bar.close()
