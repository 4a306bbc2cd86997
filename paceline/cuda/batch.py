"""A batch in the memory of a GPU: one buffer, filled by one copy, padded to the sizes of a bucket.

A CUDA graph reads from fixed addresses and launches fixed grids, so a batch is padded to a bucket of (rows,
requests, rows of one request, context) and every bucket has its own buffer. Invariant: padding rows write
only to the trash slot, which no request owns, and see one of themselves; padding requests have no rows but
the last, one more than the bucket says, which has all padding rows, be they more than the bucket's requests
have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.core.types import BLOCK_SIZE, Columns, Pick

WORD = 64  # bits of a word of the masks
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MAX_ROWS = (1, 8, 64, 256)  # few, since every bucket is recorded and compiled for
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = tuple(512 * 2**i for i in range(12))


class Bucket(NamedTuple):
    """The sizes a pass of the target is recorded for."""

    rows: int
    requests: int
    max_rows: int  # of one request
    context: int  # cached tokens of one request, at most

    @property
    def num_words(self) -> int:
        return -(-self.max_rows // WORD)


class DeviceBatch(NamedTuple):
    """What a pass reads; int32 but for the masks. The comments of types.Columns hold."""

    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    slots: torch.Tensor  # [T]
    starts: torch.Tensor  # [R + 1]
    prefix_lens: torch.Tensor  # [R]
    block_tables: torch.Tensor  # [R, B]
    # [T, W] int64: bit j of word w: row starts[r] + 64 w + j is an ancestor in this pass, or the row itself
    masks: torch.Tensor


def next_size(sizes: tuple[int, ...], size: int) -> int:
    """The smallest of the sizes that holds it; beyond the largest, the size itself."""
    return next((each for each in sizes if each >= size), size)


def context_for(length: int) -> int:
    """The bucket of this many cached tokens."""
    return next_size(CONTEXTS, length)


def bucket_for(columns: Columns) -> Bucket:
    longest = max(b - a for a, b in pairwise(columns.starts))
    return bucket_of(len(columns.slots), len(columns.prefix_lens), longest, max(columns.prefix_lens))


def bucket_of(num_rows: int, num_requests: int, longest: int, length: int) -> Bucket:
    """longest: rows of one request; length: cached tokens of one."""
    rows, requests = next_size(ROWS, num_rows), next_size(REQUESTS, num_requests)
    return Bucket(rows, requests, next_size(MAX_ROWS, longest), context_for(length))


def ancestor_words(parents: list[int], starts: list[int], num_words: int) -> np.ndarray:
    """[T, W] int64 masks, each row its parent's and its own bit. Bits of padding may wrap around."""
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


class Column(NamedTuple):
    shape: tuple[int, ...]
    dtype: type[np.generic] = np.int32  # or int64, float64
    padding: int = 0


class Buffer:
    """Named columns in one piece of memory, on the device and in `num_hosts` pieces here: with two, one may
    be written while the copy of the other is on its way."""

    def __init__(self, columns: Mapping[str, Column], device: torch.device, num_hosts: int = 1) -> None:
        self._columns = columns
        self._ends: dict[str, tuple[int, int]] = {}
        total = 0
        for name, column in columns.items():
            size = int(np.prod(column.shape)) * np.dtype(column.dtype).itemsize
            self._ends[name] = (total, total + size)
            total += -(-size // 16) * 16  # aligned: kernels are compiled for aligned addresses and for others
        is_pinned = device.type == "cuda"
        hosts = [torch.zeros(total, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(num_hosts)]
        self._hosts = [(host, self._cut(host.numpy())) for host in hosts]
        self._device = torch.zeros(total, dtype=torch.uint8, device=device)
        self.on_device: dict[str, torch.Tensor] = {}
        for name, (first, end) in self._ends.items():
            dtype = torch.from_numpy(np.empty(0, columns[name].dtype)).dtype
            self.on_device[name] = self._device[first:end].view(dtype).view(columns[name].shape)

    def _cut(self, host: np.ndarray) -> dict[str, np.ndarray]:
        return {name: host[a:b].view(self._columns[name].dtype) for name, (a, b) in self._ends.items()}

    def next_host(self) -> dict[str, np.ndarray]:
        """Flat columns to be written, then sent. Their last copy has arrived: reading its results waited."""
        self._hosts.reverse()
        return self._hosts[0][1]

    def send(self) -> None:
        self._device.copy_(self._hosts[0][0], non_blocking=True)

    def fill(self, values: Mapping[str, Any]) -> None:
        """Flat numbers of each column, from its start; what is missing is padding."""
        host = self.next_host()
        for name, column in self._columns.items():
            to, given = host[name], values.get(name, ())
            to[: len(given)] = given
            to[len(given) :] = column.padding
        self.send()


_FIRST = np.ones(REQUESTS[-1], np.int64)
_OWN = np.left_shift(_FIRST, np.arange(len(_FIRST)) % WORD)  # masks of one request's rows without ancestors
NOTHING = Columns([], [], [], [], [], [0], [], [], [])


class Inputs:
    """The buffer of one bucket."""

    def __init__(self, bucket: Bucket, trash_slot: int, device: torch.device) -> None:
        self.bucket, self.trash_slot = bucket, trash_slot
        rows, requests = bucket.rows, bucket.requests + 1
        self._num_blocks = bucket.context // BLOCK_SIZE + -(-bucket.max_rows // BLOCK_SIZE) + 1
        each, wide = Column((rows,)), Column((rows,), np.int64)
        columns = {
            "temperatures": Column((rows,), np.float64), "seeds": wide, "places": wide,
            "masks": Column((rows, bucket.num_words), np.int64),
            "input_ids": each, "positions": each, "slots": each, "starts": Column((requests + 1,)),
            "prefix_lens": Column((requests,)), "block_tables": Column((requests, self._num_blocks)),
        }  # fmt: skip
        self._buffer = Buffer(columns, device, num_hosts=2)
        parts = self._buffer.on_device
        self.temperatures, self.seeds, self.places = parts["temperatures"], parts["seeds"], parts["places"]
        self.batch = DeviceBatch(*(parts[name] for name in DeviceBatch._fields))
        self.fill(NOTHING, None)  # a capture launches before there is a batch, and must write nowhere

    def fill(self, columns: Columns, picks: Sequence[Pick] | None) -> None:
        """Copy a batch to the device."""
        to, rows, requests = self._buffer.next_host(), len(columns.slots), len(columns.prefix_lens)
        if picks is not None:  # how the token after each wanted row is chosen, and its position
            count = len(columns.rows)
            to["temperatures"][:count] = [each.temperature for each in picks]
            to["seeds"][:count] = np.array([each.seed for each in picks], np.uint64).view(np.int64)
            to["places"][:count] = [columns.positions[row] + 1 for row in columns.rows]
        to["input_ids"][:rows], to["input_ids"][rows:] = columns.input_ids, 0
        to["positions"][:rows], to["positions"][rows:] = columns.positions, 0
        to["slots"][:rows], to["slots"][rows:] = columns.slots, self.trash_slot
        to["starts"][: requests + 1], to["starts"][requests + 1 :] = columns.starts, rows
        to["starts"][-1] = self.bucket.rows
        to["prefix_lens"][:requests], to["prefix_lens"][requests:] = columns.prefix_lens, 0
        width = len(columns.block_tables) // max(requests, 1)
        tables = np.array(columns.block_tables, np.int32).reshape(requests, width)
        width = min(width, self._num_blocks)
        to["block_tables"].reshape(-1, self._num_blocks)[:requests, :width] = tables[:, :width]
        to["masks"][:] = self._masks(columns).reshape(-1)
        self._buffer.send()

    def _masks(self, columns: Columns) -> np.ndarray:
        rows, num_words = len(columns.slots), self.bucket.num_words
        extra = self.bucket.rows - rows
        is_one_each = rows == len(columns.prefix_lens)
        if is_one_each and self.bucket.rows <= len(_OWN) and num_words == 1:
            return np.concatenate((_FIRST[:rows], _OWN[:extra]))
        parents, starts = [*columns.parents, *[-1] * extra], [*columns.starts, self.bucket.rows]
        return ancestor_words(parents, starts, num_words)
