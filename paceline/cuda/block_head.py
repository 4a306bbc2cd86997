"""DFlash on a GPU: a draft is one CUDA graph, from the target's hidden states to the tokens. The interface of
cpu/block_head.py.

Features of the text and rows of the block go through one product for keys and values; queries are the block's
alone. Invariant: when a block attends, its own keys lie behind the text's, so its rows see a prefix of text
and block, and nothing of the pass besides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.core.types import BLOCK_SIZE
from paceline.cuda import head_inputs as inputs
from paceline.cuda import rows
from paceline.cuda.attention import Attending, attend
from paceline.cuda.batch import Buffer, Column, DeviceBatch, context_for, mask_words
from paceline.cuda.decoder import CudaDecoder
from paceline.cuda.overlap import PLAIN_ROWS
from paceline.cuda.pick import guess, step_results
from paceline.cuda.recorded_head import CachedHead
from paceline.cuda.weights import head_reader
from paceline.heads.config import DflashConfig
from paceline.heads.rows import Feed, Guesses, Sampler
from paceline.loaders.head_files import Head


class BlockShape(NamedTuple):
    """What a block is recorded for."""

    rows: int  # features of texts
    requests: int
    context: int  # places of one text, its block counted
    steps: int
    is_guessed: bool  # else logits are wanted


class CudaBlockHead(CachedHead):
    def __init__(self, head: Head, decoder: CudaDecoder, num_blocks: int) -> None:
        config, reader = head.config, head_reader(head, decoder.weights)
        assert isinstance(config, DflashConfig)
        prefixes = [f"layers.{i}." for i in range(config.num_layers)]
        super().__init__(head, decoder, num_blocks, reader, prefixes)
        self.config, self._fuse, self._output_layer = config, reader.matrix("fc"), reader.matrix("lm_head")
        hidden_norm, norm = reader.norm("hidden_norm"), reader.norm("norm")
        assert hidden_norm is not None, "features are normed"
        assert norm is not None, "what the output layer reads is normed"
        self._hidden_norm, self._norm = hidden_norm, norm
        self._markov = (reader.table("markov_w1"), reader.matrix("markov_w2")) if config.markov_rank else None
        # target id -> draft id; the last: any other token
        self._words = np.full(config.vocab_size, config.draft_vocab_size, np.int32)
        ids = np.arange(config.vocab_size) if self._ids is None else self._ids.cpu().numpy()
        self._words[ids] = np.arange(len(ids), dtype=np.int32)

    @torch.inference_mode()
    def read(self, feed: Feed) -> None:
        """Features, fused and normed, as keys and values of every layer."""
        count, end = len(feed.rows), feed.start + len(feed.rows)
        feed.place.reserve(end)
        addresses = Column((count, len(self.config.taps)), np.int64)
        columns = {"addresses": addresses, "positions": Column((count,)), "slots": Column((count,))}
        buffer = Buffer(columns, self.device)
        slots = feed.place.slots(feed.start, end)
        found = inputs.addresses_of(feed.rows, self.config.taps)
        buffer.fill({"addresses": found, "positions": range(feed.start, end), "slots": slots})
        context = self._empty(count, self.config.hidden_size)
        self._fused(buffer.on_device["addresses"], context)
        for i in range(len(self._layers)):
            self._queries(i, context, buffer.on_device)

    @torch.inference_mode()
    def logits(self, feeds: Sequence[Feed], steps: int) -> torch.Tensor:
        return self._run_feeds(feeds, (), steps)[:, : len(feeds)]

    @torch.inference_mode()
    def guess(self, feeds: Sequence[Feed], samplers: Sequence[Sampler], steps: int) -> Guesses:
        """Tokens from left to right; the device is waited for once."""
        return inputs.guesses_of(self._run_feeds(feeds, samplers, steps), len(feeds))

    @torch.inference_mode()
    def warm_up(self, steps: int) -> None:
        """Record what a request alone will need for drafts of up to `steps` tokens."""
        for context in inputs.warm_contexts(self.decoder.config.max_context):
            for count in range(1, steps + 1):
                self._recorded(BlockShape(inputs.rows_for(1), 1, context, count, is_guessed=True))

    def _tail(self, feed: Feed) -> Feed:
        """The feed without what is too long for a recording, which is read now."""
        if len(feed.rows) <= inputs.TAIL:
            return feed
        self.read(feed._replace(rows=feed.rows[:-1]))
        return feed._replace(start=feed.start + len(feed.rows) - 1, rows=feed.rows[-1:])

    def _run_feeds(self, feeds: Sequence[Feed], samplers: Sequence[Sampler], steps: int) -> torch.Tensor:
        feeds, size = [self._tail(feed) for feed in feeds], self.config.block_size
        ends = [feed.start + len(feed.rows) for feed in feeds]
        for feed, end in zip(feeds, ends, strict=True):
            feed.place.reserve(end + size)
        num_rows, requests = (
            inputs.rows_for(sum(len(feed.rows) for feed in feeds)),
            inputs.requests_for(len(feeds)),
        )
        shape = BlockShape(num_rows, requests, context_for(max(ends) + size), steps, bool(samplers))
        values = {**self._values(shape, feeds), **inputs.choice_values(samplers)}
        found: torch.Tensor = self._launch(shape, values, inputs.is_recordable(shape.rows, shape.requests))
        return found

    def _values(self, shape: BlockShape, feeds: Sequence[Feed]) -> dict[str, Any]:
        """Rows of the texts, padding, then the blocks: a root and masks each."""
        size, masked = self.config.block_size, [self.config.mask_token_id] * (self.config.block_size - 1)
        ends = [feed.start + len(feed.rows) for feed in feeds]
        texts = [(feed.place, feed.start, end) for feed, end in zip(feeds, ends, strict=True)]
        blocks = [(place, end, end + size) for place, _, end in texts]
        extra = shape.rows - sum(end - start for _, start, end in texts)
        absent = [1 << i for i in range(size)] * (shape.requests - len(feeds))
        return {
            "addresses": [at for feed in feeds for at in inputs.addresses_of(feed.rows, self.config.taps)],
            "positions": [
                *(at for _, start, end in texts for at in range(start, end)), *[0] * extra,
                *(at for _, start, end in blocks for at in range(start, end)),
            ],
            "slots": [
                *(slot for place, start, end in texts for slot in place.slots(start, end)),
                *[self._cache.trash_slot] * extra,
                *(slot for place, start, end in blocks for slot in place.slots(start, end)),
            ],
            "tokens": [token for feed in feeds for token in (feed.tokens[-1], *masked)],
            "masks": mask_words([*[0] * (len(feeds) * size), *absent], 1).reshape(-1),
            "prefixes": [end + size for end in ends],
            "tables": inputs.block_tables([feed.place for feed in feeds], shape.context // BLOCK_SIZE),
            "words": [self._words[feed.tokens[-1]] for feed in feeds],
        }  # fmt: skip

    def prepare(self, shape: BlockShape) -> tuple[Callable[[], Any], Buffer]:
        requests, size = shape.requests, self.config.block_size
        num_rows, both = requests * size, (shape.rows + requests * size,)
        columns = {
            "addresses": Column((shape.rows, len(self.config.taps)), np.int64, self.nowhere),
            "masks": Column((num_rows, 1), np.int64), "positions": Column(both),
            "slots": Column(both, padding=self._cache.trash_slot), "tokens": Column((num_rows,)),
            "prefixes": Column((requests,)), "tables": Column((requests, shape.context // BLOCK_SIZE)),
            "words": Column((requests,)), **inputs.choice_columns(requests),
        }  # fmt: skip
        buffer = Buffer(columns, self.device)
        buffer.fill(self._values(shape, ()))  # a capture launches before there is a batch
        starts = torch.arange(0, num_rows + 1, size, dtype=torch.int32, device=self.device)
        buffer.on_device["starts"] = starts
        return partial(self._run, shape, buffer.on_device), buffer

    def _run(self, shape: BlockShape, at: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """-> results [2, steps, requests] of guesses, or logits [steps, requests, words]."""
        requests, steps, first = shape.requests, shape.steps, 0 if self.config.sample_from_anchor else 1
        normed = self._block(shape, at).view(requests, self.config.block_size, -1)
        kept = normed[:, first : first + steps].transpose(0, 1).contiguous()
        logits = self._output_layer(kept.flatten(0, 1))  # [steps * requests, words]
        if not shape.is_guessed:
            return logits.view(steps, requests, -1)
        guessing = self._guessing(at)
        if self._markov is None:
            results = torch.empty((2, steps, requests), dtype=torch.int32, device=self.device)
            guess(logits, guessing, 0, results.flatten(1))
            return results
        results = step_results(steps, requests, self.device)
        (table, matrix), words = self._markov, at["words"]
        for step, some in enumerate(logits.split(requests)):
            before = self._empty(requests, table.shape[1])
            rows.embed(words, table, 1.0, before)
            words = guess(some, guessing, step, results[:, step, :requests], added=matrix(before))
        return results

    def _fused(self, addresses: torch.Tensor, out: torch.Tensor) -> None:
        """out [T, hidden]: what all layers read of the target."""
        rows.add_norm(self._fuse(self._gathered(addresses)), None, None, self._hidden_norm, self._eps, out)

    def _queries(self, i: int, x: torch.Tensor, at: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Keys and values of all rows to their slots; -> queries [T, heads, dim]."""
        layer = self._layers[i]
        qkv = layer.qkv.parts(x, is_early=len(x) <= PLAIN_ROWS)
        return layer.queries(qkv, (at["positions"], at["slots"]), self._cache.layer(i))

    def _block(self, shape: BlockShape, at: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[requests * size, hidden]: what the output layer reads."""
        target, count, eps = self.decoder, shape.rows, self._eps
        x = self._empty(len(at["tokens"]), self.config.hidden_size)
        both = self._empty(count + len(x), self.config.hidden_size)
        normed, added = torch.empty_like(x), None
        where = at["positions"][count:], at["slots"][count:], at["starts"], at["prefixes"]
        batch = DeviceBatch(at["tokens"], *where, at["tables"], at["masks"])
        how = Attending(self._scale, shape.context, self.config.block_size, is_prefix_old=False)
        self._fused(at["addresses"], both[:count])
        rows.embed(at["tokens"], target.weights.embedding, target.config.embed_scale, x)
        for i, layer in enumerate(self._layers):
            rows.add_norm(x, added, None, layer.attention_norm, eps, both[count:])
            q = self._queries(i, both, at)[count:]
            out = torch.empty_like(q)
            attend(q, self._cache.layer(i), batch, how, out)
            rows.add_norm(x, layer.out.parts(out.flatten(1)), None, layer.mlp_norm, eps, normed)
            added = layer.mlp(normed, "silu")
        rows.add_norm(x, added, None, self._norm, eps, normed)
        return normed
