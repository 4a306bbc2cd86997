"""What was accepted of chains, and where the rows of the next round lie: the launch between two rounds.

Request r has K + 1 rows, of the head and of the target, from row r * (K + 1) on; the head's are what the
round before picked, and those after the accepted ones are overwritten before they are seen. Invariant: a
request without rows is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from paceline.cuda.batch import DeviceBatch
from paceline.cuda.tree_nodes import slot_of

HEAD_COLUMNS = ("places", "wanted", "written", "next_positions", "next_slots", "limits")


@triton.jit(do_not_specialize=["trash", "head_trash"])
def _advance(
    target: DeviceBatch, picked_ptr: tensor, places_ptr: tensor, limits_ptr: tensor, trash: tensor,
    head: DeviceBatch, head_places_ptr: tensor, wanted_ptr: tensor, written_ptr: tensor,
    next_positions_ptr: tensor, next_slots_ptr: tensor, head_limits_ptr: tensor, head_trash: tensor,
    results_ptr: tensor, number_ptr: tensor, rounds_ptr: tensor, STEPS: constexpr, ROWS: constexpr,
    TABLE: constexpr, HEAD_TABLE: constexpr, RESULTS: constexpr, NEXT: constexpr,
) -> None:  # fmt: skip
    """A program a request. TABLE, HEAD_TABLE, RESULTS, NEXT: widths of rows in memory; ROWS: > STEPS."""
    request = tl.program_id(0)
    if tl.load(target.starts + request + 1) == tl.load(target.starts + request):
        return
    i = tl.arange(0, ROWS)
    first, is_row, is_step = request * (STEPS + 1), i <= STEPS, i < STEPS
    picked = tl.load(picked_ptr + first + i, mask=is_row, other=-1).to(tl.int32)
    # what follows the last draft is never drafted
    drafted = tl.load(target.input_ids + first + 1 + i, mask=is_step, other=-2)
    chances = tl.load(results_ptr + (STEPS + i) * RESULTS + request, mask=is_step, other=0)
    accepted = tl.min(tl.where(is_row & (picked != drafted), i, STEPS), 0)
    prefix = tl.load(target.prefix_lens + request) + accepted + 1
    row = tl.load(wanted_ptr + request).to(tl.int32) - first
    head_prefix = tl.load(head.prefix_lens + request) + row + 1
    head_place = tl.load(head_places_ptr + request) + accepted + 1
    number = tl.load(number_ptr + request)
    limit, head_limit = tl.load(limits_ptr + request), tl.load(head_limits_ptr + request)
    token = tl.maximum(picked, 0)
    tl.debug_barrier()  # all is read

    said = rounds_ptr + (number * tl.num_programs(0) + request) * (3 * STEPS + 1)
    tl.store(said + i, drafted, mask=is_step)
    tl.store(said + STEPS + i, chances, mask=is_step)
    tl.store(said + 2 * STEPS + i, picked, mask=is_row)
    tl.store(number_ptr + request, number + 1)

    prefix = tl.minimum(prefix, limit)
    at = prefix + i
    tl.store(target.prefix_lens + request, prefix)
    tl.store(target.positions + first + i, at, mask=is_row)
    tl.store(places_ptr + first + i, (at + 1).to(tl.int64), mask=is_row)
    slot = slot_of(target.block_tables + request, at, limit, trash, TABLE)
    tl.store(target.slots + first + i, slot, mask=is_row)
    tl.store(target.input_ids + first, tl.sum(tl.where(i == accepted, token, 0), 0))

    head_prefix = tl.minimum(head_prefix, head_limit)
    at = head_prefix + i
    slot = slot_of(head.block_tables + request, at, head_limit, head_trash, HEAD_TABLE)
    tl.store(head.prefix_lens + request, head_prefix)
    tl.store(head.input_ids + first + i, token, mask=is_row)
    tl.store(head.positions + first + i, at, mask=is_row)
    tl.store(written_ptr + first + i, slot, mask=is_row)
    tl.store(head.slots + first + i, slot, mask=is_row)
    tl.store(wanted_ptr + request, (first + accepted).to(tl.int64))
    tl.store(head_places_ptr + request, head_place)
    at = head_prefix + accepted + 1 + i
    tl.store(next_positions_ptr + i * NEXT + request, at, mask=i < STEPS - 1)
    slot = slot_of(head.block_tables + request, at, head_limit, head_trash, HEAD_TABLE)
    tl.store(next_slots_ptr + i * NEXT + request, slot, mask=i < STEPS - 1)


def advance(
    target: Mapping[str, Tensor],  # inputs of its pass (cuda/batch.py)
    picked: Tensor,  # [T or more] int64: what came of it
    head: Mapping[str, Tensor],  # inputs of its passes (cuda/chain_head.py)
    trash: tuple[int, int],  # slots of both that no request owns
    results: Tensor,  # [2, K, R or more] int32: tokens, and chances as the bits of float32
    number: Tensor,  # [R] int32: rounds so far
    rounds: Tensor,  # [rounds, R, 3 K + 1] int32: drafted tokens, their chances, what was picked
) -> None:
    """Launched after all before it has ended: others read where rows lie before they wait for anything. Both
    have `limits`: the positions reserved for a request."""
    num_requests, steps = len(number), results.shape[1]
    batches, columns = (DeviceBatch.of(target), DeviceBatch.of(head)), [head[name] for name in HEAD_COLUMNS]
    rows = num_requests * (steps + 1)
    assert min(len(target["slots"]), len(head["slots"])) >= rows, "rows of all"
    assert rounds.shape[1:] == (num_requests, 3 * steps + 1), "a line a request"
    widths = [each.block_tables.shape[1] for each in batches]
    _advance[(num_requests,)](
        batches[0], picked, target["places"], target["limits"], trash[0], batches[1], *columns, trash[1],
        results, number, rounds, steps, triton.next_power_of_2(steps + 1), *widths, results.shape[2],
        head["next_slots"].shape[1], num_warps=1,
    )  # fmt: skip
