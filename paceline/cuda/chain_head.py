"""A head that drafts token by token, on a GPU: EAGLE-3, EAGLE-1 or a distilled model.

A whole chain is one CUDA graph: it reads what the text has new, chooses a token, steps on from it, and the
host waits once, for the tokens. A tree's levels are a graph each. Invariant: a step of a chain sees what was
written before it, by its position alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.cuda import head_inputs as inputs
from paceline.cuda import rows
from paceline.cuda.attention import Attending
from paceline.cuda.batch import REQUESTS, Bucket, Buffer, DeviceBatch, context_for, next_size
from paceline.cuda.decoder import CudaDecoder
from paceline.cuda.features import join
from paceline.cuda.head_inputs import ChainShape, PassRows
from paceline.cuda.pick import guess
from paceline.cuda.recorded_head import RecordedHead
from paceline.cuda.weights import head_reader
from paceline.heads.config import DraftConfig, Eagle1Config, EagleConfig, LayeredConfig
from paceline.heads.rows import Feed, Guesses, HeadOutput, Node, Sampler
from paceline.loaders.head_files import Head

CHUNK = 256  # rows of a text read in one pass


class CudaChainHead(RecordedHead):
    def __init__(self, head: Head, decoder: CudaDecoder, num_blocks: int) -> None:
        config, reader = head.config, head_reader(head, decoder.weights)
        assert isinstance(config, LayeredConfig)
        prefixes = ["midlayer."]
        if isinstance(config, DraftConfig):
            prefixes = [f"layers.{i}." for i in range(config.num_layers)]
        super().__init__(head, decoder, num_blocks, prefixes)
        self.config, self.taps = config, config.hidden_layers
        self._fuse = reader.matrix("fc") if reader.has("fc") else None
        self._hidden_norm = reader.norm_if_any("midlayer.hidden_norm")
        self._norm = reader.norm_if_any("norm")
        self._output_layer = reader.matrix("lm_head")
        # EAGLE-1 reads what comes out of the target's last norm.
        self._feature_norm = decoder.weights.norm if isinstance(config, Eagle1Config) else None
        self._ones = torch.ones(config.hidden_size, device=self.device)

    @torch.inference_mode()
    def read(self, feed: Feed) -> None:
        for first in range(0, len(feed.tokens), CHUNK):
            part = slice(first, first + CHUNK)
            some = Feed(feed.place, feed.start + first, feed.tokens[part], feed.rows[part])
            table, count = inputs.table_of_feeds([some], self.taps), len(some.tokens)
            bucket = Bucket(count, 1, count, context_for(some.start))
            # Nothing waits for it, and a recording's inputs are one buffer.
            self._launch(ChainShape(bucket, 1, 0), table.values(bucket), is_recorded=False)

    @torch.inference_mode()
    def begin(self, feeds: Sequence[Feed]) -> HeadOutput:
        return self._after(inputs.table_of_feeds(self._tails(feeds), self.taps))

    @torch.inference_mode()
    def outputs(self, feeds: Sequence[Feed]) -> Tensor:
        """[feeds, hidden] after the last row of each; the next call may overwrite them."""
        return self._run_rows(inputs.table_of_feeds(self._tails(feeds), self.taps))[1]

    @torch.inference_mode()
    def level(self, nodes: Sequence[Node]) -> HeadOutput:
        for node in nodes:
            node.place.reserve(node.at + 1)  # before the trash slot is asked for: more memory moves it
        has_sources, trash_slot = bool(self.taps), self._cache.trash_slot
        return self._after(inputs.table_of_nodes(nodes, trash_slot, self.nowhere, has_sources), is_true=False)

    @torch.inference_mode()
    def guess(self, feeds: Sequence[Feed], samplers: Sequence[Sampler], steps: int, least: float) -> Guesses:
        """Chains after the last row of each feed; short ones are as quick, so `least` stops nothing."""
        feeds = self._tails(feeds)
        longest = max(feed.start + len(feed.tokens) for feed in feeds)
        for feed in feeds:
            feed.place.reserve(feed.start + len(feed.tokens) + steps)
        table = inputs.table_of_feeds(feeds, self.taps)
        bucket = inputs.bucket_of(len(table.tokens), len(feeds), longest + steps)
        shape = ChainShape(bucket, bucket.requests, steps)
        values = self.values(shape, table, feeds, samplers)
        results = self._launch(shape, values, inputs.is_recordable(bucket))
        return inputs.guesses_of(results, len(feeds))

    @torch.inference_mode()
    def warm_up(self, steps: int) -> None:
        """Record what a request alone will need for chains of up to `steps` tokens; of none, for outputs."""
        for bucket in inputs.warm_buckets(self.decoder.config.max_context):
            for count in range(min(steps, 1), steps + 1):
                self._record(ChainShape(bucket, 1, count))

    def _tails(self, feeds: Sequence[Feed]) -> list[Feed]:
        """The feeds without what is too long for a recording, which is read now: all but the last row."""
        tails = []
        for f in feeds:
            if len(f.tokens) > inputs.TAIL:
                self.read(f._replace(tokens=f.tokens[:-1], rows=f.rows[:-1]))
                f = Feed(f.place, f.start + len(f.tokens) - 1, f.tokens[-1:], f.rows[-1:])
            tails.append(f)
        return tails

    def _after(self, table: PassRows, is_true: bool = True) -> HeadOutput:
        logits, outputs = self._run_rows(table, is_true)
        return HeadOutput(logits, list(outputs.clone()))

    def _run_rows(self, table: PassRows, is_true: bool = True) -> tuple[Tensor, Tensor]:
        """Logits [n, words] and outputs [n, hidden] where the passes leave them."""
        count = len(table.wanted)
        bucket = inputs.bucket_of(len(table.tokens), len(table.prefixes), max(table.prefixes))
        shape = ChainShape(bucket, next_size(REQUESTS, count), 0, is_true)
        is_recorded = inputs.is_recordable(bucket) and shape.wanted in REQUESTS
        logits, outputs = self._launch(shape, table.values(bucket), is_recorded)
        return logits[:count], outputs[:count]

    def values(
        self, shape: ChainShape, table: PassRows, feeds: Sequence[Feed], samplers: Sequence[Sampler]
    ) -> dict[str, Any]:
        """What chains after the feeds read, and where the rows of further steps lie: [steps, requests]."""
        ends = [feed.start + len(feed.tokens) for feed in feeds]
        after = [range(end, end + shape.steps - 1) for end in ends]
        slots = [feed.place.slots(each.start, each.stop) for feed, each in zip(feeds, after, strict=True)]
        ahead = {"next_positions": np.array(after).T, "next_slots": np.array(slots).T}
        return table.values(shape.bucket) | inputs.speaker_values(samplers) | ahead

    def prepare(self, shape: ChainShape) -> tuple[Callable[[], Any], Buffer]:
        num_features = len(self.taps) if shape.is_true else min(len(self.taps), 1)
        columns = inputs.chain_columns(shape, num_features, self._cache.trash_slot, self.nowhere)
        buffer = Buffer(columns, self.device, PassRows().values(shape.bucket))
        at = buffer.on_device
        if shape.steps:
            requests = shape.bucket.requests
            at["each"] = torch.arange(requests + 1, dtype=torch.int32, device=self.device)
            at["alone"] = torch.ones((requests, 1), dtype=torch.int64, device=self.device)
        return partial(self._run, shape, at), buffer

    def _run(self, shape: ChainShape, at: Mapping[str, Tensor]) -> Any:
        """-> results of a chain, or logits [wanted, words] and outputs [wanted, hidden]."""
        how = Attending(self._scale, shape.bucket.context, shape.bucket.rows)
        features = None  # [parts, T, hidden]: of the target and fused, or of this head
        if self.taps:
            found = self._gathered(at["addresses"], self._feature_norm if shape.is_true else None)
            fuse = self._fuse if shape.is_true and isinstance(self.config, EagleConfig) else None
            features = found[None] if fuse is None else fuse.parts(found)
        x, normed = self._pass(DeviceBatch.of(at), features, at["written"], how)
        x, normed = x[at["wanted"]], normed[at["wanted"]]
        logits = self._output_layer(normed)
        if not shape.steps:
            return logits, self._output(x, normed)
        count, steps = shape.bucket.requests, shape.steps
        # [2, steps, R or more]: each step from an aligned address
        results = torch.empty((2, steps, max(count, inputs.ALIGNED)), dtype=torch.int32, device=self.device)
        for step in range(steps):
            if step:
                positions, slots = at["next_positions"][step - 1, :count], at["next_slots"][step - 1, :count]
                tables, tokens = at["block_tables"][:-1], results[0, step - 1, :count]
                batch = DeviceBatch(tokens, positions, slots, at["each"], positions, tables, at["alone"])
                features = self._output(x, normed)[None] if self.taps else None
                x, normed = self._pass(batch, features, slots, how._replace(max_rows=1))
                logits = self._output_layer(normed)
            guess(logits, at, self._ids, step, results[:, step, :count])
        return results

    def _output(self, x: Tensor, normed: Tensor) -> Tensor:
        """What the next step reads."""
        return normed if isinstance(self.config, EagleConfig) and self.config.norm_output else x

    def _enter(self, tokens: Tensor, features: Tensor | None) -> tuple[Tensor, Tensor]:
        """-> the residual stream [T, hidden] and what the first layer reads of it."""
        config, eps, norm = self.config, self._eps, self._layers[0].attention_norm
        embedding = self.decoder.weights.embedding, self.decoder.config.embed_scale
        if features is None:
            x = rows.embed(tokens, *embedding)
            first = torch.empty_like(x)
            rows.add_norm(x, None, None, norm, eps, first)
            return x, first
        if isinstance(config, Eagle1Config):
            assert self._fuse is not None
            x = self._fuse(join(tokens, embedding, features, (None, None), eps))
            return x, x
        assert isinstance(config, EagleConfig)
        x, norms = self._empty(len(tokens), config.hidden_size), (norm, self._hidden_norm)
        return x, join(tokens, embedding, features, norms, eps, x, config.norm_before_residual)

    def _pass(
        self, batch: DeviceBatch, features: Tensor | None, slots: Tensor, how: Attending
    ) -> tuple[Tensor, Tensor]:
        """-> the residual stream after all layers, and what the output layer reads of it, [T, hidden] each.
        slots: where the rows' keys are written; `batch.slots`: where they are read."""
        x, first = self._enter(batch.input_ids, features)
        normed, norms = torch.empty_like(x), [layer.attention_norm for layer in self._layers[1:]]
        norms.append(self._ones if self._norm is None else self._norm)
        for i, layer in enumerate(self._layers):
            q = layer.queries(first, (batch.positions, slots), self._cache.layer(i))
            added = layer.run(x, q, batch, self._cache.layer(i), how, normed)
            rows.add_norm(x, added, None, norms[i], self._eps, normed)
            first = normed
        return x, x if self._norm is None else normed
