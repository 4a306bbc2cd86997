"""A mixture of experts in plain torch: what follows attention in a layer, in place of `DenseFfn`.

Invariant: a row's experts and their shares depend on the row alone; of equal scores the first expert's wins.
Routers multiply in float32 whatever the type of the weights, since a near tie chooses other experts.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.models.config import NORMS_OF_EXPERTS, ExpertsConfig, ModelConfig
from paceline.models.layer import DenseFfn, Linear, Norm, gate

TINY = 1e-20  # shares that are all zero are divided by this


class Router(nn.Module):
    def __init__(self, config: ExpertsConfig, hidden: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.count, hidden), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(config.count), requires_grad=False) if config.has_bias else None
        if config.router == "sigmoid":
            self.e_score_correction_bias = nn.Parameter(torch.empty(config.count), requires_grad=False)
        scales = nn.Parameter(torch.empty(config.count), requires_grad=False) if config.has_norms else None
        self.per_expert_scale = scales

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> the chosen experts [T, per_token], best first, and their shares."""
        config, bias = self.config, None if self.bias is None else self.bias.float()
        logits = functional.linear(x.float(), self.weight.float(), bias)
        if config.router == "sigmoid":
            scores = logits.sigmoid()
            choice = self._among_groups(scores + self.e_score_correction_bias.float())
        else:
            scores, choice = logits.softmax(-1), logits
        chosen = choice.sort(dim=-1, descending=True, stable=True).indices[:, : config.per_token]
        shares = scores.gather(1, chosen)
        if config.normalizes:
            shares = shares / (shares.sum(-1, keepdim=True) + TINY)
        if self.per_expert_scale is not None:
            shares = shares * self.per_expert_scale.float()[chosen]
        return chosen, shares * config.scale

    def _among_groups(self, choice: Tensor) -> Tensor:
        """choice [T, count] without the experts of all but the best groups; a group is as good as its best
        two experts together."""
        config = self.config
        if config.top_groups == config.groups:
            return choice
        grouped = choice.unflatten(1, (config.groups, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
        kept = best.sort(dim=-1, descending=True, stable=True).indices[:, : config.top_groups]
        is_out = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)
        return grouped.masked_fill(is_out[..., None], float("-inf")).flatten(1)


class Experts(nn.Module):
    """All experts of a layer, one below the other in each matrix."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, bits: int) -> None:
        super().__init__()
        self.hidden, self.inner, self.activation = config.hidden_size, experts.inner, config.activation
        count, hidden, inner = experts.count, config.hidden_size, experts.inner
        linear = partial(Linear.empty, has_bias=experts.has_bias, bits=bits)
        self.gate_proj, self.up_proj = linear(hidden, count * inner), linear(hidden, count * inner)
        self.down_proj = linear(inner, count * hidden)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """What one expert makes of x [n, hidden]."""
        inner = slice(expert * self.inner, (expert + 1) * self.inner)
        gated = gate(self.gate_proj.part(x, inner), self.up_proj.part(x, inner), self.activation)
        return self.down_proj.part(gated, slice(expert * self.hidden, (expert + 1) * self.hidden))


class ExpertFfn(nn.Module):
    def __init__(self, config: ModelConfig, experts: ExpertsConfig, bits: int) -> None:
        super().__init__()
        self.gate = Router(experts, config.hidden_size)
        self.experts = Experts(config, experts, bits)
        shared = experts.shared_inner
        self.shared_expert = DenseFfn(config, shared, bits) if shared else None
        self.shared_expert_gate = Linear.empty(config.hidden_size, 1) if experts.has_shared_gate else None
        norms: list[nn.Module] = [
            Norm(config.hidden_size, config.rms_eps) if experts.has_norms else nn.Identity()
            for _ in NORMS_OF_EXPERTS
        ]
        self.experts_norm, self.shared_norm, self.router_norm = norms[:3]
        self.after_experts_norm, self.after_shared_norm = norms[3:]

    def forward(self, x: Tensor) -> Tensor:  # [..., hidden] -> the same
        rows = x.flatten(0, -2)
        chosen, shares = self.gate(self.router_norm(rows))
        inputs, out = self.experts_norm(rows), torch.zeros_like(rows)
        for expert in chosen.unique().tolist():
            row, rank = (chosen == expert).nonzero(as_tuple=True)
            added = self.experts(inputs[row], expert) * shares[row, rank, None].to(rows.dtype)
            out.index_add_(0, row, added)
        out = self.after_experts_norm(out)
        if self.shared_expert is not None:
            shared = self.after_shared_norm(self.shared_expert(self.shared_norm(rows)))
            if self.shared_expert_gate is not None:
                shared = shared * self.shared_expert_gate(rows).sigmoid()
            out = out + shared
        return out.view(x.shape)
