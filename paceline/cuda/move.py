"""Keys and values of the accepted nodes of trees move to where the text continues, in all layers at once.

Invariant: all of a request's lines are read before any of them is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from paceline.models.attention import LayerCache

BLOCK = 1024  # numbers of 32 bits of a line, at a time


class Caches(NamedTuple):
    """Keys and values of every layer."""

    addresses: Tensor  # [caches] int64
    widths: Tensor  # [caches] int32: of a slot's line, in numbers of 32 bits

    @classmethod
    def of(cls, kv: Sequence[LayerCache]) -> Caches:
        both = [each for layer in kv for each in layer]
        sizes = [each[0].numel() * each.element_size() for each in both]
        assert all(each.is_contiguous() for each in both), "a slot follows the other"
        assert all(size % 4 == 0 for size in sizes), "lines are numbers of 32 bits"
        addresses = torch.tensor([each.data_ptr() for each in both], dtype=torch.int64)
        widths = torch.tensor([size // 4 for size in sizes], dtype=torch.int32)
        return cls(addresses.to(both[0].device), widths.to(both[0].device))


@triton.jit
def _move(
    addresses_ptr: tensor, widths_ptr: tensor, accepted_ptr: tensor, sources_ptr: tensor, targets_ptr: tensor,
    LINES: constexpr, ROWS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """A program a request and cache. ROWS: LINES, rounded up to a power of two."""
    request, cache, k = tl.program_id(0), tl.program_id(1), tl.arange(0, ROWS)
    is_line = (k < LINES) & (k <= tl.load(accepted_ptr + request))
    source = tl.load(sources_ptr + request * LINES + k, mask=is_line, other=0)
    target = tl.load(targets_ptr + request * LINES + k, mask=is_line, other=0)
    is_moved = is_line & (source != target)
    if tl.sum(is_moved.to(tl.int32), 0) == 0:
        return
    base = tl.load(addresses_ptr + cache).to(tl.pointer_type(tl.int32))
    width = tl.load(widths_ptr + cache)
    read, written = source.to(tl.int64)[:, None] * width, target.to(tl.int64)[:, None] * width
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = is_moved[:, None] & (at < width)[None, :]
        lines = tl.load(base + read + at[None, :], mask=mask, other=0)
        tl.debug_barrier()
        tl.store(base + written + at[None, :], lines, mask=mask)


def move(
    caches: Caches,
    accepted: Tensor,  # [R] int32: lines after the first that count
    sources: Tensor,  # [R, lines] int32: slots
    targets: Tensor,  # [R, lines] int32: likewise
) -> None:
    (requests, lines), sizes = sources.shape, (sources.shape[1], triton.next_power_of_2(sources.shape[1]))
    assert targets.shape == (requests, lines), "a line has one of both"
    grid = (requests, len(caches.addresses))
    _move[grid](*caches, accepted, sources, targets, *sizes, BLOCK, num_warps=4)
