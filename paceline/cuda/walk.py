"""What was accepted of trees, and where the rows of the next round lie: the launch between two rounds.

From the root on, the child that holds the target's pick follows. Request r has depth + 1 rows of the head and
nodes + 1 of the target, from its first on; the head reads the accepted path next, and its rows after that are
overwritten before they are seen. Invariant: as `follow` (core/accept.py) says, a child whose own pick is none
is not accepted; a request without rows is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from paceline.cuda.batch import DeviceBatch
from paceline.cuda.tree_nodes import slot_of
from paceline.heads.rows import TreeShape

HEAD_COLUMNS = ("places", "wanted", "written", "limits")


class Walked(NamedTuple):
    """The accepted paths, the root first; what lies behind them is the root again."""

    accepted: Tensor  # [R] int32: nodes after the root
    rows: Tensor  # [R, depth + 1] int64: of the target's pass
    sources: Tensor  # [R, depth + 1] int32: slots where their keys and values are,
    targets: Tensor  # [R, depth + 1] int32: and where they belong

    @classmethod
    def of(cls, shape: TreeShape, requests: int, device: torch.device) -> Self:
        size, number = (requests, shape.depth + 1), torch.int32
        slots = torch.zeros((2, *size), dtype=number, device=device)
        accepted = torch.zeros(requests, dtype=number, device=device)
        return cls(accepted, torch.zeros(size, dtype=torch.int64, device=device), *slots)


@triton.jit
def _descend(
    token: tensor, parent: tensor, picked: tensor, row: tensor, k: tensor, DEPTH: constexpr, ROWS: constexpr
) -> tensor:
    """-> rows of the path [STEPS], how many after the root, and the last of them. Where no child follows,
    none does at the next step either."""
    path, accepted, node = 0 * k, tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for step in tl.static_range(1, DEPTH + 1):
        pick = tl.sum(tl.where(row == node, picked, 0), 0)
        is_child = (parent == node) & (token == pick) & (picked >= 0) & (pick >= 0)
        child = tl.min(tl.where(is_child, row, ROWS), 0)
        is_found = child < ROWS
        node = tl.where(is_found, child, node)
        accepted += is_found.to(tl.int32)
        path = tl.where((k == step) & is_found, child, path)
    return path, accepted, node


@triton.jit(do_not_specialize=["trash", "head_trash"])
def _walk(
    target: DeviceBatch, picked_ptr: tensor, limits_ptr: tensor, trash: tensor,
    head: DeviceBatch, head_places_ptr: tensor, wanted_ptr: tensor, written_ptr: tensor,
    head_limits_ptr: tensor, head_trash: tensor, drafted_ptr: tensor, walked: Walked, number_ptr: tensor,
    rounds_ptr: tensor, NODES: constexpr, DEPTH: constexpr, ROWS: constexpr, STEPS: constexpr,
    TABLE: constexpr, HEAD_TABLE: constexpr,
) -> None:  # fmt: skip
    """A program a request. ROWS > NODES, STEPS > DEPTH; TABLE, HEAD_TABLE: widths of rows in memory."""
    request = tl.program_id(0)
    if tl.load(target.starts + request + 1) == tl.load(target.starts + request):
        tl.store(walked.accepted + request, 0)
        return
    row, k = tl.arange(0, ROWS), tl.arange(0, STEPS)
    is_row, is_node, is_step = row <= NODES, (row >= 1) & (row <= NODES), k <= DEPTH
    first, head_first = request * (NODES + 1), request * (DEPTH + 1)
    picked = tl.load(picked_ptr + first + row, mask=is_row, other=-1).to(tl.int32)
    drafted = drafted_ptr + request * 3 * NODES + row - 1
    token = tl.load(drafted, mask=is_node, other=-2)
    parent = tl.load(drafted + NODES, mask=is_node, other=-1)
    reach = tl.load(drafted + 2 * NODES, mask=is_node, other=0)
    path, accepted, node = _descend(token, parent, picked, row, k, DEPTH, ROWS)
    emitted = tl.load(picked_ptr + first + path, mask=is_step, other=0).to(tl.int32)
    source = tl.load(target.slots + first + path, mask=is_step, other=0)
    into = tl.load(target.slots + first + k, mask=is_step & (k <= accepted), other=0)
    bonus = tl.sum(tl.where(row == node, picked, 0), 0)
    prefix = tl.load(target.prefix_lens + request) + accepted + 1
    head_row = tl.load(wanted_ptr + request).to(tl.int32) - head_first
    head_prefix = tl.load(head.prefix_lens + request) + head_row + 1
    head_place = tl.load(head_places_ptr + request) + accepted + 1
    number = tl.load(number_ptr + request)
    limit, head_limit = tl.load(limits_ptr + request), tl.load(head_limits_ptr + request)
    tl.debug_barrier()  # all is read

    said = rounds_ptr + (number * tl.num_programs(0) + request) * (4 * NODES + 1) + row
    tl.store(said - 1, token, mask=is_node)
    tl.store(said - 1 + NODES, parent, mask=is_node)
    tl.store(said - 1 + 2 * NODES, reach, mask=is_node)
    tl.store(said + 3 * NODES, picked, mask=is_row)
    tl.store(number_ptr + request, number + 1)
    tl.store(walked.accepted + request, accepted)
    tl.store(walked.rows + head_first + k, (first + path).to(tl.int64), mask=is_step)
    tl.store(walked.sources + head_first + k, source, mask=is_step)
    tl.store(walked.targets + head_first + k, into, mask=is_step)

    prefix = tl.minimum(prefix, limit)
    tl.store(target.prefix_lens + request, prefix)
    slot = slot_of(target.block_tables + request, prefix + row, limit, trash, TABLE)
    tl.store(target.slots + first + row, slot, mask=is_row)
    tl.store(target.input_ids + first, tl.maximum(bonus, 0))

    head_prefix = tl.minimum(head_prefix, head_limit)
    at = head_prefix + k
    slot = slot_of(head.block_tables + request, at, head_limit, head_trash, HEAD_TABLE)
    tl.store(head.prefix_lens + request, head_prefix)
    tl.store(head.input_ids + head_first + k, tl.maximum(emitted, 0), mask=is_step)
    tl.store(head.positions + head_first + k, at, mask=is_step)
    tl.store(written_ptr + head_first + k, slot, mask=is_step)
    tl.store(head.slots + head_first + k, slot, mask=is_step)
    tl.store(wanted_ptr + request, (head_first + accepted).to(tl.int64))
    tl.store(head_places_ptr + request, head_place)


def walk(
    target: Mapping[str, Tensor],  # inputs of its pass (cuda/batch.py)
    picked: Tensor,  # [T or more] int64: what came of it
    head: Mapping[str, Tensor],  # inputs of its first pass (cuda/chain_head.py)
    trash: tuple[int, int],  # slots of both that no request owns
    drafted: Tensor,  # [R, 3, nodes] int32: tokens, rows of parents, logarithms of chances as their bits
    walked: Walked,  # is written
    number: Tensor,  # [R] int32: rounds so far
    rounds: Tensor,  # [rounds, R, 4 nodes + 1] int32: `drafted`, then what was picked
) -> None:
    """Launched after all before it has ended: others read where rows lie before they wait for anything. Both
    have `limits`: the positions reserved for a request. The next tree says the rest of the target's rows."""
    (requests, _, nodes), depth = drafted.shape, walked.rows.shape[1] - 1
    batches, columns = (DeviceBatch.of(target), DeviceBatch.of(head)), [head[name] for name in HEAD_COLUMNS]
    assert len(target["slots"]) >= requests * (nodes + 1), "rows of all"
    assert len(head["slots"]) >= requests * (depth + 1), "rows of all"
    assert rounds.shape[1:] == (requests, 4 * nodes + 1), "a line a request"
    widths = [each.block_tables.shape[1] for each in batches]
    sizes = [nodes, depth, *(triton.next_power_of_2(each + 1) for each in (nodes, depth))]
    _walk[(requests,)](
        batches[0], picked, target["limits"], trash[0], batches[1], *columns, trash[1], drafted, walked,
        number, rounds, *sizes, *widths, num_warps=1,
    )  # fmt: skip
