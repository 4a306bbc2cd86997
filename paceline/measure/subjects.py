"""What `paceline bench kernels` times: the products, attention, whole passes of ours, and llama.cpp's passes
over the same tokens.

Invariant: a subject's `seconds(tokens)` is one run, and its `work(tokens)` what any implementation of it must
read and multiply.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline.cpu.decoder import CpuDecoder
from paceline.loaders.checkpoint import Checkpoint
from paceline.loaders.gguf_header import read_header
from paceline.measure.floors import Work, macs_of
from paceline.measure.passes import Passes, blocks_for, tokens_of
from paceline.measure.processes import Worker
from paceline.measure.products import Kind, Product, kinds_of
from paceline.models.config import ModelConfig
from paceline.models.quantize import bits_of
from paceline.runtime.device import cache_dtype
from paceline.runtime.kv_cache import Kept, KvCache, bytes_per_token
from paceline.runtime.runner import CPU, Runner

LLAMACPP_KV = Kept(torch.float16, torch.float16)
QUIET_S = (
    0.02  # threads that have just worked still spin: they must be asleep before another process is timed
)


class Subject(NamedTuple):
    labels: dict[str, Any]  # of its records
    seconds: Callable[[int], float]
    work: Callable[[int], Work]


class Model:
    """One precision of ours: its products, and a runner over the same weights."""

    def __init__(self, checkpoint: Checkpoint, dtype: str, lengths: Sequence[int]) -> None:
        """`lengths` of the sequences there will be room for."""
        self.dtype, self.config = dtype, checkpoint.config
        decoder = CpuDecoder.load(checkpoint, dtype=dtype)
        self.kinds = list(kinds_of(self.config, decoder.tensors, bits_of(dtype)))
        self.kept = cache_dtype(CPU, dtype)
        self.runner = Runner(decoder, KvCache(self.config, sum(map(blocks_for, lengths)), kept=self.kept))

    def products(self, widest: int) -> list[Subject]:
        return [_product(Product(kind, widest), self.dtype) for kind in self.kinds]

    def forward(self, context: int, widest: int) -> Subject:
        passes, labels = Passes(self.runner, context, widest), {"engine": "paceline", "dtype": self.dtype}
        return Subject(
            {**labels, "context": context, "logits": "all"},
            passes.seconds,
            lambda tokens: _pass_work(self.kinds, tokens, tokens).plus(
                context_work(self.config, context, tokens, self.kept)
            ),
        )

    def prefill(self, length: int) -> Subject:
        passes, labels = Passes(self.runner, 0, length), {"engine": "paceline", "dtype": self.dtype}
        return Subject(
            {**labels, "context": 0, "logits": "last"},
            lambda tokens: passes.seconds(tokens, num_logits=1),
            lambda tokens: _pass_work(self.kinds, tokens, 1).plus(
                _prompt_work(self.config, tokens, self.kept)
            ),
        )

    def attention(self, context: int, widest: int) -> Subject:
        """What a pass takes longer over the context than over none."""
        over, alone = Passes(self.runner, context, widest), Passes(self.runner, 0, widest)
        config = self.config
        shape = f"{config.num_heads}/{config.num_kv_heads}x{config.head_dim}"
        return Subject(
            {
                "kernel": "attention",
                "shape": shape,
                "dtype": str(self.kept.keys).removeprefix("torch."),
                "context": context,
            },
            lambda tokens: over.seconds(tokens) - alone.seconds(tokens),
            lambda tokens: context_work(config, context, tokens, self.kept),
        )


def _product(product: Product, dtype: str) -> Subject:
    kind = product.kind
    return Subject({"kernel": kind.name, "shape": kind.shape, "dtype": dtype}, product.seconds, kind.work)


def _pass_work(kinds: Sequence[Kind], tokens: int, num_logits: int) -> Work:
    """All products of a pass; the last kind is the head."""
    total = kinds[-1].work(num_logits)
    for kind in kinds[:-1]:
        total = total.plus(kind.work(tokens))
    return total


def context_work(config: ModelConfig, context: int, tokens: int, kept: Kept) -> Work:
    """Attention of some tokens to a cached context: it is read once, and every token's queries meet all of
    it.
    """
    macs = float(
        config.num_layers * config.num_heads * config.head_dim * context * tokens
    )  # of the scores, and as many of the sums
    has_integers = kept.values == torch.int8  # then a weight is two bytes
    scores, sums = (
        macs_of(macs, is_integer=kept.keys == torch.int8),
        macs_of(macs * (1 + has_integers), is_integer=has_integers),
    )
    return scores.plus(sums)._replace(num_bytes=float(context * bytes_per_token(config, kept)))


def _prompt_work(config: ModelConfig, tokens: int, kept: Kept) -> Work:
    """Attention of a prompt to itself: half of the pairs, of what was just computed."""
    return context_work(config, tokens, tokens, kept).times(0.5)._replace(num_bytes=0.0)


class Llamacpp:
    """llama.cpp's passes, through its reading of prompts whose beginning is cached. It computes the last
    token's logits only.
    """

    def __init__(self, worker: Worker, variant: str, path: Path, model: Model) -> None:
        self._worker, self._variant, self._model = worker, variant, model
        self._num_bytes = matrix_bytes(path)
        self._turn = 0

    def forward(self, context: int) -> Subject:
        return self._subject(context)

    def prefill(self) -> Subject:
        return self._subject(0)

    def _subject(self, context: int) -> Subject:
        config = self._model.config
        labels = {"engine": "llama.cpp", "dtype": self._variant, "context": context, "logits": "last"}
        prefix = tokens_of(config.vocab_size, context)

        def seconds(tokens: int) -> float:
            self._turn += 1  # new tokens each time: what it has read already it would not read again
            new = [(11 * i + 13 * self._turn + 1) % config.vocab_size for i in range(tokens)]
            time.sleep(QUIET_S)
            found = float(self._worker.ask("read_prompt", ids=prefix + new, num_cached=context)["seconds"])
            time.sleep(QUIET_S)
            return found

        def work(tokens: int) -> Work:
            kinds = self._model.kinds
            macs = sum(kind.macs for kind in kinds[:-1]) * tokens + kinds[-1].macs
            own = macs_of(float(macs), is_integer=self._variant != "F32")._replace(
                num_bytes=float(self._num_bytes)
            )
            around = (
                context_work(config, context, tokens, LLAMACPP_KV)
                if context
                else _prompt_work(config, tokens, LLAMACPP_KV)
            )
            return own.plus(around)

        return Subject(labels, seconds, work)


def matrix_bytes(path: Path) -> int:
    """Bytes of a GGUF file that every pass reads: all matrices, without an embedding that is not the head as
    well.
    """
    import gguf

    tensors = {name: tensor for name, tensor in read_header(path).tensors.items() if len(tensor.shape) > 1}
    if "output.weight" in tensors:
        tensors.pop("token_embd.weight", None)
    total = 0
    for tensor in tensors.values():
        block, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.kind)]
        total += tensor.shape[0] * tensor.shape[1] // block * width
    return total
