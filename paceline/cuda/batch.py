"""A batch in the memory of a GPU: one buffer, filled by one copy, padded to the sizes of a bucket.

A CUDA graph reads from fixed addresses and launches fixed grids, so a batch is padded to a bucket of (rows,
requests, rows of one request) and every bucket has its own buffer, with room for tables of the longest
context: of those, what is used is copied. Invariant: padding rows write only to the trash slot, which no
request owns, and see one of themselves; they are all of one more request than the bucket says, the last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core.types import BLOCK_SIZE, Columns, Pick
from paceline.heads.rows import Sampler

WORD = 64  # bits of a word of the masks
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MAX_ROWS = (1, 16, 256)  # few, since every bucket is recorded and compiled for
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BEYOND = 256  # positions after a model's last: a draft may be longer than what is left of the context
VERSIONS = "parents", "states_in", "states_out"  # columns of a model with recurrent layers


class Bucket(NamedTuple):
    """The sizes a pass is recorded for."""

    rows: int
    requests: int
    max_rows: int  # of one request
    num_blocks: int  # of one request

    @property
    def num_words(self) -> int:
        return -(-self.max_rows // WORD)


class DeviceBatch(NamedTuple):
    """What a pass reads; int32 but for the masks. The comments of types.Columns hold."""

    input_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T]
    starts: Tensor  # [R + 1]
    prefix_lens: Tensor  # [R]
    block_tables: Tensor  # [B, R or more]
    # [T, W] int64: bit j of word w: row starts[r] + 64 w + j is an ancestor in this pass, or the row itself
    masks: Tensor

    @classmethod
    def of(cls, columns: Mapping[str, Tensor]) -> DeviceBatch:
        return cls(*(columns[name] for name in cls._fields))


def next_size(sizes: tuple[int, ...], size: int) -> int:
    """The smallest of the sizes that holds it; beyond the largest, the size itself."""
    return next((each for each in sizes if each >= size), size)


def blocks_for(max_context: int) -> int:
    """Of a table with room for any request."""
    return -(-(max_context + BEYOND) // BLOCK_SIZE)


def bucket_for(columns: Columns, num_blocks: int) -> Bucket:
    longest = max(b - a for a, b in pairwise(columns.starts))
    return bucket_of(len(columns.slots), len(columns.prefix_lens), longest, num_blocks)


def bucket_of(num_rows: int, num_requests: int, longest: int, num_blocks: int) -> Bucket:
    """longest: rows of one request. One request, or room for as many as there are rows: so that there are
    few buckets, and all of them can be recorded beforehand."""
    rows = next_size(ROWS, num_rows)
    requests = rows if 1 < num_requests <= rows <= ROWS[-1] else num_requests
    return Bucket(rows, requests, next_size(MAX_ROWS, longest), num_blocks)


def ancestor_words(parents: list[int], starts: list[int], num_words: int) -> np.ndarray:
    """[T, W] int64 masks, each row its parent's and its own bit."""
    rows = np.arange(len(parents))
    firsts = np.repeat(np.array(starts[:-1], np.int64), np.diff(starts))
    if np.array_equal(parents, np.where(rows == firsts, -1, rows - 1)):  # chains, as prompts are
        bits = np.clip((rows - firsts)[:, None] + 1 - WORD * np.arange(num_words), 0, WORD)
        return _ONES[bits]
    masks = [0] * len(parents)
    for first, end in pairwise(starts):
        for row in range(first, end):
            above = masks[parents[row]] if parents[row] >= 0 else 0
            masks[row] = above | 1 << (row - first)
    words = bytearray().join(mask.to_bytes(WORD // 8 * num_words, "little") for mask in masks)
    return np.frombuffer(words, np.int64).reshape(len(masks), num_words)


@cache
def _own_words(count: int, num_words: int) -> np.ndarray:
    """[count, W] int64 masks of one request's rows without ancestors. They wrap around within the words that
    a tree may have: of rows that are no chain, paths are read from these alone."""
    row, words = np.arange(count, dtype=np.uint64), np.zeros((count, num_words), np.uint64)
    words[range(count), row // WORD % min(num_words, MAX_ROWS[-1] // WORD)] = np.uint64(1) << row % WORD
    return words.view(np.int64)


class Column(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int32
    padding: int | None = 0  # None: what is not given is never read, nor copied; of one column, the last


class Buffer:
    """Named columns in one piece of memory, on the device and here. Of a recording, which is filled again and
    again, twice here and pinned: one may be written while the copy of the other is on its way; the copy
    before has arrived, since reading its results waited."""

    def __init__(self, columns: dict[str, Column], device: torch.device, values: dict[str, Any]) -> None:
        """values: of a batch that writes nowhere, since a capture launches before there is another."""
        self._columns, ends, total = columns, {}, 0
        for name, (shape, dtype, _) in sorted(columns.items(), key=lambda each: each[1].padding is None):
            size = math.prod(shape) * dtype.itemsize
            ends[name] = slice(total, total + size)
            total += -(-size // 16) * 16  # aligned: kernels are compiled for aligned addresses and for others
        self._ends = ends

        self._device = torch.zeros(total, dtype=torch.uint8, device=device)
        self.on_device = self._cut(self._device)
        self._hosts = [self._host(is_pinned=False)]
        self.fill(values)

    def _cut(self, memory: Tensor) -> dict[str, Tensor]:
        columns, ends = self._columns, self._ends
        return {n: memory[ends[n]].view(each.dtype).view(each.shape) for n, each in columns.items()}

    def _host(self, is_pinned: bool) -> tuple[Tensor, dict[str, np.ndarray]]:
        memory = torch.zeros(len(self._device), dtype=torch.uint8, pin_memory=is_pinned)
        return memory, {name: each.numpy() for name, each in self._cut(memory).items()}

    def pin(self) -> None:
        """It will be filled again and again."""
        if self._device.device.type == "cuda":
            self._hosts = [self._host(is_pinned=True) for _ in range(2)]

    def fill(self, values: Mapping[str, Any]) -> None:
        """Numbers of each column, from its start in every dimension; what is missing is padding."""
        self._hosts.reverse()
        (memory, host), end = self._hosts[0], len(self._device)
        for name, column in self._columns.items():
            given = np.asarray(values.get(name, ()))
            if column.padding is None:
                end = self._ends[name].start + host[name][: len(given)].nbytes
            else:
                host[name][...] = column.padding
            if name in values:
                host[name][tuple(slice(size) for size in given.shape)] = given
        self._device[:end].copy_(memory[:end], non_blocking=True)


def by_field(*columns: Any) -> dict[str, Any]:
    """Something for each field of a DeviceBatch, in their order."""
    return dict(zip(DeviceBatch._fields, columns, strict=True))


def batch_columns(bucket: Bucket, trash_slot: int) -> dict[str, Column]:
    """The last request is one more than there are, and has all padding rows. limits: for cuda/burst.py."""
    each, requests = Column((bucket.rows,)), bucket.requests + 1
    tables = Column((bucket.num_blocks, requests), padding=None)
    masks = Column((bucket.rows, bucket.num_words), torch.int64)
    slots, prefixes = each._replace(padding=trash_slot), Column((requests,))
    columns = by_field(each, each, slots, Column((requests + 1,)), prefixes, tables, masks)
    return columns | {"limits": Column((requests,))}


def version_columns(rows: int) -> dict[str, Column]:
    """Of a model with recurrent layers: padding goes on from the state of no text and leaves none."""
    none = Column((rows,), padding=-1)
    return {"parents": none, "states_in": Column((rows,)), "states_out": none}


def tables_of(columns: Columns, bucket: Bucket) -> np.ndarray:
    """[blocks of the longest, requests]."""
    requests = len(columns.prefix_lens)
    tables = np.array(columns.block_tables, np.int32).reshape(requests, -1 if requests else 0)
    return tables.T[: bucket.num_blocks]


def choice_columns(count: int) -> dict[str, Column]:
    """How tokens are chosen; places: their positions, or those of the first ones that are guessed."""
    whole = Column((count,), torch.int64)
    return {"temperatures": Column((count,), torch.float64), "seeds": whole, "places": whole}


def choice_values(choices: Sequence[Pick | Sampler], places: Sequence[int]) -> dict[str, Any]:
    seeds = np.array([each.seed for each in choices], np.uint64).view(np.int64)
    return {"temperatures": [each.temperature for each in choices], "seeds": seeds, "places": places}


# [WORD + 1] int64: so many bits from the lowest on
_ONES = np.array([(1 << count) - 1 for count in range(WORD + 1)], np.uint64).view(np.int64)
_FIRST = np.ones((REQUESTS[-1], 1), np.int64)
NOTHING = Columns([], [], [], [], [], [0], [], [], [], [], [])


def batch_values(bucket: Bucket, columns: Columns, picks: Sequence[Pick] | None) -> dict[str, Any]:
    """Of the target's pass; picks: how the token after each wanted row is chosen."""
    rows, requests = len(columns.slots), len(columns.prefix_lens)
    extra = bucket.rows - rows
    if rows == requests <= len(_FIRST) and bucket.num_words == 1:
        masks = _FIRST[:rows]
    else:
        masks = ancestor_words(columns.parents, columns.starts, bucket.num_words)
    masks = np.concatenate((masks, _own_words(extra, bucket.num_words)))
    starts = [*columns.starts, *[rows] * (bucket.requests - requests), bucket.rows]
    ids, positions, prefixes = columns.input_ids, columns.positions, columns.prefix_lens
    values = by_field(ids, positions, columns.slots, starts, prefixes, tables_of(columns, bucket), masks)
    values["wanted"] = columns.rows
    if columns.states_in:
        values |= {name: getattr(columns, name) for name in VERSIONS}
    if picks is not None:
        values |= choice_values(picks, [positions[row] + 1 for row in columns.rows])
    return values


def target_buffer(
    bucket: Bucket, num_wanted: int, trash_slot: int, device: torch.device, has_states: bool = False
) -> Buffer:
    """Of the target's pass, without requests. num_wanted: rows whose logits are."""
    columns = batch_columns(bucket, trash_slot) | choice_columns(num_wanted)
    if has_states:
        columns |= version_columns(bucket.rows)
    columns["wanted"] = Column((num_wanted,), torch.int64)
    return Buffer(columns, device, batch_values(bucket, NOTHING, None))
