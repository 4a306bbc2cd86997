"""One decoder for all families, in plain torch: the reference of the fast ones in paceline/cpu/ and
paceline/cuda/. The teacher of paceline/train/ runs the same `Transformer` over whole sequences.

Invariant: `forward` depends on the batch and the caches alone; K/V of a row go to its slot, nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from paceline.core.types import Batch, Output
from paceline.models.attention import LayerCache, Masking, TorchAttention
from paceline.models.config import ModelConfig
from paceline.models.experts import ExpertFfn
from paceline.models.layer import AttendIn, Layer, Linear, Norm
from paceline.models.quantize import bits_of, head_bits
from paceline.models.recurrent import GatedDeltaNet
from paceline.models.rope import query_scales, rotary_tables

Caches = Sequence[LayerCache]  # by layer; of a recurrent one, its states
Recur = Callable[[int, Tensor], Tensor]  # a recurrent layer's number, rows [T, hidden] -> what it adds


class Checkpoint(Protocol):
    @property
    def config(self) -> ModelConfig: ...
    def tensor(self, name: str) -> Tensor: ...  # float32


class Transformer(nn.Module):
    """Built by `load`: until then the weights have shapes and no numbers."""

    def __init__(self, config: ModelConfig, device: torch.device, bits: int = 32) -> None:
        super().__init__()
        self.config = config
        vocabulary = partial(Linear.empty, config.hidden_size, config.vocab_size, bits=head_bits(bits))
        with torch.device("meta"):
            self.layers = nn.ModuleList(self._layer(i, bits) for i in range(config.num_layers))
            if config.has_embedding:
                self.embed_tokens = vocabulary()
            if config.has_head:
                self.norm = Norm(config.hidden_size, config.rms_eps)
                self.lm_head = self.embed_tokens if config.tie_embeddings else vocabulary()
        self.ropes = [config.rope_of(i) for i in range(config.num_layers)]
        room = config.max_context
        self.tables = {rope: rotary_tables(*rope, room).to(device) for rope in self.ropes}
        of_queries = query_scales(config.rope, config.max_context)
        self.query_scales = None if of_queries is None else of_queries.to(device)  # [max_context]
        windows = [config.sliding_window if config.is_local(i) else None for i in range(config.num_layers)]
        scales = [config.kinds[config.kind_of(i)].scale for i in range(config.num_layers)]
        self.masking = [Masking(*each, bits < 32) for each in zip(scales, windows, strict=True)]

    def _layer(self, i: int, bits: int) -> Layer:
        config, experts = self.config.kinds[self.config.kind_of(i)], self.config.experts_of(i)
        ffn = None if experts is None else ExpertFfn(config, experts, bits)
        if config.recurrent is None or not config.recurrent.layers[i]:
            return Layer(config, bits, ffn=ffn)
        mixer = GatedDeltaNet(config.recurrent, config.hidden_size, config.rms_eps, bits)
        return Layer(config, bits, ffn=ffn, recurrent=mixer)

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, dtype: str = "float32", device: str = "cpu", context: int | None = None
    ) -> Self:
        """Read every weight; positions from `context` on will not be asked for. dtype: "int8" and "int4"
        round as the CPU kernels do, and save nothing; "bfloat16" is the teacher's."""
        config, place = checkpoint.config, torch.device(device)
        config = replace(config, max_context=min(config.max_context, context or config.max_context))
        floats = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        model = cls(config, place, 32 if dtype == "bfloat16" else bits_of(dtype))
        for name, module in model.named_modules():  # a tied output layer is named once, as the embedding
            for kind, _ in list(module.named_parameters(recurse=False)):
                value = checkpoint.tensor(f"{name}.{kind}").to(place, floats).contiguous()
                if isinstance(module, Linear) and kind == "weight":
                    value = module.rounded(value)
                setattr(module, kind, nn.Parameter(value, requires_grad=False))
        return model

    @property
    def num_bytes(self) -> int:
        """Memory held by weights; norms and rotary tables not counted."""
        linears = [module for module in self.modules() if isinstance(module, Linear)]
        return sum(p.numel() * p.element_size() for linear in linears for p in linear.parameters())

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """[...] -> [..., hidden]: what enters the first layer."""
        x = self.embed_tokens.rows(ids)
        return x if self.config.embed_scale == 1.0 else x * self.config.embed_scale

    @torch.no_grad()
    def final(self, hidden: Tensor) -> Tensor:
        """The residual stream after the last layer -> what the output layer reads: the scale of logits is
        that of its input."""
        normed: Tensor = self.norm(hidden)
        return normed if self.config.logits_scale == 1.0 else normed * self.config.logits_scale

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Residual stream [n, hidden] -> final norm and output layer, [n, vocab] float32."""
        logits, cap = self.lm_head(self.final(hidden)).float(), self.config.logits_cap
        return (logits / cap).tanh() * cap if cap else logits

    def run(
        self, x: Tensor, positions: Tensor, attend: AttendIn, depth: int, kept: Sequence[int],
        recur: Recur | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:  # fmt: skip
        """x [..., hidden] at `positions` through the first `depth` layers, and what the stream was after the
        layers `kept`: hidden[n] after n layers, hidden[0] the embeddings."""
        angles = {rope: tables.at(positions) for rope, tables in self.tables.items()}
        scales = None if self.query_scales is None else self.query_scales[positions][..., None, None]

        def attend_scaled(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(i, q if scales is None else q * scales.to(q.dtype), k, v)

        hidden = {0: x} if 0 in kept else {}
        for i in range(depth):
            layer: Any = self.layers[i]
            if self.config.is_recurrent(i):
                assert recur is not None, "recurrent layers run over paged states alone"
                x = layer.leave(x, recur(i, layer.input_layernorm(x)))
            else:
                x = layer(x, angles[self.ropes[i]], partial(attend_scaled, i))
            if i + 1 in kept:
                hidden[i + 1] = x
        return x, hidden


class Decoder(Transformer):
    """The reference: one pass over a batch with paged caches."""

    latest, picks_cuts, woken = None, False, 0.0
    is_exact = False  # torch chooses its kernels by the number of rows

    @torch.inference_mode()
    def forward(
        self, batch: Batch, kv: Caches, *, num_layers: int | None = None, hidden_layers: Sequence[int] = (),
        x: Tensor | None = None,
    ) -> Output:  # fmt: skip
        """Write K/V of every row at `batch.slots`; logits of `batch.rows`. `num_layers` stops early;
        hidden[n] is the residual stream after n layers. x: what enters a stage behind the first."""
        depth = self.config.num_layers if num_layers is None else num_layers
        assert all(0 <= n <= depth <= self.config.num_layers for n in (0, *hidden_layers)), "no such layer"
        tensors = batch.tensors()
        paged = TorchAttention(tensors)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layer: Any = self.layers[i]
            return paged(q, k, v, kv[i], self.masking[i]._replace(sinks=layer.self_attn.sinks))

        def recur(i: int, x: Tensor) -> Tensor:
            layer: Any = self.layers[i]
            return layer.linear_attn(x, tensors, kv[i])

        x = self.embed(tensors.input_ids) if x is None else x.to(tensors.rows.device)
        x, hidden = self.run(x, tensors.positions, attend, depth, hidden_layers, recur)
        x = x[tensors.rows]
        return Output(self.logits(x) if self.config.has_head else x, hidden)
