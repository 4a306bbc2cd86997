"""Medusa on the CPU: K small heads on one hidden state, all of them in one compiled call.

Head i adds silu(W y + b) to its input, block by block, and guesses the token i places after the next one. The
first blocks of all heads are one product; where the heads share an output layer, that is one too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numba import carray

from paceline.cpu.compile import kernel, numbers, piece, size_of, struct
from paceline.cpu.head_call import CallMemory, Capacity, HeadCall, HeadKernel, HeadRequest, Room, Turn
from paceline.cpu.head_memory import GREEDY, Memory, Tensors, draft_ids, sources_of
from paceline.cpu.heads import multiply_8, put_8_norm, request_of, write_guess
from paceline.cpu.lanes import int_pointer
from paceline.cpu.layer import Work, matrix_at
from paceline.cpu.matmul import Matrix
from paceline.cpu.rows import add, gate, normalize
from paceline.cpu.sync import barrier, in_region, num_threads
from paceline.cpu.top import guess
from paceline.heads.config import MedusaConfig
from paceline.heads.rows import Guesses, Row, Sampler

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


class Call(NamedTuple):
    """What `draft_heads` is given the address of. Work: `narrow` has the heads' states [heads, requests,
    hidden], `wide` products [requests, heads * hidden], then [requests, hidden]."""

    turn: Turn
    work: Work
    memory: CallMemory
    heads: Heads


call_at = struct(Call)


@piece
def _run_blocks(share, num, sources, m, w):  # type: ignore[no-untyped-def]
    """From hidden states to the states of all heads: the first blocks together, then head by head."""
    width = m.hidden * 4
    for row in range(share.part, num, share.threads):
        normalize(sources[row], m.norm, w.h + row * width, m.hidden, m.eps)
        put_8_norm(w.h + row * width, 0, m, w, row, num)
    multiply_8(share, m.first, w, w.wide, num)
    for item in range(share.part, num * m.num_heads, share.threads):
        row, head = item // m.num_heads, item % m.num_heads
        state, z = w.narrow + (head * num + row) * width, w.wide + (row * m.first.n + head * m.hidden) * 4
        gate(False, z, m.ones, state, m.hidden)
        add(state, w.h + row * width, m.hidden)
    barrier(share)
    for item in range(m.num_heads * (m.num_blocks - 1)):
        matrix = matrix_at(m.others + item * MATRIX_BYTES)
        states = w.narrow + item // (m.num_blocks - 1) * num * width
        for row in range(share.part, num, share.threads):
            put_8_norm(states + row * width, 0, m, w, row, num)
        multiply_8(share, matrix, w, w.wide, num)
        for row in range(share.part, num, share.threads):
            z = w.wide + row * matrix.n * 4
            gate(False, z, m.ones, z, m.hidden)
            add(states + row * width, z, m.hidden)
        barrier(share)


@piece
def _part(share, at):  # type: ignore[no-untyped-def]
    c = call_at(at)
    m, w, num = c.heads, c.work, c.turn.num_requests
    _run_blocks(share, num, carray(int_pointer(c.memory.sources), num), m, w)
    together = m.num_heads if m.is_shared else 1
    rows = together * num
    for head in range(0, m.num_heads, together):  # logits: as rows of one product, or head by head
        for row in range(share.part, rows, share.threads):
            put_8_norm(w.narrow + (head * num + row) * m.hidden * 4, 0, m, w, row, rows)
        logits = c.memory.logits + head * num * c.memory.num_outputs * 4
        multiply_8(share, matrix_at(m.outputs + head * MATRIX_BYTES), w, logits, rows)
    for item in range(share.part, num * c.turn.steps, share.threads):
        best, chance = guess(c.memory, item, request_of(c, item % num), item // num)
        write_guess(c, item // num, item % num, best, chance, False)


@kernel(parallel=True)
def draft_heads(at, threads):  # type: ignore[no-untyped-def]
    """at: of the numbers of a Call."""
    in_region(_part, call_at(at).work.sync, threads, at)


class MedusaHead:
    """What drafters see: heads/torch_heads.py has the same in torch."""

    def __init__(self, config: MedusaConfig, tensors: Tensors, norm: torch.Tensor) -> None:
        """norm: the target's last, or the trunk's."""
        self.config, self._memory, hidden = config, Memory(), config.hidden_size
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
        at, num = memory.tables[0].buffer_info()[0], len(heads)
        ones, next_blocks = memory.vector(torch.ones(hidden)), at + MATRIX_BYTES * len(outputs)
        sizes = num, config.num_blocks, hidden, config.rms_eps
        constants = Heads(memory.vector(norm), ones, first, next_blocks, at, is_shared, *sizes)
        shape = num_threads(), hidden, outputs[0].n, config.draft_vocab_size, draft_ids(tensors)
        kernel = HeadKernel(draft_heads, (constants,), *shape, num_speaking=num)
        self._call = HeadCall(kernel, Capacity(steps=num))
        self._room = Room(hidden, hidden, wide=hidden, narrow=hidden)

    def can_guess(self, temperature: float) -> bool:
        return True

    def guess(self, rows: Sequence[Row], samplers: Sequence[Sampler]) -> Guesses:
        """The best token of each head, and the chance of the path to it."""
        tokens, chances = self._run(rows, samplers, self.config.num_heads_ahead).guesses
        return Guesses(tokens, np.cumprod(chances, 0).tolist())

    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """[heads, requests, draft vocabulary]."""
        found = self._run(rows, [GREEDY] * len(rows), 0).logits.copy()
        return torch.from_numpy(found.reshape(self.config.num_heads_ahead, len(rows), -1))

    def _run(self, rows: Sequence[Row], samplers: Sequence[Sampler], steps: int) -> HeadCall:
        count, heads = len(rows), self.config.num_heads_ahead
        requests = [HeadRequest(0, 0, 0, 0, 0, 0, 0, 0, *sampler) for sampler in samplers]
        sources = sources_of(rows, (self.config.target_layers,), self.config.hidden_size)
        self._call = call = self._call.fitting(count, count, 0, steps)
        turn, work = Turn(count, count, count * heads, steps), self._room.get(count * heads)
        call.open(turn, requests, [], sources, work)
        return call.run()
