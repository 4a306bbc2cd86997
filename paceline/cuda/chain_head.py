"""A head that drafts token by token, on a GPU: EAGLE-3, EAGLE-1 or a distilled model. The interface of
cpu/chain_head.py.

A whole chain is one CUDA graph: it reads what the text has new, chooses a token, steps on from it, and the
host waits once, for the tokens. A tree's levels are a graph each. Invariant: a step of a chain sees what was
written before it, by its position alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from paceline.cuda import head_inputs as inputs
from paceline.cuda import rows
from paceline.cuda.attention import Attending
from paceline.cuda.batch import Buffer, Column, DeviceBatch, context_for
from paceline.cuda.decoder import CudaDecoder
from paceline.cuda.features import Embedding, join
from paceline.cuda.head_inputs import ChainShape, PassRows
from paceline.cuda.overlap import PLAIN_ROWS
from paceline.cuda.pick import guess, step_results
from paceline.cuda.recorded_head import CachedHead
from paceline.cuda.weights import head_reader
from paceline.heads.config import DraftConfig, Eagle1Config, EagleConfig, LayeredConfig
from paceline.heads.rows import Feed, Guesses, HeadOutput, Node, Sampler
from paceline.loaders.head_files import Head

CHUNK = 256  # rows of a text read in one pass


class CudaChainHead(CachedHead):
    def __init__(self, head: Head, decoder: CudaDecoder, num_blocks: int) -> None:
        config, reader = head.config, head_reader(head, decoder.weights)
        assert isinstance(config, LayeredConfig)
        prefixes = ["midlayer."]
        if isinstance(config, DraftConfig):
            prefixes = [f"layers.{i}." for i in range(config.num_layers)]
        super().__init__(head, decoder, num_blocks, reader, prefixes)
        self.config, self.taps = config, config.hidden_layers
        self._fuse = reader.matrix("fc") if reader.has("fc") else None
        self._hidden_norm, self._norm = reader.norm("midlayer.hidden_norm"), reader.norm("norm")
        self._output_layer = reader.matrix("lm_head")
        # EAGLE-1 reads what comes out of the target's last norm.
        self._feature_norm = decoder.weights.norm if isinstance(config, Eagle1Config) else None
        self._ones = torch.ones(config.hidden_size, device=self.device)

    @torch.inference_mode()
    def read(self, feed: Feed) -> None:
        for first in range(0, len(feed.tokens), CHUNK):
            part = slice(first, first + CHUNK)
            some = Feed(feed.place, feed.start + first, feed.tokens[part], feed.rows[part])
            table = inputs.table_of_feeds([some], self.taps)
            shape = ChainShape(len(table.tokens), 1, 1, context_for(table.prefixes[0]), 0, is_true=True)
            # Nothing waits for it, and a recording's inputs are one buffer.
            self._launch(shape, inputs.row_values(table, shape), is_recorded=False)

    @torch.inference_mode()
    def begin(self, feeds: Sequence[Feed]) -> HeadOutput:
        return self._after(inputs.table_of_feeds(self._tails(feeds), self.taps), is_true=True)

    @torch.inference_mode()
    def outputs(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """[feeds, hidden] after the last row of each; the next call may overwrite them."""
        return self._run_rows(inputs.table_of_feeds(self._tails(feeds), self.taps), is_true=True)[1]

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
        ends = [feed.start + len(feed.tokens) for feed in feeds]
        for feed, end in zip(feeds, ends, strict=True):
            feed.place.reserve(end + steps)
        table, requests = inputs.table_of_feeds(feeds, self.taps), inputs.requests_for(len(feeds))
        rows, context = inputs.rows_for(len(table.tokens)), context_for(max(ends) + steps)
        shape = ChainShape(rows, requests, requests, context, steps, is_true=True)
        values = self.values(shape, table, feeds, samplers)
        results = self._launch(shape, values, inputs.is_recordable(rows, requests))
        return inputs.guesses_of(results, len(feeds))

    @torch.inference_mode()
    def warm_up(self, steps: int) -> None:
        """Record what a request alone will need for chains of up to `steps` tokens; of none, for outputs."""
        for context in inputs.warm_contexts(self.decoder.config.max_context):
            for count in range(min(steps, 1), steps + 1):
                self._recorded(ChainShape(inputs.rows_for(1), 1, 1, context, count, is_true=True))

    def _tails(self, feeds: Sequence[Feed]) -> list[Feed]:
        """The feeds without what is too long for a recording, which is read now: all but the last row."""
        tails = []
        for f in feeds:
            if len(f.tokens) > inputs.TAIL:
                self.read(f._replace(tokens=f.tokens[:-1], rows=f.rows[:-1]))
                f = Feed(f.place, f.start + len(f.tokens) - 1, f.tokens[-1:], f.rows[-1:])
            tails.append(f)
        return tails

    def _after(self, table: PassRows, is_true: bool) -> HeadOutput:
        logits, outputs = self._run_rows(table, is_true)
        return HeadOutput(logits, list(outputs.clone()))

    def _run_rows(self, table: PassRows, is_true: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [n, words] and outputs [n, hidden] where the passes leave them."""
        count = len(table.wanted)
        requests, wanted = inputs.requests_for(len(table.prefixes)), inputs.requests_for(count)
        context = context_for(max(table.prefixes))
        shape = ChainShape(inputs.rows_for(len(table.tokens)), requests, wanted, context, 0, is_true)
        is_recorded = inputs.is_recordable(shape.rows, wanted)
        logits, outputs = self._launch(shape, inputs.row_values(table, shape), is_recorded)
        return logits[:count], outputs[:count]

    def values(
        self, shape: ChainShape, table: PassRows, feeds: Sequence[Feed], samplers: Sequence[Sampler]
    ) -> dict[str, Any]:
        """What chains after the feeds read, and where the rows of further steps lie: [steps, requests]."""
        ends = [feed.start + len(feed.tokens) for feed in feeds]
        positions: list[int] = []
        slots: list[int] = []
        padding = max(shape.requests, inputs.ALIGNED) - len(feeds)
        for step in range(shape.steps - 1):
            positions += [*(end + step for end in ends), *[0] * padding]
            slots += [feed.place.slot(end + step) for feed, end in zip(feeds, ends, strict=True)]
            slots += [self._cache.trash_slot] * padding
        ahead = {"next_positions": positions, "next_slots": slots}
        return {**inputs.row_values(table, shape), **inputs.choice_values(samplers), **ahead}

    def prepare(self, shape: ChainShape) -> tuple[Callable[[], Any], Buffer]:
        num_features = len(self.taps) if shape.is_true else min(len(self.taps), 1)
        trash, requests = self._cache.trash_slot, shape.requests
        columns = inputs.row_columns(shape, num_features, trash, self.nowhere)
        if shape.steps:
            ahead = (max(shape.steps - 1, 1), max(requests, inputs.ALIGNED))
            columns |= inputs.choice_columns(requests)
            columns |= {"next_positions": Column(ahead), "next_slots": Column(ahead, padding=trash)}
        buffer = Buffer(columns, self.device)
        buffer.fill(inputs.row_values(PassRows(), shape))  # a capture launches before there is a batch
        at = buffer.on_device
        if shape.steps:
            at["each"] = torch.arange(requests + 1, dtype=torch.int32, device=self.device)
            at["alone"] = torch.ones((requests, 1), dtype=torch.int64, device=self.device)
        return partial(self._run, shape, at), buffer

    def _run(self, shape: ChainShape, at: Mapping[str, torch.Tensor]) -> Any:
        """-> results (`step_results`) of a chain, or logits [wanted, words] and outputs [wanted, hidden]."""
        names = ("tokens", "positions", "stands", "starts", "prefixes", "tables", "masks")
        batch = DeviceBatch(*(at[name] for name in names))
        how = Attending(self._scale, shape.context, shape.rows)
        x, normed = self._pass(batch, self._features(shape, at["addresses"]), at["slots"], how)
        x, normed = x[at["wanted"]], normed[at["wanted"]]
        logits = self._output_layer(normed)
        if not shape.steps:
            return logits, self._output(x, normed)
        count, guessing = shape.requests, self._guessing(at)
        results = step_results(shape.steps, count, self.device)
        for step in range(shape.steps):
            if step:
                positions, slots = at["next_positions"][step - 1, :count], at["next_slots"][step - 1, :count]
                tables, tokens = at["tables"][:-1], results[0, step - 1, :count]
                batch = DeviceBatch(tokens, positions, slots, at["each"], positions, tables, at["alone"])
                features = self._output(x, normed)[None] if self.taps else None
                x, normed = self._pass(batch, features, slots, how._replace(max_rows=1))
                logits = self._output_layer(normed)
            guess(logits, guessing, step, results[:, step, :count])
        return results

    def _output(self, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """What the next step reads."""
        return normed if isinstance(self.config, EagleConfig) and self.config.norm_output else x

    def _features(self, shape: ChainShape, addresses: torch.Tensor) -> torch.Tensor | None:
        """[parts, T, hidden]: of the target and fused, or of this head."""
        if not self.taps:
            return None
        features = self._gathered(addresses, self._feature_norm if shape.is_true else None)
        if self._fuse is not None and shape.is_true and isinstance(self.config, EagleConfig):
            return self._fuse.parts(features)
        return features[None]

    def _enter(
        self, tokens: torch.Tensor, features: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> the residual stream [T, hidden] and what the first layer reads of it."""
        config, eps, norm = self.config, self._eps, self._layers[0].attention_norm
        embedding = Embedding(self.decoder.weights.embedding, self.decoder.config.embed_scale)
        x = self._empty(len(tokens), config.hidden_size)
        if features is None:
            first = torch.empty_like(x)
            rows.embed(tokens, *embedding, x)
            rows.add_norm(x, None, None, norm, eps, first)
            return x, first
        both = self._empty(len(tokens), 2 * config.hidden_size)
        if isinstance(config, Eagle1Config):
            assert self._fuse is not None
            join(tokens, embedding, features, (None, None), eps, both)
            x = self._fuse(both)
            return x, x
        assert isinstance(config, EagleConfig)
        norms = norm, self._hidden_norm
        join(tokens, embedding, features, norms, eps, both, x, config.norm_before_residual)
        return x, both

    def _pass(
        self, batch: DeviceBatch, features: torch.Tensor | None, slots: torch.Tensor, how: Attending
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> the residual stream after all layers, and what the output layer reads of it, [T, hidden] each.
        slots: where the rows' keys are written; `batch.slots`: where they are read."""
        x, first = self._enter(batch.input_ids, features)
        normed, norms = torch.empty_like(x), [layer.attention_norm for layer in self._layers[1:]]
        norms.append(self._ones if self._norm is None else self._norm)
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv.parts(first, is_early=len(first) <= PLAIN_ROWS)
            attended = layer.out.parts(layer.attend(qkv, slots, batch, self._cache.layer(i), how))
            rows.add_norm(x, attended, None, layer.mlp_norm, self._eps, normed)
            rows.add_norm(x, layer.mlp(normed, "silu"), None, norms[i], self._eps, normed)
            first = normed
        return x, x if self._norm is None else normed
