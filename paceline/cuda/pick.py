"""Tokens chosen on the device: the target's own (`pick`), and a drafting head's (`guess`).

`pick` makes the choice of core/sampling.py with the random words of core/noise.py bit for bit and scores in
float64; only the last bit of a logarithm may differ, so a choice differs from the host's only where two
scores agree to about 15 digits. `guess` does the same in float32: where it errs a draft is lost and the text
is the same. Invariant: a row's choice depends on its logits, temperature, seed and position; a guess is a
token of the draft vocabulary, whatever the logits are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from paceline.core.noise import Purpose
from paceline.cuda.rows import LAUNCH, are_dense, let_next_start, wait_for_previous

BLOCK = 1024  # ids of a program; four share a random counter
TARGET = tl.constexpr(int(Purpose.TARGET))


@triton.jit
def noise_words(first: tensor, position: tensor, seed: tensor, count: constexpr) -> tensor:
    """[count] uint32: the words of ids first .. first + count - 1, both multiples of four."""
    counter = first // 4 + tl.arange(0, count // 4)
    zero = tl.zeros_like(counter)
    a, b, c, d = tl.philox(seed, counter, zero + position.to(tl.int32), zero + TARGET, zero)
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def uniform(words: tensor) -> tensor:
    """float64 above 0 and below 1; a float32 next to 1 would have no logarithm of a logarithm."""
    return (words.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)


@triton.jit
def _pick_blocks(
    logits_ptr: tensor, temperature_ptr: tensor, seeds_ptr: tensor, positions_ptr: tensor, scores_ptr: tensor,
    ids_ptr: tensor, vocab: constexpr, block: constexpr,
) -> None:  # fmt: skip
    let_next_start()
    wait_for_previous()
    row, part = tl.program_id(0), tl.program_id(1)
    ids = part * block + tl.arange(0, block)
    logits = tl.load(logits_ptr + row.to(tl.int64) * vocab + ids, mask=ids < vocab, other=-float("inf"))
    score = logits.to(tl.float32).to(tl.float64)
    temperature = tl.load(temperature_ptr + row).to(tl.float64)
    if temperature > 0:
        words = noise_words(part * block, tl.load(positions_ptr + row), tl.load(seeds_ptr + row), block)
        score = score / temperature - tl.log(-tl.log(uniform(words)))
    score = tl.where(score == score, score, float("inf"))  # a NaN wins, so that it is seen
    best, at = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    index = row * tl.num_programs(1) + part
    tl.store(scores_ptr + index, best)
    tl.store(ids_ptr + index, part * block + at)


@triton.jit
def _pick_rows(
    scores_ptr: tensor, ids_ptr: tensor, logits_ptr: tensor, out_ids_ptr: tensor, vocab: constexpr,
    num_blocks: constexpr, width: constexpr,
) -> None:  # fmt: skip
    """Blocks are in the order of their ids, so the first of the best has the lowest id."""
    let_next_start()
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, width)
    scores = tl.load(scores_ptr + row * num_blocks + at, mask=at < num_blocks, other=-float("inf"))
    block = tl.argmax(scores, 0, tie_break_left=True)
    token = tl.load(ids_ptr + row * num_blocks + block)
    best = tl.load(logits_ptr + row * vocab + token).to(tl.float32)
    is_finite = (best == best) & (tl.abs(best) != float("inf"))
    tl.store(out_ids_ptr + row, tl.where(is_finite, token, -1).to(tl.int64))


def pick(logits: Tensor, how: Mapping[str, Tensor], out_ids: Tensor | None = None) -> Tensor:
    """The token of each row of logits [L, vocab], [L] int64: its best where the temperature is 0, its seeded
    draw elsewhere; the lowest id wins a tie. -1 where a logit is NaN or +inf, or all are -inf.
    how: choice_columns (cuda/batch.py), one each or more; places: one past the row's own position."""
    (num_rows, vocab), device = logits.shape, logits.device
    out_ids = torch.empty(num_rows, dtype=torch.int64, device=device) if out_ids is None else out_ids
    assert are_dense(logits), "rows follow each other"
    assert len(how["seeds"]) >= num_rows == len(out_ids), "one of each a row"
    num_blocks = triton.cdiv(vocab, BLOCK)
    scores = torch.empty((num_rows, num_blocks), dtype=torch.float64, device=device)  # the best of each block
    ids = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=device)
    choices = (how["temperatures"], how["seeds"], how["places"])
    _pick_blocks[(num_rows, num_blocks)](logits, *choices, scores, ids, vocab, BLOCK, num_warps=4, **LAUNCH)
    width = triton.next_power_of_2(num_blocks)
    _pick_rows[(num_rows,)](scores, ids, logits, out_ids, vocab, num_blocks, width, num_warps=1, **LAUNCH)
    return out_ids


@triton.jit
def guess_scores(
    logits_ptr: tensor, added_ptr: tensor, ids_ptr: tensor, temperatures_ptr: tensor, seeds_ptr: tensor,
    places_ptr: tensor, row: tensor, part: tensor, request: tensor, ahead: tensor, vocab: constexpr,
    block: constexpr,
) -> tensor:  # fmt: skip
    """[block] float32: of a block of words, noise added; waits for the kernel before. ahead: how far the
    row's token lies behind the first that is guessed."""
    words = part * block + tl.arange(0, block)
    inside = words < vocab
    temperature = tl.load(temperatures_ptr + request).to(tl.float32)
    wait_for_previous()
    at = row.to(tl.int64) * vocab + words
    score = tl.load(logits_ptr + at, mask=inside, other=-float("inf")).to(tl.float32)
    if added_ptr is not None:
        score += tl.load(added_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if temperature > 0:
        ids = words
        if ids_ptr is not None:
            ids = tl.load(ids_ptr + words, mask=inside, other=0)
        position = tl.load(places_ptr + request) + ahead
        seed, zero = tl.load(seeds_ptr + request), tl.zeros_like(ids)
        a, b, c, d = tl.philox(seed, ids // 4, zero + position.to(tl.int32), zero + TARGET, zero)
        lane = ids % 4
        word = tl.where(lane == 0, a, tl.where(lane == 1, b, tl.where(lane == 2, c, d)))
        score += temperature * (-tl.log(-tl.log(uniform(word)))).to(tl.float32)
    return tl.where(score == score, score, -float("inf"))


@triton.jit(do_not_specialize=["step", "num_requests"])
def _guess_blocks(
    logits_ptr: tensor, added_ptr: tensor, ids_ptr: tensor, temperatures_ptr: tensor, seeds_ptr: tensor,
    places_ptr: tensor, scores_ptr: tensor, sums_ptr: tensor, words_ptr: tensor, step: tensor,
    num_requests: tensor, vocab: constexpr, block: constexpr,
) -> None:  # fmt: skip
    """Rows are steps by requests."""
    let_next_start()
    row, part = tl.program_id(0), tl.program_id(1)
    request, index = row % num_requests, row * tl.num_programs(1) + part
    score = guess_scores(
        logits_ptr, added_ptr, ids_ptr, temperatures_ptr, seeds_ptr, places_ptr, row, part, request,
        step + row // num_requests, vocab, block,
    )  # fmt: skip
    best, at = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(scores_ptr + index, best)
    tl.store(sums_ptr + index, tl.sum(tl.exp(score - tl.where(best == -float("inf"), 0.0, best)), 0))
    tl.store(words_ptr + index, tl.minimum(part * block + at, vocab - 1))


@triton.jit
def _guess_rows(
    scores_ptr: tensor, sums_ptr: tensor, words_ptr: tensor, ids_ptr: tensor, tokens_ptr: tensor,
    chances_ptr: tensor, drafted_ptr: tensor, num_blocks: constexpr, width: constexpr,
) -> None:  # fmt: skip
    let_next_start()
    wait_for_previous()
    row, at = tl.program_id(0), tl.arange(0, width)
    inside = at < num_blocks
    scores = tl.load(scores_ptr + row * num_blocks + at, mask=inside, other=-float("inf"))
    sums = tl.load(sums_ptr + row * num_blocks + at, mask=inside, other=0.0)
    best, part = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
    is_finite = tl.abs(best) != float("inf")
    total = tl.sum(sums * tl.exp(scores - tl.where(is_finite, best, 0.0)), 0)
    word = tl.load(words_ptr + row * num_blocks + part)
    token = word
    if ids_ptr is not None:
        token = tl.load(ids_ptr + word)
    tl.store(drafted_ptr + row, word)
    tl.store(tokens_ptr + row, token)
    tl.store(chances_ptr + row, tl.where(is_finite, 1.0 / total, 0.0))


def guess(
    logits: Tensor,  # [steps * R, words]: the first step's, then the next one's
    how: Mapping[str, Tensor],  # choice_columns (cuda/batch.py) of each request
    ids: Tensor | None,  # [words] int32: draft id -> target id; None: they are the same
    step: int,  # of the first rows
    results: Tensor,  # [2, steps * R] int32: gets tokens, and their chances as the bits of float32
    added: Tensor | None = None,  # [steps * R, words]: what a Markov head adds
) -> Tensor:
    """-> [steps * R] int32: the tokens as draft ids. Chances are a softmax at temperature 1, noise added."""
    (num_rows, vocab), device, seeds = logits.shape, logits.device, how["seeds"]
    num_blocks = triton.cdiv(vocab, BLOCK)
    assert are_dense(logits, logits if added is None else added), "rows follow each other"
    assert num_rows % len(seeds) == 0, "as many rows each step"
    scores, sums = torch.empty((2, num_rows, num_blocks), dtype=torch.float32, device=device)
    words = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=device)
    drafted = torch.empty(num_rows, dtype=torch.int32, device=device)
    _guess_blocks[(num_rows, num_blocks)](
        logits, added, ids, how["temperatures"], seeds, how["places"], scores, sums, words,
        step, len(seeds), vocab, BLOCK, num_warps=4, **LAUNCH,
    )  # fmt: skip
    tokens, chances, width = results[0], results[1].view(torch.float32), triton.next_power_of_2(num_blocks)
    _guess_rows[(num_rows,)](
        scores, sums, words, ids, tokens, chances, drafted, num_blocks, width, num_warps=1, **LAUNCH
    )
    return drafted
