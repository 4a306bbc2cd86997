"""The nodes of a tree that a head grows on a device, level by level, and which of them the target checks.

A level has the best `width` of what the head offers after the nodes of the level before, by the probability
of the whole path; of all levels the best are checked, better ones first. Ties go to the earlier node and the
lower id. Invariant: a path is no likelier than any of its beginnings, so the best nodes are a tree and each
comes after its parent; what has no probability is drafted as token -1, which no target picks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from paceline.cuda.batch import WORD, DeviceBatch
from paceline.cuda.rows import BLOCK_SIZE
from paceline.heads.rows import TreeShape


class TreeNodes(NamedTuple):
    """M = width * depth nodes of each request. Level after level, the likeliest of a level first."""

    tokens: Tensor  # [R, M] int32
    parents: Tensor  # [R, M] int32: which node; -1: the root
    reach: Tensor  # [R, M] float32: logarithm of the path's probability
    masks: Tensor  # [R, M] int64: bit j: node j is an ancestor, or the node itself
    positions: Tensor  # [R, M] int32: of the head's rows
    slots: Tensor  # [R, M] int32: likewise
    sources: Tensor  # [R * width] int64: of the newest level, whose output each goes on from
    ends: Tensor  # [R] int32: rows of the text, which all nodes see

    @classmethod
    def of(cls, shape: TreeShape, requests: int, device: torch.device) -> Self:
        size = (requests, shape.width * shape.depth)
        assert shape.nodes <= size[1], "no more than there are"
        assert max(size[1], shape.nodes + 1) <= WORD, "a row's mask is one word"

        def column(dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        sources = torch.zeros(requests * shape.width, dtype=torch.int64, device=device)
        ends = torch.zeros(requests, dtype=torch.int32, device=device)
        reach, masks = column(torch.float32), column(torch.int64)
        return cls(column(), column(), reach, masks, column(), column(), sources, ends)


@triton.jit
def slot_of(table: tensor, at: tensor, limit: tensor, trash: tensor, stride: constexpr) -> tensor:
    """Of positions below the limit; the others have the trash slot."""
    inside = at < limit
    found = tl.load(table + at // BLOCK_SIZE * stride, mask=inside, other=0)
    return tl.where(inside, found * BLOCK_SIZE + at % BLOCK_SIZE, trash)


@triton.jit
def _ranks(reach: tensor, index: tensor) -> tensor:
    """[n] int32: how many others are likelier, or as likely and earlier."""
    own, other = reach[:, None], reach[None, :]
    is_before = (other > own) | ((other == own) & (index[None, :] < index[:, None]))
    return tl.sum(is_before.to(tl.int32), 1)


@triton.jit(do_not_specialize=["trash"])
def _lay_out(
    head: DeviceBatch, wanted_ptr: tensor, limits_ptr: tensor, nodes: TreeNodes, trash: tensor,
    WIDTH: constexpr, NODES: constexpr, BLOCK: constexpr, TABLE: constexpr,
) -> None:  # fmt: skip
    """A program a request. Nodes lie behind the text in the order of their numbers."""
    request, i = tl.program_id(0), tl.arange(0, BLOCK)
    first, after = tl.load(head.starts + request), tl.load(head.starts + request + 1)
    end = tl.load(head.prefix_lens + request) + tl.load(wanted_ptr + request).to(tl.int32) - first + 1
    end = tl.where(after > first, end, 0)  # a request without rows
    limit = tl.load(limits_ptr + request)
    at, inside = request * NODES + i, i < NODES
    tl.store(nodes.ends + request, end)
    tl.store(nodes.positions + at, end + i // WIDTH, mask=inside)
    slot = slot_of(head.block_tables + request, end + i, tl.where(inside, limit, 0), trash, TABLE)
    tl.store(nodes.slots + at, slot, mask=inside)


def lay_out(nodes: TreeNodes, head: Mapping[str, Tensor], shape: TreeShape, trash: int) -> None:
    """head: inputs of its first pass (cuda/chain_head.py); limits: positions reserved for a request."""
    batch, (requests, count) = DeviceBatch.of(head), nodes.tokens.shape
    sizes = shape.width, count, triton.next_power_of_2(count), batch.block_tables.shape[1]
    _lay_out[(requests,)](batch, head["wanted"], head["limits"], nodes, trash, *sizes, num_warps=1)


@triton.jit
def _grow(
    nodes: TreeNodes, found_ptr: tensor, chances_ptr: tensor, LEVEL: constexpr, BEFORE: constexpr,
    WIDTH: constexpr, NODES: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """A program a request. BEFORE: nodes of the level before, with as many offers as WIDTH each."""
    request, c = tl.program_id(0), tl.arange(0, BLOCK)
    is_offer, first = c < BEFORE * WIDTH, request * BEFORE * WIDTH
    token = tl.load(found_ptr + first + c, mask=is_offer, other=0)
    reach = tl.load(chances_ptr + first + c, mask=is_offer, other=-float("inf"))
    parent, nodes_at = 0 * c - 1, request * NODES
    seen = tl.zeros((BLOCK,), tl.int64)
    if LEVEL > 0:
        parent = (LEVEL - 1) * WIDTH + c // WIDTH
        reach += tl.load(nodes.reach + nodes_at + parent, mask=is_offer, other=0.0)
        seen = tl.load(nodes.masks + nodes_at + parent, mask=is_offer, other=0)
    rank = _ranks(reach, c)
    is_kept = is_offer & (rank < WIDTH)
    node = tl.where(is_kept, LEVEL * WIDTH + rank, 0)
    at, bit = nodes_at + node, tl.full((BLOCK,), 1, tl.int64) << node.to(tl.int64)
    tl.store(nodes.tokens + at, token, mask=is_kept)
    tl.store(nodes.parents + at, parent, mask=is_kept)
    tl.store(nodes.reach + at, reach, mask=is_kept)
    tl.store(nodes.masks + at, seen | bit, mask=is_kept)
    source = (request * BEFORE + c // WIDTH).to(tl.int64)
    tl.store(nodes.sources + request * WIDTH + rank, source, mask=is_kept)


def grow(nodes: TreeNodes, found: tuple[Tensor, Tensor], level: int, shape: TreeShape) -> None:
    """found [rows, width]: what the head offers after each node of the level before (cuda/top.py)."""
    (requests, count), width = nodes.tokens.shape, shape.width
    before = width if level else 1
    assert found[0].shape == found[1].shape == (requests * before, width), "as many offers after each node"
    sizes = level, before, width, count, triton.next_power_of_2(before * width)
    _grow[(requests,)](nodes, *found, *sizes, num_warps=4)


@triton.jit
def _choose(
    nodes: TreeNodes, target: DeviceBatch, places_ptr: tensor, drafted_ptr: tensor, reach_ptr: tensor,
    WIDTH: constexpr, NODES: constexpr, KEPT: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """A program a request: row 0 is the root's, row 1 the best node's. KEPT: nodes that are checked."""
    request, i = tl.program_id(0), tl.arange(0, BLOCK)
    if tl.load(target.starts + request + 1) == tl.load(target.starts + request):
        return
    inside, nodes_at, first = i < NODES, request * NODES + i, request * (KEPT + 1)
    reach = tl.load(nodes.reach + nodes_at, mask=inside, other=-float("inf"))
    token = tl.load(nodes.tokens + nodes_at, mask=inside, other=0)
    parent = tl.load(nodes.parents + nodes_at, mask=inside, other=-1)
    seen = tl.load(nodes.masks + nodes_at, mask=inside, other=0)
    prefix = tl.load(target.prefix_lens + request)
    row = 1 + _ranks(reach, i)
    is_kept = inside & (row <= KEPT)
    # Rows of ancestors, as bits: the sum of different powers of two is their union.
    one = tl.full((BLOCK,), 1, tl.int64)
    bit = tl.where(is_kept, one << tl.where(is_kept, row, 0).to(tl.int64), 0)
    is_above = ((seen[:, None] >> i[None, :].to(tl.int64)) & 1) != 0
    mask = 1 + tl.sum(tl.where(is_above, bit[None, :], 0), 1)
    parent_row = tl.sum(tl.where(parent[:, None] == i[None, :], row[None, :], 0), 1)

    at, said = first + row, request * 3 * KEPT + row - 1
    position = prefix + 1 + i // WIDTH
    tl.store(target.input_ids + at, token, mask=is_kept)
    tl.store(target.positions + at, position, mask=is_kept)
    tl.store(places_ptr + at, (position + 1).to(tl.int64), mask=is_kept)
    tl.store(target.masks + at, mask, mask=is_kept)
    tl.store(drafted_ptr + said, tl.where(reach == -float("inf"), -1, token), mask=is_kept)
    tl.store(drafted_ptr + said + KEPT, parent_row, mask=is_kept)
    tl.store(reach_ptr + said + 2 * KEPT, reach, mask=is_kept)
    tl.store(target.positions + first, prefix)
    tl.store(places_ptr + first, (prefix + 1).to(tl.int64))
    tl.store(target.masks + first, tl.full((), 1, tl.int64))


def choose(
    nodes: TreeNodes,
    target: Mapping[str, Tensor],  # inputs of its pass (cuda/batch.py); the root's token is there
    shape: TreeShape,
    drafted: Tensor,  # [R, 3, nodes] int32: gets tokens, rows of parents, and `reach` as bits of float32
) -> None:
    batch, (requests, count) = DeviceBatch.of(target), nodes.tokens.shape
    assert batch.masks.shape == (len(batch.slots), 1), "one word a row"
    assert drafted.shape == (requests, 3, shape.nodes), "of every node"
    sizes = shape.width, count, shape.nodes, triton.next_power_of_2(count)
    reach = drafted.view(torch.float32)
    _choose[(requests,)](nodes, batch, target["places"], drafted, reach, *sizes, num_warps=4)
