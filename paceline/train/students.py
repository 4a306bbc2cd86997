"""Heads that learn: the definitions of heads/modules.py on whole batches of text, all steps of all drafts at
once.

A student is shown a batch and what the target computed on it, and returns *guesses*: hidden states beside the
output layer they are to be multiplied with, the row of the teacher each is measured against, and the step of
the draft it belongs to. Invariant: a step is what drafting one by one would compute.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.heads.config import DflashConfig, DraftConfig, HeadConfig, LayeredConfig, MedusaConfig
from paceline.heads.modules import empty_module
from paceline.models.layer import causal, masked
from paceline.models.rope import rotary_tables
from paceline.train.chains import Chains
from paceline.train.lessons import Seen, Target
from paceline.train.texts import Batch

# Of first weights whose names hold these; all others have 1 / sqrt(width).
DEVIATIONS = {"o_proj": 0.01, "down_proj": 0.01, "blocks.": 0.01, "markov_w1": 0.02, "markov_w2": 1e-3}
BEYOND = 64  # positions after the longest text that steps may reach
# Blocks of a batch, drawn anew in every one, and of a sequence: what is read is read for all of them.
ANCHORS, MOST_ANCHORS = 8192, 128
Draw = torch.Generator | None  # None: nothing is drawn, every row is guessed from


class Guess(NamedTuple):
    """Predictions of one step of a draft."""

    hidden: Tensor  # [n, width]
    weight: Tensor  # [draft vocabulary, width]
    rows: Tensor  # [n]: the teacher's row, or -1
    base: Tensor  # [n]: the row the draft starts from
    step: int


class Student:
    """What all kinds share: the definition, the target, and the output layer that is guessed with."""

    def __init__(
        self, config: Any, target: Target, draft_ids: Tensor, max_length: int, module: Any = None
    ) -> None:
        """module: where the definition is a part of another; otherwise it is made, with first weights."""
        device = target.head.device
        self.config, self.target, self.draft_ids = config, target, draft_ids.to(device)
        rows = target.head[self.draft_ids]
        self.module = module or first_weights(config, rows)
        self.output = rows if self.module.lm_head is None else self.module.lm_head.weight
        if isinstance(config, LayeredConfig):
            self.tables = rotary_tables(config.rope, config.head_dim, max_length + BEYOND).to(device)

    def guesses(self, batch: Batch, seen: Seen, num_steps: int, draw: Draw = None) -> list[Guess]:
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """What the head's file holds, float32."""
        found = {name: value.detach().float().cpu() for name, value in self.module.state_dict().items()}
        if self.config.draft_vocab_size < self.config.vocab_size:
            found["draft_ids"] = self.draft_ids.to(torch.int32).cpu()
        return found

    def start_from(self, seen: Seen, batch: Batch) -> None:
        """A look at a first batch before training. Some channels of a residual stream are a thousand times
        larger than others: kinds that fuse several start with all of them alike."""
        if self.config.kind not in ("eagle", "dflash"):
            return
        features = seen.features(self.config.hidden_layers).flatten(0, 1)[batch.rows].float()
        self.module.fc.weight.data /= features.square().mean(0).sqrt().clamp(min=1e-6)


def first_weights(config: HeadConfig, rows: Tensor) -> Any:
    """The definition, ready to learn, on the device of `rows` [draft vocabulary, hidden], as which its output
    layer starts."""
    module = empty_module(config).to_empty(device="cpu")  # drawn here: the same numbers for every device
    for name, weight in module.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.ones_(weight)
        elif name.endswith("bias"):
            nn.init.zeros_(weight)
        else:
            usual = weight.shape[1] ** -0.5
            nn.init.normal_(weight, std=next((d for part, d in DEVIATIONS.items() if part in name), usual))
    if module.lm_head is not None:
        module.lm_head.weight.data.copy_(rows)
    return module.to(rows.device).requires_grad_()


class EagleStudent(Student):
    def guesses(self, batch: Batch, seen: Seen, num_steps: int, draw: Draw = None) -> list[Guess]:
        module, rows, embed = self.module, batch.rows, self.target.embed
        fused = module.source(seen.features(self.config.taps))  # [B, S, hidden]
        places = torch.arange(batch.ids.shape[1], device=rows.device)
        inputs = module.inputs(embed(nn.functional.pad(batch.ids[:, 1:], (0, 1))), fused)
        k, v = module.midlayer.self_attn.keys_values(inputs, self.tables.at(places))
        chains, source, found = Chains(k, v, rows, self.config.num_heads), fused.flatten(0, 1)[rows], []
        for step in range(num_steps):
            angles = self.tables.at(batch.position + step)
            hidden, source = module.finish(module(embed(batch.token_after(1 + step)), source, angles, chains))
            found.append(Guess(hidden, self.output, batch.row_after(1 + step), batch.numbers, step))
        return found


class MedusaStudent(Student):
    def __init__(self, config: MedusaConfig, target: Target, draft_ids: Tensor, max_length: int) -> None:
        super().__init__(config, target, draft_ids, max_length)
        self.trunk = None
        if config.trunk is not None:
            self.trunk = EagleStudent(config.trunk, target, draft_ids, max_length, self.module.trunk)

    def start_from(self, seen: Seen, batch: Batch) -> None:
        if self.trunk is not None:
            self.trunk.start_from(seen, batch)

    def guesses(self, batch: Batch, seen: Seen, num_steps: int, draw: Draw = None) -> list[Guess]:
        if self.trunk is None:
            start = self.target.final(seen.last.flatten(0, 1)[batch.rows])  # [N, hidden]
        else:
            start = self.trunk.guesses(batch, seen, 1)[0].hidden
        return [
            Guess(x, self.output, batch.row_after(1 + step), batch.numbers, step)
            for step, x in enumerate(self.module(start)[:num_steps])
        ]


class DraftStudent(Student):
    def __init__(self, config: DraftConfig, target: Target, draft_ids: Tensor, max_length: int) -> None:
        """Where sizes agree a layer starts as one of the target's, the first and the last among them."""
        super().__init__(config, target, draft_ids, max_length)
        theirs, last = dict(target.named_parameters()), target.config.num_layers - 1
        for i, layer in enumerate(self.module.layers):
            source = f"layers.{round(i * last / max(1, config.num_layers - 1))}."
            for name, weight in layer.named_parameters():
                other = theirs.get(source + name)
                if other is not None and other.shape == weight.shape:
                    weight.data.copy_(other)
        self.module.norm.weight.data.copy_(theirs["norm.weight"])

    def guesses(self, batch: Batch, seen: Seen, num_steps: int, draw: Draw = None) -> list[Guess]:
        """While training one guess a row: later steps are the same function of a longer text."""
        embedded = self.target.embed(batch.ids).to(self.module.norm.weight.dtype)
        angles = self.tables.at(torch.arange(batch.ids.shape[1], device=embedded.device))
        x = self.module(embedded, None, angles, lambda i, q, k, v: causal(q, k, v))
        hidden, _ = self.module.finish(x.flatten(0, 1)[batch.rows])  # row t: what comes after the token at t
        if draw is not None:
            return [Guess(hidden, self.output, batch.numbers, batch.numbers, 0)]
        after = [batch.row_after(1 + step) for step in range(num_steps)]
        found = [hidden[rows.clamp(min=0)] for rows in after]
        return [Guess(x, self.output, after[step], batch.numbers, step) for step, x in enumerate(found)]


class DflashStudent(Student):
    """While training, a few rows of each sequence are anchors of blocks; all blocks of a sequence are one
    attention under a mask."""

    def __init__(self, config: DflashConfig, target: Target, draft_ids: Tensor, max_length: int) -> None:
        super().__init__(config, target, draft_ids, max_length + config.block_size)
        self._draft_of = torch.full_like(target.head[:, 0], config.draft_vocab_size, dtype=torch.int64)
        self._draft_of[self.draft_ids] = torch.arange(len(draft_ids), device=self._draft_of.device)

    def guesses(self, batch: Batch, seen: Seen, num_steps: int, draw: Draw = None) -> list[Guess]:
        config, module, device = self.config, self.module, batch.ids.device
        anchors, is_real = self._anchors(batch, draw)  # [B, A]: rows, and which of them count
        places = batch.position[anchors]  # [B, A]: t
        size, length = config.block_size, batch.ids.shape[1]
        tokens = torch.full((*anchors.shape, size), config.mask_token_id, device=device)
        tokens[..., 0] = batch.token_after(1)[anchors]
        x = self.target.embed(tokens.flatten(1)).to(module.norm.weight.dtype)  # [B, A * size, hidden]
        positions = (places[..., None] + 1 + torch.arange(size, device=device)).flatten(1)
        angles = self.tables.at(torch.arange(length, device=device))
        context = module.keys_values(seen.features(config.taps), angles)
        visible = _visible(places, length, size)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            far_k, far_v = context[i]  # [B, S, kv_heads, dim]
            return masked(q, torch.cat([far_k, k], 1), torch.cat([far_v, v], 1), visible)

        hidden = module(x, self.tables.at(positions), attend).unflatten(1, (-1, size))[is_real]
        base, count = anchors[is_real], min(num_steps, config.num_drafts)
        return [self._guess(batch, hidden, base, step) for step in range(count)]

    def _anchors(self, batch: Batch, draw: Draw) -> tuple[Tensor, Tensor]:
        """Rows that blocks hang from, as many for every sequence; all of them where nothing is drawn."""
        first, count = batch.first[:, None], batch.size[:, None].clamp(min=1)
        if draw is None:
            index = torch.arange(int(batch.size.max()), device=first.device)[None]
            is_real = index < batch.size[:, None]
            return torch.where(is_real, first + index, 0), is_real
        number = max(min(ANCHORS // len(first), MOST_ANCHORS, int(batch.size.max())), 1)
        number -= number % 8 if number > 8 else 0  # masks of such widths need not be filled up
        within = torch.rand((len(first), number), generator=draw, device=draw.device)
        # one in each of as many equal parts of the answer
        part = ((torch.arange(number) + within) / number).to(first.device)
        chosen = first + torch.minimum((part * count).long(), count - 1)
        return chosen.clamp(max=len(batch.rows) - 1), (batch.size > 0)[:, None].expand(-1, number)

    def _guess(self, batch: Batch, hidden: Tensor, base: Tensor, step: int) -> Guess:
        """hidden [n, size, hidden]. The Markov head's part is a product with the token before: both are one
        product."""
        x, weight = hidden[:, step if self.config.sample_from_anchor else step + 1], self.output
        if self.config.markov_rank:
            before = self.module.markov_w1.rows(self._draft_of[batch.token_after(1 + step)[base]])
            x = torch.cat([x, before.to(x.dtype)], -1)
            weight = torch.cat([weight.to(x.dtype), self.module.markov_w2.weight.to(x.dtype)], 1)
        return Guess(x, weight, batch.row_after(1 + step)[base], base, step)


def _visible(places: Tensor, length: int, size: int) -> Tensor:
    """places [B, A] -> [B, 1, A * size, S + A * size]: the context up to t, then the block's own rows."""
    num, anchors = places.shape
    upto = torch.arange(length, device=places.device) <= places[..., None]  # [B, A, S]
    block = torch.arange(anchors, device=places.device).repeat_interleave(size)
    own = (block[:, None] == block).expand(num, -1, -1)
    return torch.cat([upto.repeat_interleave(size, 1), own], -1)[:, None]


def build_student(config: HeadConfig, target: Target, draft_ids: Tensor, max_length: int) -> Student:
    kinds = {"eagle": EagleStudent, "medusa": MedusaStudent, "dflash": DflashStudent, "draft": DraftStudent}
    student: Student = kinds[config.kind](config, target, draft_ids, max_length)
    return student
