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

from paceline.cpu.compile import kernel, piece
from paceline.cpu.guess import guess
from paceline.cpu.head_memory import Flat, Memory, Tensors, address
from paceline.cpu.heads import COLUMNS, Work, put_row
from paceline.cpu.lanes import double_pointer, int_pointer, seed_pointer
from paceline.cpu.matmul import Activations, Matrix, product_8
from paceline.cpu.rows import add, copy, gate, normalize
from paceline.cpu.sync import BYTES, barrier, num_threads
from paceline.cpu.taps import address_in
from paceline.heads.config import MedusaConfig
from paceline.heads.rows import Guesses, Row, Speaker
from paceline.models.quantize import padded


class Heads(NamedTuple):
    norm: int  # of the hidden states
    ones: int
    first: int  # address of a Matrix's fields: the first blocks, stacked
    others: int  # [heads, blocks - 1] of them
    outputs: int  # [heads] of them; all the same where the output layer is shared
    is_shared: bool
    num_heads: int
    num_blocks: int
    hidden: int
    eps: float
    num_words: int
    num_outputs: int
    threads: int


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


@piece
def _matrix(at, i):  # type: ignore[no-untyped-def]
    f = carray(int_pointer(at + i * 32), 4)
    return Matrix(f[0], f[1], f[2], f[3])


@piece
def _multiply(part, m, w, matrix, y, rows):  # type: ignore[no-untyped-def]
    barrier(w.sync, m.threads)
    product_8(part, m.threads, matrix, Activations(w.values, w.scales, w.sums), y, rows)
    barrier(w.sync, m.threads)


@piece
def _put(w, source, row, rows, width):  # type: ignore[no-untyped-def]
    ready = w.ready + row * w.widest * 4
    copy(source, ready, width)
    put_row(ready, width, w, row, rows)


@piece
def _first_blocks(part, m, t, w):  # type: ignore[no-untyped-def]
    sources, width = carray(int_pointer(t.sources), t.num), m.hidden * 4
    for row in range(part, t.num, m.threads):
        normalize(sources[row], m.norm, w.h + row * width, m.hidden, m.eps)
        _put(w, w.h + row * width, row, t.num, m.hidden)
    first = _matrix(m.first, 0)
    _multiply(part, m, w, first, t.z, t.num)
    for item in range(part, t.num * m.num_heads, m.threads):
        row, head = item // m.num_heads, item % m.num_heads
        state, z = t.states + (head * t.num + row) * width, t.z + (row * first.n + head * m.hidden) * 4
        gate(False, z, m.ones, state, m.hidden)
        add(state, w.h + row * width, m.hidden)
    barrier(w.sync, m.threads)


@piece
def _other_blocks(part, m, t, w):  # type: ignore[no-untyped-def]
    width = m.hidden * 4
    for head in range(m.num_heads):
        for block in range(m.num_blocks - 1):
            matrix = _matrix(m.others, head * (m.num_blocks - 1) + block)
            for row in range(part, t.num, m.threads):
                _put(w, t.states + (head * t.num + row) * width, row, t.num, m.hidden)
            _multiply(part, m, w, matrix, t.z, t.num)
            for row in range(part, t.num, m.threads):
                z = t.z + row * matrix.n * 4
                gate(False, z, m.ones, z, m.hidden)
                add(t.states + (head * t.num + row) * width, z, m.hidden)
            barrier(w.sync, m.threads)


@piece
def _speak(part, m, t, w):  # type: ignore[no-untyped-def]
    """Logits of all heads: as rows of one product, or head by head."""
    together = m.num_heads if m.is_shared else 1
    rows = together * t.num
    for head in range(0, m.num_heads, together):
        for row in range(part, rows, m.threads):
            _put(w, t.states + (head * t.num + row) * m.hidden * 4, row, rows, m.hidden)
        _multiply(part, m, w, _matrix(m.outputs, head), t.logits + head * t.num * m.num_outputs * 4, rows)


@piece
def _part(part, m, t, w):  # type: ignore[no-untyped-def]
    temperatures, seeds = carray(double_pointer(t.temperatures), t.num), carray(seed_pointer(t.seeds), t.num)
    positions, ids = carray(int_pointer(t.positions), t.num), carray(int_pointer(t.ids), t.num_ids)
    tokens, chances = (
        carray(int_pointer(t.tokens), (m.num_heads, t.num)),
        carray(double_pointer(t.chances), (m.num_heads, t.num)),
    )
    _first_blocks(part, m, t, w)
    _other_blocks(part, m, t, w)
    _speak(part, m, t, w)
    for item in range(part, t.num * m.num_heads, m.threads):
        head, row = item // t.num, item % t.num
        at = t.logits + item * m.num_outputs * 4
        best, chance = guess(
            at, m.num_outputs, m.num_words, ids, temperatures[row], seeds[row], positions[row] + head
        )
        tokens[head, row] = ids[best] if t.num_ids else best
        chances[head, row] = chance


@kernel(parallel=True)
def draft_heads(m, t, w):  # type: ignore[no-untyped-def]
    for part in prange(m.threads):
        _part(np.int64(part), m, t, w)


class MedusaHead:
    """What drafters see: models/side_heads.py has the same in torch."""

    def __init__(self, config: MedusaConfig, tensors: Tensors, norm: torch.Tensor) -> None:
        """norm: the target's last, or the trunk's."""
        self.config, self._memory = config, Memory()
        memory, blocks = self._memory, [range(config.num_blocks), range(config.num_heads_ahead)]
        weights = {
            (h, b): (tensors[f"blocks.{h}.layers.{b}.weight"], tensors[f"blocks.{h}.layers.{b}.bias"])
            for h in blocks[1]
            for b in blocks[0]
        }
        first = memory.matrix(
            [weights[h, 0][0] for h in blocks[1]], torch.cat([weights[h, 0][1] for h in blocks[1]])
        )
        others = [
            memory.matrix([weights[h, b][0]], weights[h, b][1]) for h in blocks[1] for b in blocks[0] if b
        ]
        is_shared = "lm_head.weight" in tensors
        names = ["lm_head.weight"] if is_shared else [f"lm_heads.{h}.weight" for h in blocks[1]]
        outputs = [memory.output(tensors[name]) for name in names]
        table = torch.tensor([first, *outputs, *others])
        memory.kept.append(table)
        at = table.data_ptr()
        self._heads = Heads(
            memory.vector(norm), memory.vector(torch.ones(config.hidden_size)), at, at + 32 * (1 + len(outputs)), at + 32, is_shared,
            config.num_heads_ahead, config.num_blocks, config.hidden_size, config.rms_eps, config.draft_vocab_size, outputs[0].n,
            num_threads(),
        )  # fmt: skip
        self._stack = first.n
        ids = tensors.get("draft_ids")
        self._ids = np.empty(0, np.int64) if ids is None else ids.to(torch.int64).numpy()
        self._sync = np.zeros(BYTES // 8, np.int64)

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
        m, count, flat = self._heads, len(rows), Flat()
        width, layer = 4 * m.hidden, self.config.target_layers
        logits = np.empty((m.num_heads, count, m.num_outputs), np.float32)
        tokens, chances = np.empty((m.num_heads, count), np.int64), np.empty((m.num_heads, count))
        temperatures, seeds = (
            np.array([s.temperature for s in speakers], np.float64),
            np.array([s.seed for s in speakers], np.uint64),
        )
        sources = [address_in(r.hidden, layer) + width * r.at for r in rows]
        offsets = [flat.add(column) for column in (sources, [s.position for s in speakers])]
        base = flat.close()
        states, z = (
            np.empty((m.num_heads, count, m.hidden), np.float32),
            np.empty((count, self._stack), np.float32),
        )
        task = Task(
            count, base + offsets[0], address(temperatures), address(seeds), base + offsets[1], address(self._ids), len(self._ids),
            address(states), address(z), address(logits), address(tokens), address(chances),
        )  # fmt: skip
        draft_heads(m, task, self._work(count * m.num_heads))
        return logits, tokens, chances

    def _work(self, rows: int) -> Work:
        """Memory of a pass; `kept` holds it until the next."""
        wide = padded(self._heads.hidden, COLUMNS)
        sizes = {
            "h": rows * wide * 4,
            "ready": rows * wide * 4,
            "values": rows * wide,
            "scales": rows * wide // 16,
            "sums": rows * wide // 16,
        }
        self._space = np.empty(sum(sizes.values()) + 64, np.uint8)
        at, places = padded(address(self._space), 64), {}
        for name, size in sizes.items():
            places[name] = at
            at += size
        return Work(sync=address(self._sync), wide=0, narrow=0, scores=0, longest=0, widest=wide, **places)
