"""A head that drafts token by token, on a GPU: EAGLE-3, EAGLE-1 or a distilled model. The interface of
cpu/chain_head.py.

A whole chain is one CUDA graph: it reads what the text has new, chooses a token, steps on from it, and the
host waits once, for the tokens. A tree's levels are a graph each. Invariant: graphs are recorded for a bucket
and for one memory of keys and values; padding writes to the trash slot alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paceline.cuda import rows
from paceline.cuda.attention import attend
from paceline.cuda.batch import REQUESTS, context_for, next_size
from paceline.cuda.enter import gather, join
from paceline.cuda.graphs import Graphs, Recording
from paceline.cuda.guess import Guessing, guess, step_results
from paceline.cuda.head_cache import HeadCache, PagedPlace
from paceline.cuda.head_inputs import (
    ALIGNED,
    NO_ROWS,
    TAIL,
    Buffer,
    Column,
    Table,
    guesses_of,
    is_bucket,
    row_columns,
    row_values,
    rows_for,
    speaker_columns,
    speaker_values,
    table_of_feeds,
    table_of_nodes,
    warm_contexts,
)
from paceline.cuda.head_weights import HeadReader
from paceline.cuda.overlap import PLAIN_ROWS
from paceline.cuda.weights import Layer
from paceline.heads.config import DraftConfig, EagleConfig, LayeredConfig
from paceline.heads.others import Eagle1Config
from paceline.heads.rows import Feed, Guesses, Node, Said, Speaker

if TYPE_CHECKING:
    from paceline.cuda.decoder import CudaDecoder

CHUNK = 256  # rows of a text read in one pass


class Bucket(NamedTuple):
    rows: int
    requests: int
    speaking: int  # rows whose logits are wanted
    context: int
    steps: int  # tokens of a chain; 0: logits
    is_true: bool  # features are the target's, else outputs of this head


class Sight(NamedTuple):
    """What attention reads (cuda/attention.py)."""

    positions: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    prefix_lens: torch.Tensor
    block_tables: torch.Tensor
    masks: torch.Tensor


class CudaChainHead:
    def __init__(
        self, config: LayeredConfig, tensors: Mapping[str, torch.Tensor], decoder: CudaDecoder, num_blocks: int,
        feature_norm: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """feature_norm: the target's last norm, for heads that read what comes out of it."""
        self.config, self.device, self._decoder = config, decoder.device, decoder
        reader = HeadReader(tensors, decoder)
        prefixes = (
            [f"layers.{i}." for i in range(config.num_layers)]
            if isinstance(config, DraftConfig)
            else ["midlayer."]
        )
        self._layers, self._dtype, self._ids = reader.layers(config, prefixes), reader.dtype, reader.ids()
        self._fuse = reader.matrix("fc") if reader.has("fc") else None
        self._hidden_norm, self._norm = reader.norm_if_any("midlayer.hidden_norm"), reader.norm_if_any("norm")
        self._speak, self._feature_norm = (
            reader.matrix("lm_head"),
            None if feature_norm is None else feature_norm.to(self.device),
        )
        self._cache = HeadCache(
            len(prefixes), config.num_kv_heads, config.head_dim, self._dtype, self.device, num_blocks
        )
        self._graphs = Graphs(decoder.capture)
        self._nowhere = torch.zeros(
            config.hidden_size, dtype=self._dtype, device=self.device
        )  # padding's features
        self._ones = torch.ones(config.hidden_size, device=self.device)

    @property
    def nowhere(self) -> int:
        """An address of features for rows that have none."""
        return self._nowhere.data_ptr()

    @property
    def generation(self) -> int:
        """What is recorded is good for one of them."""
        return self._cache.generation

    def place(self) -> PagedPlace:
        return self._cache.place()

    def fork(self, place: PagedPlace, length: int) -> PagedPlace:
        return self._cache.fork(place, length)

    def can_guess(self, temperature: float) -> bool:
        return True

    @torch.inference_mode()
    def read(self, feeds: Sequence[Feed]) -> None:
        for feed in feeds:
            for first in range(0, len(feed.tokens), CHUNK):
                part = slice(first, first + CHUNK)
                table = table_of_feeds(
                    [Feed(feed.place, feed.start + first, feed.tokens[part], feed.rows[part])], self.taps
                )
                bucket = Bucket(len(table.tokens), 1, 1, context_for(table.prefixes[0]), 0, is_true=True)
                # Nobody waits for it, and a recording's inputs are one buffer.
                self._launch(bucket, self._rows(bucket, table), is_recorded=False)

    @torch.inference_mode()
    def begin(self, feeds: Sequence[Feed]) -> Said:
        return self._said(table_of_feeds(self._tails(feeds), self.taps), is_true=True)

    @torch.inference_mode()
    def outputs(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """[feeds, hidden] after the last row of each; the next call may overwrite them."""
        _, outputs = self._said_there(table_of_feeds(self._tails(feeds), self.taps), is_true=True)
        return outputs

    @torch.inference_mode()
    def level(self, nodes: Sequence[Node]) -> Said:
        for node in nodes:
            node.place.reserve(node.at + 1)  # before the trash slot is asked for: more memory moves it
        table = table_of_nodes(nodes, self._cache.trash_slot, self.nowhere, has_sources=bool(self.taps))
        return self._said(table, is_true=False)

    @torch.inference_mode()
    def guess(self, feeds: Sequence[Feed], speakers: Sequence[Speaker], steps: int, least: float) -> Guesses:
        """Chains after the last row of each feed; short ones are as quick, so `least` stops nothing."""
        feeds, ends = self._tails(feeds), [feed.start + len(feed.tokens) for feed in feeds]
        for feed, end in zip(feeds, ends, strict=True):
            feed.place.reserve(end + steps)
        table = table_of_feeds(feeds, self.taps)
        requests = next_size(REQUESTS, len(feeds))
        bucket = Bucket(
            rows_for(len(table.tokens)),
            requests,
            requests,
            context_for(max(ends) + steps),
            steps,
            is_true=True,
        )
        return guesses_of(self._launch(bucket, self.values(bucket, table, feeds, speakers)), len(feeds))

    @torch.inference_mode()
    def warm_up(self, steps: int) -> None:
        """Record what a request alone will need for chains of up to so many tokens; of none, for outputs."""
        for context in warm_contexts(self._decoder.config.max_context):
            for count in range(min(steps, 1), steps + 1):
                self._recorded(Bucket(rows_for(1), 1, 1, context, count, is_true=True))

    def _tails(self, feeds: Sequence[Feed]) -> Sequence[Feed]:
        """The feeds without what is too long for a recording, which is read now: all but the last row of a
        prompt.
        """
        long = [feed for feed in feeds if len(feed.tokens) > TAIL]
        self.read([Feed(feed.place, feed.start, feed.tokens[:-1], feed.rows[:-1]) for feed in long])
        last = {id(f): Feed(f.place, f.start + len(f.tokens) - 1, f.tokens[-1:], f.rows[-1:]) for f in long}
        return [last.get(id(feed), feed) for feed in feeds]

    def _said(self, table: Table, is_true: bool) -> Said:
        logits, outputs = self._said_there(table, is_true)
        return Said(logits, list(outputs.clone()))

    def _said_there(self, table: Table, is_true: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [n, words] and outputs [n, hidden] where the passes leave them."""
        count, num_rows = len(table.speaking), len(table.tokens)
        requests, speaking = next_size(REQUESTS, len(table.prefixes)), next_size(REQUESTS, count)
        bucket = Bucket(rows_for(num_rows), requests, speaking, context_for(max(table.prefixes)), 0, is_true)
        logits, outputs = self._launch(bucket, self._rows(bucket, table))
        return logits[:count], outputs[:count]

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.hidden_layers

    def _ahead(self, feeds: Sequence[Feed], ends: Sequence[int], bucket: Bucket) -> dict[str, list[int]]:
        """Where the rows of the steps after the first lie, [steps, requests]; a row sees what was before
        it.
        """
        ahead: dict[str, list[int]] = {"next_positions": [], "next_slots": []}
        padding = max(bucket.requests, ALIGNED) - len(feeds)
        for step in range(bucket.steps - 1):
            ahead["next_positions"] += [*(end + step for end in ends), *[0] * padding]
            slots = (feed.place.slot(end + step) for feed, end in zip(feeds, ends, strict=True))
            ahead["next_slots"] += [*slots, *[self._cache.trash_slot] * padding]
        return ahead

    def values(
        self, bucket: Bucket, table: Table, feeds: Sequence[Feed], speakers: Sequence[Speaker]
    ) -> dict[str, Any]:
        """What chains after the feeds read."""
        ends = [feed.start + len(feed.tokens) for feed in feeds]
        return {**self._rows(bucket, table), **speaker_values(speakers), **self._ahead(feeds, ends, bucket)}

    def _rows(self, bucket: Bucket, table: Table) -> dict[str, Any]:
        return row_values(table, bucket.rows, bucket.requests, bucket.context)

    def _launch(self, bucket: Bucket, given: Mapping[str, Any], is_recorded: bool = True) -> Any:
        if is_recorded and is_bucket(bucket.rows, bucket.speaking):
            recording, buffer = self._recorded(bucket)
            buffer.fill(given)
            recording.replay()
            return recording.outputs
        run, buffer = self.prepare(bucket)
        buffer.fill(given)
        return run()

    def _recorded(self, bucket: Bucket) -> tuple[Recording, Buffer]:
        return self._graphs.get((bucket, self.generation), lambda: self.prepare(bucket))

    def prepare(self, bucket: Bucket) -> tuple[Callable[[], Any], Buffer]:
        """What launches the passes of a bucket, and what they read."""
        features = len(self.taps) if bucket.is_true else min(len(self.taps), 1)
        trash = self._cache.trash_slot
        columns = row_columns(
            bucket.rows, bucket.requests, bucket.speaking, bucket.context, features, trash, self.nowhere
        )  # fmt: skip
        if bucket.steps:
            ahead = (max(bucket.steps - 1, 1), max(bucket.requests, ALIGNED))
            columns |= {
                **speaker_columns(bucket.requests),
                "next_positions": Column(ahead),
                "next_slots": Column(ahead, padding=trash),
            }
        buffer = Buffer(columns, self.device)
        buffer.fill(self._rows(bucket, NO_ROWS))  # a capture launches before there is a batch
        if bucket.steps:
            buffer.on_device["each"] = torch.arange(
                bucket.requests + 1, dtype=torch.int32, device=self.device
            )
            buffer.on_device["alone"] = torch.ones(
                (bucket.requests, 1), dtype=torch.int64, device=self.device
            )
        return partial(self._run, bucket, buffer.on_device), buffer

    def _run(self, bucket: Bucket, at: dict[str, torch.Tensor]) -> Any:
        """-> results (`step_results`) of a chain, or logits [speaking, words] and outputs [speaking,
        hidden].
        """
        sight = Sight(at["positions"], at["stands"], at["starts"], at["prefixes"], at["tables"], at["masks"])
        x, normed = self._pass(
            at["tokens"], self._features(bucket, at), at["slots"], sight, bucket.context, bucket.rows
        )
        x, normed = x[at["speaking"]], normed[at["speaking"]]
        logits = self._speak(normed)
        if not bucket.steps:
            return logits, self._output(x, normed)
        count, how = bucket.requests, Guessing(at["temperatures"], at["seeds"], at["places"], self._ids)
        results = step_results(bucket.steps, bucket.requests, self.device)
        for step in range(bucket.steps):
            if step:
                positions, slots = at["next_positions"][step - 1, :count], at["next_slots"][step - 1, :count]
                sight = Sight(positions, slots, at["each"], positions, at["tables"][:-1], at["alone"])
                features = self._output(x, normed)[None] if self.taps else None
                x, normed = self._pass(
                    results[0, step - 1, :count], features, slots, sight, bucket.context, 1
                )
                logits = self._speak(normed)
            guess(logits, how, step, results[:, step, :count])
        return results

    def _output(self, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """What the next step reads."""
        return normed if isinstance(self.config, EagleConfig) and self.config.norm_output else x

    def _features(self, bucket: Bucket, at: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """[parts, T, hidden]: of the target and fused, or of this head."""
        if not self.taps:
            return None
        out = torch.empty(
            (bucket.rows, at["addresses"].shape[1] * self.config.hidden_size),
            dtype=self._dtype,
            device=self.device,
        )
        norm = self._feature_norm if bucket.is_true else None
        gather(at["addresses"], norm, self.config.rms_eps, self.config.hidden_size, out)
        return (
            self._fuse.parts(out)
            if self._fuse is not None and bucket.is_true and isinstance(self.config, EagleConfig)
            else out[None]
        )

    def _enter(
        self, tokens: torch.Tensor, features: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> the residual stream [T, hidden] and what the first layer reads of it."""
        config, target = self.config, self._decoder
        table, scale, shape = (
            target.weights.embedding,
            target.config.embed_scale,
            (len(tokens), config.hidden_size),
        )
        x = torch.empty(shape, dtype=self._dtype, device=self.device)
        if features is None:
            first = torch.empty_like(x)
            rows.embed(tokens, table, scale, x)
            rows.add_norm(x, None, None, self._layers[0].attention_norm, config.rms_eps, first)
            return x, first
        both = torch.empty((shape[0], 2 * shape[1]), dtype=self._dtype, device=self.device)
        if isinstance(config, Eagle1Config):
            assert self._fuse is not None
            join(tokens, table, scale, features, (None, None), config.rms_eps, both)
            x = self._fuse(both)
            return x, x
        assert isinstance(config, EagleConfig)
        norms = self._layers[0].attention_norm, self._hidden_norm
        join(tokens, table, scale, features, norms, config.rms_eps, both, x, config.norm_before_residual)
        return x, both

    def _pass(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor | None,
        slots: torch.Tensor,
        sight: Sight,
        context: int,
        max_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> the residual stream after all layers, and what the output layer reads of it, [T, hidden]
        each.
        """
        eps = self.config.rms_eps
        x, first = self._enter(tokens, features)
        normed = torch.empty_like(x)
        for i, layer in enumerate(self._layers):
            attended = layer.out.parts(self._attend(i, layer, first, slots, sight, context, max_rows))
            rows.add_norm(x, attended, None, layer.mlp_norm, eps, normed)
            added = layer.down.parts(layer.gate_up(normed, "silu"))
            following = self._layers[i + 1].attention_norm if i + 1 < len(self._layers) else self._norm
            rows.add_norm(x, added, None, self._ones if following is None else following, eps, normed)
            first = normed
        return x, x if self._norm is None else normed

    def _attend(
        self, i: int, layer: Layer, x: torch.Tensor, slots: torch.Tensor, sight: Sight, context: int, max_rows: int
    ) -> torch.Tensor:  # fmt: skip
        """[T, width] -> [T, heads * dim]."""
        config, (keys, values) = self.config, self._cache.layer(i)
        q = torch.empty((len(x), config.num_heads, config.head_dim), dtype=self._dtype, device=self.device)
        rows.place(
            layer.qkv.parts(x, is_early=len(x) <= PLAIN_ROWS),
            sight.positions,
            slots,
            *layer.tables,
            keys,
            values,
            layer.q_norm,
            layer.k_norm,
            config.rms_eps,
            q,
        )
        out, scale = torch.empty_like(q), config.head_dim**-0.5
        attend(
            q, keys, values, sight, scale=scale, window=None, max_context=context, max_rows=max_rows, out=out
        )
        return out.view(len(out), -1)
