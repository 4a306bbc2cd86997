"""Makes the next batches while the current one is computed on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

from paceline.train.stream import Batch

DEPTH = 4


def prefetched(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches in the same order. What a thread makes too much is thrown away; an error in it is
    raised here.
    """
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(DEPTH)
    is_closed = threading.Event()

    def put(item: Batch | BaseException | None) -> None:
        while not is_closed.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def make() -> None:
        try:
            for batch in batches:
                if is_closed.is_set():
                    return
                put(batch)
            put(None)
        except Exception as error:  # handed over, not hidden
            put(error)

    thread = threading.Thread(target=make, name="batches", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        is_closed.set()
        thread.join()
