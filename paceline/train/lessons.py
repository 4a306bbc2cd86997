"""The target as a teacher over whole sequences, the losses that heads learn from it, and what several heads
learn from together: its text, its passes (half of the work), and the tokens that can be drafted.

Losses and gradients are computed a few thousand rows at a time, so the logits of a batch never lie in memory
together. Invariant: rows of weight 0 change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.loaders.checkpoint import Checkpoint
from paceline.loaders.heads import target_hash
from paceline.models.config import ModelConfig
from paceline.models.decoder import Transformer
from paceline.models.layer import causal
from paceline.train.recipes import Mix, Recipe
from paceline.train.texts import ROUND, Batch, Texts, split

CHUNK = 4096  # rows whose logits are in memory together
COVERED = 0.98  # of the answers' tokens are to be among those that can be drafted
SIZES = (8192, 32_768)  # of the draft vocabulary, at least and at most
Known = tuple[np.ndarray, int]  # tokens that can be drafted, ascending; the one that stands for a blank
Pair = tuple[Tensor, Tensor]


class Teacher(NamedTuple):
    """The target's word on each row of a batch."""

    chances: Tensor  # [N, draft vocabulary] half precision: p, renormalized over what can be drafted
    best: Tensor  # [N]: draft id of the target's first choice, or -1 where it cannot be drafted


class Guess(NamedTuple):
    """Predictions of one step of a draft, and what they are measured against."""

    hidden: Tensor  # [n, width]
    weight: Tensor  # [draft vocabulary, width]
    rows: Tensor  # [n]: the teacher's row, or -1
    base: Tensor  # [n]: the row the draft starts from
    step: int


class _Agreement(torch.autograd.Function):
    """Gradients are computed on the way: afterwards the logits are gone."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, teacher: Teacher, rows: Tensor, scale: Tensor, mix: Mix
    ) -> Pair:
        needs = ctx.needs_input_grad[:2]
        ctx.dtypes = hidden.dtype, weight.dtype
        to_hidden, to_weight = torch.zeros_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        loss, guessed = hidden.new_zeros((), dtype=torch.float32), []
        for part in torch.arange(len(hidden), device=hidden.device).split(CHUNK):
            x, own = hidden[part].requires_grad_(needs[0]), weight.detach().requires_grad_(needs[1])
            at, wanted = rows[part].clamp(min=0), [each for each in (x, own) if each.requires_grad]
            with torch.enable_grad():
                logits = (x @ own.T).float()
                value = (_losses(logits, teacher.chances[at], teacher.best[at], mix) * scale[part]).sum()
            guessed.append(logits.argmax(-1))
            loss += value.detach()
            slopes = list(torch.autograd.grad(value, wanted)) if wanted and value.requires_grad else []
            if slopes and needs[0]:
                to_hidden[part] = slopes.pop(0)
            if slopes:
                to_weight += slopes.pop()
        ctx.save_for_backward(to_hidden, to_weight)
        found = torch.cat(guessed)
        ctx.mark_non_differentiable(found)
        return loss, found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight = (slope * grads[0] for slope in ctx.saved_tensors)
        return hidden.to(ctx.dtypes[0]), weight.to(ctx.dtypes[1]), None, None, None, None


def _losses(logits: Tensor, chances: Tensor, best: Tensor, mix: Mix) -> Tensor:
    """Of each row [n]."""
    p, log_q = chances.float(), logits.log_softmax(-1)
    losses = torch.zeros_like(logits[:, 0])
    if mix.soft:
        losses = losses - mix.soft * (p * log_q).sum(-1)
    if mix.hard:
        losses = losses - mix.hard * log_q.gather(1, best.clamp(min=0)[:, None])[:, 0]
    if mix.variation:
        losses = losses + mix.variation * 0.5 * (log_q.exp() - p).abs().sum(-1)
    return losses


def agreement(guess: Guess, teacher: Teacher, scale: Tensor, mix: Mix, dtype: torch.dtype) -> Pair:
    """-> the sum of scale [n] * loss, computed in the dtype; and the draft id guessed in each row [n]."""
    return _Agreement.apply(guess.hidden.to(dtype), guess.weight.to(dtype), teacher, guess.rows, scale, mix)


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


class Seen(NamedTuple):
    """What the target shows of a batch."""

    hidden: dict[int, Tensor]  # layer -> [B, S, hidden]: the residual stream after that many layers
    last: Tensor  # [B, S, hidden]: after the last layer, before the final norm

    def features(self, taps: Sequence[int]) -> Tensor:
        """[B, S, taps * hidden]: the stream after those layers, side by side."""
        return torch.cat([self.hidden[tap] for tap in taps], -1)


class Target(Transformer):
    @torch.no_grad()
    def read(self, ids: Tensor, taps: Sequence[int]) -> Seen:
        """ids [B, S]."""
        positions, depth = torch.arange(ids.shape[1], device=ids.device), self.config.num_layers
        x, hidden = self.run(
            self.embed(ids), positions, lambda i, q, k, v: causal(q, k, v, *self.masking[i][:2]), depth, taps
        )
        return Seen(hidden, x)

    def observe(self, batch: Batch, taps: Sequence[int], draft_ids: Tensor) -> tuple[Seen, Teacher]:
        """One pass: what it shows, and its word on every row."""
        seen = self.read(batch.ids, taps)
        return seen, teach(self.final(seen.last.flatten(0, 1)[batch.rows]), self.lm_head.weight, draft_ids)


class Lessons(NamedTuple):
    target: Target
    name: str  # of the target
    target_hash: str
    texts: Texts
    digest: str  # of the texts
    learned: np.ndarray  # sequences to learn from
    held: np.ndarray  # greedy ones that are held out
    draft_ids: np.ndarray
    blank: int  # the token that stands for one not known yet
    covered: float  # share of the answers' tokens that can be drafted


def prepare(
    checkpoint: Checkpoint, texts: Texts, recipe: Recipe, device: torch.device, known: Known | None = None
) -> Lessons:
    """known: what a head that is to learn on drafts already; else the commonest tokens of the answers."""
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    learned, held = split(texts, recipe.num_held_out)
    frequency = answer_counts(texts, learned, checkpoint.config.vocab_size)
    size = recipe.draft_vocab_size or covering(frequency)
    ids, blank = known or draft_vocabulary(frequency, size, checkpoint.eos_ids)
    covered = float(frequency[ids].sum() / max(frequency.sum(), 1))
    check_teachable(checkpoint.config)
    target = Target.load(checkpoint, dtype=dtype, device=str(device), context=recipe.max_length + ROUND)
    name, digest = checkpoint.name, texts.digest()
    return Lessons(target, name, target_hash(checkpoint), texts, digest, learned, held, ids, blank, covered)


def check_teachable(config: ModelConfig) -> None:
    """The teacher reads whole sequences at once."""
    what = "attention sinks" if config.attention_sinks else "recurrent layers" if config.recurrent else ""
    if what:
        raise ConfigError(f"heads of a model with {what} cannot be trained; leave speculative_config to auto")


def answer_counts(texts: Texts, chosen: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each token stands in the answers of the chosen sequences, [vocab_size]."""
    found, begins = np.zeros(vocab_size, np.int64), texts.starts[:-1] + texts.num_prompt
    for i in chosen:
        np.add.at(found, texts.tokens[begins[i] : texts.starts[i + 1]], 1)
    return found


def covering(frequency: np.ndarray) -> int:
    """How many of the most frequent tokens are enough, in whole thousands."""
    shares = np.cumsum(np.sort(frequency)[::-1]) / max(int(frequency.sum()), 1)
    thousands = -(-int(np.searchsorted(shares, COVERED) + 1) // 1024)
    return min(max(1024 * thousands, SIZES[0]), SIZES[1])


def draft_vocabulary(frequency: np.ndarray, size: int, ends: tuple[int, ...]) -> Known:
    """The most frequent tokens, the end tokens always among them; and the rarest, to stand for a blank."""
    rank = frequency.astype(np.float64)
    rank[list(ends)] += frequency.sum() + 1
    chosen = np.sort(np.argsort(-rank, kind="stable")[: min(size, len(rank))]).astype(np.int64)
    return chosen, int(np.argmin(frequency))
