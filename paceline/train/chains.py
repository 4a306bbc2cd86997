"""Attention of simulated draft steps: a row sees the keys of the text up to its position, and the keys of its
own earlier steps.

The text's part is an ordinary causal attention (a fused kernel) that also gives its log-sum; the few keys of
the row's own chain are added to it afterwards, and the fused backward, given the joined output and log-sum,
is exact for the joined softmax. So no mask of steps by steps is ever made. Invariant: equal to attention over
the concatenated keys, which tests/train/test_oracles.py checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor


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


def plain_chain_attention(
    q: Tensor, own_k: Tensor, own_v: Tensor, k: Tensor, v: Tensor, rows: Tensor, scale: float
) -> Tensor:
    """By the book: scores of all positions with all, so memory grows with the square of the length."""
    batch, _, length, _ = k.shape
    b, t = rows // length, rows % length
    far = (_spread(q, rows, batch, length) @ k.transpose(-1, -2))[b, :, t].float() * scale  # [N, H, S]
    far = far.masked_fill(torch.arange(length, device=q.device) > t[:, None, None], -torch.inf)
    near = torch.einsum("nhd,nkhd->nhk", q, own_k).float() * scale
    weights = torch.cat([far, near], -1).softmax(-1).to(q.dtype)
    seen = (_spread(weights[..., :length], rows, batch, length) @ v)[b, :, t]
    return seen + torch.einsum("nhk,nkhd->nhd", weights[..., length:], own_v)


@cache
def _is_fused_exact(device: str, dtype: torch.dtype, dim: int) -> bool:
    """The fused kernels are torch's own business and may change: a small trial says whether they still mean
    what they did."""
    draw = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(device, dtype).requires_grad_()

    inputs = some(4, 2, dim), some(4, 2, 2, dim), some(4, 2, 2, dim), some(2, 2, 8, dim), some(2, 2, 8, dim)
    rows = torch.tensor([3, 7, 8, 13], device=device)
    try:
        with torch.enable_grad():
            outputs = [
                way(*inputs, rows, dim**-0.5) for way in (_ChainAttention.apply, plain_chain_attention)
            ]
            found = [torch.autograd.grad(output.square().sum(), inputs) for output in outputs]
    except (RuntimeError, AttributeError, TypeError, ValueError, NotImplementedError):
        return False
    loose = 0.1 if dtype != torch.float32 else 1e-3
    pairs = zip(*found, strict=True)
    return all(torch.allclose(a.float(), b.float(), atol=loose, rtol=loose) for a, b in pairs)


def chain_attention(
    q: Tensor, own_k: Tensor, own_v: Tensor, k: Tensor, v: Tensor, rows: Tensor, scale: float
) -> Tensor:
    """q [N, H, D] of the rows (b * S + t); own_k, own_v [N, K, H, D] of their chains, K may be 0; k, v [B, H,
    S, D] of the text. A row sees the text's keys at positions 0 .. t and all of its own. -> [N, H, D]."""
    is_fused = _is_fused_exact(str(q.device), q.dtype, q.shape[-1])
    way: Any = _ChainAttention.apply if is_fused else plain_chain_attention
    with torch.autocast(q.device.type, enabled=False):  # sums and exponents stay in float32
        found: Tensor = way(q, own_k, own_v, k, v, rows, scale)
    return found


class Chains:
    """Attention of one step after the other. The first step's own keys are the text's at its rows; those of
    later steps are kept here."""

    def __init__(self, k: Tensor, v: Tensor, rows: Tensor, num_heads: int) -> None:
        """k and v [B, S, kv_heads, D] of the text, rows [N]: b * S + t."""
        self.rows, self.group, self.step = rows, num_heads // k.shape[2], 0
        self.text = [self._for_all_heads(x).transpose(1, 2).contiguous() for x in (k, v)]  # [B, H, S, D]
        self.own = [x.new_empty((len(rows), 0, num_heads, x.shape[-1])) for x in (k, v)]

    def _for_all_heads(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.group, -2)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, H, D], k and v [N, kv_heads, D] of the next step -> [N, H, D]."""
        if self.step:
            new = [self._for_all_heads(x)[:, None] for x in (k, v)]
            self.own = [torch.cat(pair, 1) for pair in zip(self.own, new, strict=True)]
        self.step += 1
        (own_k, own_v), (text_k, text_v) = self.own, self.text
        return chain_attention(q, own_k, own_v, text_k, text_v, self.rows, float(q.shape[-1] ** -0.5))
