"""The likeliest tokens after each of many nodes, chosen as `guess` (cuda/pick.py) chooses one.

Invariant: the first of them is the one that `guess` would choose; the lowest id wins a tie.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from paceline.cuda.pick import BLOCK, guess_scores
from paceline.cuda.rows import LAUNCH, are_dense, let_next_start, wait_for_previous


@triton.jit(do_not_specialize=["depth", "each"])
def _top_blocks(
    logits_ptr: tensor, ids_ptr: tensor, temperatures_ptr: tensor, seeds_ptr: tensor, places_ptr: tensor,
    scores_ptr: tensor, sums_ptr: tensor, words_ptr: tensor, depth: tensor, each: tensor, vocab: constexpr,
    block: constexpr, WIDTH: constexpr,
) -> None:  # fmt: skip
    """each: rows of a request."""
    let_next_start()
    row, part = tl.program_id(0), tl.program_id(1)
    index, lane = row * tl.num_programs(1) + part, tl.arange(0, block)
    score = guess_scores(
        logits_ptr, None, ids_ptr, temperatures_ptr, seeds_ptr, places_ptr, row, part, row // each, depth,
        vocab, block,
    )  # fmt: skip
    highest = tl.max(score, 0)
    total = tl.sum(tl.exp(score - tl.where(highest == -float("inf"), 0.0, highest)), 0)
    tl.store(sums_ptr + index, total)
    for i in tl.static_range(WIDTH):
        best, at = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(scores_ptr + index * WIDTH + i, best)
        tl.store(words_ptr + index * WIDTH + i, tl.minimum(part * block + at, vocab - 1))
        score = tl.where(lane == at, -float("inf"), score)


@triton.jit
def _top_rows(
    scores_ptr: tensor, sums_ptr: tensor, words_ptr: tensor, ids_ptr: tensor, tokens_ptr: tensor,
    chances_ptr: tensor, num_blocks: constexpr, WIDTH: constexpr, room: constexpr,
) -> None:  # fmt: skip
    """room: a power of two with place for all that the blocks offer, in the order of scores and ids."""
    let_next_start()
    row, at = tl.program_id(0), tl.arange(0, room)
    inside = at < num_blocks * WIDTH
    wait_for_previous()
    scores = tl.load(scores_ptr + row * num_blocks * WIDTH + at, mask=inside, other=-float("inf"))
    is_first = inside & (at % WIDTH == 0)  # the highest of its block
    sums = tl.load(sums_ptr + row * num_blocks + at // WIDTH, mask=is_first, other=0.0)
    highest = tl.max(scores, 0)
    is_finite = tl.abs(highest) != float("inf")
    base = tl.where(is_finite, highest, 0.0)
    total = tl.sum(tl.where(is_first, sums * tl.exp(scores - base), 0.0), 0)
    for i in tl.static_range(WIDTH):
        best, part = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.load(words_ptr + row * num_blocks * WIDTH + part)
        if ids_ptr is not None:
            token = tl.load(ids_ptr + token)
        chance = tl.minimum(best - base - tl.log(total), 0.0)
        tl.store(tokens_ptr + row * WIDTH + i, token)
        tl.store(chances_ptr + row * WIDTH + i, tl.where(is_finite, chance, -float("inf")))
        scores = tl.where(at == part, -float("inf"), scores)


def top(
    logits: Tensor,  # [rows, words]: of each request as many, one after the other
    how: Mapping[str, Tensor],  # choice_columns (cuda/batch.py) of each request
    ids: Tensor | None,  # [words] int32: draft id -> target id; None: they are the same
    depth: int,  # 0: tokens right after the root
    width: int,
) -> tuple[Tensor, Tensor]:
    """-> [rows, width] int32 and float32: the best tokens, and logarithms of their chances: a softmax at
    temperature 1, noise added."""
    (num_rows, vocab), device, requests = logits.shape, logits.device, len(how["seeds"])
    num_blocks = triton.cdiv(vocab, BLOCK)
    assert are_dense(logits), "rows follow each other"
    assert num_rows % requests == 0, "as many rows of each request"
    assert width <= vocab, "as many tokens as there are"
    sums = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=device)
    scores = torch.empty((num_rows, num_blocks, width), dtype=torch.float32, device=device)
    words = torch.empty((num_rows, num_blocks, width), dtype=torch.int32, device=device)
    tokens = torch.empty((num_rows, width), dtype=torch.int32, device=device)
    chances = torch.empty((num_rows, width), dtype=torch.float32, device=device)
    _top_blocks[(num_rows, num_blocks)](
        logits, ids, how["temperatures"], how["seeds"], how["places"], scores, sums, words, depth,
        num_rows // requests, vocab, BLOCK, width, num_warps=4, **LAUNCH,
    )  # fmt: skip
    room = triton.next_power_of_2(num_blocks * width)
    _top_rows[(num_rows,)](
        scores, sums, words, ids, tokens, chances, num_blocks, width, room, num_warps=4, **LAUNCH
    )
    return tokens, chances
