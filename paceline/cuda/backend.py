"""The backend of an NVIDIA GPU: Triton kernels recorded as CUDA graphs, for the decoder, heads and bursts."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from paceline.core.errors import ConfigError
from paceline.cuda.burst import CudaBurstBackend
from paceline.cuda.chain_head import CudaChainHead
from paceline.cuda.decoder import CudaDecoder
from paceline.cuda.graphs import Capture
from paceline.cuda.parallel_heads import CudaBlockHead, CudaMedusaHead
from paceline.cuda.recorded_head import MOST_DRAFTED
from paceline.cuda.weights import dtype_of
from paceline.loaders.head_files import HeadInput
from paceline.models.attention import FLOATS, KvFormat

Recorded = TypeVar("Recorded", CudaChainHead, CudaBlockHead, CudaMedusaHead, CudaBurstBackend)


class CudaBackend:
    default_dtype = "bfloat16"
    most_drafted = MOST_DRAFTED  # of more, nothing is recorded
    most_matched = 4  # of more, the device would wait for the host

    def __init__(self, device: torch.device, exact: bool = False, capture: Capture | None = None) -> None:
        """exact: a row has the same bits in every pass. capture: for all recordings, which share memory."""
        self.device, self._exact = device, exact
        self._capture = capture or Capture()

    @property
    def is_async(self) -> bool:
        return self.device.type == "cuda"

    @property
    def num_recordings(self) -> int:
        return self._capture.num_recordings

    def check_dtype(self, dtype: str) -> None:
        dtype_of(dtype)

    def kv_format(self, dtype: str, asked: str) -> KvFormat:
        """As exact as the arithmetic of the pass, unless integers are asked for."""
        if asked not in ("auto", "int8"):
            raise ConfigError(f"kv_cache_dtype is {asked!r}; choose auto or int8")
        if asked == "int8":
            return KvFormat(torch.int8, torch.int8)
        if dtype == "float32":
            return FLOATS
        narrow = torch.float16 if dtype == "float16" else torch.bfloat16
        return KvFormat(narrow, narrow)

    def load(self, source: Any, dtype: str, context: int | None = None) -> CudaDecoder:
        return CudaDecoder.load(source, dtype, self.device, context, self._exact, self._capture)

    def record(self, decoder: CudaDecoder, *given: Any) -> None:
        if self.is_async:
            decoder.record(*given)

    def chain_head(self, given: HeadInput) -> CudaChainHead:
        return self._recorded(CudaChainHead(given.head, given.decoder, given.num_blocks), given.steps)

    def block_head(self, given: HeadInput) -> CudaBlockHead:
        return self._recorded(CudaBlockHead(given.head, given.decoder, given.num_blocks), given.steps)

    def side_heads(self, given: HeadInput) -> CudaMedusaHead:
        return self._recorded(CudaMedusaHead(given.head, given.decoder), given.steps)

    def top(self, logits: torch.Tensor, k: int) -> torch.Tensor:
        return logits.topk(k).indices

    def burst(self, decoder: CudaDecoder, kv: Any, head: Any, length: int) -> CudaBurstBackend | None:
        """Without a head there is none: plain passes follow each other as they are."""
        if head is None or not head.taps:
            return None
        return self._recorded(CudaBurstBackend(head, decoder, kv, length), length)

    def _recorded(self, made: Recorded, steps: int) -> Recorded:
        """What a GPU compiles and records, no request should wait for."""
        if self.is_async:
            made.record(steps)
        return made
