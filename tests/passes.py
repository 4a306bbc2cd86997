"""Forward passes for tests: requests laid out over shuffled blocks of a small KV cache, chains and trees."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.core.types import BLOCK_SIZE, Batch, Columns
from paceline.cpu.backend import CpuBackend
from paceline.cpu.decoder import CpuDecoder
from paceline.models.attention import FLOATS, row_widths
from paceline.models.config import ModelConfig
from paceline.runtime.backend import Decoder

NUM_BLOCKS = 64


class Rows(NamedTuple):
    """One request's share of a pass."""

    tokens: Sequence[int]
    blocks: Sequence[int]  # its block table
    prefix: int = 0  # tokens cached before this pass
    parents: Sequence[int] | None = None  # local; None: a chain


def new_kv(model: Decoder, config: ModelConfig | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As `model` keeps it, filled with large values: reading a slot that was never written is seen at
    once.
    """
    config = config or model.config
    has_integers = isinstance(model, CpuDecoder) and model.bits < 32
    kept = CpuBackend().kv_format("int8", "auto") if has_integers else FLOATS
    # as int8 127, and where scales are 3e38
    value = 127 if has_integers else 1e3
    kinds = [config.kinds[config.kind_of(i)] for i in range(config.num_layers)]
    return [
        tuple(
            torch.full((NUM_BLOCKS * BLOCK_SIZE, kind.num_kv_heads, width), value, dtype=dtype)
            for width, dtype in zip(row_widths(kind, kept), (kept.keys, kept.values), strict=True)
        )
        for kind in kinds
    ]  # type: ignore[misc]


def shuffled_blocks(num_requests: int, seed: int = 0) -> list[list[int]]:
    """Disjoint block tables of equal length."""
    blocks = list(range(NUM_BLOCKS))
    random.Random(seed).shuffle(blocks)
    share = NUM_BLOCKS // num_requests
    return [blocks[i * share : (i + 1) * share] for i in range(num_requests)]


def batch_of(requests: Sequence[Rows], rows: Sequence[int] | None = None) -> Batch:
    """Logits are wanted for `rows`, by default for all."""
    ids: list[int] = []
    positions, slots, parents, request_of, starts = [], [], [], [], [0]
    for r, (tokens, blocks, prefix, tree) in enumerate(requests):
        first = len(ids)
        depths: list[int] = []
        for i, token in enumerate(tokens):
            parent = i - 1 if tree is None else tree[i]
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
            index = prefix + i  # a tree's slots follow each other, whatever the positions
            ids.append(token)
            slots.append(blocks[index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE)
            parents.append(first + parent if parent >= 0 else -1)
            request_of.append(r)
        positions += [prefix + depth for depth in depths]
        starts.append(len(ids))
    tables = [block for request in requests for block in request.blocks]
    prefixes, wanted = (
        [request.prefix for request in requests],
        list(range(len(ids)) if rows is None else rows),
    )
    return Batch(
        Columns(ids, positions, slots, parents, request_of, starts, tables, prefixes, wanted, [], [])
    )


def random_parents(draws: Sequence[int]) -> list[int]:
    """A tree from arbitrary non-negative numbers: node i + 1 hangs from node draws[i] mod (i + 1)."""
    return [-1] + [draw % (i + 1) for i, draw in enumerate(draws)]


def ancestors(parents: Sequence[int], node: int) -> list[int]:
    """The path from a tree's root to a node, both included."""
    return [*ancestors(parents, parents[node]), node] if node >= 0 else []
