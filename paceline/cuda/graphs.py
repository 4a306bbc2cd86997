"""CUDA graphs of whole passes, one for each bucket, captured while a model is loaded and replayed ever after.

A launch costs the host a few microseconds and a pass has hundreds; a graph is one launch. Invariant: nothing
is recorded on the way: what was not recorded before runs kernel by kernel. A recording's outputs lie at fixed
addresses and are overwritten by the next replay of any recording, since all share one pool of memory: what is
to be kept is copied before.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from paceline.cuda.batch import Buffer

Run = Callable[[], Any]  # launches kernels, returns the tensors they write
Make = Callable[[], tuple[Run, Any]]  # gives what to record, and the Buffer that it reads


class Recording(NamedTuple):
    replay: Callable[[], None]
    outputs: Any  # what the run returned; its content is as of the last replay
    run: Run  # what was recorded: a graph keeps addresses, and no memory that its run has brought along


# One for each kernel that was compiled and loaded in this process, when it was first launched.
_KERNEL_LOADS: list[None] = []
triton.knobs.runtime.kernel_load_end_hook.add(lambda *_, **__: _KERNEL_LOADS.append(None))


class Capture:
    """Makes recordings on one device, all of them in one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._num_recorded = 0

    @property
    def num_recordings(self) -> int:
        """Graphs, and kernels loaded: each takes as long as many replays: no request should wait."""
        return self._num_recorded + len(_KERNEL_LOADS)

    def __call__(self, run: Run) -> Recording:
        self._num_recorded += 1
        self._pool = self._pool or torch.cuda.graph_pool_handle()
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


class Arriving(Sequence[Any]):
    """Numbers on their way to the host, in line before anything that overwrites their source. The first read
    waits for them, the one time in a step."""

    def __init__(self, source: torch.Tensor) -> None:
        is_cuda = source.device.type == "cuda"
        self._event = torch.cuda.Event() if is_cuda else None
        self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=is_cuda)
        self._host.copy_(source, non_blocking=True)
        if self._event is not None:
            self._event.record()

    @cached_property
    def array(self) -> np.ndarray:
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()

    @cached_property
    def _numbers(self) -> list[Any]:
        return self.array.tolist()

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return self._numbers[index]


class Graphs:
    """Recordings by key."""

    def __init__(self, capture: Callable[[Run], Recording]) -> None:
        self._capture = capture
        self._recordings: dict[Hashable, tuple[Recording, Any]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._recordings

    def launch(self, key: Hashable, make: Make, values: Mapping[str, Any]) -> Any:
        """The outputs of what `make` gives, with these inputs: recorded by the key, or kernel by kernel."""
        if key in self._recordings:
            (replay, outputs, _), buffer = self._recordings[key]
            buffer.fill(values)
            replay()
            return outputs
        run, buffer = make()
        buffer.fill(values)
        return run()

    def record(self, key: Hashable, make: Make) -> tuple[Recording, Any]:
        """The recording of a key and its inputs, which `make` gives along with what to record."""
        if key not in self._recordings:
            run, beside = make()
            self._recordings[key] = (self._capture(run), beside)
            if isinstance(beside, Buffer):
                beside.pin()
        return self._recordings[key]
