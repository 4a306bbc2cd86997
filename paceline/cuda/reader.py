"""Tensors by their names, brought to a GPU as matrices, norms, experts and layers; norms and rotary tables
are float32.

Invariant: a matrix is on the device in its final form before the next is read, so loading needs little more
memory than the model.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paceline.cuda.attention import LOG2_E
from paceline.cuda.delta_net import DeltaNet
from paceline.cuda.experts import BesideExperts, DenseFfn, Experts
from paceline.cuda.layer import Ffn, Layer
from paceline.cuda.linear import Matrix
from paceline.cuda.pack import PackedWeight, pack, pack_kept
from paceline.cuda.recurrent import Rule
from paceline.models.config import Activation, ExpertsConfig, ModelConfig, RopeConfig
from paceline.models.kept import Kept, stacked
from paceline.models.rope import Angles, rotary_tables

NORMS = ("input", "pre_feedforward", "post_feedforward")  # not of every layer
AROUND_EXPERTS = ("router", "shared", "after_experts", "after_shared")  # gemma 4


Read = Callable[..., Tensor]  # a tensor of a name, or some rows, float32
ReadKept = Callable[..., Kept | None]  # the same in FP8 or MXFP4, or None where files have it otherwise


class WeightReader:
    """Tensors by their names, brought to the device."""

    def __init__(self, read: Read, names: Container[str], device: torch.device, dtype: torch.dtype,
                 kept: ReadKept = lambda *_: None, packed: Callable[[Tensor], PackedWeight] | None = None,
                 is_exact: bool = False) -> None:  # fmt: skip
        """names: those there are; dtype: of activations; kept: of matrices that stay so; packed: what is
        made of others, None: they are whole."""
        self._read, self._names, self.device, self.dtype = read, names, device, dtype
        self._kept, self._packed, self._is_exact = kept, packed, is_exact

    def has(self, name: str) -> bool:
        return f"{name}.weight" in self._names

    def norm(self, name: str) -> Tensor:
        """float32."""
        return self._read(f"{name}.weight").to(self.device).contiguous()

    def rest(self, name: str, scale: float = 1.0) -> Tensor | None:
        """float32, if there is any."""
        return scale * self._read(name).to(self.device) if name in self._names else None

    def norm_if_any(self, name: str) -> Tensor | None:
        return self.norm(name) if self.has(name) else None

    def table(self, name: str) -> Tensor:
        return self._read(f"{name}.weight").to(self.device).to(self.dtype).contiguous()

    def matrix(self, *names: str) -> Matrix:
        """One matrix from the rows of several: one launch instead of three."""
        has_bias = f"{names[0]}.bias" in self._names
        biases = [self._read(f"{name}.bias") for name in names if has_bias]
        kept = [self._kept(f"{name}.weight") for name in names]
        if _are_alike(kept):
            return self.stacked(kept, biases)
        return self.stacked((self._read(f"{name}.weight") for name in names), biases)

    def stacked(self, weights: Iterable[Any], biases: list[Tensor]) -> Matrix:
        """weights: all of them tensors, or all of them FP8 or MXFP4."""
        kept, tensors = list[Kept](), list[Tensor]()
        for each in weights:
            if isinstance(each, Kept):
                kept.append(type(each)(*(part.to(self.device) for part in each)))
            else:
                tensors.append(each.to(self.device).to(self.dtype if self._packed is None else torch.float32))
        bias = torch.cat([each.to(self.device).to(self.dtype) for each in biases]) if biases else None
        made = self._packed or partial(pack, bits=16)
        weight = pack_kept(stacked(kept)) if kept else made(torch.cat(tensors))
        return Matrix(weight, bias, self._is_exact)

    def whole(self, *names: str) -> Matrix:
        """Of the activations' type, whatever others are packed to."""
        weight = torch.cat([self._read(f"{name}.weight").to(self.device) for name in names])
        return Matrix(pack(weight.to(self.dtype), 16), None, self._is_exact)

    def dense(self, prefix: str, activation: Activation = "silu") -> DenseFfn:
        gate_up = self.matrix(f"{prefix}gate_proj", f"{prefix}up_proj")
        return DenseFfn(gate_up, self.matrix(f"{prefix}down_proj"), activation)

    def experts(self, prefix: str, config: ExpertsConfig, hidden: int, activation: Activation) -> Experts:
        """One by one; an expert that every row wakes is several at the end, filled up with zeros."""
        count, inner, own, halves = config.count, config.inner, f"{prefix}experts.", ("gate_proj", "up_proj")
        shared, beside = -(-config.shared_inner // config.inner), f"{prefix}shared_expert."
        parts = [each + name for each in (own, beside)[: 1 + bool(shared)] for name in (*halves, "down_proj")]
        is_filled = config.shared_inner not in (0, inner)
        # Zeros that fill an expert up might not end where a group of FP8 does.
        keeps = not is_filled and _are_alike([self._kept(f"{part}.weight", slice(1)) for part in parts])
        read: Callable[..., Any] = self._kept if keeps else self._read

        def pieces(name: str, size: int) -> Iterable[Any]:
            for e in range(count):
                yield read(f"{own}{name}.weight", slice(e * size, (e + 1) * size))
            if shared and not is_filled:
                yield read(f"{beside}{name}.weight")
            elif shared:
                whole, extra = self._read(f"{beside}{name}.weight"), shared * inner - config.shared_inner
                filled = (0, 0, 0, extra) if name in halves else (0, extra)
                yield from functional.pad(whole, filled).chunk(shared, int(name not in halves))

        both: list[Tensor] = []
        downs = [self._read(f"{own}down_proj.bias")] if config.has_bias else []
        if config.has_bias:
            biases = [self._read(f"{own}{name}.bias").view(count, -1) for name in halves]
            both = [torch.stack(biases, 1).flatten()]
        routers = [self.rest(f"{prefix}{name}.weight") for name in ("gate", "shared_expert_gate")]
        router = pack(torch.cat([each for each in routers if each is not None]).to(self.dtype), 16)
        return Experts(
            config,
            Matrix(router, self.rest(f"{prefix}gate.bias")),
            self.rest(f"{prefix}gate.e_score_correction_bias"),
            self.rest(f"{prefix}gate.per_expert_scale"),
            torch.zeros(count + 1, dtype=torch.int32, device=self.device),
            torch.zeros(1, dtype=torch.int32, device=self.device),
            self.stacked(chain.from_iterable(zip(*(pieces(n, inner) for n in halves), strict=True)), both),
            self.stacked(pieces("down_proj", hidden), downs),
            activation,
        )

    def ffn(self, prefix: str, config: ModelConfig, experts: ExpertsConfig | None) -> Ffn:
        hidden, activation = config.hidden_size, config.activation
        if experts is None:
            return self.dense(prefix, activation)
        if not experts.has_norms:
            return self.experts(prefix, experts, hidden, activation)
        norms = [self.norm(f"{prefix}{name}_norm") for name in AROUND_EXPERTS]
        return BesideExperts(
            self.experts(prefix, replace(experts, shared_inner=0), hidden, activation),
            self.dense(f"{prefix}shared_expert.", activation),
            before=torch.stack(norms[:2]),
            after=torch.stack(norms[2:]),
            eps=config.rms_eps,
        )

    def rotary(self, rope: RopeConfig, head_dim: int, num_positions: int, rotary_dim: int = 0) -> Angles:
        """What does not turn has angles of zero."""
        turned = rotary_dim or head_dim
        tables, extra = rotary_tables(rope, turned, num_positions), (head_dim - turned) // 2
        filled = (functional.pad(table, (0, extra), value=i) for table, i in zip(tables, (1, 0), strict=True))
        return Angles(*(table.to(self.device).contiguous() for table in filled))

    def layer(self, prefix: str, rotary: Angles, eps: float, ffn: Ffn | None = None) -> Layer:
        """Gemma norms what a block adds, too: then there are four norms. Gemma 4's third is its experts'."""
        attention = f"{prefix}self_attn."
        before, before_mlp, after_mlp = (self.norm_if_any(f"{prefix}{name}_layernorm") for name in NORMS)
        if isinstance(ffn, BesideExperts):
            before_mlp = self.norm(f"{prefix}mlp.experts_norm")
        after = self.norm(f"{prefix}post_attention_layernorm")
        return Layer(
            eps=eps,
            attention_norm=torch.ones_like(after) if before is None else before,
            qkv=self.matrix(*(f"{attention}{name}_proj" for name in "qkv")),
            qk_norms=(self.norm_if_any(f"{attention}q_norm"), self.norm_if_any(f"{attention}k_norm")),
            rotary=rotary,
            out=self.matrix(f"{attention}o_proj"),
            after_attention=None if before_mlp is None else after,
            mlp_norm=after if before_mlp is None else before_mlp,
            ffn=ffn or self.dense(f"{prefix}mlp."),
            sinks=self.rest(f"{attention}sinks", LOG2_E),
            gates=self.matrix(f"{attention}q_gate") if self.has(f"{attention}q_gate") else None,
            after_mlp=after_mlp,
        )

    def delta_net(self, prefix: str, config: ModelConfig, ffn: DenseFfn | Experts) -> DeltaNet:
        sizes, own = config.recurrent, f"{prefix}linear_attn."
        assert sizes is not None, "a layer is recurrent"

        def rest(name: str) -> Tensor:
            found = self.rest(own + name)
            assert found is not None, f"a recurrent layer has {name}"
            return found.contiguous()

        convolution = rest("conv1d.weight")[:, 0].T.contiguous()
        return DeltaNet(
            eps=config.rms_eps,
            attention_norm=self.norm(f"{prefix}input_layernorm"),
            mixed=self.matrix(f"{own}in_proj_qkv", f"{own}in_proj_z"),
            rates=self.whole(f"{own}in_proj_b", f"{own}in_proj_a"),
            rule=Rule(sizes, convolution, -rest("A_log").exp(), rest("dt_bias")),
            norm=self.norm(f"{own}norm"),
            out=self.matrix(f"{own}out_proj"),
            mlp_norm=self.norm(f"{prefix}post_attention_layernorm"),
            ffn=ffn,
            scale=config.residual_scale,
        )


def _are_alike(kept: list[Kept | None]) -> bool:
    """Whether all of them are FP8, or all are MXFP4."""
    return None not in kept and len(set(map(type, kept))) == 1
