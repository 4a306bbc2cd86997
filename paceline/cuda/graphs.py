"""CUDA graphs of whole passes, one for each bucket, captured when first needed and replayed ever after.

A launch costs the host a few microseconds and a pass has hundreds; a graph is one launch. Invariant: a
recording's outputs lie at fixed addresses and are overwritten by the next replay of any recording, since all
share one pool of memory: whoever replays copies what it keeps.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
import triton

LIMIT = 128  # recordings kept; the one not used for longest goes first
WARM_UPS = 1  # runs before a capture: kernels are compiled, which a capture does not allow

Run = Callable[[], Any]  # launches kernels, returns the tensors they write
Capture = Callable[[Run], "Recording"]


class Recording(NamedTuple):
    replay: Callable[[], None]
    outputs: Any  # what the run returned; its content is as of the last replay
    run: Run  # what was recorded: a graph keeps addresses, and no memory that its run has brought along


class Loads:
    """Kernels that were compiled and loaded in this process so far, each when it was first launched."""

    def __init__(self) -> None:
        self.count = 0
        triton.knobs.runtime.kernel_load_end_hook.add(self._add)

    def _add(self, *_: Any, **__: Any) -> None:
        self.count += 1


LOADS = Loads()


class CudaCapture:
    """Captures on one device, all recordings in one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._num_recorded = 0

    @property
    def num_recordings(self) -> int:
        """Of graphs, and of kernels: each takes as long as hundreds of replays, once."""
        return self._num_recorded + LOADS.count

    def __call__(self, run: Run) -> Recording:
        self._num_recorded += 1
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        was_collecting = gc.isenabled()
        # pinned memory that is collected notes an event, and no event may be noted while a graph is captured
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                outputs = run()
        finally:
            # what a compiler leaves behind is much, and stays: no later collection need look at it
            gc.freeze()
            if was_collecting:
                gc.enable()
        return Recording(graph.replay, outputs, run)


class Graphs:
    """Recordings by key, at most LIMIT of them."""

    def __init__(self, capture: Capture, limit: int = LIMIT) -> None:
        self._capture, self._limit = capture, limit
        self._recordings: OrderedDict[Hashable, tuple[Recording, Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recordings)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._recordings

    def get(self, key: Hashable, make: Callable[[], tuple[Run, Any]]) -> tuple[Recording, Any]:
        """The recording of a key and what `make` gave along with it (its inputs); `make` says what to record
        if there is none.
        """
        if key not in self._recordings:
            while len(self._recordings) >= self._limit:
                self._recordings.popitem(last=False)
            run, beside = make()
            self._recordings[key] = (self._capture(run), beside)
        self._recordings.move_to_end(key)
        return self._recordings[key]
