"""What a drafting head owns on the CPU: weights packed in int8, sequences of keys and values, and what
heads with layers share.

Invariant: an address given out here stays valid while the object that gave it lives, but for a sequence's,
which moves when it grows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from paceline.cpu import head_call
from paceline.cpu.compile import numbers
from paceline.cpu.decoder import CpuDecoder
from paceline.cpu.head_attention import BLOCK
from paceline.cpu.head_call import (
    NO_BLOCK,
    NOTHING,
    Block,
    Entry,
    HeadCall,
    HeadKernel,
    HeadRequest,
    Room,
    Turn,
)
from paceline.cpu.lanes import LANES
from paceline.cpu.layer import COLUMNS, LayerRow, Model
from paceline.cpu.matmul import Matrix
from paceline.cpu.recycle import Taps, address
from paceline.cpu.rows import SILU
from paceline.cpu.sync import num_threads
from paceline.cpu.tables import expert_rows, matrix_of, routing_of
from paceline.heads.config import (
    DflashConfig,
    DraftConfig,
    Eagle1Config,
    EagleConfig,
    LayeredConfig,
    MtpConfig,
)
from paceline.heads.modules import layer_config
from paceline.heads.rows import Feed, Row, Sampler
from paceline.loaders.fields import ALL
from paceline.loaders.packed import gate_up_order, gated_order, packed_ffn
from paceline.models.config import ModelConfig
from paceline.models.quantize import pack_linear, padded
from paceline.models.rope import rotary_tables

Tensors = Mapping[str, torch.Tensor]
GREEDY = Sampler(0.0, 0, 0)
NEVER = -3e38  # the logit of a row that only fills up the last tile
CHUNK = 256  # rows read in one pass


class Place:
    """A sequence's keys and values, [layers * kv heads][blocks][a block's floats]; it moves when it grows."""

    __slots__ = ("_keys", "_values", "blocks", "keys_at", "values_at")

    def __init__(self, num_heads: int, dim: int) -> None:
        """num_heads: KV heads of all layers."""
        nothing = np.empty((num_heads, 0, dim * BLOCK), np.float32)
        self._move(nothing, nothing)

    def _move(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Asking an array where it lies takes longer than all else that a draft asks of a place."""
        self._keys, self._values, self.blocks = keys, values, keys.shape[1]
        self.keys_at, self.values_at = address(keys), address(values)

    def reserve(self, length: int) -> None:
        """Room for `length` positions."""
        if length > self.blocks * BLOCK:
            blocks = max(-(-length // BLOCK), self.blocks + self.blocks // 2, 8)
            more = (0, 0), (0, blocks - self.blocks), (0, 0)
            self._move(np.pad(self._keys, more), np.pad(self._values, more))

    def export(self, length: int) -> torch.Tensor:
        """[2, heads, blocks, floats] of the first positions."""
        blocks = -(-length // BLOCK)
        return torch.from_numpy(np.stack([self._keys[:, :blocks], self._values[:, :blocks]]))

    def adopt(self, data: torch.Tensor) -> None:
        """The same, where there is room for it."""
        for own, given in zip((self._keys, self._values), data.numpy(), strict=True):
            own[:, : data.shape[2]] = given

    def fork(self, length: int) -> Place:
        """Another sequence with the same first positions."""
        (num_heads, _, size), blocks = self._keys.shape, -(-length // BLOCK)
        fresh = Place(num_heads, size // BLOCK)
        fresh._move(self._keys[:, :blocks].copy(), self._values[:, :blocks].copy())
        return fresh


class HeadLayer:
    """A head's layer as a model of one."""

    def __init__(self, config: ModelConfig, tensors: Tensors, prefix: str) -> None:
        self.config, self._tensors, self._prefix = config, tensors, prefix

    def tensor(self, name: str, rows: slice = ALL) -> torch.Tensor:
        return self._tensors[self._prefix + name.removeprefix("layers.0.")][rows].float()


class Memory:
    """Weights as the kernels read them."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self.tables: list[array[int]] = []

    def vector(self, tensor: torch.Tensor) -> int:
        self.kept.append(tensor.float().contiguous())
        return self.kept[-1].data_ptr()

    def matrix(
        self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None = None, order: Sequence[int] = ()
    ) -> Matrix:
        whole = torch.cat([w.float() for w in weights])
        if order:
            whole, bias = whole[list(order)], None if bias is None else bias[list(order)]
        weight, its_bias = pack_linear(whole, bias, 8)
        self.kept += [weight, its_bias]
        return Matrix(weight.data_ptr(), its_bias.data_ptr(), padded(whole.shape[1], COLUMNS), len(its_bias))

    def balanced(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[Matrix, int]:
        """A product whose input is first multiplied by the lengths of the columns, which then all have length
        one. Some channels of a residual stream are a thousand times larger than others: without it they would
        take all of a group's integers."""
        lengths = weight.float().norm(dim=0).clamp(min=1e-30)
        return self.matrix([weight / lengths], bias), self.vector(lengths)

    def output(self, weight: torch.Tensor, fill: float = NEVER) -> Matrix:
        """Filled up to whole lanes with rows that are never the largest."""
        missing = padded(len(weight), LANES) - len(weight)
        bias = torch.cat([torch.zeros(len(weight)), torch.full((missing,), fill)])
        return self.matrix([torch.nn.functional.pad(weight.float(), (0, 0, 0, missing))], bias)

    def layer(self, tensors: Tensors, prefix: str, config: LayeredConfig, cos: int, sin: int) -> LayerRow:
        heads, inner = (config.num_heads, config.num_kv_heads, config.head_dim), config.intermediate_size
        is_gated = isinstance(config, MtpConfig) and config.is_gated
        gates = (heads[0] + 2 * heads[1]) * heads[2] if is_gated else 0
        order = gated_order(*heads) if is_gated else ()

        def norm(name: str) -> int:
            return self.vector(tensors[prefix + name]) if prefix + name in tensors else 0

        def linear(*names: str, order: Sequence[int] = ()) -> Matrix:
            biases = [tensors[f"{prefix}{n}.bias"].float() for n in names if f"{prefix}{n}.bias" in tensors]
            weights = [tensors[f"{prefix}{n}.weight"] for n in names]
            return self.matrix(weights, torch.cat(biases) if biases else None, order)

        row = LayerRow(
            norm("input_layernorm.weight"), norm("hidden_norm.weight"),
            linear(*(f"self_attn.{name}_proj" for name in "qkv"), order=order),
            norm("self_attn.q_norm.weight"), norm("self_attn.k_norm.weight"), cos, sin, 0,
            linear("self_attn.o_proj"), 0, norm("post_attention_layernorm.weight"),
            NOTHING, NOTHING, 0, gates=gates,
        )  # fmt: skip
        if isinstance(config, MtpConfig) and config.experts is not None:
            return self._with_experts(row, config, tensors, prefix)
        gate_up = linear("mlp.gate_proj", "mlp.up_proj", order=gate_up_order(inner))
        return row._replace(gate_up=gate_up, down=linear("mlp.down_proj"))

    def _with_experts(self, row: LayerRow, config: MtpConfig, tensors: Tensors, prefix: str) -> LayerRow:
        """Packed as a model's of one layer."""
        source, experts = HeadLayer(layer_config(config), tensors, prefix), config.experts
        assert experts is not None
        packed = dict(packed_ffn(source, 8))
        self.kept += packed.values()
        self.tables.append(numbers(expert_rows(packed, "layers.0.", experts, config.hidden_size, 8)))
        router = matrix_of(packed, "layers.0.router", config.hidden_size, 32)
        name = f"{prefix}mlp.gate.e_score_correction_bias"
        correction = self.vector(tensors[name]) if name in tensors else 0
        at = self.tables[-1].buffer_info()[0]
        return row._replace(experts=at, router=router, correction=correction)

    def describe(
        self, config: LayeredConfig, prefixes: Sequence[str], tensors: Tensors, target: CpuDecoder
    ) -> Model:
        """A head whose layers' tensors have these prefixes; its tokens are embedded as the target's."""
        tables = rotary_tables(config.rope, config.rotary_width, target.config.max_context)
        cos, sin, inner = self.vector(tables.cos), self.vector(tables.sin), config.intermediate_size
        rows = [self.layer(tensors, prefix, config, cos, sin) for prefix in prefixes]
        self.tables.append(numbers(rows))
        norm = self.vector(tensors["norm.weight"]) if "norm.weight" in tensors else 0
        head, at = self.output(tensors["lm_head.weight"]), self.tables[-1].buffer_info()[0]
        model = target.model._replace(head=head, norm=norm, layers=at, num_layers=len(rows))
        model = model._replace(hidden=config.hidden_size, inner=inner, vocab=config.draft_vocab_size)
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        model = model._replace(num_heads=heads, num_kv_heads=kv_heads, dim=dim, scale=dim**-0.5)
        model = model._replace(
            rotary=config.rotary_width, is_norm_over_heads=False, query_scales=0, residual_scale=1.0
        )
        routing = routing_of(config.experts if isinstance(config, MtpConfig) else None, 8)
        model = model._replace(routing=routing, cap=0.0, num_kinds=1)
        return model._replace(eps=float(config.rms_eps), activation=SILU)


def draft_ids(tensors: Tensors) -> np.ndarray:
    """Of the draft's vocabulary in the target's; empty where they are the same."""
    ids = tensors.get("draft_ids")
    return np.empty(0, np.int64) if ids is None else ids.to(torch.int64).numpy()


def sources_of(rows: Sequence[Row], layers: Sequence[int], hidden_size: int) -> list[int]:
    """Addresses of the features, layer by layer; rows of one pass share their tensors."""
    found: list[int] = []
    hidden: Mapping[int, torch.Tensor] | None = None
    starts: list[int] = []
    for row in rows:
        if row.hidden is not hidden:
            hidden = row.hidden
            if isinstance(hidden, Taps):
                starts = [hidden.address_of(layer) for layer in layers]
            else:
                starts = [hidden[layer].data_ptr() for layer in layers]
        found.extend(start + 4 * hidden_size * row.at for start in starts)
    return found


class LayeredHead:
    """A head with layers of its own, over sequences of its own; chain_head.py and block_head.py draft."""

    _call: HeadCall

    most_read = 4  # one by one, which takes time

    def __init__(
        self, config: LayeredConfig, tensors: Tensors, target: CpuDecoder, norm: torch.Tensor | None = None
    ) -> None:
        """norm: the target's last, for heads that read what comes out of it."""
        self._memory, self.layers, self._ids = Memory(), config.hidden_layers, draft_ids(tensors)
        memory, fuse, balance = self._memory, head_call.NOTHING, 0
        if "fc.weight" in tensors:
            fuse, balance = memory.balanced(tensors["fc.weight"], tensors.get("fc.bias"))
        kind, normed, prefixes = head_call.PLAIN, (False, False), ["midlayer."]
        is_mtp = isinstance(config, MtpConfig)
        rank = config.markov_rank if isinstance(config, DflashConfig) else 0
        if isinstance(config, (DraftConfig, DflashConfig)):
            prefixes = [f"layers.{i}." for i in range(config.num_layers)]
        if isinstance(config, EagleConfig):
            kind, normed = head_call.EAGLE_3, (config.norm_before_residual, config.norm_output)
        elif isinstance(config, Eagle1Config):
            kind, normed = head_call.EAGLE_1, (False, isinstance(config, MtpConfig) and config.norm_output)
        self.model, self.threads = memory.describe(config, prefixes, tensors, target), num_threads()
        feature_norm = memory.vector(norm) if norm is not None else 0
        norms = [memory.vector(tensors[f"{n}_norm.weight"]) for n in ("embed", "hidden") if is_mtp]
        self._entry = Entry(kind, max(len(self.layers), 1), feature_norm, fuse, balance, *normed, *norms)
        hidden, queries = config.hidden_size, config.num_heads * config.head_dim
        widest = max(fuse.k, rank, 2 * hidden, config.intermediate_size, queries)
        qkv = 2 * queries + 2 * config.num_kv_heads * config.head_dim  # gates counted, where there are any
        wide = max(padded(qkv, 8), 2 * padded(config.intermediate_size, 8))
        experts = config.experts if isinstance(config, MtpConfig) else None
        self._room = Room(widest, hidden, wide, hidden, self.threads, experts)

    def _kernel(
        self, run: Callable[[int, int], None], block: Block = NO_BLOCK, /, **sizes: Any
    ) -> HeadKernel:
        model, entry = self.model, self._entry
        shape = self.threads, model.hidden, model.head.n, model.vocab, self._ids, entry.num_sources
        return HeadKernel(run, (model, entry, block), *shape, **sizes)

    def place(self) -> Place:
        return Place(self.model.num_layers * self.model.num_kv_heads, self.model.dim)

    def fork(self, place: Place, length: int) -> Place:
        return place.fork(length)

    def can_guess(self, temperature: float) -> bool:
        return True

    def _request(self, feed: Feed, count: int, ahead: int, sampler: Sampler, *root: int) -> HeadRequest:
        """Of `count` new rows, with room for `ahead` more."""
        place, start = feed.place, feed.start
        place.reserve(start + count + ahead)
        where = place.keys_at, place.values_at, place.blocks
        return HeadRequest(*where, start, count, start, start + 1, 0, *sampler, *root)

    def _open(
        self, turn: Turn, requests: list[HeadRequest], tokens: list[int], rows: list[Row], ahead: int
    ) -> HeadCall:
        """The next call, with more room if need be. rows: whose features the requests' new rows have."""
        self._call = call = self._call.fitting(turn.num_requests, turn.num_rows, 0, turn.steps)
        longest = max(request.start + request.num_rows for request in requests) + ahead
        sources = sources_of(rows, self.layers, self.model.hidden)
        call.open(turn, requests, tokens, sources, self._room.get(call.num_rows, longest))
        return call
