"""Bursts on a GPU: a head drafts a chain, the target checks it, and both go on from what was accepted.

A round is one CUDA graph, replayed as often as rounds are wanted; the host fills the inputs of the first,
learns how far the text has come from what each of them says while the next is running, and sends another
after it. Between two rounds one launch says what was accepted and where the rows of the next lie: request r
has K + 1 rows, of the head and of the target, from row r * (K + 1) on; the head's are what the round before
picked, and those after the accepted ones are overwritten before they are seen. Invariant: between two rounds
nothing but numbers at fixed addresses changes, a request without rows is left alone, and the target's pass is
the decoder's own over the same bucket of rows, so its bits are those of a usual step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from paceline.core.tree import Tree
from paceline.core.types import Batch, Draft, Round
from paceline.cuda.batch import Bucket, Buffer, DeviceBatch, batch_values, bucket_for, bucket_of
from paceline.cuda.chain_head import CudaChainHead
from paceline.cuda.decoder import CudaDecoder, PassSpec
from paceline.cuda.graphs import Arriving, Graphs, Recording
from paceline.cuda.recorded_head import HeadShape
from paceline.cuda.rows import BLOCK_SIZE
from paceline.heads.rows import BurstInput
from paceline.models.attention import LayerCache

MOST_ROUNDS = 64  # in a row: to begin costs as much as a round, and slots are reserved for all of them
MOST_REQUESTS = 4  # of more, a pass hides what the host does, and each number of them is recorded for
HEAD_COLUMNS = ("places", "wanted", "written", "next_positions", "next_slots")


@triton.jit
def _slot_of(table: tensor, at: tensor, inside: tensor, length: constexpr, stride: constexpr) -> tensor:
    """Beyond the table, where a round that never comes would lie: any."""
    block = at // BLOCK_SIZE
    found = tl.load(table + block * stride, mask=inside & (block < length), other=0)
    return found * BLOCK_SIZE + at % BLOCK_SIZE


@triton.jit
def _advance(
    target: DeviceBatch, picked_ptr: tensor, places_ptr: tensor, head: DeviceBatch, head_places_ptr: tensor,
    wanted_ptr: tensor, written_ptr: tensor, next_positions_ptr: tensor, next_slots_ptr: tensor,
    results_ptr: tensor, number_ptr: tensor, rounds_ptr: tensor, STEPS: constexpr, ROWS: constexpr,
    BLOCKS: constexpr, TABLE: constexpr, HEAD_BLOCKS: constexpr, HEAD_TABLE: constexpr, RESULTS: constexpr,
    NEXT: constexpr,
) -> None:  # fmt: skip
    """A program a request. BLOCKS, HEAD_BLOCKS: of a table; TABLE, HEAD_TABLE, RESULTS, NEXT: widths of rows
    in memory; ROWS: > STEPS."""
    request = tl.program_id(0)
    if tl.load(target.starts + request + 1) == tl.load(target.starts + request):
        return
    i = tl.arange(0, ROWS)
    first, is_row, is_step = request * (STEPS + 1), i <= STEPS, i < STEPS
    picked = tl.load(picked_ptr + first + i, mask=is_row, other=-1).to(tl.int32)
    # what follows the last draft is never drafted
    drafted = tl.load(target.input_ids + first + 1 + i, mask=is_step, other=-2)
    chances = tl.load(results_ptr + (STEPS + i) * RESULTS + request, mask=is_step, other=0)
    accepted = tl.min(tl.where(is_row & (picked != drafted), i, STEPS), 0)
    prefix = tl.load(target.prefix_lens + request) + accepted + 1
    row = tl.load(wanted_ptr + request).to(tl.int32) - first
    head_prefix = tl.load(head.prefix_lens + request) + row + 1
    head_place = tl.load(head_places_ptr + request) + accepted + 1
    number = tl.load(number_ptr + request)
    token = tl.maximum(picked, 0)
    tl.debug_barrier()  # all is read

    said = rounds_ptr + (number * tl.num_programs(0) + request) * (3 * STEPS + 1)
    tl.store(said + i, drafted, mask=is_step)
    tl.store(said + STEPS + i, chances, mask=is_step)
    tl.store(said + 2 * STEPS + i, picked, mask=is_row)
    tl.store(number_ptr + request, number + 1)

    at = prefix + i
    tl.store(target.prefix_lens + request, prefix)
    tl.store(target.positions + first + i, at, mask=is_row)
    tl.store(places_ptr + first + i, (at + 1).to(tl.int64), mask=is_row)
    slot = _slot_of(target.block_tables + request, at, is_row, BLOCKS, TABLE)
    tl.store(target.slots + first + i, slot, mask=is_row)
    tl.store(target.input_ids + first, tl.sum(tl.where(i == accepted, token, 0), 0))

    at = head_prefix + i
    slot = _slot_of(head.block_tables + request, at, is_row, HEAD_BLOCKS, HEAD_TABLE)
    tl.store(head.prefix_lens + request, head_prefix)
    tl.store(head.input_ids + first + i, token, mask=is_row)
    tl.store(head.positions + first + i, at, mask=is_row)
    tl.store(written_ptr + first + i, slot, mask=is_row)
    tl.store(head.slots + first + i, slot, mask=is_row)
    tl.store(wanted_ptr + request, (first + accepted).to(tl.int64))
    tl.store(head_places_ptr + request, head_place)
    at = head_prefix + accepted + 1 + i
    tl.store(next_positions_ptr + i * NEXT + request, at, mask=i < STEPS - 1)
    slot = _slot_of(head.block_tables + request, at, i < STEPS - 1, HEAD_BLOCKS, HEAD_TABLE)
    tl.store(next_slots_ptr + i * NEXT + request, slot, mask=i < STEPS - 1)


def advance(
    target: Mapping[str, Tensor],  # inputs of its pass (cuda/batch.py)
    picked: Tensor,  # [T or more] int64: what came of it
    head: Mapping[str, Tensor],  # inputs of its passes (cuda/chain_head.py)
    results: Tensor,  # [2, K, R or more] int32: tokens, and chances as the bits of float32
    number: Tensor,  # [R] int32: rounds so far
    rounds: Tensor,  # [rounds, R, 3 K + 1] int32: drafted tokens, their chances, what was picked
) -> None:
    """Launched after all before it has ended: others read where rows lie before they wait for anything."""
    num_requests, steps = len(number), results.shape[1]
    batches, columns = (DeviceBatch.of(target), DeviceBatch.of(head)), [head[name] for name in HEAD_COLUMNS]
    rows = num_requests * (steps + 1)
    assert min(len(target["slots"]), len(head["slots"])) >= rows, "rows of all"
    assert rounds.shape[1:] == (num_requests, 3 * steps + 1), "a line a request"
    widths = [size for each in batches for size in each.block_tables.shape]
    _advance[(num_requests,)](
        batches[0], picked, target["places"], batches[1], *columns, results, number, rounds,
        steps, triton.next_power_of_2(steps + 1), *widths, results.shape[2], head["next_slots"].shape[1],
        num_warps=1,
    )  # fmt: skip


class _Room(NamedTuple):
    """What a recording reads and writes."""

    shape: HeadShape
    head: Buffer
    bucket: Bucket  # of the target
    target: Buffer
    hidden: Tensor  # [layers, T, hidden]: of the round before, which the head reads
    number: Tensor  # [R] int32: rounds so far
    rounds: Tensor  # [rounds, R, 3 steps + 1] int32: what the host will read


class CudaBurst:
    """What rounds emit, on its way to the host."""

    def __init__(
        self, replay: Callable[[], None], room: _Room, layers: Sequence[int], given: BurstInput
    ) -> None:
        """layers: of the hidden states."""
        self._replay, self._room, self._layers, self._given = replay, room, layers, given
        self._rounds: list[Arriving] = []

    @property
    def num_left(self) -> int:
        return self._given.num_rounds - len(self)

    def hidden(self, number: int) -> dict[int, Tensor]:
        """The last round's: the next has read those before it."""
        if number < len(self) - 1:
            return {}
        return dict(zip(self._layers, self._room.hidden.clone(), strict=True))

    @torch.inference_mode()
    def more(self) -> None:
        self._replay()
        self._rounds.append(Arriving(self._room.rounds[len(self)]))

    def __len__(self) -> int:
        return len(self._rounds)

    def round(self, number: int, roots: Sequence[int]) -> Round:
        said = self._rounds[number].array  # [requests, 3 * steps + 1]
        steps = said.shape[1] // 3
        reach = np.ascontiguousarray(said[:, steps : 2 * steps]).view(np.float32).cumprod(1).tolist()
        drafts = [
            Draft(Tree.chain(root, tokens), self._given.names[1], None, (1.0, *paths))
            for root, tokens, paths in zip(roots, said[:, :steps].tolist(), reach, strict=True)
        ]
        return Round(drafts, said[:, 2 * steps :].tolist())


class CudaBurstBackend:
    most_rounds, most_requests, is_weighing = MOST_ROUNDS, MOST_REQUESTS, False

    def __init__(self, head: CudaChainHead, decoder: CudaDecoder, kv: Sequence[LayerCache]) -> None:
        self._head, self._decoder, self._kv, self.device = head, decoder, kv, decoder.device
        self._layers = tuple(dict.fromkeys(head.taps))
        self._graphs = Graphs(decoder.capture)

    def can_run(self, temperature: float) -> bool:
        return True

    @torch.inference_mode()
    def launch(self, batch: Batch, given: BurstInput) -> CudaBurst:
        """batch: the target's rows of the first round, chains of which only the roots are known; slots are
        reserved for all rounds, one of which is sent now. feeds: no more rows than a chain has."""
        feeds, count, columns = given.feeds, given.num_rounds, batch.columns
        rows = len(columns.rows) // len(feeds)
        assert 1 <= count <= self.most_rounds, "there is room for no more rounds"
        assert all(1 <= len(feed.tokens) <= rows for feed in feeds), "as many to read as a round shows"
        ends = [feed.start + len(feed.tokens) for feed in feeds]
        for feed, end in zip(feeds, ends, strict=True):  # before anything is recorded: more memory makes
            feed.place.reserve(end + count * rows)  # recordings useless
        (replay, _, _), room = self._recorded(len(feeds), rows - 1)
        assert room.bucket == bucket_for(columns, room.bucket.num_blocks), "the bucket of a usual step"
        room.head.fill(self._head.values(room.shape, feeds, given.samplers, rows))
        room.target.fill(batch_values(room.bucket, columns, batch.picks))
        room.number.zero_()
        self._decoder.latest = None  # a round's picks lie where a pass's do
        burst = CudaBurst(replay, room, self._layers, given)
        burst.more()
        return burst

    @torch.inference_mode()
    def warm_up(self, steps: int) -> None:
        """Record what a request alone will need."""
        self._recorded(1, steps)

    def _recorded(self, requests: int, steps: int) -> tuple[Recording, _Room]:
        key = (requests, steps, self._head.generation, id(self._kv))
        return self._graphs.get(key, partial(self._prepare, requests, steps))

    def _prepare(self, requests: int, steps: int) -> tuple[Callable[[], None], _Room]:
        decoder, device, layers, rows = self._decoder, self.device, self._layers, requests * (steps + 1)
        bucket = self._head.bucket(rows, requests, steps + 1)
        shape = HeadShape(bucket, steps, wanted=bucket.requests)
        draft, head = self._head.prepare(shape)
        bucket = bucket_of(rows, requests, steps + 1, decoder.num_blocks)
        spec = PassSpec(bucket, decoder.config.num_layers, layers, has_picks=True)
        check, target = decoder.prepare(spec, self._kv)
        sizes = (len(layers), bucket.rows, decoder.config.hidden_size)
        hidden = torch.zeros(sizes, dtype=decoder.weights.dtype, device=device)
        said = (self.most_rounds, requests, 3 * steps + 1)
        rounds, number = (torch.zeros(each, dtype=torch.int32, device=device) for each in (said, requests))
        room = _Room(shape, head, bucket, target, hidden, number, rounds)
        # [rows of the head, taps] int64: where the hidden states of the round before lie
        addresses = torch.full((shape.bucket.rows, len(self._head.taps)), self._head.nowhere)
        for row in range(rows):
            for i, layer in enumerate(self._head.taps):
                addresses[row, i] = hidden[layers.index(layer), row].data_ptr()
        return partial(self._run, room, draft, check, addresses.to(device)), room

    def _run(
        self, room: _Room, draft: Callable[[], Any], check: Callable[[], Any], addresses: Tensor
    ) -> None:
        head, target, requests = room.head.on_device, room.target.on_device, len(room.number)
        results = draft()  # [2, steps, requests or more]
        rows = requests * (results.shape[1] + 1)
        target["input_ids"][:rows].view(requests, -1)[:, 1:] = results[0, :, :requests].T
        _, picked, hidden = check()
        advance(target, picked, head, results, room.number, room.rounds)
        room.hidden.copy_(hidden)
        head["addresses"].copy_(addresses)
