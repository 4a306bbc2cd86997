"""Heads that draft all tokens in one pass, on a GPU: DFlash's block and Medusa's heads. A draft is one CUDA
graph, from the target's hidden states to the tokens. The interfaces of cpu/block_head.py and cpu/medusa.py.

Of DFlash, features of the text and rows of the block go through one product for keys and values; queries are
the block's alone. Invariant: when a block attends, its own keys lie behind the text's, so its rows see a
prefix of text and block, and nothing of the pass besides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.batch import build
from paceline.core.types import Cached, Segment
from paceline.cuda import rows
from paceline.cuda.attention import Attending
from paceline.cuda.batch import REQUESTS, Bucket, Buffer, Column, DeviceBatch, choice_columns, tables_of
from paceline.cuda.decoder import CudaDecoder
from paceline.cuda.pick import guess
from paceline.cuda.recorded_head import ALIGNED, MOST_DRAFTED, HeadShape, RecordedHead, sampler_values
from paceline.cuda.weights import head_reader
from paceline.heads.config import TRUNK, DflashConfig, MedusaConfig
from paceline.heads.rows import Feed, Guesses, Row, Sampler
from paceline.loaders.head_files import Head


class CudaBlockHead(RecordedHead):
    """The rows of its buckets are features of texts."""

    def __init__(self, head: Head, decoder: CudaDecoder, num_blocks: int) -> None:
        config, reader = head.config, head_reader(head, decoder.weights)
        assert isinstance(config, DflashConfig)
        prefixes = [f"layers.{i}." for i in range(config.num_layers)]
        super().__init__(head, decoder, num_blocks, prefixes)
        self.config, self._fuse, self._output_layer = config, reader.matrix("fc"), reader.matrix("lm_head")
        self._hidden_norm, self._norm = reader.norm("hidden_norm"), reader.norm("norm")
        self._markov = (reader.table("markov_w1"), reader.matrix("markov_w2")) if config.markov_rank else None
        # target id -> draft id; the last: any other token
        self._words = np.full(config.vocab_size, config.draft_vocab_size, np.int32)
        ids = np.arange(config.vocab_size) if self.ids is None else self.ids.cpu().numpy()
        self._words[ids] = np.arange(len(ids), dtype=np.int32)

    @torch.inference_mode()
    def read(self, *feeds: Feed) -> None:
        """Features, fused and normed, as keys and values of every layer."""
        at = self._read_columns(feeds)
        context = self._empty(len(at["slots"]), self.config.hidden_size)
        self._fused(at["addresses"], context)
        for i, layer in enumerate(self._layers):
            layer.queries(context, (at["positions"], at["slots"]), self._cache.layer(i))

    @torch.inference_mode()
    def logits(self, feeds: Sequence[Feed], steps: int) -> Tensor:
        return self._run_feeds(feeds, (), steps)[:, : len(feeds)]

    @torch.inference_mode()
    def guess(self, feeds: Sequence[Feed], samplers: Sequence[Sampler], steps: int) -> Guesses:
        """Tokens from left to right; the device is waited for once. Shorter drafts are not recorded."""
        return self._guesses(self._run_feeds(feeds, samplers, max(steps, self._steps)), len(feeds))

    @torch.inference_mode()
    def record(self, steps: int) -> None:
        """What drafts of `steps` tokens need, however many requests."""
        self._steps = steps
        for requests in (size for size in REQUESTS if size <= MOST_DRAFTED and steps):
            self._record(HeadShape(self.bucket(requests), steps))

    def _run_feeds(self, feeds: Sequence[Feed], samplers: Sequence[Sampler], steps: int) -> Tensor:
        feeds, size = self._tails(feeds), self.config.block_size
        ends = [feed.start + len(feed.rows) for feed in feeds]
        for feed, end in zip(feeds, ends, strict=True):
            feed.place.reserve(end + size)
        bucket = self.bucket(len(feeds))
        values = self._values(bucket, feeds) | sampler_values(samplers)
        return self._launch(HeadShape(bucket, steps, bool(samplers)), values)

    def _values(self, bucket: Bucket, feeds: Sequence[Feed]) -> dict[str, Any]:
        """Rows of the texts, padding, then the blocks: a root and masks each."""
        size, masked = self.config.block_size, [self.config.mask_token_id] * (self.config.block_size - 1)
        texts = build([Segment([0] * len(f.rows), Cached(f.place.blocks, f.start)) for f in feeds]).columns
        ends = [Cached(f.place.blocks, f.start + len(f.rows)) for f in feeds]
        roots = [f.tokens[-1] for f in feeds]
        blocks = build([Segment([root, *masked], end) for root, end in zip(roots, ends, strict=True)]).columns
        extra = bucket.rows - len(texts.slots)
        absent = [1 << i for i in range(size)] * (bucket.requests - len(feeds))
        rows = [row for feed in feeds for row in feed.rows]
        return {
            "addresses": self._addresses(rows),
            "positions": [*texts.positions, *[0] * extra, *blocks.positions],
            "slots": [*texts.slots, *[self._cache.trash_slot] * extra, *blocks.slots],
            "tokens": blocks.input_ids,
            "masks": np.array([*[0] * len(blocks.slots), *absent], np.uint64).view(np.int64)[:, None],
            "prefixes": [end + size for end in blocks.prefix_lens],
            "tables": tables_of(blocks, bucket),
            "words": self._words[roots],
        }

    def prepare(self, shape: HeadShape) -> tuple[Callable[[], Any], Buffer]:
        (num_texts, requests, _, _), size = shape.bucket, self.config.block_size
        num_rows, both, each = requests * size, (num_texts + requests * size,), Column((requests,))
        columns = {
            "addresses": Column((num_texts, len(self.taps)), torch.int64, self.nowhere),
            "masks": Column((num_rows, 1), torch.int64), "positions": Column(both),
            "slots": Column(both, padding=self._cache.trash_slot), "tokens": Column((num_rows,)),
            "prefixes": each, "tables": Column((shape.bucket.num_blocks, requests), padding=None),
            "words": each, **choice_columns(requests),
        }  # fmt: skip
        buffer = Buffer(columns, self.device, self._values(shape.bucket, ()))
        starts = torch.arange(0, num_rows + 1, size, dtype=torch.int32, device=self.device)
        buffer.on_device["starts"] = starts
        return partial(self._run, shape, buffer.on_device), buffer

    def _run(self, shape: HeadShape, at: Mapping[str, Tensor]) -> Tensor:
        """-> results [2, steps, requests] of guesses, or logits [steps, requests, words]."""
        requests, steps = shape.bucket.requests, shape.steps
        first = 0 if self.config.sample_from_anchor else 1
        normed = self._block(shape.bucket, at).view(requests, self.config.block_size, -1)
        kept = normed[:, first : first + steps].transpose(0, 1).contiguous()
        logits = self._output_layer(kept.flatten(0, 1))  # [steps * requests, words]
        if self._markov is None or not shape.is_guessed:
            return self._chosen(shape, logits, at)
        results = self._results(steps, max(requests, ALIGNED))  # each step from an aligned address
        (table, matrix), words = self._markov, at["words"]
        for step, some in enumerate(logits.split(requests)):
            added = matrix(rows.embed(words, table, 1.0))
            words = guess(some, at, self.ids, step, results[:, step, :requests], added)
        return results

    def _fused(self, addresses: Tensor, out: Tensor) -> None:
        """out [T, hidden]: what all layers read of the target."""
        rows.add_norm(self._fuse(self._gathered(addresses)), None, None, self._hidden_norm, self._eps, out)

    def _block(self, bucket: Bucket, at: Mapping[str, Tensor]) -> Tensor:
        """[requests * size, hidden]: what the output layer reads."""
        target, count, eps = self.decoder, bucket.rows, self._eps
        x = rows.embed(at["tokens"], target.weights.embedding, target.config.embed_scale)
        both = self._empty(count + len(x), self.config.hidden_size)
        normed, added = torch.empty_like(x), None
        where = at["positions"][count:], at["slots"][count:], at["starts"], at["prefixes"]
        batch = DeviceBatch(at["tokens"], *where, at["tables"], at["masks"])
        how = Attending(self.scale, self.config.block_size, is_prefix_old=False)
        self._fused(at["addresses"], both[:count])
        for i, layer in enumerate(self._layers):
            rows.add_norm(x, added, None, layer.attention_norm, eps, both[count:])
            q = layer.queries(both, (at["positions"], at["slots"]), self._cache.layer(i))[count:]
            added = layer.run(x, q, batch, self._cache.layer(i), how, normed)
        rows.add_norm(x, added, None, self._norm, eps, normed)
        return normed


class CudaMedusaHead(RecordedHead):
    def __init__(self, head: Head, decoder: CudaDecoder) -> None:
        super().__init__(head, decoder)
        config, reader = head.config, head_reader(head, decoder.weights)
        assert isinstance(config, MedusaConfig)
        self.config, heads = config, range(config.num_heads_ahead)
        self.taps = (config.target_layers,)  # a trunk's output is in its place

        def stacked(name: str) -> Tensor:
            """[heads, inputs, outputs]"""
            return torch.stack([reader.table(name.format(i)) for i in heads]).transpose(1, 2)

        # the target's last, or the trunk's
        self._norm = decoder.weights.norm if config.trunk is None else reader.norm_if_any(f"{TRUNK}norm")
        self._blocks = []  # weights and biases [heads, 1, outputs]
        for name in (f"blocks.{{}}.layers.{block}" for block in range(config.num_blocks)):
            bias = torch.stack([head.tensors[f"{name.format(i)}.bias"] for i in heads])[:, None]
            self._blocks.append((stacked(name), bias.to(self.device, self.dtype)))
        # one output layer for all heads, or one each
        self._output_layer = reader.matrix("lm_head") if reader.has("lm_head") else stacked("lm_heads.{}")

    @torch.inference_mode()
    def guess(self, rows: Sequence[Row], samplers: Sequence[Sampler]) -> Guesses:
        return self._guesses(self._run_rows(rows, samplers), len(rows))

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> Tensor:
        return self._run_rows(rows, ())[:, : len(rows)]

    @torch.inference_mode()
    def record(self, steps: int) -> None:
        """All heads are computed, however many tokens are wanted."""
        for requests in (size for size in REQUESTS if size <= MOST_DRAFTED):
            self._record(HeadShape(self.bucket(requests), self.config.num_heads_ahead))

    def _run_rows(self, rows: Sequence[Row], samplers: Sequence[Sampler]) -> Tensor:
        shape = HeadShape(self.bucket(len(rows)), self.config.num_heads_ahead, bool(samplers))
        return self._launch(shape, {"addresses": self._addresses(rows), **sampler_values(samplers)})

    def prepare(self, shape: HeadShape) -> tuple[Callable[[], Any], Buffer]:
        addresses = Column((shape.bucket.requests, 1), torch.int64, self.nowhere)
        buffer = Buffer({"addresses": addresses, **choice_columns(shape.bucket.requests)}, self.device, {})
        return partial(self._run, shape, buffer.on_device), buffer

    def _run(self, shape: HeadShape, at: Mapping[str, Tensor]) -> Tensor:
        """-> results [2, heads, requests] of guesses, or logits [heads, requests, words]."""
        y = self._gathered(at["addresses"], self._norm).expand(shape.steps, -1, -1)
        for weight, bias in self._blocks:
            y = y + functional.silu(torch.baddbmm(bias, y, weight))
        if isinstance(self._output_layer, Tensor):
            return self._chosen(shape, torch.bmm(y, self._output_layer).flatten(0, 1), at)
        return self._chosen(shape, self._output_layer(y.flatten(0, 1)), at)
