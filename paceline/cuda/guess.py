"""A drafting head's guesses on the device: the likeliest token of each row, or with a temperature the one
that the target's own noise makes win, and how sure the head is of it.

The noise is that of cuda/pick.py, at the tokens' ids in the target's vocabulary. A guess that differs from
the host's in the last bit costs a draft now and then and never changes the text. Invariant: a guess is a
token of the draft vocabulary, whatever the logits are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from paceline.core.noise import Purpose
from paceline.cuda.overlap import LAUNCH, let_next_start, wait_for_previous
from paceline.cuda.pick import BLOCK

_TARGET = tl.constexpr(int(Purpose.TARGET))


class Guessing(NamedTuple):
    """How each request's tokens are chosen, on the device."""

    temperatures: torch.Tensor  # [R] float64; 0: the likeliest
    seeds: torch.Tensor  # [R] int64
    places: torch.Tensor  # [R] int64: position of the first token
    ids: torch.Tensor | None  # [words] int32: draft id -> target id; None: they are the same


@triton.jit
def _noise(ids: tl.tensor, position: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """Gumbel noise of these tokens, float32; by way of float64, since a float32 next to 1 has no logarithm of
    a logarithm.
    """
    zero = tl.zeros_like(ids)
    a, b, c, d = tl.philox(seed, ids // 4, zero + position.to(tl.int32), zero + _TARGET, zero)
    lane = ids % 4
    word = tl.where(lane == 0, a, tl.where(lane == 1, b, tl.where(lane == 2, c, d)))
    uniform = (word.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit(do_not_specialize=["step", "num_requests"])
def _best_of_blocks(
    logits_ptr: tl.tensor,
    added_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    places_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    words_ptr: tl.tensor,
    step: tl.tensor,
    num_requests: tl.tensor,
    vocab: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Rows are steps by requests."""
    let_next_start()
    row, part = tl.program_id(0), tl.program_id(1)
    request, index = row % num_requests, row * tl.num_programs(1) + part
    words = part * block + tl.arange(0, block)
    inside = words < vocab
    temperature = tl.load(temperatures_ptr + request).to(tl.float32)
    wait_for_previous()
    score = tl.load(logits_ptr + row.to(tl.int64) * vocab + words, mask=inside, other=-float("inf")).to(
        tl.float32
    )
    if added_ptr is not None:
        score += tl.load(added_ptr + row.to(tl.int64) * vocab + words, mask=inside, other=0.0).to(tl.float32)
    if temperature > 0:
        ids = words
        if ids_ptr is not None:
            ids = tl.load(ids_ptr + words, mask=inside, other=0)
        position = tl.load(places_ptr + request) + step + row // num_requests
        score += temperature * _noise(ids, position, tl.load(seeds_ptr + request))
    score = tl.where(score == score, score, -float("inf"))
    best, at = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(scores_ptr + index, best)
    tl.store(sums_ptr + index, tl.sum(tl.exp(score - tl.where(best == -float("inf"), 0.0, best)), 0))
    tl.store(words_ptr + index, tl.minimum(part * block + at, vocab - 1))


@triton.jit
def _best_of_rows(
    scores_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    words_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    chances_ptr: tl.tensor,
    drafted_ptr: tl.tensor,
    num_blocks: tl.constexpr,
    width: tl.constexpr,
) -> None:
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


def step_results(steps: int, num_requests: int, device: torch.device) -> torch.Tensor:
    """[2, steps, R or more] int32: what `guess` fills step by step, each from an aligned address, since
    kernels are compiled for that.
    """
    return torch.empty((2, steps, max(num_requests, 4)), dtype=torch.int32, device=device)


def guess(
    logits: torch.Tensor,  # [steps * R, words]: the first step's, then the next one's
    how: Guessing,
    step: int,  # of the first rows
    # [2, steps * R] int32: gets the tokens, and their chances as the bits of a float32
    results: torch.Tensor,
    added: torch.Tensor | None = None,  # [steps * R, words]: what a Markov head adds
) -> torch.Tensor:
    """-> [steps * R] int32: the tokens as draft ids. The chance is a softmax at temperature 1, of what the
    noise has been added to.
    """
    num_rows, vocab = logits.shape
    num_requests, num_blocks = len(how.seeds), triton.cdiv(vocab, BLOCK)
    assert all(x is None or x.is_contiguous() for x in (logits, added)), "rows follow each other"
    assert added is None or added.shape == logits.shape, "one number a logit"
    assert num_rows % num_requests == 0, "as many rows each step"
    assert results.shape == (2, num_rows), "a guess a row"
    assert how.ids is None or (len(how.ids) == vocab and how.ids.dtype == torch.int32), "a token a logit"
    scores, sums = torch.empty((2, num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    words = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=logits.device)
    drafted = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    _best_of_blocks[(num_rows, num_blocks)](
        logits, added, how.ids, how.temperatures, how.seeds, how.places, scores, sums, words, step, num_requests, vocab, BLOCK,
        num_warps=4, **LAUNCH,
    )  # fmt: skip
    tokens, chances = results[0], results[1].view(torch.float32)
    width = triton.next_power_of_2(num_blocks)
    _best_of_rows[(num_rows,)](
        scores, sums, words, how.ids, tokens, chances, drafted, num_blocks, width, num_warps=1, **LAUNCH
    )
    return drafted
