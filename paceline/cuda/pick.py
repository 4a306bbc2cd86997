"""The target's choices on the device: a step copies no logits to the host, which follows the choices down the
drafted trees.

`pick` makes the choice of paceline/core/sampling.py for requests without further options, with the same
noise: the random words are those of paceline/core/noise.py bit for bit, and scores are float64 as there. The
only thing that may differ is the last bit of a logarithm, so a choice differs from the host's only where two
scores agree to about 15 digits; it never differs between two runs here. Invariant: a row's choice depends on
its logits, temperature, seed and position.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from paceline.core.noise import Purpose
from paceline.cuda.overlap import LAUNCH, let_next_start, wait_for_previous

BLOCK = 1024  # ids a program looks at; four share a random counter
_TARGET = tl.constexpr(int(Purpose.TARGET))


class Workspace(NamedTuple):
    """The best of each block of the vocabulary."""

    scores: torch.Tensor  # [rows, blocks] float64
    ids: torch.Tensor  # [rows, blocks] int32


def workspace(num_rows: int, vocab: int, device: torch.device | str) -> Workspace:
    shape = (num_rows, triton.cdiv(vocab, BLOCK))
    return Workspace(
        torch.empty(shape, dtype=torch.float64, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
    )


@triton.jit
def noise_words(first: tl.tensor, position: tl.tensor, seed: tl.tensor, count: tl.constexpr) -> tl.tensor:
    """[count] uint32: the words of ids first .. first + count - 1, both multiples of four. TARGET noise has
    no round.
    """
    counter = first // 4 + tl.arange(0, count // 4)
    zero = tl.zeros_like(counter)
    a, b, c, d = tl.philox(seed, counter, zero + position.to(tl.int32), zero + _TARGET, zero)
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def _best_of_blocks(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    vocab: tl.constexpr,
    block: tl.constexpr,
) -> None:
    let_next_start()
    wait_for_previous()
    row, part = tl.program_id(0), tl.program_id(1)
    ids = part * block + tl.arange(0, block)
    logits = tl.load(logits_ptr + row.to(tl.int64) * vocab + ids, mask=ids < vocab, other=-float("inf"))
    score = logits.to(tl.float32).to(tl.float64)
    temperature = tl.load(temperature_ptr + row).to(tl.float64)
    if temperature > 0:
        words = noise_words(part * block, tl.load(positions_ptr + row), tl.load(seeds_ptr + row), block)
        uniform = (words.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
        score = score / temperature - tl.log(-tl.log(uniform))
    score = tl.where(score == score, score, float("inf"))  # a NaN wins, so that it is seen
    best, at = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    index = row * tl.num_programs(1) + part
    tl.store(scores_ptr + index, best)
    tl.store(ids_ptr + index, part * block + at)


@triton.jit
def _best_of_rows(
    scores_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    out_ids_ptr: tl.tensor,
    vocab: tl.constexpr,
    num_blocks: tl.constexpr,
    width: tl.constexpr,
) -> None:
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


def pick(
    logits: torch.Tensor,  # [L, vocab] float32, bfloat16 or float16
    # [L] float64 for the host's choice; float32 is as valid a draw, of a temperature off by 3e-8
    temperature: torch.Tensor,
    seeds: torch.Tensor,  # [L] int64: the 64 bits of each request's seed
    positions: torch.Tensor,  # [L] int64: of the token to be chosen, one past the row's own
    out_ids: torch.Tensor | None = None,  # [L] int64
    work: Workspace | None = None,  # of at least L rows
) -> torch.Tensor:
    """The token of each row, [L] int64: its best where the temperature is 0, its seeded draw elsewhere; the
    lowest id wins a tie.

    It is -1 where a row is broken: if any logit is NaN or +inf, or all are -inf.
    """
    num_rows, vocab = logits.shape
    out_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device) if out_ids is None else out_ids
    work = workspace(num_rows, vocab, logits.device) if work is None else work
    assert logits.is_contiguous(), "rows follow each other"
    assert len(temperature) == len(seeds) == len(positions) == len(out_ids) == num_rows, "one of each a row"
    assert seeds.dtype == positions.dtype == out_ids.dtype == torch.int64, "64-bit keys and ids"
    assert temperature.dtype in (torch.float32, torch.float64), "a temperature is a fraction"
    num_blocks = triton.cdiv(vocab, BLOCK)
    assert len(work.scores) >= num_rows, "a workspace of as many rows"
    assert work.scores.shape[1] == num_blocks, "a workspace of this vocabulary"
    _best_of_blocks[(num_rows, num_blocks)](
        logits, temperature, seeds, positions, *work, vocab, BLOCK, num_warps=4, **LAUNCH
    )
    width = triton.next_power_of_2(num_blocks)
    _best_of_rows[(num_rows,)](*work, logits, out_ids, vocab, num_blocks, width, num_warps=1, **LAUNCH)
    return out_ids
