"""The decoder on a GPU: the same interface as models/decoder.py, fused kernels, and one CUDA graph a bucket
for the whole pass.

Small passes whose every row wants logits (plain decoding and checking drafts) are padded to a bucket and
replayed; prompts run kernel by kernel. Invariant: what a row computes depends on the bucket and on its own
context alone, so a request gets the same bits whoever shares its pass; in exact mode on its own context
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
from paceline.cuda.attention import attend
from paceline.cuda.batch import Bucket, DeviceBatch, Inputs, bucket_for
from paceline.cuda.graphs import Capture, CudaCapture, Graphs
from paceline.cuda.overlap import CHECKED_ROWS, PLAIN_ROWS
from paceline.cuda.pick import pick
from paceline.cuda.weights import Layer, Weights, load_weights
from paceline.models.attention import LayerCache
from paceline.models.config import ModelConfig

COUNTERS = (
    8192  # tiles and KV heads of a launch of attention whose splits are added by whoever is last, at most
)
MAX_GRAPH_ROWS = 256  # beyond, a pass is bound by arithmetic and launches hide behind it


class Task(NamedTuple):
    """What a recording was made for."""

    bucket: Bucket
    depth: int
    hidden_layers: tuple[int, ...]
    has_picks: bool


class Picked(Sequence[int]):
    """Tokens on their way from the device: whoever looks first waits for them, the one time in a step."""

    def __init__(self, tokens: torch.Tensor) -> None:
        is_there = tokens.device.type == "cpu"
        self._host = (
            tokens.clone() if is_there else torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        )
        self._arrival = None if is_there else torch.cuda.Event()
        self._tokens: list[int] | None = None
        if self._arrival is not None:  # the copy is in line before whatever overwrites the tokens
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

    def __init__(
        self, config: ModelConfig, weights: Weights, device: torch.device, capture: Capture, is_exact: bool
    ) -> None:
        self.config, self.weights, self.device = config, weights, device
        self.capture = capture  # for whoever records more beside it: all share its memory
        self._graphs = Graphs(capture)
        self._latest = torch.zeros(
            MAX_GRAPH_ROWS, dtype=torch.int64, device=device
        )  # what the last pass picked,
        self.latest: Sequence[int] | None = None  # and the same on its way to the host
        self.is_exact = is_exact
        self._counters = torch.zeros(
            COUNTERS, dtype=torch.int32, device=device
        )  # of attention: all passes are on one stream

    @classmethod
    def load(
        cls,
        checkpoint: Any,
        *,
        dtype: str = "bfloat16",
        device: str = "cuda",
        context: int | None = None,
        exact: bool = False,
        capture: Capture | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        """`exact`: a row has the same bits in every pass, however many rows it has; checked are chains, no
        trees.
        """
        config = replace(
            checkpoint.config,
            max_context=min(checkpoint.config.max_context, context or checkpoint.config.max_context),
        )
        place = torch.device(device)
        weights = load_weights(
            checkpoint, config, dtype, place, exact, progress or (lambda done, total: None)
        )
        return cls(config, weights, place, capture or CudaCapture(), exact)

    @property
    def checks_trees(self) -> bool:
        """Side branches have the bits that plain decoding gives: in attention a node stands at its row, and
        not at its position.
        """
        return not self.is_exact

    @property
    def runs_by_itself(self) -> bool:
        return self.device.type == "cuda"

    @property
    def num_bytes(self) -> int:
        matrices = [
            matrix
            for layer in self.weights.layers
            for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down)
        ]
        return sum(matrix.num_bytes for matrix in (*matrices, self.weights.head))

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        kv: Sequence[LayerCache],
        *,
        num_layers: int | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> Output:
        """Write K/V of every row at `batch.slots`; logits of `batch.rows`, and the tokens chosen there where
        the batch says how.
        """
        depth = self.config.num_layers if num_layers is None else num_layers
        assert all(0 <= n <= depth <= self.config.num_layers for n in (0, *hidden_layers)), "no such layer"
        columns = batch.columns
        task = Task(bucket_for(columns), depth, tuple(dict.fromkeys(hidden_layers)), batch.picks is not None)
        is_first = False
        if task.bucket.rows <= MAX_GRAPH_ROWS and len(columns.rows) == len(columns.slots):
            is_first = (task, id(kv)) not in self._graphs
            latest = self._latest.clone() if is_first else None
            recording, (inputs, _) = self._graphs.get((task, id(kv)), lambda: self._prepare_graph(task, kv))
            if latest is not None:  # recording a pass runs it, too
                self._latest.copy_(latest)
            inputs.fill(columns, batch.picks)
            recording.replay()
            logits, picked, hidden = recording.outputs
        else:
            run, inputs = self.prepare(task, kv, columns.rows)
            inputs.fill(columns, batch.picks)
            logits, picked, hidden = run()
        count, num_rows = len(columns.rows), len(columns.slots)
        kept = hidden[:, :num_rows].clone() if hidden is not None else ()
        chosen = None if picked is None else Picked(picked[:count])
        if chosen is not None and count <= MAX_GRAPH_ROWS:  # of more, the next pass could not read them
            self.latest = chosen
        return Output(
            logits[:count], dict(zip(task.hidden_layers, kept, strict=True)), chosen, is_first=is_first
        )

    def _prepare_graph(
        self, task: Task, kv: Sequence[LayerCache]
    ) -> tuple[Callable[[], Any], tuple[Inputs, Sequence[LayerCache]]]:
        """Kept beside the recording: its inputs, and the cache, since another at the same address would be
        taken for it.
        """
        run, inputs = self.prepare(task, kv)
        return run, (inputs, kv)

    def prepare(
        self, task: Task, kv: Sequence[LayerCache], wanted: Sequence[int] | None = None
    ) -> tuple[Callable[[], Any], Inputs]:
        """A pass of this task and what it reads; wanted: rows whose logits are, if not all."""
        inputs = Inputs(task.bucket, kv[0][0].shape[0] - 1, self.device)
        rows = None if wanted is None else torch.tensor(wanted, dtype=torch.int64, device=self.device)
        return partial(self._run, inputs, task, kv, rows), inputs

    def _run(self, inputs: Inputs, task: Task, kv: Sequence[LayerCache], wanted: torch.Tensor | None) -> Any:
        """Launch a pass: -> logits [L, vocab], the picked tokens or None, hidden states [layers, T, hidden]
        or None.
        """
        weights, eps, batch = self.weights, self.config.rms_eps, inputs.batch
        x = torch.empty((task.bucket.rows, self.config.hidden_size), dtype=weights.dtype, device=self.device)
        normed, added, after, wished = torch.empty_like(x), None, None, task.hidden_layers
        hidden = torch.empty((len(wished), *x.shape), dtype=x.dtype, device=x.device) if wished else None
        is_plain, is_checking = task.bucket.rows <= PLAIN_ROWS, task.bucket.rows <= CHECKED_ROWS
        rows.embed(batch.input_ids, weights.embedding, self.config.embed_scale, x, self._latest)
        for i, layer in enumerate(weights.layers[: task.depth]):
            rows.add_norm(x, added, after, layer.attention_norm, eps, normed)
            if hidden is not None and i in wished:
                hidden[wished.index(i)] = x
            attended = self._attend(
                layer, layer.qkv.parts(normed, is_early=is_checking), batch, task.bucket, kv[i]
            )
            attended = layer.out.parts(
                attended, is_early=is_checking and not is_plain and layer.out.weight.is_whole
            )
            rows.add_norm(x, attended, layer.after_attention, layer.mlp_norm, eps, normed)
            added, after = layer.down.parts(layer.gate_up(normed, self.config.activation)), layer.after_mlp
        rows.add_norm(x, added, after, weights.norm, eps, normed)
        if hidden is not None and task.depth in wished:
            hidden[wished.index(task.depth)] = x
        if wanted is not None and not len(wanted):  # part of a prompt
            return normed.new_empty((0, self.config.vocab_size)), None, hidden
        logits = weights.head(normed if wanted is None else normed[wanted])
        return logits, self._pick(logits, inputs) if task.has_picks else None, hidden

    def _pick(self, logits: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """[L]: the chosen tokens, -1 where the logits are not finite. Where they always lie, so that the next
        pass may read them there.
        """
        count = len(logits)
        out = self._latest[:count] if count <= MAX_GRAPH_ROWS else None
        return pick(logits, inputs.temperatures[:count], inputs.seeds[:count], inputs.places[:count], out)

    def _attend(
        self, layer: Layer, qkv: torch.Tensor, batch: DeviceBatch, bucket: Bucket, cache: LayerCache
    ) -> torch.Tensor:
        """[parts, T, (heads + 2 * kv_heads) * dim] -> [T, heads * dim]."""
        keys, values = cache
        q = torch.empty(
            (bucket.rows, self.config.num_heads, self.config.head_dim),
            dtype=self.weights.dtype,
            device=self.device,
        )
        rows.place(
            qkv, batch.positions, batch.slots, *layer.tables, keys, values, layer.q_norm, layer.k_norm, self.config.rms_eps, q
        )  # fmt: skip
        out = torch.empty_like(q)
        scale, window, context, max_rows = self.config.scale, layer.window, bucket.context, bucket.max_rows
        attend(
            q, keys, values, batch, scale=scale, window=window, max_context=context, max_rows=max_rows, out=out, is_exact=self.is_exact,
            counters=self._counters,
        )  # fmt: skip
        return out.view(len(out), -1)
