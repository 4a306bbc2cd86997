"""Language models that are tables, behind a real Runner and KV cache: each row's K holds its token, so a
wrong slot or parent shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import paceline.core.accept as accept_module
import paceline.drafters.grow as grow_module
import paceline.drafters.reading as reading_module
from paceline.core.noise import Noise
from paceline.core.types import Batch, Output, Request, Segment
from paceline.drafters import registry
from paceline.drafters.base import Drafter, DrafterContext
from paceline.runtime.backend import TorchBackend
from paceline.runtime.executor import KvMemory, LocalExecutor
from tests.laws.harness import CONFIG, TARGET

Table = Callable[[Sequence[int]], np.ndarray]


class TableDecoder:
    """`exits`: what it says when it is stopped after that many layers."""

    num_bytes = 0
    is_exact, picks_cuts = True, False
    latest = None

    def __init__(self, table: Table, vocab: int, exits: dict[int, Table] | None = None) -> None:
        self.table, self.exits = table, exits or {}
        self.config = replace(CONFIG, vocab_size=vocab)
        self.num_rows: list[int] = []  # of each pass

    def forward(
        self, batch: Batch, kv: Any, *, num_layers: int | None = None, hidden_layers: Sequence[int] = ()
    ) -> Output:
        c = batch.columns
        table = self.table if num_layers is None else self.exits[num_layers]
        self.num_rows.append(len(c.input_ids))
        keys = kv[0][0]
        width = len(c.block_tables) // batch.num_requests
        contexts: list[list[int]] = []
        for row, token in enumerate(c.input_ids):
            request, parent = c.request_of[row], c.parents[row]
            blocks = c.block_tables[request * width : (request + 1) * width]
            slots = [
                blocks[i // batch.block_size] * batch.block_size + i % batch.block_size
                for i in range(c.prefix_lens[request])
            ]
            prefix = keys[slots, 0, 0].long().tolist()
            contexts.append([*(prefix if parent < 0 else contexts[parent]), token])
            assert c.positions[row] == len(contexts[-1]) - 1
        for slot, token in zip(c.slots, c.input_ids, strict=True):
            keys[slot] = token
        return Output(torch.stack([torch.from_numpy(table(contexts[row])) for row in c.rows]), {})


def table_runner(table: Table, vocab: int, exits: dict[int, Table] | None = None) -> LocalExecutor:
    small = replace(CONFIG, num_layers=1, num_kv_heads=1, head_dim=2)
    backend = TorchBackend(torch.device("cpu"))
    return LocalExecutor(backend, TableDecoder(table, vocab, exits), KvMemory(small, 8))


def table_drafter(
    options: dict[str, Any], target: LocalExecutor, models: dict[str, LocalExecutor]
) -> Drafter:
    """A drafter of the registry; draft models are looked up by name."""
    kind, config = registry.parse(options)
    return registry.create(
        kind, config, DrafterContext(target, None, None, lambda name: (TARGET, None, models[name]))
    )  # type: ignore[arg-type, return-value]


def ready(runner: LocalExecutor, request: Request, budget: int) -> None:
    """The target has read all of the text but its newest token, and has room for a draft: what an engine
    guarantees.
    """
    runner.kv.reserve(request.cache, request.num_tokens + budget)
    unread = request.tokens[request.cache.num_cached : -1]
    if unread:
        runner.forward([Segment(unread, request.cache)])
    request.cache.num_cached = request.num_tokens - 1


@contextmanager
def drafting_with(noise: Noise) -> Iterator[None]:
    """Within, drafters take their chances from this noise."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (grow_module, reading_module, accept_module):
            patch.setattr(module, "noise_of", lambda request: noise)
        yield
