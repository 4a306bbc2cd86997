"""The decoder on the CPU: the interface of models/decoder.py, every pass one compiled call.

Invariant: a row's logits and hidden states are bitwise the same however many rows are in the pass, whatever
the other rows are and however its context was split into passes, for float32, int8 and int4. Speculation is
lossless because of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Self

import torch

from paceline.core.errors import ConfigError
from paceline.core.types import Batch, Output
from paceline.cpu.attend import FEW_ROWS, TOGETHER
from paceline.cpu.compile import numbers
from paceline.cpu.forward import FORWARD, Pass, Work
from paceline.cpu.layer import COLUMNS, LayerRow, Model
from paceline.cpu.matmul import Matrix
from paceline.cpu.recycle import Recycled, Taps, Workspace
from paceline.cpu.sync import Team, num_threads
from paceline.cpu.tiles import PLACE, TAIL
from paceline.cpu.value_tiles import CHUNK, LONGEST
from paceline.loaders.checkpoint import Checkpoint
from paceline.loaders.packed import Tensors, load_packed, pack_model
from paceline.models.config import ModelConfig
from paceline.models.quantize import DOT_ROWS, FLOAT_ROWS, GROUP, bits_of, head_bits, padded
from paceline.models.rope import rotary_tables

LayerCache = tuple[torch.Tensor, torch.Tensor]  # keys and values of a layer, [slots, KV heads, width]
Caches = Sequence[LayerCache]
NO_HIDDEN: dict[int, torch.Tensor] = {}
MULTIPLE = 16  # widths the kernels can handle are multiples of it


class Prepared(NamedTuple):
    """Addresses, and what they are of where it lives no longer than this."""

    spec: array[int]  # a Pass
    model: int
    work: int
    logits: torch.Tensor
    taps: array[int]
    picked: int
    threads: int  # a number


class CpuDecoder:
    """Built by `CpuDecoder.load`."""

    checks_trees = is_exact = True
    latest: Sequence[int] | None = None

    def __init__(self, config: ModelConfig, dtype: str, tensors: Tensors) -> None:
        self.config, self.bits = config, bits_of(dtype)
        self.tensors = tensors  # the tables below hold addresses into them
        ropes = [config.rope] if config.rope_local is None else [config.rope, config.rope_local]
        self._rotary = [rotary_tables(rope, config.head_dim, config.max_context) for rope in ropes]
        self._layers = numbers(self._layer(i) for i in range(config.num_layers))
        self.model = self._describe()
        self._model = numbers(self.model)
        self._team = Team()
        widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
        self._widest = padded(max(widths), COLUMNS)
        self._workspace = Workspace(self._sizes, self._work)
        self._outputs, self._features = Recycled(), Recycled()
        self._caches, self._picked = array("q"), array("q", [0])
        self._caches_of: Caches | None = None
        self._no_taps = array("q", [0] * (config.num_layers + 1))

    @classmethod
    def load(
        cls, source: Checkpoint, dtype: str = "int8", context: int | None = None, use_cache: bool = True
    ) -> Self:
        """Positions from `context` on will not be asked for; `use_cache` keeps packed weights on disk."""
        config = source.config
        sizes = {"heads": config.head_dim, "layers": config.hidden_size, "MLPs": config.intermediate_size}
        for what, size in sizes.items():
            if size % MULTIPLE:
                need = f"the CPU kernels need {what} whose width is a multiple of {MULTIPLE}, not {size}"
                raise ConfigError(f"{need}; use kernels='torch'")
        seen = min(config.max_context, context or config.max_context)
        if bits_of(dtype) < 32 and seen > LONGEST:
            most = f"{dtype} on a CPU reads at most {LONGEST:,} tokens, not {seen:,}"
            raise ConfigError(f"{most}; set max_model_len, or dtype float32")
        tensors = (load_packed if use_cache else pack_model)(source, bits_of(dtype))
        return cls(replace(config, max_context=seen), dtype, tensors)

    @property
    def num_bytes(self) -> int:
        """Memory held by weights."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def _matrix(self, name: str, width: int, bits: int) -> Matrix:
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        assert weight.is_contiguous() & bias.is_contiguous(), "the kernels read contiguous tensors"
        k = width if bits == 32 else padded(width, GROUP[bits])
        rows = FLOAT_ROWS if bits == 32 else DOT_ROWS
        return Matrix(weight.data_ptr(), bias.data_ptr(), k, weight.shape[0] * rows)

    def _at(self, name: str) -> int:
        return self.tensors[name].data_ptr() if name in self.tensors else 0

    def _layer(self, i: int) -> LayerRow:
        config, name = self.config, f"layers.{i}."
        tables = self._rotary[-1 if config.is_local(i) else 0]
        after, before_mlp = "post_attention_layernorm", "pre_feedforward_layernorm"
        has_after = config.sandwich_norm
        return LayerRow(
            input_norm=self._at(f"{name}input_layernorm.weight"),
            hidden_norm=0,
            qkv=self._matrix(f"{name}qkv", config.hidden_size, self.bits),
            q_norm=self._at(f"{name}self_attn.q_norm.weight"),
            k_norm=self._at(f"{name}self_attn.k_norm.weight"),
            cos=tables.cos.data_ptr(),
            sin=tables.sin.data_ptr(),
            window=(config.sliding_window or 0) if config.is_local(i) else 0,
            out=self._matrix(f"{name}out", config.num_heads * config.head_dim, self.bits),
            after_attention=self._at(f"{name}{after}.weight") if has_after else 0,
            mlp_norm=self._at(f"{name}{before_mlp if has_after else after}.weight"),
            gate_up=self._matrix(f"{name}gate_up", config.hidden_size, self.bits),
            down=self._matrix(f"{name}down", config.intermediate_size, self.bits),
            after_mlp=self._at(f"{name}post_feedforward_layernorm.weight"),
        )

    def _describe(self) -> Model:
        config, bits = self.config, head_bits(self.bits)
        names = ["embedding"] * 2 if config.tie_embeddings else ["embedding", "head"]
        embedding, head = (self._matrix(name, config.hidden_size, bits) for name in names)
        return Model(
            embedding, bits == 32, head, self._at("norm.weight"), self._layers.buffer_info()[0],
            config.num_layers, config.hidden_size, config.intermediate_size, config.num_heads,
            config.num_kv_heads, config.head_dim, float(config.rms_eps), float(config.scale),
            float(config.embed_scale), config.activation == "gelu_tanh", config.vocab_size, self.bits < 32,
            *self._kv_widths(),
        )  # fmt: skip

    def _kv_widths(self) -> tuple[int, int]:
        """Bytes of a head of a cached key, and of a value: a quantized model's are int8, and a key has both
        their scales (tiles.py)."""
        dim = self.config.head_dim
        return (4 * dim, 4 * dim) if self.bits == 32 else (dim + TAIL, dim)

    def forward(
        self, batch: Batch, kv: Caches, *, num_layers: int | None = None, hidden_layers: Sequence[int] = ()
    ) -> Output:
        """Write K/V of every row at `batch.slots`; logits of `batch.rows`. `num_layers` stops early;
        hidden[n] is the residual stream after n layers, hidden[0] the embeddings."""
        depth = self.config.num_layers if num_layers is None else num_layers
        assert all(0 <= n <= depth <= self.config.num_layers for n in (0, *hidden_layers)), "no such layer"
        hidden: Mapping[int, torch.Tensor] = NO_HIDDEN
        taps = self._no_taps
        if hidden_layers:
            rows, width, taps = len(batch.columns.slots), self.config.hidden_size, taps[:]
            hidden = Taps(hidden_layers, self._features.block(len(hidden_layers) * rows * width), rows, width)
            for n in hidden_layers:
                taps[n] = hidden.address_of(n)
        ready = self._ready(batch, kv, taps, depth)
        spec, logits = ready.spec.buffer_info()[0], ready.logits
        FORWARD[self.bits](ready.threads, spec, ready.model, ready.work, logits.data_ptr())
        self._team.notice()
        picked, vocab = None, self.config.vocab_size
        if batch.picks is not None:  # of rows that are greedy; draws are left to the host
            chosen = zip(self._picked, batch.picks, strict=False)
            picked = [token if pick[0] == 0 else -1 for token, pick in chosen]
        own = logits if vocab == logits.shape[1] else logits[:, :vocab].contiguous()
        return Output(own, hidden, picked)

    def prepare(self, batch: Batch, kv: Caches, num_more: int) -> Prepared:
        """What a kernel must know that runs passes by itself, none with more rows than the batch has, up to
        `num_more` positions further on."""
        self._team.notice()
        return self._ready(batch, kv, self._no_taps[:], self.config.num_layers, num_more)

    def _ready(self, batch: Batch, kv: Caches, taps: array[int], depth: int, num_more: int = 0) -> Prepared:
        columns, num_rows = batch.columns, len(batch.columns.rows)
        ids, positions, slots, parents, request_of, _, tables, prefixes, rows = batch.addresses()
        if num_rows > len(self._picked):
            self._picked = array("q", [0] * num_rows)
        self._check(batch, kv)
        length = max(columns.positions) + 1 + num_more
        max_blocks = len(columns.block_tables) // batch.num_requests
        # an odd number of cache lines, so that scores of several queries do not compete for cache lines
        span = (padded(length, 16) // 16 | 1) * 16
        caches, picked = self._caches.buffer_info()[0], self._picked.buffer_info()[0]
        spec = Pass(
            len(columns.slots), ids, positions, slots, parents, request_of, tables, prefixes,
            batch.num_requests, max_blocks, batch.block_size, span, caches, rows, num_rows,
            taps.buffer_info()[0], depth, picked if batch.picks is not None else 0,
        )  # fmt: skip
        logits, threads = self._outputs.take(num_rows, self.model.head.n), num_threads()
        places = batch.num_requests * max_blocks * batch.block_size
        work = self._workspace.get(spec.rows, span, places, threads).buffer_info()[0]
        return Prepared(array("q", spec), self._model.buffer_info()[0], work, logits, taps, picked, threads)

    def _check(self, batch: Batch, kv: Caches) -> None:
        """Kernels read and write where they are told: nothing may lie outside the tables and the cache."""
        columns, config = batch.columns, self.config
        assert max(columns.positions) < config.max_context, "a position beyond the rotary tables"
        assert max(columns.slots) < kv[0][0].shape[0], "a slot beyond the cache"
        assert max(columns.input_ids) < config.vocab_size, "a token beyond the vocabulary"
        room = len(columns.block_tables) // batch.num_requests * batch.block_size
        assert max(columns.prefix_lens) <= room, "a prefix longer than its blocks"
        most = max(len(columns.rows), max(columns.rows, default=-1) + 1)
        assert most <= len(columns.slots), "logits of a row that is not there"
        if kv is self._caches_of:
            return
        kept = torch.float32 if self.bits == 32 else torch.int8
        shapes = [(config.num_kv_heads, width // kept.itemsize) for width in self._kv_widths()]
        for cache in kv:
            for tensor, shape in zip(cache, shapes, strict=True):
                assert tensor.is_contiguous(), "the cache is contiguous"
                assert tensor.dtype is kept, f"keys and values are {kept}"
                assert tensor.shape[1:] == shape, "keys or values of another model"
        self._caches, self._caches_of = array("q", [t.data_ptr() for cache in kv for t in cache]), kv

    def _work(self, places: dict[str, int]) -> array[int]:
        return numbers(Work(self._team.at, **places, widest=self._widest))

    def _sizes(self, rows: int, span: int, places: int, threads: int) -> dict[str, int]:
        """Bytes of each part of the workspace."""
        config, widest, layer = self.config, self._widest, self._layer(0)
        together = threads * TOGETHER * config.num_heads // config.num_kv_heads
        queries = max(min(rows, FEW_ROWS) * config.num_heads, together)
        return {
            "h": rows * config.hidden_size * 4,
            "ready": rows * widest * 4,
            "wide": rows * max(layer.qkv.n, layer.gate_up.n) * 4,
            "narrow": rows * max(layer.out.n, layer.down.n) * 4,
            "values": rows * widest * 4,
            "scales": rows * widest // 32 * 4,
            "sums": rows * widest // 32 * 4,
            # kernels look this far beyond the end of a list
            "paths": (rows * (rows + 1) + 2 * CHUNK) * PLACE,
            "places": (places + 2 * CHUNK) * PLACE,
            "queries": rows * config.num_heads * config.head_dim * 4,
            "scores": queries * span * 4,
            "value_scales": max(min(rows, FEW_ROWS) * config.num_kv_heads, threads * TOGETHER) * span * 4,
            "mixed": queries * config.head_dim * 8,
            "totals": queries * 4,
            "largest": rows * threads * 8,
        }
