"""DFlash on a GPU: a draft is one CUDA graph, from the target's hidden states to the tokens. The interface of
cpu/block_head.py.

Features of the text and rows of the block go through one product for keys and values; queries are the block's
alone. Invariant: when a block attends, its own keys lie behind the text's, so its rows see a prefix of text
and block, and nothing of the pass besides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from paceline.cuda import rows
from paceline.cuda.attention import attend
from paceline.cuda.batch import BLOCK_SIZE, REQUESTS, context_for, mask_words, next_size
from paceline.cuda.chain_head import Sight
from paceline.cuda.enter import gather
from paceline.cuda.graphs import Graphs, Recording
from paceline.cuda.guess import Guessing, guess, step_results
from paceline.cuda.head_cache import HeadCache, PagedPlace
from paceline.cuda.head_inputs import (
    TAIL,
    Buffer,
    Column,
    addresses_of,
    block_tables,
    guesses_of,
    is_bucket,
    rows_for,
    speaker_columns,
    speaker_values,
    warm_contexts,
)
from paceline.cuda.head_weights import HeadReader
from paceline.cuda.overlap import PLAIN_ROWS
from paceline.cuda.weights import Layer
from paceline.heads.config import DflashConfig
from paceline.heads.rows import BlockFeed, Guesses, Speaker

if TYPE_CHECKING:
    from paceline.cuda.decoder import CudaDecoder


class Bucket(NamedTuple):
    rows: int  # features of texts
    requests: int
    context: int  # places of one text, its block counted
    steps: int
    is_guessed: bool  # else logits are wanted


class CudaBlockHead:
    def __init__(
        self, config: DflashConfig, tensors: Mapping[str, torch.Tensor], decoder: CudaDecoder, num_blocks: int
    ) -> None:
        self.config, self.device, self._decoder = config, decoder.device, decoder
        reader = HeadReader(tensors, decoder)
        self._layers = reader.layers(config, [f"layers.{i}." for i in range(config.num_layers)])
        self._dtype, self._ids, self._fuse, self._speak = (
            reader.dtype,
            reader.ids(),
            reader.matrix("fc"),
            reader.matrix("lm_head"),
        )
        self._hidden_norm, self._norm = reader.norm("hidden_norm"), reader.norm("norm")
        self._markov = (reader.table("markov_w1"), reader.matrix("markov_w2")) if config.markov_rank else None
        words = np.full(
            config.vocab_size, config.draft_vocab_size, np.int32
        )  # target id -> draft id; the last: any other token
        ids = np.arange(config.vocab_size) if self._ids is None else tensors["draft_ids"].cpu().numpy()
        words[ids] = np.arange(len(ids), dtype=np.int32)
        self._words = words
        self._cache = HeadCache(
            config.num_layers, config.num_kv_heads, config.head_dim, self._dtype, self.device, num_blocks
        )
        self._graphs = Graphs(decoder.capture)
        self._nowhere = torch.zeros(config.hidden_size, dtype=self._dtype, device=self.device)

    def place(self) -> PagedPlace:
        return self._cache.place()

    def fork(self, place: PagedPlace, length: int) -> PagedPlace:
        return self._cache.fork(place, length)

    def can_guess(self, temperature: float) -> bool:
        return True

    @torch.inference_mode()
    def read(self, feed: BlockFeed) -> None:
        """Features, fused and normed, as keys and values of every layer."""
        end = feed.start + len(feed.rows)
        feed.place.reserve(end)
        where = {"positions": Column((len(feed.rows),)), "slots": Column((len(feed.rows),))}
        buffer = Buffer(
            {"addresses": Column((len(feed.rows), len(self.config.taps)), np.int64), **where}, self.device
        )
        addresses = addresses_of(feed.rows, self.config.taps)
        buffer.fill(
            {
                "addresses": addresses,
                "positions": range(feed.start, end),
                "slots": feed.place.slots(feed.start, end),
            }
        )
        at, context = (
            buffer.on_device,
            torch.empty((len(feed.rows), self.config.hidden_size), dtype=self._dtype, device=self.device),
        )
        self._fused(at["addresses"], context)
        for i, layer in enumerate(self._layers):
            self._placed(i, layer, context, at)

    @torch.inference_mode()
    def logits(self, feeds: Sequence[BlockFeed], steps: int) -> torch.Tensor:
        found: torch.Tensor = self._launch(feeds, (), steps)
        return found[:, : len(feeds)]

    @torch.inference_mode()
    def guess(self, feeds: Sequence[BlockFeed], speakers: Sequence[Speaker], steps: int) -> Guesses:
        """Tokens from left to right; the device is waited for once."""
        return guesses_of(self._launch(feeds, speakers, steps), len(feeds))

    @torch.inference_mode()
    def warm_up(self, steps: int) -> None:
        """Record what a request alone will need for drafts of up to so many tokens."""
        for context in warm_contexts(self._decoder.config.max_context):
            for count in range(1, steps + 1):
                self._recorded(Bucket(rows_for(1), 1, context, count, is_guessed=True))

    def _tail(self, feed: BlockFeed) -> BlockFeed:
        """The feed without what is too long for a recording, which is read now."""
        if len(feed.rows) <= TAIL:
            return feed
        self.read(feed._replace(rows=feed.rows[:-1]))
        return feed._replace(start=feed.start + len(feed.rows) - 1, rows=feed.rows[-1:])

    def _recorded(self, bucket: Bucket) -> tuple[Recording, Buffer]:
        return self._graphs.get((bucket, self._cache.generation), lambda: self._prepare(bucket))

    def _launch(self, feeds: Sequence[BlockFeed], speakers: Sequence[Speaker], steps: int) -> Any:
        feeds, size, ends = (
            [self._tail(feed) for feed in feeds],
            self.config.block_size,
            [feed.start + len(feed.rows) for feed in feeds],
        )
        for feed, end in zip(feeds, ends, strict=True):
            feed.place.reserve(end + size)
        num_rows = sum(len(feed.rows) for feed in feeds)
        bucket = Bucket(
            rows_for(num_rows), next_size(REQUESTS, len(feeds)), context_for(max(ends) + size), steps, bool(speakers)
        )  # fmt: skip
        values = {**self._values(bucket, feeds, ends), **speaker_values(speakers)}
        if is_bucket(bucket.rows, bucket.requests):
            recording, buffer = self._recorded(bucket)
            buffer.fill(values)
            recording.replay()
            return recording.outputs
        run, buffer = self._prepare(bucket)
        buffer.fill(values)
        return run()

    def _values(self, bucket: Bucket, feeds: Sequence[BlockFeed], ends: Sequence[int]) -> dict[str, Any]:
        size, mask, trash = self.config.block_size, self.config.mask_token_id, self._cache.trash_slot
        positions = [at for feed, end in zip(feeds, ends, strict=True) for at in range(feed.start, end)]
        slots = [
            slot for feed, end in zip(feeds, ends, strict=True) for slot in feed.place.slots(feed.start, end)
        ]
        extra, absent = bucket.rows - len(positions), bucket.requests - len(feeds)
        positions += [*[0] * extra, *(at for end in ends for at in range(end, end + size))]
        slots += [
            *[trash] * extra,
            *(
                slot
                for feed, end in zip(feeds, ends, strict=True)
                for slot in feed.place.slots(end, end + size)
            ),
        ]
        return {
            "addresses": [address for feed in feeds for address in addresses_of(feed.rows, self.config.taps)],
            "positions": positions, "slots": slots, "tokens": [token for feed in feeds for token in (feed.root, *[mask] * (size - 1))],
            "masks": mask_words([*[0] * (len(feeds) * size), *[1 << i for i in range(size)] * absent], 1).reshape(-1),
            "prefixes": [end + size for end in ends], "tables": block_tables([feed.place for feed in feeds], bucket.context // BLOCK_SIZE),
            "words": [self._words[feed.root] for feed in feeds],
        }  # fmt: skip

    def _prepare(self, bucket: Bucket) -> tuple[Callable[[], Any], Buffer]:
        requests, num_rows = bucket.requests, bucket.requests * self.config.block_size
        trash = self._cache.trash_slot
        columns = {
            "addresses": Column((bucket.rows, len(self.config.taps)), np.int64, self._nowhere.data_ptr()),
            "masks": Column((num_rows, 1), np.int64), "positions": Column((bucket.rows + num_rows,)),
            "slots": Column((bucket.rows + num_rows,), padding=trash), "tokens": Column((num_rows,)), "prefixes": Column((requests,)),
            "tables": Column((requests, bucket.context // BLOCK_SIZE)), "words": Column((requests,)), **speaker_columns(requests),
        }  # fmt: skip
        buffer = Buffer(columns, self.device)
        buffer.fill(self._values(bucket, (), ()))  # a capture launches before there is a batch
        buffer.on_device["starts"] = torch.arange(
            0, num_rows + 1, self.config.block_size, dtype=torch.int32, device=self.device
        )
        return partial(self._run, bucket, buffer.on_device), buffer

    def _run(self, bucket: Bucket, at: dict[str, torch.Tensor]) -> torch.Tensor:
        """-> results [2, steps, requests] of guesses, or logits [steps, requests, words]."""
        normed, requests, first = (
            self._block(bucket, at),
            bucket.requests,
            0 if self.config.sample_from_anchor else 1,
        )
        kept = (
            normed.view(requests, self.config.block_size, -1)[:, first : first + bucket.steps]
            .transpose(0, 1)
            .contiguous()
        )
        logits = self._speak(kept.flatten(0, 1))  # [steps * requests, words]
        if not bucket.is_guessed:
            return logits.view(bucket.steps, requests, -1)
        how = Guessing(at["temperatures"], at["seeds"], at["places"], self._ids)
        if self._markov is None:
            results = torch.empty((2, bucket.steps, requests), dtype=torch.int32, device=self.device)
            guess(logits, how, 0, results.flatten(1))
            return results
        results = step_results(bucket.steps, requests, self.device)
        (table, speak), words = self._markov, at["words"]
        for step, some in enumerate(logits.split(requests)):
            before = torch.empty((requests, table.shape[1]), dtype=self._dtype, device=self.device)
            rows.embed(words, table, 1.0, before)
            words = guess(some, how, step, results[:, step, :requests], added=speak(before))
        return results

    def _fused(self, addresses: torch.Tensor, out: torch.Tensor) -> None:
        """out [T, hidden]: what all layers read of the target."""
        taken = torch.empty(
            (len(addresses), addresses.shape[1] * self.config.hidden_size),
            dtype=self._dtype,
            device=self.device,
        )
        gather(addresses, None, self.config.rms_eps, self.config.hidden_size, taken)
        rows.add_norm(self._fuse(taken), None, None, self._hidden_norm, self.config.rms_eps, out)

    def _placed(self, i: int, layer: Layer, x: torch.Tensor, at: dict[str, torch.Tensor]) -> torch.Tensor:
        """Keys and values of all rows to their slots; -> queries [T, heads, dim]."""
        config, (keys, values) = self.config, self._cache.layer(i)
        q = torch.empty((len(x), config.num_heads, config.head_dim), dtype=self._dtype, device=self.device)
        where = at["positions"], at["slots"]
        rows.place(
            layer.qkv.parts(x, is_early=len(x) <= PLAIN_ROWS),
            *where,
            *layer.tables,
            keys,
            values,
            layer.q_norm,
            layer.k_norm,
            config.rms_eps,
            q,
        )
        return q

    def _block(self, bucket: Bucket, at: dict[str, torch.Tensor]) -> torch.Tensor:
        """[requests * size, hidden]: what the output layer reads."""
        config, target, count = self.config, self._decoder, bucket.rows
        x = torch.empty((len(at["tokens"]), config.hidden_size), dtype=self._dtype, device=self.device)
        both = torch.empty((count + len(x), config.hidden_size), dtype=self._dtype, device=self.device)
        normed, added = torch.empty_like(x), None
        sight = Sight(
            at["positions"][count:],
            at["slots"][count:],
            at["starts"],
            at["prefixes"],
            at["tables"],
            at["masks"],
        )
        self._fused(at["addresses"], both[:count])
        rows.embed(at["tokens"], target.weights.embedding, target.config.embed_scale, x)
        for i, layer in enumerate(self._layers):
            rows.add_norm(x, added, None, layer.attention_norm, config.rms_eps, both[count:])
            q, (keys, values) = self._placed(i, layer, both, at)[count:], self._cache.layer(i)
            out, scale, context, size = (
                torch.empty_like(q),
                config.head_dim**-0.5,
                bucket.context,
                config.block_size,
            )
            attend(
                q, keys, values, sight, scale=scale, window=None, max_context=context, max_rows=size, out=out, is_prefix_old=False
            )  # fmt: skip
            rows.add_norm(x, layer.out.parts(out.flatten(1)), None, layer.mlp_norm, config.rms_eps, normed)
            added = layer.down.parts(layer.gate_up(normed, "silu"))
        rows.add_norm(x, added, None, self._norm, config.rms_eps, normed)
        return normed
