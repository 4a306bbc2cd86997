"""Paged K/V memory of one model: blocks from the pool, tensors for the values, and the moves between them.

A sequence's token at index i lives in slot `blocks[i // block_size] * block_size + i % block_size`. During a
pass the nodes of a tree take the slots after the cached tokens in node order; `commit` moves the accepted
path into place and gives the rest back. Invariant: slots at or beyond `num_cached` hold nothing anyone may
read; shared blocks are copied before a write.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.core.errors import ConfigError
from paceline.core.types import Cached
from paceline.models.config import ModelConfig
from paceline.runtime.block_pool import BlockPool, block_names, chain_hash

BLOCK_SIZE = 16
SCALE_BYTES = 16  # after the integers of a head: its scales, float32, and nothing, so that rows stay aligned


class Kept(NamedTuple):
    """How keys and values are kept. Integers have scales behind them, whose number is between those who write
    and read them.
    """

    keys: torch.dtype
    values: torch.dtype
    has_value_scales: bool = True  # if values are integers; else theirs lie behind the keys too


FLOATS = Kept(torch.float32, torch.float32)


def row_widths(config: ModelConfig, kept: Kept) -> tuple[int, int]:
    """Elements a head of one token takes, of its key and its value."""
    keys, values = (SCALE_BYTES if dtype == torch.int8 else 0 for dtype in (kept.keys, kept.values))
    return config.head_dim + keys, config.head_dim + values * kept.has_value_scales


def bytes_per_token(config: ModelConfig, kept: Kept) -> int:
    keys, values = row_widths(config, kept)
    return (
        config.num_layers * config.num_kv_heads * (keys * kept.keys.itemsize + values * kept.values.itemsize)
    )


def blocks_in(memory: int, config: ModelConfig, kept: Kept) -> int:
    """How many blocks fit into `memory` bytes."""
    per_block = BLOCK_SIZE * bytes_per_token(config, kept)
    if memory < per_block * 2:
        raise ConfigError(
            f"kv_cache_memory is {memory:,} bytes, less than two blocks of {per_block:,}; give more"
        )
    return memory // per_block


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """On a CPU, pages that the system maps when they are first written: unused memory costs nothing, where
    torch writes its zeros.
    """
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    pages = mmap.mmap(-1, max(math.prod(shape) * dtype.itemsize, 1))
    return (
        torch.frombuffer(pages, dtype=torch.uint8)[: math.prod(shape) * dtype.itemsize]
        .view(dtype)
        .view(shape)
    )


class KvCache:
    def __init__(
        self, config: ModelConfig, num_blocks: int, *, device: torch.device | str = "cpu", kept: Kept = FLOATS, has_spare: bool = False,
    ) -> None:  # fmt: skip
        """`has_spare`: one block more than the pool gives out, into whose last slot the rows that fill up a
        CUDA graph write.
        """
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.kept = kept
        shape = (config.num_layers, (num_blocks + has_spare) * BLOCK_SIZE, config.num_kv_heads)
        # each [layers, slots, KV heads, width]
        of_keys, of_values = row_widths(config, kept)
        self.keys = _zeros((*shape, of_keys), torch.device(device), kept.keys)
        self.values = _zeros((*shape, of_values), torch.device(device), kept.values)
        self.device = self.keys.device
        self.layers = list(zip(self.keys, self.values, strict=True))

    def slots(self, cached: Cached, start: int, end: int) -> list[int]:
        return [cached.blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(start, end)]

    def reserve(self, cached: Cached, num_tokens: int) -> bool:
        """Make slots [num_cached, num_tokens) writable for this sequence alone. False, and nothing changed,
        if blocks run out.
        """
        first, blocks = cached.num_cached // BLOCK_SIZE, cached.blocks
        if num_tokens <= len(blocks) * BLOCK_SIZE == (first + 1) * BLOCK_SIZE and self.pool.is_private(
            blocks[first]
        ):
            return True  # nearly always: there is room in the last block
        shared = [i for i in range(first, len(blocks)) if not self.pool.is_private(blocks[i])]
        num_new = -(-num_tokens // BLOCK_SIZE) - len(blocks)
        fresh = self.pool.allocate(max(num_new, 0) + len(shared))
        if fresh is None:
            return False
        for i in shared:
            source, copy = cached.blocks[i], fresh.pop()
            self._copy_block(source, copy)
            cached.blocks[i] = copy
            self.pool.release([source])
        cached.blocks.extend(fresh)
        return True

    def commit(
        self, cached: Cached, first: int, path: Sequence[int], tokens: Sequence[int], has_more: bool = False
    ) -> None:
        """The accepted nodes of a tree rooted at index `first` become tokens first, first+1, ...; the rest is
        given back.

        tokens: the sequence's tokens that have K/V now, for naming full blocks. has_more: the rest is written
        to already, and kept.
        """
        self.gather(cached, first, path)
        num_full = cached.num_cached // BLOCK_SIZE
        if not has_more and len(cached.blocks) * BLOCK_SIZE >= cached.num_cached + BLOCK_SIZE:
            self.trim(cached)
        if num_full > len(cached.block_hashes):
            self.register(cached, tokens[: cached.num_cached])

    def gather(self, cached: Cached, first: int, path: Sequence[int]) -> None:
        """Move the nodes on a path into place, one after the other from index `first` on, and keep all
        blocks.
        """
        if path and path[-1] != len(path) - 1:  # else all are in place: nodes of a path rise
            moves = [(first + node, first + i) for i, node in enumerate(path) if node != i]
            source = [self.slots(cached, s, s + 1)[0] for s, _ in moves]
            target = [self.slots(cached, t, t + 1)[0] for _, t in moves]
            for data in (self.keys, self.values):
                data[:, target] = data[:, source]  # the right side is gathered before anything is written
        cached.num_cached = first + len(path)

    def trim(self, cached: Cached) -> None:
        """Give back the blocks beyond the cached tokens."""
        keep = -(-cached.num_cached // BLOCK_SIZE)
        if keep < len(cached.blocks):
            self.pool.release(cached.blocks[keep:])
            del cached.blocks[keep:]

    def rewind(self, cached: Cached, num_cached: int) -> None:
        """Forget the tokens from `num_cached` on: what a drafter does with the ones that were rejected."""
        cached.num_cached = min(cached.num_cached, num_cached)
        del cached.block_hashes[cached.num_cached // BLOCK_SIZE :]
        self.trim(cached)

    def free(self, cached: Cached) -> None:
        self.pool.release(cached.blocks)
        cached.blocks.clear()
        cached.block_hashes.clear()
        cached.num_cached = 0

    def adopt_prefix(self, cached: Cached, tokens: Sequence[int]) -> int:
        """Start a sequence with the longest known prefix of `tokens`, whole blocks, the last token left to
        compute.
        """
        assert not cached.blocks, "only a sequence without blocks can adopt a prefix"
        for start in range(0, len(tokens) - BLOCK_SIZE, BLOCK_SIZE):
            name = chain_hash(
                cached.block_hashes[-1] if cached.block_hashes else b"", tokens[start : start + BLOCK_SIZE]
            )
            block = self.pool.find(name)
            if block is None:
                break
            self.pool.hold(block)
            cached.blocks.append(block)
            cached.block_hashes.append(name)
        cached.num_cached = len(cached.blocks) * BLOCK_SIZE
        return cached.num_cached

    def fork(self, source: Cached, target: Cached, num_tokens: int) -> None:
        """`target` shares the first `num_tokens` tokens of `source`, the last block too if it is only part
        full.
        """
        assert not target.blocks
        assert num_tokens <= source.num_cached
        target.blocks.extend(source.blocks[: -(-num_tokens // BLOCK_SIZE)])
        for block in target.blocks:
            self.pool.hold(block)
        target.block_hashes.extend(source.block_hashes[: num_tokens // BLOCK_SIZE])
        target.num_cached = num_tokens

    def register(self, cached: Cached, tokens: Sequence[int]) -> None:
        """Make the full blocks of `tokens`, whose K/V are in place, findable by others with the same
        prefix.
        """
        known = len(cached.block_hashes)
        if len(tokens) // BLOCK_SIZE == known:
            return
        cached.block_hashes[:] = block_names(tokens, BLOCK_SIZE, cached.block_hashes)
        for block, name in zip(cached.blocks[known:], cached.block_hashes[known:], strict=False):
            self.pool.register(block, name)

    def _copy_block(self, source: int, target: int) -> None:
        a, b = source * BLOCK_SIZE, target * BLOCK_SIZE
        for data in (self.keys, self.values):
            data[:, b : b + BLOCK_SIZE] = data[:, a : a + BLOCK_SIZE]

    def waste(self, sequences: Sequence[Cached]) -> float:
        """The share of allocated slots that hold no token."""
        slots = len({b for s in sequences for b in s.blocks}) * BLOCK_SIZE
        used = sum(s.num_cached for s in sequences)
        return 1 - used / slots if slots else 0.0
