"""What a drafter is taught: agreement with the target's distribution over the tokens that can be drafted.

`agreement` multiplies with the output layer, compares with the teacher and computes both gradients, a few
thousand rows at a time, so the logits of a batch never lie in memory together. Soft cross-entropy is
EAGLE-3's loss and, up to a constant, the KL divergence of distillation; hard is Medusa's and DFlash's; total
variation is the chance of rejection itself. Invariant: rows of weight 0 change nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK = 4096  # rows whose logits are in memory together


class Mix(NamedTuple):
    """How much of which loss."""

    soft: float = 1.0  # cross-entropy with the teacher's distribution
    hard: float = 0.0  # with the teacher's first choice
    variation: float = 0.0  # half the sum of |p - q|


class Teacher(NamedTuple):
    """The target's word on each row of a batch."""

    chances: Tensor  # [N, draft vocabulary] half precision: p, renormalized over what can be drafted
    best: Tensor  # [N]: draft id of the target's first choice, or -1 where it cannot be drafted


class _Agreement(torch.autograd.Function):
    """Gradients are computed on the way: afterwards the logits are gone."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, teacher: Teacher, rows: Tensor, scale: Tensor, mix: Mix
    ) -> tuple[Tensor, Tensor]:
        needs = ctx.needs_input_grad[:2]
        to_hidden = torch.empty_like(hidden) if needs[0] else None
        to_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs[1] else None
        loss, guessed = hidden.new_zeros((), dtype=torch.float32), []
        for part in torch.arange(len(hidden), device=hidden.device).split(CHUNK):
            x, at = hidden[part], rows[part].clamp(min=0)
            logits = (x @ weight.T).float()
            guessed.append(logits.argmax(-1))
            value, slope = _compare(logits, teacher.chances[at], teacher.best[at], mix)
            factor = scale[part]
            loss += (value * factor).sum()
            if any(needs):
                slope = (slope * factor[:, None]).to(x.dtype)
                if to_hidden is not None:
                    to_hidden[part] = slope @ weight
                if to_weight is not None:
                    to_weight += (slope.T @ x).float()
        ctx.save_for_backward(to_hidden, to_weight)
        ctx.dtype = weight.dtype
        found = torch.cat(guessed)
        ctx.mark_non_differentiable(found)
        return loss, found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        to_hidden, to_weight = ctx.saved_tensors
        hidden = None if to_hidden is None else to_hidden * grads[0].to(to_hidden.dtype)
        weight = None if to_weight is None else (to_weight * grads[0]).to(ctx.dtype)
        return hidden, weight, None, None, None, None


def _compare(logits: Tensor, chances: Tensor, best: Tensor, mix: Mix) -> tuple[Tensor, Tensor]:
    """Loss of each row [n], and its slope with respect to the logits [n, vocabulary]."""
    p, log_q = chances.float(), logits.log_softmax(-1)
    q = log_q.exp()
    value, slope = torch.zeros_like(logits[:, 0]), torch.zeros_like(logits)
    if mix.soft:
        value += mix.soft * -(p * log_q).sum(-1)
        slope += mix.soft * (q * p.sum(-1, keepdim=True) - p)
    if mix.hard:
        at = best.clamp(min=0)[:, None]
        value += mix.hard * -log_q.gather(1, at)[:, 0]
        slope += mix.hard * q
        slope.scatter_add_(1, at, torch.full_like(at, -mix.hard, dtype=slope.dtype))
    if mix.variation:
        value += mix.variation * 0.5 * (q - p).abs().sum(-1)
        sign = 0.5 * (q - p).sign()
        slope += mix.variation * q * (sign - (sign * q).sum(-1, keepdim=True))
    return value, slope


def agreement(
    hidden: Tensor, weight: Tensor, teacher: Teacher, rows: Tensor, scale: Tensor, mix: Mix
) -> tuple[Tensor, Tensor]:
    """hidden [n, width], weight [draft vocabulary, width], rows [n] of the teacher (-1: none), scale [n].
    -> the sum of scale * loss, and the draft id guessed in each row [n]."""
    loss, guessed = _Agreement.apply(hidden, weight.to(hidden.dtype), teacher, rows, scale, mix)
    return loss, guessed


@torch.no_grad()
def teach(final: Tensor, head: Tensor, draft_ids: Tensor, chunk: int = CHUNK) -> Teacher:
    """final [N, hidden]: what the target's output layer reads. Its first choice is over all tokens, its
    chances over those of the draft."""
    size, vocab = len(draft_ids), len(head)
    draft_of = torch.full((vocab,), -1, dtype=torch.int64, device=head.device)
    draft_of[draft_ids] = torch.arange(size, device=head.device)
    chances = torch.empty((len(final), size), dtype=torch.float16, device=final.device)
    best = torch.empty(len(final), dtype=torch.int64, device=final.device)
    for part in range(0, len(final), chunk):
        logits = final[part : part + chunk] @ head.T
        best[part : part + chunk] = draft_of[logits.argmax(-1)]
        reduced = logits if size == vocab else logits[:, draft_ids]
        chances[part : part + chunk] = reduced.float().softmax(-1)
    return Teacher(chances, best)
