"""Between two rounds that a device runs by itself: what was accepted, and where the rows of the next round
lie. One launch.

A round's rows are the same for the head and for the target: request r has K + 1 of them, from row r * (K + 1)
on. The head's are what the round before picked; rows after the accepted ones are junk behind the text,
overwritten before anybody sees them. Invariant: a request without rows is left alone; tokens that are written
are tokens, whatever was picked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

BLOCK_SIZE = tl.constexpr(16)  # slots of a block, of either cache


class Verified(NamedTuple):
    """Inputs of the target's pass (cuda/batch.py), and what came of it."""

    picked: torch.Tensor  # [T or more] int64
    input_ids: torch.Tensor  # [T]: roots and drafts; int32 as all that follow but the places
    positions: torch.Tensor  # [T]
    slots: torch.Tensor  # [T]
    starts: torch.Tensor  # [R + 1]
    prefixes: torch.Tensor  # [R]
    tables: torch.Tensor  # [R, B]
    places: torch.Tensor  # [T] int64: position of the token after each row


class Drafted(NamedTuple):
    """Inputs of the head's passes (cuda/head_inputs.py), and what it drafted."""

    results: torch.Tensor  # [2, K, R or more]: tokens, and chances as the bits of float32
    tokens: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    slots: torch.Tensor  # [T]
    stands: torch.Tensor  # [T]
    prefixes: torch.Tensor  # [R]
    tables: torch.Tensor  # [R, B]
    speaking: torch.Tensor  # [R] int64: rows
    places: torch.Tensor  # [R] int64: position of the first token that is drafted
    next_positions: torch.Tensor  # [K - 1 or more, R or more]: of the steps after the first
    next_slots: torch.Tensor  # likewise


class Ring(NamedTuple):
    """What the host will read."""

    number: torch.Tensor  # [R] int32: rounds so far
    rounds: torch.Tensor  # [rounds, R, 3 K + 1] int32: drafted tokens, their chances, what was picked


@triton.jit
def _slot_of(table: tl.tensor, at: tl.tensor, inside: tl.tensor, width: tl.constexpr) -> tl.tensor:
    """Beyond the table, where a round that never comes would lie: any."""
    block = at // BLOCK_SIZE
    return tl.load(table + block, mask=inside & (block < width), other=0) * BLOCK_SIZE + at % BLOCK_SIZE


@triton.jit
def _advance(
    picked_ptr: tl.tensor, ids_ptr: tl.tensor, positions_ptr: tl.tensor, slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    prefixes_ptr: tl.tensor, tables_ptr: tl.tensor, places_ptr: tl.tensor,
    results_ptr: tl.tensor, head_tokens_ptr: tl.tensor, head_positions_ptr: tl.tensor,
    head_slots_ptr: tl.tensor,
    head_stands_ptr: tl.tensor, head_prefixes_ptr: tl.tensor, head_tables_ptr: tl.tensor,
    speaking_ptr: tl.tensor,
    head_places_ptr: tl.tensor, next_positions_ptr: tl.tensor, next_slots_ptr: tl.tensor,
    number_ptr: tl.tensor, rounds_ptr: tl.tensor,
    STEPS: tl.constexpr, ROWS: tl.constexpr, TABLE: tl.constexpr, HEAD_TABLE: tl.constexpr,
    RESULTS: tl.constexpr, NEXT: tl.constexpr,
) -> None:  # fmt: skip
    """A program a request. TABLE, HEAD_TABLE, RESULTS, NEXT: widths of rows in memory; ROWS: STEPS + 1,
    rounded up.
    """
    request = tl.program_id(0)
    if tl.load(starts_ptr + request + 1) == tl.load(starts_ptr + request):
        return
    i = tl.arange(0, ROWS)
    first, is_row, is_step = request * (STEPS + 1), i <= STEPS, i < STEPS
    picked = tl.load(picked_ptr + first + i, mask=is_row, other=-1).to(tl.int32)
    drafted = tl.load(
        ids_ptr + first + 1 + i, mask=is_step, other=-2
    )  # what follows the last draft is never drafted
    chances = tl.load(results_ptr + (STEPS + i) * RESULTS + request, mask=is_step, other=0)
    accepted = tl.min(tl.where(is_row & (picked != drafted), i, STEPS), 0)
    prefix = tl.load(prefixes_ptr + request) + accepted + 1
    row = tl.load(speaking_ptr + request).to(tl.int32) - first
    head_prefix = tl.load(head_prefixes_ptr + request) + row + 1
    head_place = tl.load(head_places_ptr + request) + accepted + 1
    number = tl.load(number_ptr + request)
    token = tl.maximum(picked, 0)
    tl.debug_barrier()  # all is read

    said = rounds_ptr + (number * tl.num_programs(0) + request) * (3 * STEPS + 1)
    tl.store(said + i, drafted, mask=is_step)
    tl.store(said + STEPS + i, chances, mask=is_step)
    tl.store(said + 2 * STEPS + i, picked, mask=is_row)
    tl.store(number_ptr + request, number + 1)

    at = prefix + i
    tl.store(prefixes_ptr + request, prefix)
    tl.store(positions_ptr + first + i, at, mask=is_row)
    tl.store(places_ptr + first + i, (at + 1).to(tl.int64), mask=is_row)
    tl.store(slots_ptr + first + i, _slot_of(tables_ptr + request * TABLE, at, is_row, TABLE), mask=is_row)
    tl.store(ids_ptr + first, tl.sum(tl.where(i == accepted, token, 0), 0))

    at = head_prefix + i
    slot = _slot_of(head_tables_ptr + request * HEAD_TABLE, at, is_row, HEAD_TABLE)
    tl.store(head_prefixes_ptr + request, head_prefix)
    tl.store(head_tokens_ptr + first + i, token, mask=is_row)
    tl.store(head_positions_ptr + first + i, at, mask=is_row)
    tl.store(head_slots_ptr + first + i, slot, mask=is_row)
    tl.store(head_stands_ptr + first + i, slot, mask=is_row)
    tl.store(speaking_ptr + request, (first + accepted).to(tl.int64))
    tl.store(head_places_ptr + request, head_place)
    at = head_prefix + accepted + 1 + i
    tl.store(next_positions_ptr + i * NEXT + request, at, mask=i < STEPS - 1)
    slot = _slot_of(head_tables_ptr + request * HEAD_TABLE, at, i < STEPS - 1, HEAD_TABLE)
    tl.store(next_slots_ptr + i * NEXT + request, slot, mask=i < STEPS - 1)


def advance(verified: Verified, drafted: Drafted, ring: Ring, num_requests: int) -> None:
    """Launched in the usual way, after all before it has ended: others read where rows lie before they wait
    for anything.
    """
    steps = drafted.results.shape[1]
    narrow, wide = (
        (*verified[1:7], *drafted[:7], *drafted[9:], *ring),
        (verified.picked, verified.places, *drafted[7:9]),
    )
    assert all(x.dtype == torch.int32 for x in narrow), "places in memory are 32-bit numbers"
    assert all(x.dtype == torch.int64 for x in wide), (
        "picks, positions of noise and rows that speak are 64-bit numbers"
    )
    assert all(x.is_contiguous() for x in (*verified, *drafted, *ring)), "addresses follow from shapes"
    assert len(verified.input_ids) >= num_requests * (steps + 1) <= len(drafted.tokens), "rows of all"
    assert ring.rounds.shape[1:] == (num_requests, 3 * steps + 1), "a line a request"
    assert len(drafted.next_positions) >= steps - 1, "places of all steps"
    _advance[(num_requests,)](
        *verified, *drafted, *ring, steps, triton.next_power_of_2(steps + 1), verified.tables.shape[1],
        drafted.tables.shape[1],
        drafted.results.shape[2], drafted.next_positions.shape[1], num_warps=1,
    )  # fmt: skip
