"""A capture for devices without CUDA graphs: a replay runs the same launches again and writes the same
outputs. And an executor over a decoder that was captured so.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.cuda.backend import CudaBackend
from paceline.cuda.decoder import CudaDecoder
from paceline.cuda.graphs import Capture, Recording, Run
from paceline.runtime.executor import KvMemory, LocalExecutor


def _tensors(outputs: Any) -> list[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    inner = outputs.values() if isinstance(outputs, dict) else outputs or ()
    return [tensor for each in inner for tensor in _tensors(each)]


class CountingCapture(Capture):
    @property
    def num_recordings(self) -> int:
        return self._num_recorded

    def __call__(self, run: Run) -> Recording:
        self._num_recorded += 1
        outputs = run()

        def replay() -> None:
            for kept, new in zip(_tensors(outputs), _tensors(run()), strict=True):
                kept.copy_(new)

        return Recording(replay, outputs, run)


def capture_on(device: torch.device) -> Capture:
    return Capture() if device.type == "cuda" else CountingCapture()


def executor_of(decoder: CudaDecoder, num_blocks: int) -> LocalExecutor:
    backend = CudaBackend(decoder.device, decoder.is_exact, decoder.capture)
    return LocalExecutor(backend, decoder, KvMemory(decoder.config, num_blocks, decoder.device))
