"""A batch in the memory of a GPU: one buffer, filled by one copy, padded to the sizes of a bucket.

A CUDA graph reads from fixed addresses and launches fixed grids, so a batch is padded to a bucket of (rows,
requests, rows of one request, context) and every bucket has its own buffer. Invariant: padding rows write
only to the trash slot, which no request owns, and see one of themselves; padding requests have no rows but
the last, one more than the bucket says, which has all padding rows, be they more than the bucket's requests
have.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from paceline.core.types import Columns, Pick

BLOCK_SIZE = 16
WORD = 64  # bits of a word of the masks
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MAX_ROWS = (1, 8, 64, 256)  # few, since every bucket is recorded and compiled for
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = tuple(512 * 2**i for i in range(12))


class Bucket(NamedTuple):
    """The sizes a launch is made for."""

    rows: int
    requests: int
    max_rows: int  # of one request
    context: int  # cached tokens of one request, at most

    @property
    def num_words(self) -> int:
        return -(-self.max_rows // WORD)


class DeviceBatch(NamedTuple):
    """int32 but for the masks; the comments of types.Columns hold."""

    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    slots: torch.Tensor  # [T]
    parents: torch.Tensor  # [T]
    request_of: torch.Tensor  # [T]
    starts: torch.Tensor  # [R + 1]
    prefix_lens: torch.Tensor  # [R]
    block_tables: torch.Tensor  # [R, B]
    # [T, W] int64: bit j of word w: row starts[r] + 64 w + j is an ancestor in this pass, or the row itself
    masks: torch.Tensor


def next_size(sizes: tuple[int, ...], size: int) -> int:
    """The smallest of the sizes that holds it; beyond the largest, the size itself."""
    return next((each for each in sizes if each >= size), size)


def context_for(length: int) -> int:
    """The bucket of so many cached tokens."""
    return next_size(CONTEXTS, length)


def bucket_for(columns: Columns) -> Bucket:
    longest = max(b - a for a, b in zip(columns.starts, columns.starts[1:], strict=False))
    return bucket_of(len(columns.slots), len(columns.prefix_lens), longest, max(columns.prefix_lens))


def bucket_of(num_rows: int, num_requests: int, longest: int, length: int) -> Bucket:
    """longest: rows of one request; length: cached tokens of one."""
    rows, requests = next_size(ROWS, num_rows), next_size(REQUESTS, num_requests)
    return Bucket(rows, requests, next_size(MAX_ROWS, longest), context_for(length))


def ancestor_words(parents: list[int], starts: list[int], num_words: int) -> np.ndarray:
    """[T, W] int64 masks, each row its parent's and its own bit. Bits wrap around, which only padding
    needs.
    """
    masks = [0] * len(parents)
    for first, end in pairwise(starts):
        for row in range(first, end):
            above = masks[parents[row]] if parents[row] >= 0 else 0
            masks[row] = above | 1 << (row - first) % (WORD * num_words)
    return mask_words(masks, num_words)


def mask_words(masks: Sequence[int], num_words: int) -> np.ndarray:
    """[T, W] int64 of masks of any length."""
    size = WORD // 8 * num_words
    words = bytearray().join(mask.to_bytes(size, "little") for mask in masks)
    return np.frombuffer(words, np.int64).reshape(len(masks), num_words)


_FIRST = np.ones(REQUESTS[-1], np.int64)
_OWN = np.left_shift(_FIRST, np.arange(len(_FIRST)) % WORD)  # masks of one request's rows that follow nobody
NOTHING = Columns([], [], [], [], [], [0], [], [], [])


class Inputs:
    """The buffer of one bucket, on the device and twice here: a pass may be filled in while the copy for the
    one before is on its way.
    """

    def __init__(self, bucket: Bucket, trash_slot: int, device: torch.device) -> None:
        self.bucket, self.trash_slot = bucket, trash_slot
        rows, requests = bucket.rows, bucket.requests + 1
        blocks = bucket.context // BLOCK_SIZE + -(-bucket.max_rows // BLOCK_SIZE) + 1
        self._shapes: dict[str, tuple[int, ...]] = {
            # first, so that their 64-bit words are aligned
            "picks": (3, 2 * rows), "masks": (rows, 2 * bucket.num_words),
            "input_ids": (rows,), "positions": (rows,), "slots": (rows,), "parents": (rows,), "request_of": (rows,),
            "starts": (requests + 1,), "prefix_lens": (requests,), "block_tables": (requests, blocks),
        }  # fmt: skip
        size = sum(int(np.prod(shape)) for shape in self._shapes.values())
        hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(2)]
        self._hosts = [
            (host, {name: part.numpy() for name, part in self._cut(host).items()}) for host in hosts
        ]
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        parts = self._cut(self._device)
        temperatures, self.seeds, self.places = parts.pop("picks").view(torch.int64)  # [T] each
        self.temperatures = temperatures.view(torch.float64)
        parts["masks"] = parts["masks"].view(torch.int64)
        self.batch = DeviceBatch(**parts)
        self.fill(NOTHING, None)  # a capture launches before there is a batch, and must write nowhere

    def _cut(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = flat.split([int(np.prod(shape)) for shape in self._shapes.values()])
        return {
            name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }

    def fill(self, columns: Columns, picks: Sequence[Pick] | None) -> None:
        """Copy a batch to the device. The last copy but one must have arrived: whoever read a pass's results
        has waited for it.
        """
        self._hosts.reverse()
        host, to = self._hosts[0]
        if picks is not None:
            _fill_picks(to["picks"].view(np.int64), columns, picks)
        rows, requests = len(columns.slots), len(columns.prefix_lens)
        extra, last = self.bucket.rows - rows, self.bucket.requests
        for name, padding in (
            ("input_ids", 0),
            ("positions", 0),
            ("slots", self.trash_slot),
            ("parents", -1),
            ("request_of", last),
        ):
            to[name][:rows] = getattr(columns, name)
            to[name][rows:] = padding
        to["starts"][: requests + 1] = columns.starts
        to["starts"][requests + 1 :] = rows
        to["starts"][-1] = self.bucket.rows
        to["prefix_lens"][:requests], to["prefix_lens"][requests:] = columns.prefix_lens, 0
        tables = np.array(columns.block_tables, np.int32).reshape(
            requests, len(columns.block_tables) // max(requests, 1)
        )
        width = min(tables.shape[1], to["block_tables"].shape[1])
        to["block_tables"][:requests, :width] = tables[:, :width]
        if rows == requests and self.bucket.rows <= len(_OWN) and self.bucket.num_words == 1:  # one row each
            to["masks"].view(np.int64)[:, 0] = np.concatenate((_FIRST[:rows], _OWN[:extra]))
        else:
            words = ancestor_words(
                [*columns.parents, *[-1] * extra], [*columns.starts, self.bucket.rows], self.bucket.num_words
            )
            to["masks"][:] = words.view(np.int32)
        self._device.copy_(host, non_blocking=True)


def _fill_picks(to: np.ndarray, columns: Columns, picks: Sequence[Pick]) -> None:
    """to [3, 2 L]: how the token after each wanted row is chosen, and its position."""
    count = len(columns.rows)
    to[0, :count] = np.array([each.temperature for each in picks], np.float64).view(np.int64)
    to[1, :count] = np.array([each.seed for each in picks], np.uint64).view(np.int64)
    to[2, :count] = [columns.positions[row] + 1 for row in columns.rows]
