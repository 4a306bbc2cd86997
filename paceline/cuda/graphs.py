"""CUDA graphs of whole passes, one for each bucket, captured when first needed and replayed ever after.

A launch costs the host a few microseconds and a pass has hundreds; a graph is one launch. Invariant: a
recording's outputs lie at fixed addresses and are overwritten by the next replay of any recording, since all
share one pool of memory: what is to be kept is copied before.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import torch
import triton

LIMIT = 128  # recordings kept; the one not used for longest goes first

Run = Callable[[], Any]  # launches kernels, returns the tensors they write


class Recording(NamedTuple):
    replay: Callable[[], None]
    outputs: Any  # what the run returned; its content is as of the last replay
    run: Run  # what was recorded: a graph keeps addresses, and no memory that its run has brought along


class Capture(Protocol):
    """Makes recordings."""

    @property
    def num_recordings(self) -> int: ...  # graphs, and kernels loaded: each takes as long as many replays
    def __call__(self, run: Run) -> Recording: ...


# One for each kernel that was compiled and loaded in this process, when it was first launched.
_KERNEL_LOADS: list[None] = []
triton.knobs.runtime.kernel_load_end_hook.add(lambda *_, **__: _KERNEL_LOADS.append(None))


class CudaCapture:
    """Captures on one device, all recordings in one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._num_recorded = 0

    @property
    def num_recordings(self) -> int:
        return self._num_recorded + len(_KERNEL_LOADS)

    def __call__(self, run: Run) -> Recording:
        self._num_recorded += 1
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # kernels are compiled, which a capture does not allow
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        was_collecting = gc.isenabled()
        # Pinned memory that is collected notes an event, and no event may be noted while a graph is captured.
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                outputs = run()
        finally:
            gc.freeze()  # what a compiler leaves behind is much, and stays: no later collection visits it
            if was_collecting:
                gc.enable()
        return Recording(graph.replay, outputs, run)


class Graphs:
    """Recordings by key, at most `limit` of them."""

    def __init__(self, capture: Callable[[Run], Recording], limit: int = LIMIT) -> None:
        self._capture, self._limit = capture, limit
        self._recordings: OrderedDict[Hashable, tuple[Recording, Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recordings)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._recordings

    def get(self, key: Hashable, make: Callable[[], tuple[Run, Any]]) -> tuple[Recording, Any]:
        """The recording of a key and its inputs, which `make` gives along with what to record."""
        if key not in self._recordings:
            while len(self._recordings) >= self._limit:
                self._recordings.popitem(last=False)
            run, beside = make()
            self._recordings[key] = (self._capture(run), beside)
        self._recordings.move_to_end(key)
        return self._recordings[key]
