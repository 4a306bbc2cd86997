"""Heads in torch: the teacher against the decoder, losses against autograd, simulated steps against drafting
one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from paceline.core.types import Cached, Segment
from paceline.heads.config import DflashConfig, EagleConfig
from paceline.heads.modules import tensor_shapes
from paceline.loaders.checkpoint import Checkpoint, open_checkpoint
from paceline.loaders.heads import target_hash
from paceline.runtime.backend import TorchBackend
from paceline.runtime.executor import LocalExecutor
from paceline.train import chains
from paceline.train.lessons import Guess, Target, Teacher, agreement, teach
from paceline.train.recipes import Mix, head_config
from paceline.train.students import (
    DflashStudent,
    DraftStudent,
    EagleStudent,
    MedusaStudent,
    build_student,
    measure,
    walk,
)
from paceline.train.texts import Texts, batches, split
from tests.make_models import VOCAB, tiny_hf
from tests.train.small import CPU, head_of, small, some_batch

# The teacher and the losses


@pytest.mark.parametrize("family", ["llama", "llama3", "mistral", "qwen2", "qwen3", "gemma3"])
def test_the_teacher_computes_what_the_decoder_does(family: str, tmp_path: Path) -> None:
    opened = open_checkpoint(str(tiny_hf(tmp_path / family, family)), progress=False)
    config, ids = opened.config, list(range(40, 80))
    executor = LocalExecutor.load(TorchBackend(CPU), opened, 8)
    cache, layers = Cached(), (0, 1, config.num_layers)
    executor.kv.reserve(cache, len(ids))
    output = executor.forward([Segment(ids, cache, num_logits=len(ids))], hidden_layers=layers)
    teacher = Target.load(opened, context=64)
    seen = teacher.read(torch.tensor([ids]), layers)
    torch.testing.assert_close(
        seen.features(layers)[0], torch.cat([output.hidden[n] for n in layers], -1), atol=2e-4, rtol=2e-4
    )
    torch.testing.assert_close(
        teacher.final(seen.last)[0] @ teacher.lm_head.weight.T, output.logits, atol=2e-4, rtol=2e-4
    )


def test_the_teacher_speaks_of_the_draft_vocabulary_alone(target: Target) -> None:
    final = torch.randn(7, 64)
    logits = final @ target.lm_head.weight.T
    ids = torch.arange(0, VOCAB, 3)
    teacher = teach(final, target.lm_head.weight, ids, chunk=3)
    torch.testing.assert_close(teacher.chances.float(), logits[:, ids].softmax(-1), atol=1e-3, rtol=1e-2)
    first = logits.argmax(-1)
    expected = torch.where(first % 3 == 0, first // 3, -1)
    assert torch.equal(teacher.best, expected)


@pytest.mark.parametrize("mix", [Mix(), Mix(0.0, 1.0), Mix(0.0, 0.0, 1.0), Mix(0.3, 0.5, 0.7)])
def test_losses_and_their_gradients_are_those_of_the_definitions(
    mix: Mix, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.train import lessons

    monkeypatch.setattr(lessons, "CHUNK", 4)
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=draw, requires_grad=True) for shape in ((10, 6), (12, 6)))
    teacher = Teacher(torch.randn(9, 12, generator=draw).softmax(-1).half(), torch.arange(9))
    rows, scale = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, -1]), torch.rand(10, generator=draw)
    scale[-1] = 0
    loss, guessed = agreement(Guess(hidden, weight, rows, rows, 0), teacher, scale, mix, torch.float32)
    logits = hidden @ weight.T
    p, log_q = teacher.chances.float()[rows], logits.log_softmax(-1)
    by_hand = mix.soft * -(p * log_q).sum(-1) + mix.hard * functional.cross_entropy(
        logits, teacher.best[rows], reduction="none"
    )
    by_hand = by_hand + mix.variation * 0.5 * (p - log_q.exp()).abs().sum(-1)
    expected = (by_hand * scale).sum()
    torch.testing.assert_close(loss, expected)
    assert torch.equal(guessed, logits.argmax(-1))
    for mine, theirs in zip(
        torch.autograd.grad(loss * 2, (hidden, weight)),
        torch.autograd.grad(expected * 2, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=2e-3)


def test_chain_attention_is_attention_over_text_and_chain() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = (6, 3, 16), (6, 2, 3, 16), (6, 2, 3, 16), (2, 3, 11, 16), (2, 3, 11, 16)
    inputs = [torch.randn(shape, generator=draw, requires_grad=True) for shape in shapes]
    rows = torch.tensor([0, 4, 10, 11, 17, 21])
    ways: list[Callable[..., torch.Tensor]] = [chains.chain_attention, chains.plain_chain_attention]
    found = [way(inputs[0], inputs[1:3], inputs[3:], rows, 0.25) for way in ways]
    torch.testing.assert_close(found[0], found[1])
    slopes = [torch.autograd.grad((out * out.detach().sin()).sum(), inputs) for out in found]
    for mine, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    by_hand = _attend_alone(*(x.detach() for x in inputs), rows)
    torch.testing.assert_close(found[0], by_hand)


def _attend_alone(
    q: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    out = []
    for n, row in enumerate(rows.tolist()):
        b, t = divmod(row, k.shape[2])
        keys = torch.cat([k[b, :, : t + 1], own_k[n].transpose(0, 1)], 1)  # [H, t + 1 + K, D]
        values = torch.cat([v[b, :, : t + 1], own_v[n].transpose(0, 1)], 1)
        weights = (torch.einsum("hd,hsd->hs", q[n], keys) * 0.25).softmax(-1)
        out.append(torch.einsum("hs,hsd->hd", weights, values))
    return torch.stack(out)


# The heads, against drafting step by step as the docs write it down


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def turn(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """[heads, dim] at a position."""
    half = x.shape[-1] // 2
    angle = position / theta ** (torch.arange(half) / half)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], -1)


def attend(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """q [heads, dim], keys and values [kv_heads, dim] each -> [heads * dim]."""
    group = len(q) // len(keys[0])
    k, v = (torch.stack(x).repeat_interleave(group, 1) for x in (keys, values))
    weights = (torch.einsum("hd,shd->hs", q, k) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("hs,shd->hd", weights, v).flatten()


def mlp(w: dict[str, torch.Tensor], prefix: str, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = (w[f"{prefix}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
    return down @ (functional.silu(gate @ x) * (up @ x))


def heads_of(w: dict[str, torch.Tensor], name: str, x: torch.Tensor, dim: int) -> torch.Tensor:
    return (w[f"{name}_proj.weight"] @ x).view(-1, dim)


@torch.no_grad()
def test_simulated_eagle_steps_are_those_of_drafting_one_by_one(
    target: Target, checkpoint: Checkpoint
) -> None:
    head, batch = head_of("eagle", target, checkpoint), some_batch()
    config = head.config
    assert isinstance(head, EagleStudent)
    assert isinstance(config, EagleConfig)
    seen, w, d = target.read(batch.ids, config.taps), head.tensors(), config.head_dim
    found, shown = head.guesses(batch, seen, 3), seen.features(config.taps)
    row = 20  # of the second sequence
    b, t = int(batch.sequence[row]), int(batch.position[row])
    assert b == 1
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    feature = torch.zeros(0)
    for place in range(t + 3):
        g = w["fc.weight"] @ shown[b, place] if place <= t else feature
        e = rms(
            target.embed_tokens.weight[batch.ids[b, place + 1]],
            w["midlayer.input_layernorm.weight"],
            config.rms_eps,
        )
        x = torch.cat([e, rms(g, w["midlayer.hidden_norm.weight"], config.rms_eps)])
        q, k, v = (heads_of(w, f"midlayer.self_attn.{n}", x, d) for n in "qkv")
        keys.append(turn(k, place, config.rope.theta))
        values.append(v)
        a = g + w["midlayer.self_attn.o_proj.weight"] @ attend(
            turn(q, place, config.rope.theta), keys, values
        )
        feature = a + mlp(
            w, "midlayer.", rms(a, w["midlayer.post_attention_layernorm.weight"], config.rms_eps)
        )
        if place >= t:
            guess = found[place - t]
            torch.testing.assert_close(
                guess.hidden[row], rms(feature, w["norm.weight"], config.rms_eps), atol=1e-4, rtol=1e-4
            )
            assert guess.rows[row] == row + 1 + place - t
    assert torch.equal(found[0].weight, w["lm_head.weight"])


@torch.no_grad()
@pytest.mark.parametrize("from_anchor", [True, False])
def test_a_block_is_what_the_docs_say(target: Target, checkpoint: Checkpoint, from_anchor: bool) -> None:
    from dataclasses import replace

    made, batch = head_of("dflash", target, checkpoint), some_batch()
    config = made.config
    assert isinstance(config, DflashConfig)
    config = replace(config, sample_from_anchor=from_anchor)
    head = build_student(config, target, made.draft_ids, 192)
    assert isinstance(head, DflashStudent)
    head.module.load_state_dict(made.module.state_dict())
    seen, w, d, eps, theta = (
        target.read(batch.ids, config.taps),
        head.tensors(),
        config.head_dim,
        config.rms_eps,
        config.rope.theta,
    )
    found, shown, row = head.guesses(batch, seen, 3), seen.features(config.taps), 20
    b, t = int(batch.sequence[row]), int(batch.position[row])
    context = [rms(w["fc.weight"] @ shown[b, s], w["hidden_norm.weight"], eps) for s in range(t + 1)]
    tokens = [int(batch.ids[b, t + 1]), *[config.mask_token_id] * (config.block_size - 1)]
    xs = [target.embed_tokens.weight[token] for token in tokens]
    for i in range(config.num_layers):
        prefix = f"layers.{i}."
        normed = [rms(x, w[f"{prefix}input_layernorm.weight"], eps) for x in xs]
        norms = {n: w[f"{prefix}self_attn.{n}_norm.weight"] for n in "qk"}
        keys = [
            turn(rms(heads_of(w, f"{prefix}self_attn.k", c, d), norms["k"], eps), s, theta)
            for s, c in enumerate([*context, *normed])
        ]
        values = [heads_of(w, f"{prefix}self_attn.v", c, d) for c in (*context, *normed)]
        for j, n in enumerate(normed):
            q = turn(rms(heads_of(w, f"{prefix}self_attn.q", n, d), norms["q"], eps), t + 1 + j, theta)
            a = xs[j] + w[f"{prefix}self_attn.o_proj.weight"] @ attend(q, keys, values)
            xs[j] = a + mlp(w, prefix, rms(a, w[f"{prefix}post_attention_layernorm.weight"], eps))
    assert len(found) == config.num_drafts
    draft_of = {int(token): i for i, token in enumerate(head.draft_ids)}
    for step, guess in enumerate(found):
        at = int((guess.base == row).nonzero()[0])
        hidden = rms(xs[step if from_anchor else step + 1], w["norm.weight"], eps)
        before = draft_of.get(int(batch.ids[b, t + 1 + step]), config.draft_vocab_size)
        by_hand = (
            target.lm_head.weight[head.draft_ids] @ hidden
            + w["markov_w2.weight"] @ w["markov_w1.weight"][before]
        )
        torch.testing.assert_close(guess.weight @ guess.hidden[at], by_hand, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("has_trunk", [False, True])
@torch.no_grad()
def test_medusa_is_what_the_docs_say(has_trunk: bool, target: Target, checkpoint: Checkpoint) -> None:
    batch, row = some_batch(), 20
    b, t = int(batch.sequence[row]), int(batch.position[row])
    medusa = head_of("medusa", target, checkpoint, has_trunk=has_trunk)
    assert isinstance(medusa, MedusaStudent)
    seen, w = target.read(batch.ids, medusa.config.hidden_layers), medusa.tensors()
    h = rms(seen.last[b, t], target.norm.weight, medusa.config.rms_eps)
    if medusa.trunk is not None:  # what EAGLE's first step speaks of
        h = medusa.trunk.guesses(batch, seen, 1)[0].hidden[row]
    for step, guess in enumerate(medusa.guesses(batch, seen, 3)):
        x = h + functional.silu(w[f"blocks.{step}.layers.0.weight"] @ h + w[f"blocks.{step}.layers.0.bias"])
        torch.testing.assert_close(guess.hidden[row], x, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_drafts_later_steps_are_those_of_a_longer_text(target: Target, checkpoint: Checkpoint) -> None:
    batch, row = some_batch(), 20
    seen = target.read(batch.ids, ())
    draft = head_of("draft", target, checkpoint, num_layers=2)
    assert isinstance(draft, DraftStudent)
    guesses, every = draft.guesses(batch, seen, 3), draft.guesses(batch, seen, 3, torch.Generator())
    torch.testing.assert_close(guesses[1].hidden[row], every[0].hidden[row + 2])
    assert guesses[1].rows[row] == row + 2
    assert torch.equal(every[0].rows, torch.arange(len(batch.rows)))


@torch.no_grad()
def test_a_draft_with_all_of_the_targets_layers_is_the_target(
    target: Target, checkpoint: Checkpoint, texts: Texts
) -> None:
    recipe = small("draft", num_layers=checkpoint.config.num_layers, draft_vocab_size=VOCAB)
    config = head_config(recipe, checkpoint.config, "tiny", target_hash(checkpoint), 5)
    assert "draft_ids" not in tensor_shapes(config)
    head = build_student(config, target, torch.arange(VOCAB), 448)
    _, held = split(texts, 8)
    found = measure(head, batches(texts, held, 2048, 448, None), 3, torch.float32)
    assert found.by_position[0] > 0.95  # less than 1 for the ends of texts alone
    assert found.tau > 3.5


def test_a_walk_goes_from_one_accepted_token_to_the_next() -> None:
    assert walk(np.array([0, 0, 0, 0])) == (3, 3)
    assert walk(np.array([2, 0, 0, 1, 0, 0])) == (2, 5)
    assert walk(np.array([0])) == (0, 0)
