"""The gated delta rule in plain torch: the reference of cpu/recurrent.py.

A head keeps a matrix S [key, value] that sums up the text: with a row's key k, value v, decay a and rate b,
S ← a S, then S ← S + k (b (v − kᵀS))ᵀ, and the row reads qᵀS. Before it, queries, keys and values pass a
convolution over the last few rows of the text. Invariant: rows are taken one after the other, each from the
state that its parent has left, so what a row reads does not depend on how the text was split into passes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.core.types import ColumnsOf
from paceline.models.config import RecurrentConfig
from paceline.models.layer import Linear, Norm

# Of all slots: S [slots, heads, key, value], and rows before the convolution [slots, kernel - 1, mixed]
StateCache = tuple[Tensor, Tensor]
EPS = 1e-6  # of the norm of keys and queries


class _Weights(nn.Module):
    """A tensor with a name of its own."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)


class GatedDeltaNet(nn.Module):
    """Names as in Hugging Face's files."""

    def __init__(self, config: RecurrentConfig, hidden: int, eps: float, bits: int) -> None:
        super().__init__()
        self.config = config
        heads, width = config.value_heads, config.value_heads * config.value_dim
        sizes = (config.mixed_width, width, heads, heads)
        parts = [Linear.empty(hidden, size, bits=bits) for size in sizes]
        self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a = parts
        self.conv1d, self.norm = _Weights(config.mixed_width, 1, config.kernel), Norm(config.value_dim, eps)
        self.dt_bias, self.A_log = (nn.Parameter(torch.empty(heads)) for _ in range(2))
        self.out_proj = Linear.empty(width, hidden, bits=bits)

    def forward(self, x: Tensor, batch: ColumnsOf[Tensor], cache: StateCache) -> Tensor:
        """x [T, hidden], normed -> [T, hidden]; leaves the states that the batch asks for."""
        states, tails = cache
        mixed, z = self.in_proj_qkv(x), self.in_proj_z(x)
        rates = self.in_proj_b(x).float().sigmoid()  # [T, heads]
        steps = functional.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        decays = (-self.A_log.float().exp() * steps).exp()
        found, state, tail = [], states[0], tails[0]
        sources, targets = batch.states_in.tolist(), batch.states_out.tolist()
        for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
            if source >= 0:
                state, tail = states[source], tails[source]
            seen = torch.cat([tail, mixed[row : row + 1].float()])  # [kernel, mixed]
            tail = seen[1:]
            q, k, v = self._convolved(seen)
            state = state * decays[row, :, None, None]
            change = (v - (state * k[..., None]).sum(-2)) * rates[row, :, None]
            state = state + k[..., None] * change[:, None]
            found.append((state * q[..., None]).sum(-2))
            if target >= 0:
                states[target], tails[target] = state, tail
        read = torch.stack(found)  # [T, heads, value]
        gates = functional.silu(z.float()).view_as(read)
        normed = self.norm(read) * gates
        return self.out_proj(normed.flatten(1).to(x.dtype))

    def _convolved(self, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[kernel, mixed] -> query and key [heads, key], of unit length but for the query's scale, and value
        [heads, value]."""
        config = self.config
        kernel = self.conv1d.weight.float()[:, 0].T  # [kernel, mixed]
        mixed = functional.silu((seen * kernel).sum(0))
        width = config.key_heads * config.key_dim
        q, k = (part.view(config.key_heads, -1) for part in mixed[: 2 * width].chunk(2))
        q, k = (part * (part.square().sum(-1, keepdim=True) + EPS).rsqrt() for part in (q, k))
        each = config.value_heads // config.key_heads
        q, k = (part.repeat_interleave(each, 0) for part in (q * config.key_dim**-0.5, k))
        return q, k, mixed[2 * width :].view(config.value_heads, -1)
