"""Medusa on the CPU: K small heads on one hidden state, all of them in one compiled call.

Head i adds silu(W y + b) to its input, block by block, and guesses the token i places after the next one. The
first blocks of all heads are one product; where the heads share an output layer, that is one too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numba import carray, prange

from paceline.cpu.compile import kernel, numbers, piece, size_of, struct
from paceline.cpu.guess import Noise, guess
from paceline.cpu.head_memory import Memory, Room, Tensors, address, draft_ids
from paceline.cpu.heads import Work, multiply_8, put_8_row
from paceline.cpu.lanes import double_pointer, int_pointer, seed_pointer
from paceline.cpu.layer import matrix_at
from paceline.cpu.matmul import Matrix
from paceline.cpu.recycle import address_in
from paceline.cpu.rows import add, copy, gate, normalize
from paceline.cpu.sync import barrier, close_region, join, num_threads, open_region
from paceline.heads.config import MedusaConfig
from paceline.heads.rows import Guesses, Row, Speaker

MATRIX_BYTES = 8 * size_of(Matrix)


class Heads(NamedTuple):
    norm: int  # of the hidden states
    ones: int
    first: Matrix  # the first blocks, stacked
    others: int  # address of [heads, blocks - 1] Matrix
    outputs: int  # address of [heads] Matrix, or of one where the output layer is shared
    is_shared: bool
    num_heads: int
    num_blocks: int
    hidden: int
    eps: float
    num_words: int
    num_outputs: int


class Task(NamedTuple):
    num: int  # requests
    sources: int  # [num] addresses of hidden states
    temperatures: int
    seeds: int
    positions: int
    ids: int
    num_ids: int
    states: int  # [heads, num, hidden]
    z: int  # [num, heads * hidden], then [num, hidden]
    logits: int  # [heads, num, num_outputs]
    tokens: int  # [heads, num]
    chances: int


class Call(NamedTuple):
    """What `draft_heads` is given the address of."""

    heads: Heads
    task: Task
    work: Work


call_at = struct(Call)


@piece
def _put(w, source, row, rows, width):  # type: ignore[no-untyped-def]
    ready = w.ready + row * w.widest * 4
    copy(source, ready, width)
    put_8_row(ready, width, w, row, rows)


@piece
def _first_blocks(share, m, t, w):  # type: ignore[no-untyped-def]
    sources, width = carray(int_pointer(t.sources), t.num), m.hidden * 4
    for row in range(share.part, t.num, share.threads):
        normalize(sources[row], m.norm, w.h + row * width, m.hidden, m.eps)
        _put(w, w.h + row * width, row, t.num, m.hidden)
    multiply_8(share, m.first, w, t.z, t.num)
    for item in range(share.part, t.num * m.num_heads, share.threads):
        row, head = item // m.num_heads, item % m.num_heads
        state, z = t.states + (head * t.num + row) * width, t.z + (row * m.first.n + head * m.hidden) * 4
        gate(False, z, m.ones, state, m.hidden)
        add(state, w.h + row * width, m.hidden)
    barrier(share)


@piece
def _other_blocks(share, m, t, w):  # type: ignore[no-untyped-def]
    width = m.hidden * 4
    for item in range(m.num_heads * (m.num_blocks - 1)):
        matrix, states = (
            matrix_at(m.others + item * MATRIX_BYTES),
            t.states + item // (m.num_blocks - 1) * t.num * width,
        )
        for row in range(share.part, t.num, share.threads):
            _put(w, states + row * width, row, t.num, m.hidden)
        multiply_8(share, matrix, w, t.z, t.num)
        for row in range(share.part, t.num, share.threads):
            z = t.z + row * matrix.n * 4
            gate(False, z, m.ones, z, m.hidden)
            add(states + row * width, z, m.hidden)
        barrier(share)


@piece
def _speak(share, m, t, w):  # type: ignore[no-untyped-def]
    """Logits of all heads: as rows of one product, or head by head."""
    together = m.num_heads if m.is_shared else 1
    rows = together * t.num
    for head in range(0, m.num_heads, together):
        for row in range(share.part, rows, share.threads):
            _put(w, t.states + (head * t.num + row) * m.hidden * 4, row, rows, m.hidden)
        matrix = matrix_at(m.outputs + head * MATRIX_BYTES)
        multiply_8(share, matrix, w, t.logits + head * t.num * m.num_outputs * 4, rows)


@piece
def _part(share, m, t, w):  # type: ignore[no-untyped-def]
    temperatures, seeds = carray(double_pointer(t.temperatures), t.num), carray(seed_pointer(t.seeds), t.num)
    positions, ids = carray(int_pointer(t.positions), t.num), carray(int_pointer(t.ids), t.num_ids)
    tokens = carray(int_pointer(t.tokens), (m.num_heads, t.num))
    chances = carray(double_pointer(t.chances), (m.num_heads, t.num))
    _first_blocks(share, m, t, w)
    _other_blocks(share, m, t, w)
    _speak(share, m, t, w)
    for item in range(share.part, t.num * m.num_heads, share.threads):
        head, row = item // t.num, item % t.num
        how = Noise(temperatures[row], seeds[row], positions[row] + head)
        best, chance = guess(t.logits + item * m.num_outputs * 4, m.num_outputs, m.num_words, ids, how)
        tokens[head, row] = ids[best] if t.num_ids else best
        chances[head, row] = chance


@kernel(parallel=True)
def draft_heads(at, threads):  # type: ignore[no-untyped-def]
    """at: of the numbers of a Call."""
    sync = call_at(at).work.sync
    open_region(sync)
    for part in prange(threads):
        share = join(sync, np.int64(part), threads)
        if share.part >= 0:
            call = call_at(at)
            _part(share, call.heads, call.task, call.work)
    close_region(sync)


class MedusaHead:
    """What drafters see: heads/side.py has the same in torch."""

    def __init__(self, config: MedusaConfig, tensors: Tensors, norm: torch.Tensor) -> None:
        """norm: the target's last, or the trunk's."""
        self.config, self._memory, self._threads = config, Memory(), num_threads()
        memory, heads, blocks = self._memory, range(config.num_heads_ahead), range(1, config.num_blocks)

        def block(head: int, block: int, part: str) -> torch.Tensor:
            return tensors[f"blocks.{head}.layers.{block}.{part}"]

        biases = torch.cat([block(h, 0, "bias") for h in heads])
        first = memory.matrix([block(h, 0, "weight") for h in heads], biases)
        others = [memory.matrix([block(h, b, "weight")], block(h, b, "bias")) for h in heads for b in blocks]
        is_shared = "lm_head.weight" in tensors
        names = ["lm_head.weight"] if is_shared else [f"lm_heads.{h}.weight" for h in heads]
        outputs = [memory.output(tensors[name]) for name in names]
        memory.tables.append(numbers((*outputs, *others)))
        at = memory.tables[0].buffer_info()[0]
        ones = memory.vector(torch.ones(config.hidden_size))
        self._heads = Heads(
            memory.vector(norm), ones, first, at + MATRIX_BYTES * len(outputs), at, is_shared, len(heads),
            config.num_blocks, config.hidden_size, config.rms_eps, config.draft_vocab_size, outputs[0].n,
        )  # fmt: skip
        self._ids, self._room = draft_ids(tensors), Room(config.hidden_size, config.hidden_size)

    def can_guess(self, temperature: float) -> bool:
        return True

    def guess(self, rows: Sequence[Row], speakers: Sequence[Speaker]) -> Guesses:
        """The best token of each head, and the chance of the path to it."""
        _, tokens, chances = self._run(rows, speakers)
        return Guesses(tokens.tolist(), chances.cumprod(0).tolist())

    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """[heads, requests, draft vocabulary]."""
        found, _, _ = self._run(rows, [Speaker(0.0, 0, 0)] * len(rows))
        return torch.from_numpy(found[:, :, : self.config.draft_vocab_size])

    def _run(
        self, rows: Sequence[Row], speakers: Sequence[Speaker]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Logits, tokens and chances, [heads, requests, ...]."""
        m, count, layer = self._heads, len(rows), self.config.target_layers
        logits = np.empty((m.num_heads, count, m.num_outputs), np.float32)
        tokens, chances = np.empty((m.num_heads, count), np.int64), np.empty((m.num_heads, count))
        states = np.empty((m.num_heads, count, m.hidden), np.float32)
        z = np.empty((count, m.first.n), np.float32)
        sources = np.array([address_in(r.hidden, layer) + 4 * m.hidden * r.at for r in rows])
        temperatures = np.array([s.temperature for s in speakers], np.float64)
        seeds = np.array([s.seed for s in speakers], np.uint64)
        positions = np.array([s.position for s in speakers], np.int64)
        given = [address(each) for each in (sources, temperatures, seeds, positions, self._ids)]
        made = [address(each) for each in (states, z, logits, tokens, chances)]
        task = Task._make((count, *given, len(self._ids), *made))
        call = numbers(Call(m, task, self._room.get(count * m.num_heads)))
        draft_heads(call.buffer_info()[0], self._threads)
        return logits, tokens, chances
