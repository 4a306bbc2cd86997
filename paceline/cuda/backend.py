"""The backend of an NVIDIA GPU: Triton kernels recorded as CUDA graphs, for the decoder, heads and bursts."""

from __future__ import annotations

from collections.abc import Sequence
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
from paceline.heads.rows import TreeShape
from paceline.loaders.head_files import HeadInput
from paceline.models.attention import FLOATS, KvFormat
from paceline.models.kept import dtypes_kept
from paceline.models.shard import Group

Recorded = TypeVar("Recorded", CudaChainHead, CudaBlockHead, CudaMedusaHead, CudaBurstBackend)


class CudaBackend:
    most_drafted = MOST_DRAFTED  # of more, nothing is recorded
    most_matched = 4  # of more, the device would wait for the host

    def __init__(
        self, device: torch.device, exact: bool = False, capture: Capture | None = None,
        group: Group | None = None,
    ) -> None:  # fmt: skip
        """exact: a row has the same bits in every pass; with a group of ranks always. capture: for all
        recordings, which share memory."""
        self.device, self._exact, self._group = device, exact or group is not None, group
        self._capture = capture or Capture()

    @property
    def is_async(self) -> bool:
        return self.device.type == "cuda"

    @property
    def num_recordings(self) -> int:
        return self._capture.num_recordings

    def check_dtype(self, dtype: str) -> None:
        dtype_of(dtype)

    def default_dtype(self, source: Any) -> str:
        """What files have in MXFP4 or FP8 stays so: nothing is lost."""
        return next(iter(dtypes_kept(source)), "bfloat16")

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
        return CudaDecoder.load(source, dtype, self.device, context, self._exact, self._capture, self._group)

    def record(self, decoder: CudaDecoder, *given: Any) -> None:
        """Not what ranks exchange anything in: the host takes part in it."""
        if self.is_async and self._group is None:
            decoder.record(*given)

    def chain_head(self, given: HeadInput) -> CudaChainHead:
        return self._recorded(CudaChainHead(given.head, given.decoder, given.num_blocks), given.steps)

    def block_head(self, given: HeadInput) -> CudaBlockHead:
        return self._recorded(CudaBlockHead(given.head, given.decoder, given.num_blocks), given.steps)

    def side_heads(self, given: HeadInput) -> CudaMedusaHead:
        return self._recorded(CudaMedusaHead(given.head, given.decoder), given.steps)

    def top(self, logits: torch.Tensor, k: int) -> torch.Tensor:
        return logits.topk(k).indices

    def burst(
        self, decoder: CudaDecoder, kv: Any, head: Any, length: int, trees: Sequence[TreeShape] = ()
    ) -> CudaBurstBackend | None:
        """Without a head there is none: plain passes follow each other as they are. Nor with ranks or
        recurrent layers, of which a burst knows nothing."""
        is_able = self._group is None and decoder.config.recurrent is None
        if head is None or not head.taps or not is_able:
            return None
        return self._recorded(CudaBurstBackend(head, decoder, kv, length, trees), length)

    def _recorded(self, made: Recorded, steps: int) -> Recorded:
        """What a GPU compiles and records, no request should wait for."""
        if self.is_async:
            made.record(steps)
        return made
