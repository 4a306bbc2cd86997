"""Heads that learn: the definitions of heads/modules.py on whole batches of text, all steps of all drafts at
once; and their acceptance on held-out answers that the target wrote greedily.

Along such an answer the text's tokens are the target's choices, so a head that reads them drafts as in use,
up to its first mistake, which is all that counts. Invariant: a step is what drafting one by one computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from paceline.heads.config import DflashConfig, DraftConfig, HeadConfig, LayeredConfig, MedusaConfig
from paceline.heads.modules import empty_module
from paceline.models.layer import causal, masked
from paceline.models.rope import rotary_tables
from paceline.train.chains import Chains
from paceline.train.lessons import Guess, Seen, Target, agreement
from paceline.train.recipes import Mix
from paceline.train.texts import Batch

# Of first weights whose names hold these; all others have 1 / sqrt(width).
DEVIATIONS = {"o_proj": 0.01, "down_proj": 0.01, "blocks.": 0.01, "markov_w1": 0.02, "markov_w2": 1e-3}
BEYOND = 64  # positions after the longest text that steps may reach
# Blocks of a batch, drawn anew in every one, and of a sequence: what is read is read for all of them.
ANCHORS, MOST_ANCHORS = 8192, 128
Draw = torch.Generator | None  # None: nothing is drawn, every row is guessed from


class Student:
    """What all kinds share: the definition, the target, and the output layer that is guessed with."""

    def __init__(self, config: Any, target: Target, ids: Tensor, max_length: int, module: Any = None) -> None:
        """module: where the definition is a part of another; otherwise it is made, with first weights."""
        words = target.lm_head.weight  # [vocabulary, hidden]
        self.config, self.target, self.draft_ids = config, target, ids.to(words.device)
        rows = words[self.draft_ids]
        self.module = module or first_weights(config, rows)
        self.output = rows if self.module.lm_head is None else self.module.lm_head.weight
        if isinstance(config, LayeredConfig):
            self.tables = rotary_tables(config.rope, config.head_dim, max_length + BEYOND).to(words.device)

    def guesses(self, batch: Batch, seen: Seen, num_steps: int, draw: Draw = None) -> list[Guess]:
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """What the head's file holds, float32."""
        found = {name: value.detach().float().cpu() for name, value in self.module.state_dict().items()}
        if self.config.draft_vocab_size < self.config.vocab_size:
            found["draft_ids"] = self.draft_ids.to(torch.int32).cpu()
        return found

    def start_from(self, seen: Seen, batch: Batch) -> None:
        """Some channels of a residual stream are a thousand times larger than others: kinds that fuse several
        start with all of them alike, as a first batch shows."""
        if self.config.kind not in ("eagle", "dflash"):
            return
        features = seen.features(self.config.hidden_layers).flatten(0, 1)[batch.rows].float()
        self.module.fc.weight.data /= features.square().mean(0).sqrt().clamp(min=1e-6)


def first_weights(config: HeadConfig, rows: Tensor) -> Any:
    """The definition, ready to learn; rows [draft vocabulary, hidden]: as which its output layer starts."""
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
    def __init__(self, config: MedusaConfig, target: Target, ids: Tensor, max_length: int) -> None:
        super().__init__(config, target, ids, max_length)
        trunk, module = config.trunk, self.module.trunk
        self.trunk = None if trunk is None else EagleStudent(trunk, target, ids, max_length, module)

    def start_from(self, seen: Seen, batch: Batch) -> None:
        if self.trunk is not None:
            self.trunk.start_from(seen, batch)

    def guesses(self, batch: Batch, seen: Seen, num_steps: int, draw: Draw = None) -> list[Guess]:
        if self.trunk is None:
            start = self.target.final(seen.last.flatten(0, 1)[batch.rows])  # [N, hidden]
        else:
            start = self.trunk.guesses(batch, seen, 1)[0].hidden
        ahead = enumerate(self.module(start)[:num_steps])
        return [Guess(x, self.output, batch.row_after(1 + k), batch.numbers, k) for k, x in ahead]


class DraftStudent(Student):
    def __init__(self, config: DraftConfig, target: Target, ids: Tensor, max_length: int) -> None:
        """Where sizes agree a layer starts as one of the target's, the first and the last among them."""
        super().__init__(config, target, ids, max_length)
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
        after = enumerate(batch.row_after(1 + step) for step in range(num_steps))
        return [Guess(hidden[r.clamp(min=0)], self.output, r, batch.numbers, step) for step, r in after]


class DflashStudent(Student):
    """In training, a few rows of a sequence are anchors of blocks, all in one attention under a mask."""

    def __init__(self, config: DflashConfig, target: Target, ids: Tensor, max_length: int) -> None:
        super().__init__(config, target, ids, max_length + config.block_size)
        self._draft_of = self.draft_ids.new_full((config.vocab_size,), config.draft_vocab_size)
        self._draft_of[self.draft_ids] = torch.arange(len(ids), device=self._draft_of.device)

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
        block = torch.arange(anchors.shape[1], device=device).repeat_interleave(size)
        own = (block[:, None] == block).expand(len(anchors), -1, -1)
        upto = torch.arange(length, device=device) <= places[..., None]  # [B, A, S]: the context up to t
        visible = torch.cat([upto.repeat_interleave(size, 1), own], -1)[:, None]  # [B, 1, A size, S + A size]

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
        """hidden [n, size, hidden]. The Markov head's product with the token before is joined to it."""
        x, weight = hidden[:, step if self.config.sample_from_anchor else step + 1], self.output
        if self.config.markov_rank:
            before = self.module.markov_w1.rows(self._draft_of[batch.token_after(1 + step)[base]])
            x = torch.cat([x, before.to(x.dtype)], -1)
            weight = torch.cat([weight.to(x.dtype), self.module.markov_w2.weight.to(x.dtype)], 1)
        return Guess(x, weight, batch.row_after(1 + step)[base], base, step)


def build_student(config: HeadConfig, target: Target, ids: Tensor, max_length: int) -> Student:
    kinds = {"eagle": EagleStudent, "medusa": MedusaStudent, "dflash": DflashStudent, "draft": DraftStudent}
    student: Student = kinds[config.kind](config, target, ids, max_length)
    return student


class Acceptance(NamedTuple):
    tau: float  # tokens a step, the target's own counted
    by_position: tuple[float, ...]  # chance that the first k + 1 drafted tokens are all right, over all rows


@torch.no_grad()
def measure(head: Student, batches: Iterable[Batch], num_steps: int, dtype: torch.dtype) -> Acceptance:
    steps = gained = 0
    device, accepted = head.draft_ids.device, list[np.ndarray]()
    for batch in (each.to(device) for each in batches):
        seen, teacher = head.target.observe(batch, head.config.hidden_layers, head.draft_ids)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            guesses = head.guesses(batch, seen, num_steps)
        # [N, K]: is step k of the draft from each row the target's choice?
        is_right = torch.zeros((len(batch.rows), num_steps), dtype=torch.bool, device=device)
        for guess in guesses:
            _, guessed = agreement(guess, teacher, torch.zeros_like(guess.rows), Mix(soft=0.0), dtype)
            best = teacher.best[guess.rows.clamp(min=0)]
            is_right[guess.base, guess.step] = (guess.rows >= 0) & (guessed == best)
        lengths = is_right.long().cumprod(1).sum(1).cpu().numpy()
        accepted.append(lengths)
        for first, size in zip(batch.first.tolist(), batch.size.tolist(), strict=True):
            count, tokens = walk(lengths[first : first + size])
            steps, gained = steps + count, gained + tokens
    every = np.concatenate(accepted) if accepted else np.zeros(1)
    return Acceptance(gained / max(steps, 1), tuple(float((every > k).mean()) for k in range(num_steps)))


def walk(accepted: np.ndarray) -> tuple[int, int]:
    """Decode one answer; accepted [rows]: tokens that a draft from there would gain. -> steps, tokens."""
    row = steps = tokens = 0
    while row < len(accepted) - 1:  # the last row has nothing to add
        advance = 1 + int(accepted[row])
        steps, tokens, row = steps + 1, tokens + advance, row + advance
    return steps, tokens
