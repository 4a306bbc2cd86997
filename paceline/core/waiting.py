"""Tells a person at a terminal what takes long, on stderr, and only if it does."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 1.0  # what is done sooner needs no words


@contextmanager
def waiting(what: str, is_wanted: bool = True) -> Iterator[None]:
    """Around slow work: after a second, a line that counts the seconds (in a log, one line without a
    count)."""
    done = threading.Event()
    reporter = threading.Thread(target=_report, args=(what, done), daemon=True)
    if is_wanted:
        reporter.start()
    try:
        yield
    finally:
        done.set()
        if is_wanted:
            reporter.join()


def _report(what: str, done: threading.Event) -> None:
    started, is_terminal = time.monotonic(), sys.stderr.isatty()
    if done.wait(PATIENCE_S):
        return
    if not is_terminal:
        print(f"paceline: {what}", file=sys.stderr, flush=True)
        return
    while True:
        print(f"\rpaceline: {what} {time.monotonic() - started:.0f} s", end="", file=sys.stderr, flush=True)
        if done.wait(PATIENCE_S):
            break
    print("\r\x1b[K", end="", file=sys.stderr, flush=True)
