"""The decoder on a GPU: the same interface as models/decoder.py, fused kernels, and one CUDA graph a bucket
for the whole pass.

Small passes whose every row wants logits (plain decoding and checking drafts) are padded to a bucket and
replayed; prompts run kernel by kernel. Invariant: what a row computes depends on the bucket and on its own
context alone, so a request gets the same bits whatever shares its pass; in exact mode on its own context
alone, and the text is bitwise the same with drafts and without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch

from paceline.core.types import Batch, Output
from paceline.cuda import rows
from paceline.cuda.attention import Attending
from paceline.cuda.batch import Bucket, Inputs, bucket_for
from paceline.cuda.graphs import Capture, CudaCapture, Graphs
from paceline.cuda.overlap import CHECKED_ROWS, PLAIN_ROWS
from paceline.cuda.pick import pick
from paceline.cuda.weights import Weights, load_weights
from paceline.models.attention import LayerCache
from paceline.models.config import ModelConfig

# Tiles and KV heads of a launch of attention whose splits are added by its last program, at most.
COUNTERS = 8192
MAX_GRAPH_ROWS = 256  # beyond, a pass is bound by arithmetic and launches hide behind it


class PassSpec(NamedTuple):
    """What a pass is recorded for."""

    bucket: Bucket
    depth: int
    hidden_layers: tuple[int, ...]
    has_picks: bool


class Picked(Sequence[int]):
    """Tokens on their way from the device: the first read waits for them, the one time in a step."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._arrival = None if tokens.device.type == "cpu" else torch.cuda.Event()
        self._tokens: list[int] | None = None
        if self._arrival is None:
            self._host = tokens.clone()
        else:  # the copy is in line before anything that overwrites the tokens
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._arrival.record()

    def _read(self) -> list[int]:
        if self._tokens is None:
            if self._arrival is not None:
                self._arrival.synchronize()
            self._tokens = self._host.tolist()
        return self._tokens

    def __len__(self) -> int:
        return len(self._read())

    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]


class CudaDecoder:
    """Built by `CudaDecoder.load`."""

    def __init__(self, config: ModelConfig, weights: Weights, capture: Capture, is_exact: bool) -> None:
        self.config, self.weights, self.device, self.is_exact = config, weights, weights.norm.device, is_exact
        self.capture = capture  # of all that is recorded on this device: recordings share its memory
        self._graphs = Graphs(capture)
        self._picks = torch.zeros(MAX_GRAPH_ROWS, dtype=torch.int64, device=self.device)  # of the last pass,
        self.latest: Sequence[int] | None = None  # and the same on their way to the host
        # of attention: all passes are on one stream
        self._counters = torch.zeros(COUNTERS, dtype=torch.int32, device=self.device)

    @classmethod
    def load(
        cls, source: Any, dtype: str = "bfloat16", device: str = "cuda", context: int | None = None,
        exact: bool = False, capture: Capture | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:  # fmt: skip
        """source: a checkpoint. `exact`: a row has the same bits in every pass, however many rows it has;
        chains are checked, no trees."""
        most = source.config.max_context
        config = replace(source.config, max_context=min(most, context or most))
        weights = load_weights(source, config, dtype, torch.device(device), exact, progress)
        return cls(config, weights, capture or CudaCapture(), exact)

    @property
    def checks_trees(self) -> bool:
        """In attention a node stands at its row, not at its position: side branches have other bits."""
        return not self.is_exact

    @property
    def num_bytes(self) -> int:
        return self.weights.num_bytes

    @torch.inference_mode()
    def forward(
        self, batch: Batch, kv: Sequence[LayerCache], *,
        num_layers: int | None = None, hidden_layers: Sequence[int] = (),
    ) -> Output:  # fmt: skip
        """Write K/V of every row at its slot; logits of `batch.rows`, and tokens where there are picks."""
        depth = self.config.num_layers if num_layers is None else num_layers
        assert all(0 <= n <= depth <= self.config.num_layers for n in (0, *hidden_layers)), "no such layer"
        columns, wished = batch.columns, tuple(dict.fromkeys(hidden_layers))
        count, num_rows, is_first = len(columns.rows), len(columns.slots), False
        spec = PassSpec(bucket_for(columns), depth, wished, batch.picks is not None)
        if spec.bucket.rows <= MAX_GRAPH_ROWS and count == num_rows:
            is_first = (spec, id(kv)) not in self._graphs
            picks_before = self._picks.clone() if is_first else None
            recording, inputs = self._graphs.get((spec, id(kv)), lambda: self.prepare(spec, kv))
            if picks_before is not None:  # recording a pass runs it, too
                self._picks.copy_(picks_before)
            inputs.fill(columns, batch.picks)
            recording.replay()
            logits, picked, hidden = recording.outputs
        else:
            run, inputs = self.prepare(spec, kv, columns.rows)
            inputs.fill(columns, batch.picks)
            logits, picked, hidden = run()
        kept = hidden[:, :num_rows].clone() if hidden is not None else ()
        chosen = None if picked is None else Picked(picked[:count])
        if chosen is not None and count <= MAX_GRAPH_ROWS:  # of more, the next pass could not read them
            self.latest = chosen
        return Output(logits[:count], dict(zip(wished, kept, strict=True)), chosen, is_first=is_first)

    def prepare(
        self, spec: PassSpec, kv: Sequence[LayerCache], wanted: Sequence[int] | None = None
    ) -> tuple[Callable[[], Any], Inputs]:
        """A pass and what it reads; wanted: rows whose logits are, if not all. The pass keeps its cache:
        another at the same address would be taken for it."""
        inputs = Inputs(spec.bucket, kv[0][0].shape[0] - 1, self.device)
        rows = None if wanted is None else torch.tensor(wanted, dtype=torch.int64, device=self.device)
        return partial(self._run, inputs, spec, kv, rows), inputs

    def _run(
        self, inputs: Inputs, spec: PassSpec, kv: Sequence[LayerCache], wanted: torch.Tensor | None
    ) -> Any:
        """-> logits [L, vocab], the picked tokens or None, hidden states [layers, T, hidden] or None."""
        weights, eps, batch, bucket = self.weights, self.config.rms_eps, inputs.batch, spec.bucket
        x = torch.empty((bucket.rows, self.config.hidden_size), dtype=weights.dtype, device=self.device)
        normed, added, after, wished = torch.empty_like(x), None, None, spec.hidden_layers
        hidden = torch.empty((len(wished), *x.shape), dtype=x.dtype, device=x.device) if wished else None
        is_plain, is_checking = bucket.rows <= PLAIN_ROWS, bucket.rows <= CHECKED_ROWS
        how = Attending(self.config.scale, bucket.context, bucket.max_rows)
        how = how._replace(is_exact=self.is_exact, counters=self._counters)
        rows.embed(batch.input_ids, weights.embedding, self.config.embed_scale, x, self._picks)
        for i, layer in enumerate(weights.layers[: spec.depth]):
            rows.add_norm(x, added, after, layer.attention_norm, eps, normed)
            if hidden is not None and i in wished:
                hidden[wished.index(i)] = x
            qkv = layer.qkv.parts(normed, is_early=is_checking)
            attended = layer.attend(qkv, batch.slots, batch, kv[i], how)
            is_early = is_checking and not is_plain and layer.out.weight.is_whole
            attended = layer.out.parts(attended, is_early=is_early)
            rows.add_norm(x, attended, layer.after_attention, layer.mlp_norm, eps, normed)
            added, after = layer.mlp(normed, self.config.activation), layer.after_mlp
        rows.add_norm(x, added, after, weights.norm, eps, normed)
        if hidden is not None and spec.depth in wished:
            hidden[wished.index(spec.depth)] = x
        if wanted is not None and not len(wanted):  # part of a prompt
            return normed.new_empty((0, self.config.vocab_size)), None, hidden
        logits = weights.head(normed if wanted is None else normed[wanted])
        return logits, self._pick(logits, inputs) if spec.has_picks else None, hidden

    def _pick(self, logits: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """[L]: the chosen tokens, -1 where the logits are not finite; the next pass may read them there."""
        count = len(logits)
        out = self._picks[:count] if count <= MAX_GRAPH_ROWS else None
        return pick(logits, inputs.temperatures[:count], inputs.seeds[:count], inputs.places[:count], out)
