"""The decoder on the CPU: the interface of models/decoder.py, every pass one compiled call.

Invariant: a row's logits and hidden states are bitwise the same however many rows are in the pass, whatever
the other rows are and however its context was split into passes, for float32, int8 and int4. Speculation is
lossless because of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch

from paceline.core.errors import ConfigError
from paceline.core.types import Batch, Output, Pick
from paceline.cpu.compile import entry_of, numbers
from paceline.cpu.draw import CHOICE, draw_rows
from paceline.cpu.forward import FORWARD, Pass
from paceline.cpu.layer import LayerRow, Model
from paceline.cpu.matmul import Matrix
from paceline.cpu.parallel import CpuGroup
from paceline.cpu.pass_memory import NUM_FIELDS, PassMemory, Widths
from paceline.cpu.recycle import Taps, address
from paceline.cpu.rows import ACTIVATIONS
from paceline.cpu.tables import expert_rows, matrix_of, routing_of
from paceline.cpu.tiles import TAIL
from paceline.cpu.value_tiles import LONGEST
from paceline.loaders.checkpoint import Checkpoint
from paceline.loaders.packed import Tensors, load_packed, load_part, pack_model
from paceline.models.config import NORMS_OF_EXPERTS, ModelConfig
from paceline.models.quantize import bits_of, head_bits, padded
from paceline.models.rope import query_scales, rotary_tables
from paceline.models.shard import Shard

LayerCache = tuple[torch.Tensor, torch.Tensor]  # keys and values of a layer, [slots, KV heads, width]
Caches = Sequence[LayerCache]
NOTHING = Matrix(0, 0, 0, 0)
MULTIPLE = 16  # widths the kernels can handle are multiples of it


class Prepared(NamedTuple):
    """What a pass's kernel is called with (threads, and the addresses of a Pass, a Model, a Work and the
    logits), and what else lives no longer than this."""

    arguments: tuple[int, int, int, int, int]
    logits: torch.Tensor
    kept: tuple[object, ...]


class CpuDecoder:
    """Built by `CpuDecoder.load`."""

    is_exact = picks_cuts = True
    latest: Sequence[int] | None = None

    def __init__(
        self, config: ModelConfig, dtype: str, tensors: Tensors, group: CpuGroup | None = None
    ) -> None:
        """group: the ranks that run it together; this one attends with some heads."""
        self.config, self.bits, self._group = config, bits_of(dtype), group
        shard = Shard() if group is None else group.shard
        # by kind of layer: this rank's heads
        self._own = [shard.own(kind) for kind in config.kinds]
        self._first_kv_head = shard.of(config.num_kv_heads).start
        self._is_by_expert = shard.is_by_expert
        self.tensors = tensors  # the tables below hold addresses into them
        ropes, room = {config.rope_of(i) for i in range(config.num_layers)}, config.max_context
        self._rotary = {rope: rotary_tables(*rope, room) for rope in ropes}
        self._query_scales = query_scales(config.rope, room)
        # the scale of logits is that of their norm
        self._norm = tensors["norm.weight"] * config.logits_scale if config.has_head else None
        self._attending = [i for i in range(config.num_layers) if not config.is_recurrent(i)]
        self._kept: list[torch.Tensor] = []
        self._rows: list[array[int]] = []
        self._experts = [self._expert_rows(i) for i in range(config.num_layers)]
        layers = [self._layer(i) for i in range(config.num_layers)]
        self._layers = numbers(layers)
        models = self._describe()
        self.model, self._model = models[0], numbers(models)
        widest = max(config.hidden_size, config.intermediate_size, *(layer.width for layer in layers))
        wide = max(max(layer.qkv.n, layer.gate_up.n) for layer in layers)
        narrow = max(max(layer.out.n, layer.down.n) for layer in layers)
        self.memory = PassMemory(config, Widths(widest, wide, narrow), group)
        self._outputs, self._features, self._entering = (self.memory.recycled() for _ in range(3))
        self._caches, self._picked = array("q"), array("q", [0])
        self._caches_of: Caches | None = None
        self.no_taps = array("q", [0] * (config.num_layers + 1))

    @classmethod
    def load(
        cls, source: Checkpoint, dtype: str = "int8", context: int | None = None, use_cache: bool = True,
        group: CpuGroup | None = None,
    ) -> Self:  # fmt: skip
        """Positions from `context` on will not be asked for; `use_cache` keeps packed weights on disk."""
        config = source.config
        sizes = {"heads": config.head_dim, "layers": config.hidden_size, "MLPs": config.intermediate_size}
        sizes |= {"heads of global layers": config.global_head_dim}
        if (own := config.recurrent) is not None:
            sizes |= {"recurrent keys": own.key_dim, "recurrent values": own.value_dim}
        if (experts := config.experts) is not None:
            sizes |= {"experts": experts.inner, "shared experts": experts.shared_inner}
        for what, size in sizes.items():
            if size % MULTIPLE:
                need = f"the CPU kernels need {what} whose width is a multiple of {MULTIPLE}, not {size}"
                raise ConfigError(f"{need}; use kernels='torch'")
        seen = min(config.max_context, context or config.max_context)
        if bits_of(dtype) < 32 and seen > LONGEST:
            most = f"{dtype} on a CPU reads at most {LONGEST:,} tokens, not {seen:,}"
            raise ConfigError(f"{most}; set max_model_len, or dtype float32")
        if group is None:
            tensors = (load_packed if use_cache else pack_model)(source, bits_of(dtype))
        else:
            tensors = load_part(source, bits_of(dtype), group.shard)
            entry_of(FORWARD[bits_of(dtype)], 5)  # compiled now: no rank waits for another that compiles
        return cls(replace(config, max_context=seen), dtype, tensors, group)

    @property
    def num_bytes(self) -> int:
        """Memory held by weights."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @property
    def woken(self) -> float:
        """Distinct experts that the last pass woke in a layer that has them, on average."""
        return self.memory.woken[0] / max(sum(map(bool, self._experts)), 1)

    def _at(self, name: str) -> int:
        return self.tensors[name].data_ptr() if name in self.tensors else 0

    def _layer(self, i: int) -> LayerRow:
        kind, is_local = self.config.kind_of(i), self.config.is_local(i)
        config = self.config.kinds[kind]

        def norm(name: str) -> int:
            return self._at(f"layers.{i}.{name}.weight")

        def linear(name: str, width: int = config.hidden_size) -> Matrix:
            return matrix_of(self.tensors, f"layers.{i}.{name}", width, self.bits)

        cos, sin = (table.data_ptr() for table in self._rotary[self.config.rope_of(i)])
        window = (config.sliding_window or 0) if is_local else 0
        after, mlp_norm = 0, norm("post_attention_layernorm")
        if config.sandwich_norm or config.post_norm:  # of these, post-norm models have no norm of the input
            after, mlp_norm = mlp_norm, norm("pre_feedforward_layernorm")
        heads = linear("qkv"), norm("self_attn.q_norm"), norm("self_attn.k_norm"), cos, sin, window
        width, inner = config.num_heads * config.head_dim, config.intermediate_size
        gates = width + 2 * config.num_kv_heads * config.head_dim if config.gated_attention else 0
        if config.recurrent is not None and config.is_recurrent(i):
            width, gates = config.recurrent.value_heads * config.recurrent.value_dim, 0
        before = norm("input_layernorm"), 0, *heads, linear("out", width), after, mlp_norm
        sinks, group = self._at(f"layers.{i}.self_attn.sinks"), config.num_heads // config.num_kv_heads
        sinks = sinks and sinks + 4 * group * self._first_kv_head
        more = sinks, width, gates, self._recurrent(i, heads[0].n)
        after_mlp, scalar = norm("post_feedforward_layernorm"), self.tensors.get(f"layers.{i}.layer_scalar")
        v_norm = self._keep(torch.ones(config.head_dim)) if config.value_norm else 0
        extra: dict[str, Any] = {
            "kind": kind,
            "v_norm": v_norm,
            "scalar": 1.0 if scalar is None else scalar.item(),
        }
        if not self._experts[i]:
            return LayerRow(*before, linear("gate_up"), linear("down", inner), after_mlp, *more, **extra)
        router = matrix_of(self.tensors, f"layers.{i}.router", config.hidden_size, 32)
        gate = f"layers.{i}.mlp.gate."
        correction = self._at(gate + "e_score_correction_bias") or self._at(gate + "per_expert_scale")
        experts = self._experts[i].buffer_info()[0], router, correction
        extra |= {f"{name}_norm": norm(f"mlp.{name}_norm") for name in NORMS_OF_EXPERTS[1:]}
        row = LayerRow(*before, NOTHING, NOTHING, after_mlp, *more, *experts, **extra)
        return row._replace(mlp_norm=norm("mlp.experts_norm") or mlp_norm)

    def _expert_rows(self, i: int) -> array[int]:
        """Empty where the ffn is dense."""
        experts, hidden = self.config.experts_of(i), self.config.hidden_size
        if experts is None:
            return array("q")
        return numbers(expert_rows(self.tensors, f"layers.{i}.", experts, hidden, self.bits))

    def _recurrent(self, i: int, stride: int) -> int:
        """Where what the kernel must know of a recurrent layer lies; 0 if it attends. stride: of a row of its
        first product."""
        if self.config.recurrent is None or not self.config.is_recurrent(i):
            return 0
        from paceline.cpu.recurrent import Recurrent, recur

        sizes, prefix = self.config.recurrent, f"layers.{i}.linear_attn."
        shape = sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim, sizes.kernel
        convolution = self._keep(self.tensors[f"{prefix}conv1d.weight"][:, 0].T)
        decay, bias = self._keep(-self.tensors[f"{prefix}A_log"].exp()), self._at(f"{prefix}dt_bias")
        norm, eps = self._at(f"{prefix}norm.weight"), float(self.config.rms_eps)
        row = Recurrent(entry_of(recur, 7), *shape, stride, convolution, decay, bias, norm, eps)
        self._rows.append(numbers(row))
        return self._rows[-1].buffer_info()[0]

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()

    def _describe(self) -> list[Model]:
        """One for each kind of layer."""
        config, bits = self.config, head_bits(self.bits)
        names = ["embedding"] * 2 if config.tie_embeddings else ["embedding", "head"]
        embedding, head = (
            matrix_of(self.tensors, name, config.hidden_size, bits) if is_here else NOTHING
            for name, is_here in zip(names, (config.has_embedding, config.has_head), strict=True)
        )
        norm = 0 if self._norm is None else self._norm.data_ptr()
        return [
            Model(
                embedding, bits == 32, head, norm, self._layers.buffer_info()[0],
                config.num_layers, config.hidden_size, config.intermediate_size, own.num_heads,
                own.num_kv_heads, kind.head_dim, float(config.rms_eps), float(kind.scale),
                float(config.embed_scale), ACTIVATIONS[config.activation], config.vocab_size, self.bits < 32,
                *self._kv_widths(kind.head_dim), kind.rotary_width, config.qk_norm_over_heads,
                0 if self._query_scales is None else self._query_scales.data_ptr(),
                float(config.residual_scale), routing_of(config.experts, self.bits, self._is_by_expert),
                float(config.logits_cap), len(self._own), self._first_kv_head, kind.num_heads,
                kind.num_kv_heads,
            )
            for kind, own in zip(config.kinds, self._own, strict=True)
        ]  # fmt: skip

    def _kv_widths(self, dim: int) -> tuple[int, int]:
        """Bytes of a head of a cached key, and of a value: a quantized model's are int8, and a key has both
        their scales (tiles.py)."""
        return (4 * dim, 4 * dim) if self.bits == 32 else (dim + TAIL, dim)

    def forward(
        self, batch: Batch, kv: Caches, *, num_layers: int | None = None, hidden_layers: Sequence[int] = (),
        x: torch.Tensor | None = None,
    ) -> Output:  # fmt: skip
        """Write K/V of every row at `batch.slots`; logits of `batch.rows`. `num_layers` stops early;
        hidden[n] is the residual stream after n layers, hidden[0] the embeddings. x: what enters a stage
        behind the first."""
        depth = self.config.num_layers if num_layers is None else num_layers
        assert all(0 <= n <= depth <= self.config.num_layers for n in (0, *hidden_layers)), "no such layer"
        hidden: Mapping[int, torch.Tensor] = {}
        taps = self.no_taps
        if hidden_layers:
            rows, width, taps = len(batch.columns.slots), self.config.hidden_size, taps[:]
            hidden = Taps(hidden_layers, self._features.block(len(hidden_layers) * rows * width), rows, width)
            for n in hidden_layers:
                taps[n] = hidden.address_of(n)
        source = 0
        if x is not None:  # where all ranks can read it
            entering = self._entering.block(x.numel())
            entering[:], source = x.numpy().ravel(), address(entering)
        ready = self.prepare(batch, kv, taps, depth, source=source)
        self.memory.woken[0] = 0
        FORWARD[self.bits](*ready.arguments)
        picked, vocab, logits = None, self.config.vocab_size, ready.logits
        if not self.config.has_head:
            return Output(logits, hidden)
        if batch.picks is not None:
            picked = self._picked[: len(batch.picks)].tolist()
        own = logits if vocab == logits.shape[1] else logits[:, :vocab].contiguous()
        return Output(own, hidden, picked)

    def prepare(
        self, batch: Batch, kv: Caches, taps: array[int], depth: int, num_more: int = 0, source: int = 0
    ) -> Prepared:
        """What a kernel must know of a pass; or of passes that it runs by itself, none with more rows than
        the batch has, up to `num_more` positions further on. taps: for each layer and the last, where the
        residual stream before it goes, or 0."""
        self.memory.team.notice()
        columns, num_rows = batch.columns, len(batch.columns.rows)
        mail, places = self.memory.mail(batch, taps)
        ids, positions, slots, parents, request_of, _, tables, prefixes, rows, *states = places
        if num_rows > len(self._picked):
            self._picked = array("q", [0] * num_rows)
        self._check(batch, kv)
        length = max(columns.positions) + 1 + num_more
        max_blocks = len(columns.block_tables) // batch.num_requests
        # an odd number of cache lines, so that scores of several queries do not compete for cache lines
        span = (padded(length + self.config.attention_sinks, 16) // 16 | 1) * 16
        caches, picked = self._caches.buffer_info()[0], self._picked.buffer_info()[0]
        draw, choices = self._choices(batch.picks or ())
        spec = Pass(
            len(columns.slots), ids, positions, slots, parents, request_of, tables, prefixes,
            batch.num_requests, max_blocks, batch.block_size, span, caches, rows, num_rows,
            address(mail) + 8 * NUM_FIELDS, depth, picked if batch.picks is not None else 0, draw,
            choices.buffer_info()[0], *states,
        )._replace(source=source)  # fmt: skip
        logits, mail[:NUM_FIELDS] = self._outputs.take(num_rows, self.model.head.n), spec
        model, work = self._model.buffer_info()[0], self.memory.work(spec)
        arguments = self.memory.threads, address(mail), model, work, logits.data_ptr()
        return Prepared(arguments, logits, (mail, choices))

    def follow(self, kv: Caches) -> None:
        """Of a rank above 0: run the passes that rank 0 orders, until there is a message."""
        assert self._group is not None, "there is a rank 0"
        self._check_caches(kv)
        while (given := self._group.next_pass()) is not None:
            spec, work, logits = self.memory.arguments(given, self._caches)
            model = self._model.buffer_info()[0]
            FORWARD[self.bits](self.memory.threads, address(spec), model, work, logits)

    @cached_property
    def draw(self) -> int:
        """The entry of the kernel that draws tokens, compiled when first asked for."""
        return entry_of(draw_rows, 7)

    def _choices(self, picks: Sequence[Pick]) -> tuple[int, array[int]]:
        """That entry, and how a token is chosen after each of the wanted rows; 0 if all are greedy."""
        choices, vocab = array("q"), self.config.vocab_size
        if all(pick.temperature == 0 for pick in picks):
            return 0, choices
        for temperature, seed, top_k, top_p, min_p in picks:
            choices.frombytes(CHOICE.pack(temperature, seed % 2**64, top_k * (top_k < vocab), top_p, min_p))
        return self.draw, choices

    def _check(self, batch: Batch, kv: Caches) -> None:
        """Kernels read and write where they are told: nothing may lie outside the tables and the cache."""
        columns, config = batch.columns, self.config
        assert max(columns.positions) < config.max_context, "a position beyond the rotary tables"
        assert max(columns.slots) < kv[self._attending[0]][0].shape[0], "a slot beyond the cache"
        if config.recurrent is not None:
            assert len(columns.states_in) == len(columns.slots), "a row goes on from a state"
        assert max(columns.input_ids) < config.vocab_size, "a token beyond the vocabulary"
        room = len(columns.block_tables) // batch.num_requests * batch.block_size
        assert max(columns.prefix_lens) <= room, "a prefix longer than its blocks"
        most = max(len(columns.rows), max(columns.rows, default=-1) + 1)
        assert most <= len(columns.slots), "logits of a row that is not there"
        self._check_caches(kv)

    def _check_caches(self, kv: Caches) -> None:
        if kv is self._caches_of:
            return
        kept = torch.float32 if self.bits == 32 else torch.int8
        for i in self._attending:
            own = self._own[self.config.kind_of(i)]
            for tensor, width in zip(kv[i], self._kv_widths(own.head_dim), strict=True):
                assert tensor.is_contiguous(), "the cache is contiguous"
                assert tensor.dtype is kept, f"keys and values are {kept}"
                shape = own.num_kv_heads, width // kept.itemsize
                assert tensor.shape[1:] == shape, "keys or values of another model"
        self._caches, self._caches_of = array("q", [t.data_ptr() for cache in kv for t in cache]), kv
