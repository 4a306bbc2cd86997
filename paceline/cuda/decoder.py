"""The decoder on a GPU: fused kernels, and one CUDA graph a bucket for the whole pass.

Small passes whose every row wants logits (plain decoding and checking drafts) are padded to a bucket and
replayed where that was recorded; prompts run kernel by kernel. Invariant: what a row computes depends on the
bucket and on its own context alone, so a request gets the same bits whatever shares its pass; in exact mode
on its own context alone, and the text is bitwise the same with drafts and without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch

from paceline.core.types import Batch, Output, PassSizes
from paceline.cuda import batch as batches
from paceline.cuda import rows
from paceline.cuda.attention import Attending, paths_of
from paceline.cuda.batch import (
    MAX_ROWS,
    ROWS,
    Bucket,
    Buffer,
    DeviceBatch,
    batch_values,
    bucket_for,
    next_size,
    target_buffer,
)
from paceline.cuda.delta_net import DeltaNet
from paceline.cuda.experts import DenseFfn
from paceline.cuda.gathered import Gathered
from paceline.cuda.graphs import Arriving, Capture, Graphs
from paceline.cuda.layer import Weights
from paceline.cuda.linear import Matrix
from paceline.cuda.norms import cap_logits
from paceline.cuda.pick import pick
from paceline.cuda.recurrent import Versions
from paceline.cuda.weights import load_weights
from paceline.models.attention import LayerCache
from paceline.models.config import ModelConfig
from paceline.models.shard import Group

# Tiles and KV heads of a launch of attention whose splits are added by its last program, at most.
COUNTERS = 8192
MAX_GRAPH_ROWS = 256  # beyond, a pass is bound by arithmetic and launches hide behind it
# Rows of one prompt's pass that is replayed: as long as launches would take longer than arithmetic, so few
# that times the weights they are no more than this.
PROMPT_ROWS, ROWS_TIMES_WEIGHTS = (64, 128, 256, 512, 1024), 6 * 10**11
# Rows and requests of prompts' passes: one of each kind for which kernels differ.
PROMPTS = ((16, 2), (32, 1), (64, 1), (128, 1), (256, 1), (256, 2), (256, 17), (272, 1), (272, 17))


class PassSpec(NamedTuple):
    """What a pass is recorded for."""

    bucket: Bucket
    depth: int
    hidden_layers: tuple[int, ...] = ()
    num_wanted: int | None = None  # rows whose logits are; None: all


class CudaDecoder:
    """Built by `CudaDecoder.load`."""

    picks_cuts = False

    def __init__(
        self, config: ModelConfig, weights: Weights, capture: Capture, is_exact: bool, is_alone: bool = True
    ) -> None:
        """is_alone: no other rank has a part of the weights."""
        self.config, self.weights, self.device, self.is_exact = config, weights, weights.norm.device, is_exact
        self._scales = [config.kinds[config.kind_of(i)].scale for i in range(config.num_layers)]
        self._last_norm = weights.norm * config.logits_scale
        self._is_alone = is_alone
        self.capture = capture  # of all that is recorded on this device: recordings share its memory
        self._graphs = Graphs(capture)
        self.num_blocks = batches.blocks_for(config.max_context)  # of one request, at most
        self._picks = torch.zeros(MAX_GRAPH_ROWS, dtype=torch.int64, device=self.device)  # of the last pass,
        self.latest: Sequence[int] | None = None  # and the same on their way to the host
        self._counters = torch.zeros(COUNTERS, dtype=torch.int32, device=self.device)  # of attention

    @classmethod
    def load(
        cls, source: Any, dtype: str = "bfloat16", device: torch.device | str = "cuda",
        context: int | None = None, exact: bool = False, capture: Capture | None = None,
        group: Group | None = None,
    ) -> Self:  # fmt: skip
        """source: a checkpoint. `exact`: a row has the same bits in every pass, however many rows it has and
        wherever in a tree it is. group: the ranks that have a part each."""
        most = source.config.max_context
        config = replace(source.config, max_context=min(most, context or most))
        weights = load_weights(source, config, dtype, torch.device(device), exact, group)
        return cls(config, weights, capture or Capture(), exact, group is None)

    @property
    def woken(self) -> float:
        """Distinct experts that the last pass woke in a layer that has them, on average; rows that fill it up
        wake some, too. Routers leave their numbers on the device: this alone waits for them."""
        counts = [each.ffn.woken for each in self.weights.layers if not isinstance(each.ffn, DenseFfn)]
        return torch.cat(counts).float().mean().item() if counts else 0.0

    @property
    def num_bytes(self) -> int:
        """Of the matrices, which a pass reads in full."""
        return sum(matrix.num_bytes for matrix in self._matrices)

    @property
    def num_weights(self) -> int:
        return sum(math.prod(matrix.weight.shape) for matrix in self._matrices)

    @property
    def _matrices(self) -> list[Matrix | Gathered]:
        return [m for each in self.weights.layers for m in each.matrices] + [self.weights.head]

    @torch.inference_mode()
    def forward(
        self, batch: Batch, kv: Sequence[LayerCache], *,
        num_layers: int | None = None, hidden_layers: Sequence[int] = (),
    ) -> Output:  # fmt: skip
        """Write K/V of every row at its slot; logits of `batch.rows`, and tokens where there are picks."""
        depth = self.config.num_layers if num_layers is None else num_layers
        assert all(0 <= n <= depth <= self.config.num_layers for n in (0, *hidden_layers)), "no such layer"
        columns, wished = batch.columns, tuple(dict.fromkeys(hidden_layers))
        count, num_rows = len(columns.rows), len(columns.slots)
        spec = PassSpec(bucket_for(columns, self.num_blocks), depth, wished)
        if count < num_rows:
            rows, requests = next_size(PROMPT_ROWS, num_rows), len(columns.prefix_lens)
            spec = PassSpec(Bucket(rows, requests, rows, self.num_blocks), depth, wished, count)
        if (spec, id(kv)) not in self._graphs:  # no more rows and no longer tables than it needs
            num_blocks = len(columns.block_tables) // len(columns.prefix_lens)
            spec = PassSpec(bucket_for(columns, num_blocks), depth, wished, count)
        values = batch_values(spec.bucket, columns, batch.picks)
        logits, picked, hidden = self._graphs.launch((spec, id(kv)), partial(self.prepare, spec, kv), values)
        kept = hidden[:, :num_rows].clone() if hidden is not None else ()
        chosen = None if picked is None or batch.picks is None else Arriving(picked[:count])
        # of more, the next pass cannot read them; nor can other ranks
        self.latest = chosen if count <= MAX_GRAPH_ROWS and self._is_alone else None
        return Output(logits[:count], dict(zip(wished, kept, strict=True)), chosen)

    @torch.inference_mode()
    def record(
        self, kv: Sequence[LayerCache], sizes: PassSizes, hidden_layers: Sequence[int] = (),
        num_layers: int | None = None,
    ) -> None:  # fmt: skip
        """All that passes of these sizes replay, with hidden states and without: plain decoding, drafts of
        one request, drafts of several."""
        depth = num_layers or self.config.num_layers
        several = [size for size in ROWS if size <= next_size(ROWS, min(sizes.requests, MAX_GRAPH_ROWS))]
        shapes = [(size, size, 1) for size in several]
        if sizes.nodes:
            shapes += [(size, 1, next_size(MAX_ROWS, size)) for size in ROWS[1:]]
            for fewer, most in pairwise(MAX_ROWS) if sizes.requests > 1 else ():
                shapes += [(size, size, most) for size in ROWS[2:] if size > fewer]
        specs = [PassSpec(Bucket(*shape, self.num_blocks), depth) for shape in shapes]
        most = max(ROWS_TIMES_WEIGHTS // self.num_weights, PROMPT_ROWS[0])
        prompts = [Bucket(size, 1, size, self.num_blocks) for size in PROMPT_ROWS if size <= most]
        specs += [PassSpec(bucket, depth, num_wanted=1) for bucket in prompts]
        taps = dict.fromkeys(((), tuple(dict.fromkeys(hidden_layers))))
        for spec in [spec._replace(hidden_layers=each) for each in taps for spec in specs]:
            self._graphs.record((spec, id(kv)), partial(self.prepare, spec, kv))
        for count, requests in PROMPTS:  # kernels are compiled
            bucket = Bucket(count, min(requests, sizes.requests), next_size(MAX_ROWS, count), self.num_blocks)
            run, _ = self.prepare(PassSpec(bucket, depth, num_wanted=1), kv)
            run()

    def prepare(self, spec: PassSpec, kv: Sequence[LayerCache]) -> tuple[Callable[[], Any], Buffer]:
        """A pass and what it reads. The pass keeps its cache: another at the same address would be taken for
        it."""
        count = spec.bucket.rows if spec.num_wanted is None else spec.num_wanted
        has_states = self.config.recurrent is not None
        keys = next(keys for i, (keys, _) in enumerate(kv) if not self.config.is_recurrent(i))
        buffer = target_buffer(spec.bucket, count, len(keys) - 1, self.device, has_states)
        return partial(self._run, buffer.on_device, spec, kv), buffer

    def _run(self, at: Mapping[str, torch.Tensor], spec: PassSpec, kv: Sequence[LayerCache]) -> Any:
        """-> logits [L, vocab], the picked tokens or None, hidden states [layers, T, hidden] or None."""
        weights, eps, (bucket, depth, wished, num_wanted) = self.weights, self.config.rms_eps, spec
        batch, layers = DeviceBatch.of(at), weights.layers[:depth]
        norms = [*(layer.attention_norm for layer in layers), self._last_norm]
        x = rows.embed(batch.input_ids, weights.embedding, self.config.embed_scale, self._picks)
        hidden = torch.empty((len(wished), *x.shape), dtype=x.dtype, device=x.device) if wished else None
        paths = paths_of(batch) if self.is_exact and bucket.max_rows > 1 else None
        how = Attending(1.0, bucket.max_rows, is_exact=self.is_exact, paths=paths, counters=self._counters)
        normed, added, after, scalar = torch.empty_like(x), None, None, 1.0
        for i, norm in enumerate(norms):
            rows.add_norm(x, added, after, norm, eps, normed, self.config.residual_scale, scalar)
            if hidden is not None and i in wished:
                hidden[wished.index(i)] = x
            if i < depth:
                layer = layers[i]
                if isinstance(layer, DeltaNet):
                    added = layer.run(x, Versions.of(at), kv[i], normed)
                else:
                    q = layer.queries(normed, (batch.positions, batch.slots), kv[i])
                    added = layer.run(x, q, batch, kv[i], how._replace(scale=self._scales[i]), normed)
                after, scalar = layer.after_mlp, layer.scalar
        if num_wanted == 0:  # part of a prompt
            return normed.new_empty((0, self.config.vocab_size)), None, hidden
        logits = weights.head(normed if num_wanted is None else normed[at["wanted"]])
        if self.config.logits_cap:
            cap_logits(logits, self.config.logits_cap)
        # the next pass may read the tokens where they are written
        out = self._picks[: len(logits)] if len(logits) <= MAX_GRAPH_ROWS else None
        return logits, pick(logits, at, out), hidden
