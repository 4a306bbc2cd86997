"""Attention of simulated draft steps: a row sees the text up to its position and its own earlier steps.

The text's part is a fused causal attention that also gives its log-sum; the few keys of the row's own chain
are added afterwards, and the fused backward, given the joined output and log-sum, is exact for the joined
softmax, so no mask of steps by steps is made. Invariant: equal to attention over the concatenated keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Pair = Sequence[Tensor]  # keys and values


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """-> output [B, H, S, D], log-sum [B, H, S], and what else the backward wants."""
    ops = torch.ops.aten
    if q.device.type == "cpu":
        attend = ops._scaled_dot_product_flash_attention_for_cpu
        return *attend(q, k, v, 0.0, True, attn_mask=None, scale=scale), ()
    out, log_sum, *rest = ops._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)
    return out, log_sum, tuple(rest[:6])


def _fused_backward(tensors: Sequence[Tensor], rest: tuple[Any, ...], scale: float) -> tuple[Tensor, ...]:
    """tensors: the output's gradient, q, k, v, the output and its log-sum; rest: as `_fused` gave it."""
    ops = torch.ops.aten
    if not rest:
        backward = ops._scaled_dot_product_flash_attention_for_cpu_backward
        return tuple(backward(*tensors, 0.0, True, attn_mask=None, scale=scale))
    *shape, seed, offset = rest
    backward = ops._scaled_dot_product_flash_attention_backward
    return tuple(backward(*tensors, *shape, 0.0, True, seed, offset, scale=scale))


class _ChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, own_k: Tensor, own_v: Tensor, k: Tensor, v: Tensor, rows: Tensor, scale: float
    ) -> Tensor:
        batch, heads, length, dim = k.shape
        full = _spread(q, rows, batch, length)  # [B, H, S, D]
        out, log_sum, ctx.rest = _fused(full, k, v, scale)
        mine = out.transpose(1, 2).reshape(-1, heads, dim)[rows].float()  # [N, H, D]
        base = log_sum.transpose(1, 2).reshape(-1, heads)[rows].float()  # [N, H]
        scores = torch.einsum("nhd,nkhd->nhk", q.float(), own_k.float()) * scale
        total = torch.logsumexp(torch.cat([base[..., None], scores], -1), -1)  # [N, H]
        weights = (scores - total[..., None]).exp()
        own = torch.einsum("nhk,nkhd->nhd", weights, own_v.float())
        joined = (mine * (base - total).exp()[..., None] + own).to(q.dtype)
        ctx.save_for_backward(q, own_k, own_v, k, v, rows, joined, total, out, log_sum, weights)
        ctx.scale = scale
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, own_k, own_v, k, v, rows, joined, total, out, log_sum, weights = ctx.saved_tensors
        grad, scale = grads[0].contiguous(), ctx.scale
        batch, length = k.shape[0], k.shape[2]
        out, log_sum = out.clone(memory_format=torch.contiguous_format), log_sum.clone()
        b, t = rows // length, rows % length
        out[b, :, t], log_sum[b, :, t] = joined, total.to(log_sum.dtype)
        full_q, full_grad = _spread(q, rows, batch, length), _spread(grad, rows, batch, length)
        to_q, to_k, to_v = _fused_backward((full_grad, full_q, k, v, out, log_sum), ctx.rest, scale)
        to_q = to_q[b, :, t].float()
        wide = grad.float()
        delta = (wide * joined.float()).sum(-1, keepdim=True)  # [N, H, 1]
        slopes = weights * (torch.einsum("nhd,nkhd->nhk", wide, own_v.float()) - delta) * scale
        to_q = to_q + torch.einsum("nhk,nkhd->nhd", slopes, own_k.float())
        to_own_k = torch.einsum("nhk,nhd->nkhd", slopes, q.float())
        to_own_v = torch.einsum("nhk,nhd->nkhd", weights, wide)
        return to_q.to(q.dtype), to_own_k.to(own_k.dtype), to_own_v.to(own_v.dtype), to_k, to_v, None, None


def _spread(x: Tensor, rows: Tensor, batch: int, length: int) -> Tensor:
    """[N, H, D] at its places in [B, H, S, D], zeros elsewhere."""
    full = x.new_zeros((batch * length, *x.shape[1:]))
    full[rows] = x
    return full.view(batch, length, *x.shape[1:]).transpose(1, 2)


def plain_chain_attention(q: Tensor, own: Pair, text: Pair, rows: Tensor, scale: float) -> Tensor:
    """By the book: scores of all positions with all, so memory grows with the square of the length."""
    (own_k, own_v), (k, v) = own, text
    batch, _, length, _ = k.shape
    b, t = rows // length, rows % length
    far = (_spread(q, rows, batch, length) @ k.transpose(-1, -2))[b, :, t].float() * scale  # [N, H, S]
    far = far.masked_fill(torch.arange(length, device=q.device) > t[:, None, None], -torch.inf)
    near = torch.einsum("nhd,nkhd->nhk", q, own_k).float() * scale
    weights = torch.cat([far, near], -1).softmax(-1).to(q.dtype)
    seen = (_spread(weights[..., :length], rows, batch, length) @ v)[b, :, t]
    return seen + torch.einsum("nhk,nkhd->nhd", weights[..., length:], own_v)


def chain_attention(q: Tensor, own: Pair, text: Pair, rows: Tensor, scale: float) -> Tensor:
    """q [N, H, D] of the rows (b * S + t); own [N, K, H, D] of their chains, K may be 0; text [B, H, S, D].
    A row sees the text's keys at positions 0 .. t and all of its own. -> [N, H, D]."""
    is_half, device = q.dtype != torch.float32, q.device  # torch's flash kernels: on a GPU for halves alone
    is_fused = device.type == "cpu" or (
        is_half and torch.get_device_module(device).get_device_capability(device) >= (8, 0)
    )
    with torch.autocast(q.device.type, enabled=False):  # sums and exponents stay in float32
        if not is_fused:
            return plain_chain_attention(q, own, text, rows, scale)
        return _ChainAttention.apply(q, *own, *text, rows, scale)


class Chains:
    """Attention step after step. The first step's own keys are the text's; those of later ones are kept."""

    def __init__(self, k: Tensor, v: Tensor, rows: Tensor, num_heads: int) -> None:
        """k and v [B, S, kv_heads, D] of the text, rows [N]: b * S + t."""
        self.rows, self.group, self.step = rows, num_heads // k.shape[2], 0
        heads = (x.repeat_interleave(self.group, -2) for x in (k, v))
        self.text = [x.transpose(1, 2).contiguous() for x in heads]  # [B, H, S, D]
        self.own = [x.new_empty((len(rows), 0, num_heads, x.shape[-1])) for x in (k, v)]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, H, D], k and v [N, kv_heads, D] of the next step -> [N, H, D]."""
        if self.step:
            new = [x.repeat_interleave(self.group, -2)[:, None] for x in (k, v)]
            self.own = [torch.cat(pair, 1) for pair in zip(self.own, new, strict=True)]
        self.step += 1
        return chain_attention(q, self.own, self.text, self.rows, float(q.shape[-1] ** -0.5))
