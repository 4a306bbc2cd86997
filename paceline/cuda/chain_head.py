"""A head that drafts token by token, on a GPU: EAGLE-3, EAGLE-1 or a distilled model.

A whole chain is one CUDA graph: it reads what the text has new, chooses a token, steps on from it, and the
host waits once, for the tokens. A tree's levels are a graph each. Invariant: a step of a chain sees what was
written before it, by its position alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core.batch import build
from paceline.core.errors import ConfigError
from paceline.core.types import Cached, Columns, Segment
from paceline.cuda import batch, rows
from paceline.cuda.attention import Attending
from paceline.cuda.batch import REQUESTS, Bucket, Buffer, Column, DeviceBatch, next_size
from paceline.cuda.decoder import CudaDecoder
from paceline.cuda.features import join
from paceline.cuda.pick import guess
from paceline.cuda.recorded_head import (
    ALIGNED,
    LONGEST,
    MOST_DRAFTED,
    HeadShape,
    RecordedHead,
    sampler_values,
)
from paceline.cuda.weights import head_reader
from paceline.heads.config import DraftConfig, Eagle1Config, EagleConfig, LayeredConfig, MtpConfig
from paceline.heads.rows import Feed, Guesses, HeadOutput, Node, Sampler
from paceline.loaders.head_files import Head

CHUNK = 256  # rows of a text read in one pass
MOST_WIDTH = 16  # nodes of a tree's level that are recorded for


class ChainRows(NamedTuple):
    """Rows of a pass."""

    columns: Columns  # slots: where keys and values are read
    written: list[int]  # where they are written: not so for rows of passes before
    addresses: np.ndarray  # [T, features] int64

    def values(self, bucket: Bucket) -> dict[str, Any]:
        others = {"written": self.written, "wanted": self.columns.rows, "addresses": self.addresses}
        return batch.batch_values(bucket, self.columns, None) | others


class CudaChainHead(RecordedHead):
    def __init__(self, head: Head, decoder: CudaDecoder, num_blocks: int) -> None:
        config, reader = head.config, head_reader(head, decoder.weights)
        assert isinstance(config, LayeredConfig)
        if isinstance(config, MtpConfig) and config.experts is not None:
            remedy = "use device='cpu', or another speculative_config"
            raise ConfigError(f"the GPU kernels do not do experts in an MTP module's layer; {remedy}")
        prefixes = ["midlayer."]
        if isinstance(config, DraftConfig):
            prefixes = [f"layers.{i}." for i in range(config.num_layers)]
        super().__init__(head, decoder, num_blocks, prefixes)
        self.config = config
        self._fuse = reader.matrix("fc") if reader.has("fc") else None
        is_mtp = isinstance(config, MtpConfig)
        self._reads_normed = isinstance(config, (MtpConfig, EagleConfig)) and config.norm_output
        self._hidden_norm = reader.norm_if_any("hidden_norm" if is_mtp else "midlayer.hidden_norm")
        self._embed_norm = reader.norm_if_any("embed_norm")
        self._norm = reader.norm_if_any("norm")
        self._output_layer = reader.matrix("lm_head")
        # EAGLE-1 reads what comes out of the target's last norm.
        self._feature_norm = decoder.weights.norm if isinstance(config, Eagle1Config) else None
        self._ones = torch.ones(config.hidden_size, device=self.device)

    @torch.inference_mode()
    def read(self, *feeds: Feed) -> None:
        """Of one layer, keys and values are all that is left of a row that is not the last."""
        if len(self._layers) == 1 and self.taps:
            at = self._read_columns(feeds)
            _, x = self._enter(at["tokens"], self._features(at["addresses"], True))
            self._layers[0].queries(x, (at["positions"], at["slots"]), self._cache.layer(0))
            return
        for feed in feeds:
            for first in range(0, len(feed.tokens), CHUNK):
                part = slice(first, first + CHUNK)
                some = Feed(feed.place, feed.start + first, feed.tokens[part], feed.rows[part])
                count = len(some.tokens)
                bucket = Bucket(count, 1, count, self.decoder.num_blocks)
                self._launch(HeadShape(bucket, 0, is_guessed=False), self._feed_rows([some]).values(bucket))

    @torch.inference_mode()
    def begin(self, feeds: Sequence[Feed]) -> HeadOutput:
        logits, outputs = self._run_rows(self._feed_rows(self._tails(feeds)))
        return HeadOutput(logits, list(outputs.clone()))

    @torch.inference_mode()
    def outputs(self, feeds: Sequence[Feed]) -> Tensor:
        """[feeds, hidden] after the last row of each; the next call may overwrite them."""
        return self._run_rows(self._feed_rows(self._tails(feeds)))[1]

    @torch.inference_mode()
    def level(self, nodes: Sequence[Node]) -> HeadOutput:
        """Nodes of levels before stand in the pass for their keys alone."""
        groups: dict[int, list[Node]] = {}
        for node in nodes:
            groups.setdefault(id(node.place), []).append(node)
        segments = []
        for members in groups.values():
            place, seen, end = members[0].place, members[0].seen, max(node.at for node in members) + 1
            place.reserve(end)
            tokens, parents = [0] * (end - seen), [-1] * (end - seen)
            for node in members:
                assert node.seen == seen, "nodes of a tree see the same text"
                tokens[node.at - seen] = node.token
                for above, at in pairwise(node.others):
                    parents[at - seen] = above - seen
            segments.append(Segment(tokens, Cached(place.blocks, seen), parents))
        columns = build(segments).columns
        firsts, count = dict(zip(groups, columns.starts, strict=False)), len(columns.slots)
        wanted = [firsts[id(node.place)] + node.at - node.seen for node in nodes]
        written = [self._cache.trash_slot] * count
        addresses = np.full((count, min(len(self.taps), 1)), self.nowhere)
        for node, row in zip(nodes, wanted, strict=True):
            written[row] = columns.slots[row]
            if self.taps:
                addresses[row, 0] = node.source.data_ptr()
        found = ChainRows(columns._replace(rows=wanted), written, addresses)
        logits, outputs = self._run_rows(found, is_true=False)
        return HeadOutput(logits, list(outputs.clone()))

    @torch.inference_mode()
    def guess(self, feeds: Sequence[Feed], samplers: Sequence[Sampler], steps: int, least: float) -> Guesses:
        """Chains after the last row of each feed; `least` stops nothing: shorter ones are not recorded."""
        feeds, steps = self._tails(feeds), max(steps, self._steps)
        ends = [feed.start + len(feed.tokens) for feed in feeds]
        for feed, end in zip(feeds, ends, strict=True):
            feed.place.reserve(end + steps)
        bucket = self.bucket(len(feeds))
        shape = HeadShape(bucket, steps, wanted=bucket.requests)
        return self._guesses(self._launch(shape, self.values(shape, feeds, samplers)), len(feeds))

    @torch.inference_mode()
    def record(self, steps: int) -> None:
        """What chains of `steps` tokens need, however many requests; without steps, levels of one tree."""
        self._steps = steps
        for requests in (size for size in REQUESTS if size <= MOST_DRAFTED):
            self._record(HeadShape(self.bucket(requests), steps, steps > 0, requests))
        self._record(HeadShape(self.bucket(1), 0, False))
        for wanted in (size for size in REQUESTS if size <= (1 if steps else MOST_WIDTH)):
            for longest in LONGEST[: 1 if steps else len(LONGEST)]:
                self._record(HeadShape(self.bucket(1, longest), 0, False, wanted, is_true=False))

    def _feed_rows(self, feeds: Sequence[Feed], count: int = 0) -> ChainRows:
        """The logits of each text's last row are wanted. count: as many rows each, at least: those after a
        text's last have features that lie `nowhere`, and are overwritten before they are seen."""
        segments = []
        for feed in feeds:
            extra = max(count - len(feed.tokens), 0)
            feed.place.reserve(feed.start + len(feed.tokens) + extra)
            segments.append(Segment([*feed.tokens, *[0] * extra], Cached(feed.place.blocks, feed.start)))
        columns = build(segments).columns
        addresses = np.full((len(columns.slots), len(self.taps)), self.nowhere)
        starts = list(zip(columns.starts, feeds, strict=False))
        shown = [first + i for first, feed in starts for i in range(len(feed.rows))]
        addresses[shown] = self._addresses([row for feed in feeds for row in feed.rows])
        wanted = [first + len(feed.tokens) - 1 for first, feed in starts]
        return ChainRows(columns._replace(rows=wanted), columns.slots, addresses)

    def _run_rows(self, found: ChainRows, is_true: bool = True) -> tuple[Tensor, Tensor]:
        """Logits [n, words] and outputs [n, hidden] where the passes leave them."""
        columns, count = found.columns, len(found.columns.rows)
        longest = max(b - a for a, b in pairwise(columns.starts))
        bucket = self.bucket(len(columns.prefix_lens), longest)
        shape = HeadShape(bucket, 0, False, next_size(REQUESTS, count), is_true)
        logits, outputs = self._launch(shape, found.values(bucket))
        return logits[:count], outputs[:count]

    def values(
        self, shape: HeadShape, feeds: Sequence[Feed], samplers: Sequence[Sampler], count: int = 0
    ) -> dict[str, Any]:
        """What chains after the feeds read, and where the rows of further steps lie: [steps, requests]."""
        ends = [feed.start + len(feed.tokens) for feed in feeds]
        after = [range(end, end + shape.steps - 1) for end in ends]
        slots = [feed.place.slots(each.start, each.stop) for feed, each in zip(feeds, after, strict=True)]
        ahead = {"next_positions": np.array(after).T, "next_slots": np.array(slots).T}
        return self._feed_rows(feeds, count).values(shape.bucket) | sampler_values(samplers) | ahead

    def prepare(self, shape: HeadShape) -> tuple[Callable[[], Any], Buffer]:
        (num_rows, requests, _, _), trash_slot = shape.bucket, self._cache.trash_slot
        num_features = len(self.taps) if shape.is_true else min(len(self.taps), 1)  # of a row
        columns = batch.batch_columns(shape.bucket, trash_slot)
        columns["addresses"] = Column((num_rows, num_features), torch.int64, self.nowhere)
        columns["written"] = Column((num_rows,), padding=trash_slot)
        columns["wanted"] = Column((shape.wanted,), torch.int64)
        if shape.is_guessed:
            ahead = Column((max(shape.steps - 1, 1), max(requests, ALIGNED)))
            columns |= {"next_positions": ahead, "next_slots": ahead._replace(padding=trash_slot)}
        if shape.is_guessed or shape.tree is not None:
            columns |= batch.choice_columns(requests)
        buffer = Buffer(columns, self.device, batch.batch_values(shape.bucket, batch.NOTHING, None))
        at = buffer.on_device
        if shape.is_guessed:
            at["each"] = torch.arange(requests + 1, dtype=torch.int32, device=self.device)
            at["alone"] = torch.ones((requests, 1), dtype=torch.int64, device=self.device)
        return partial(self._run, shape, at), buffer

    def _run(self, shape: HeadShape, at: Mapping[str, Tensor]) -> Any:
        """-> results of a chain, or logits [wanted, words] and outputs [wanted, hidden]."""
        how = Attending(self.scale, shape.bucket.max_rows)
        features = self._features(at["addresses"], shape.is_true) if self.taps else None
        x, normed = self._pass(DeviceBatch.of(at), features, at["written"], how)
        x, normed = x[at["wanted"]], normed[at["wanted"]]
        logits = self._output_layer(normed)
        if not shape.is_guessed:
            return logits, self._output(x, normed)
        count, steps = shape.bucket.requests, shape.steps
        results = self._results(steps, max(count, ALIGNED))  # each step from an aligned address
        for step in range(steps):
            if step:
                positions, slots = at["next_positions"][step - 1, :count], at["next_slots"][step - 1, :count]
                tables, tokens = at["block_tables"], results[0, step - 1, :count]
                step_batch = DeviceBatch(tokens, positions, slots, at["each"], positions, tables, at["alone"])
                features = self._output(x, normed)[None] if self.taps else None
                x, normed = self._pass(step_batch, features, slots, how._replace(max_rows=1))
                logits = self._output_layer(normed)
            guess(logits, at, self.ids, step, results[:, step, :count])
        return results

    def read_on(
        self, batch: DeviceBatch, features: Tensor, how: Attending, newest: int
    ) -> tuple[Tensor, Tensor]:
        """Logits and outputs of the last `newest` rows of each request, all of which have as many. features
        [1, T, hidden]: outputs of this head."""
        x, normed = self._pass(batch, features, batch.slots, how)
        requests = len(batch.prefix_lens)
        x, normed = (
            each.view(requests, -1, each.shape[1])[:, -newest:].flatten(0, 1) for each in (x, normed)
        )
        return self._output_layer(normed), self._output(x, normed)

    def _features(self, addresses: Tensor, is_true: bool) -> Tensor:
        """[parts, T, hidden]: of the target and fused, or of this head."""
        found = self._gathered(addresses, self._feature_norm if is_true else None)
        fuse = self._fuse if is_true and isinstance(self.config, EagleConfig) else None
        return found[None] if fuse is None else fuse.parts(found)

    def _output(self, x: Tensor, normed: Tensor) -> Tensor:
        """What the next step reads."""
        return normed if self._reads_normed else x

    def _enter(self, tokens: Tensor, features: Tensor | None) -> tuple[Tensor, Tensor]:
        """-> the residual stream [T, hidden] and what the first layer reads of it."""
        config, eps, norm = self.config, self._eps, self._layers[0].attention_norm
        embedding = self.decoder.weights.embedding, self.decoder.config.embed_scale
        if features is not None and isinstance(config, EagleConfig):
            x, norms = self._empty(len(tokens), config.hidden_size), (norm, self._hidden_norm)
            return x, join(tokens, embedding, features, norms, eps, x, config.norm_before_residual)
        if features is None:
            x = rows.embed(tokens, *embedding)
        else:
            assert self._fuse is not None, "EAGLE-1 and MTP fuse"
            x = self._fuse(join(tokens, embedding, features, (self._embed_norm, self._hidden_norm), eps))
            if not isinstance(config, MtpConfig):
                return x, x
        first = torch.empty_like(x)
        rows.add_norm(x, None, None, norm, eps, first)
        return x, first

    def _pass(
        self, batch: DeviceBatch, features: Tensor | None, slots: Tensor, how: Attending
    ) -> tuple[Tensor, Tensor]:
        """-> the residual stream after all layers, and what the output layer reads of it, [T, hidden] each.
        slots: where the rows' keys are written; `batch.slots`: where they are read."""
        x, first = self._enter(batch.input_ids, features)
        norms = [layer.attention_norm for layer in self._layers[1:]]
        normed = torch.empty_like(x) if self._layers[0].gates is None else first
        norms.append(self._ones if self._norm is None else self._norm)
        for i, layer in enumerate(self._layers):
            q = layer.queries(first, (batch.positions, slots), self._cache.layer(i))
            added = layer.run(x, q, batch, self._cache.layer(i), how, normed)
            rows.add_norm(x, added, None, norms[i], self._eps, normed)
            first = normed
        return x, x if self._norm is None else normed
