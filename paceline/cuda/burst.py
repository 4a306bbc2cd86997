"""Bursts on a GPU: a head drafts a chain, the target checks it, and both go on from what was accepted.

A round is one CUDA graph, replayed as often as rounds are wanted; the host fills the inputs of the first,
learns how far the text has come from what each of them says while the next is running, and sends another
after it. Between two rounds one launch says what was accepted and where the rows of the next lie: request r
has K + 1 rows, of the head and of the target, from row r * (K + 1) on; the head's are what the round before
picked, and those after the accepted ones are overwritten before they are seen. Recorded are a few numbers of
requests, each with its K; the others are padded. Invariant: between two rounds nothing but numbers at fixed
addresses changes, a request without rows is left alone, and rows beyond what is reserved for a request, which
has ended without the device knowing it, write to the trash slot.
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
from paceline.core.types import Batch, Draft, Round, Verdict
from paceline.cuda.batch import REQUESTS, Bucket, Buffer, DeviceBatch, batch_values, next_size
from paceline.cuda.chain_head import CudaChainHead
from paceline.cuda.decoder import CudaDecoder, PassSpec
from paceline.cuda.graphs import Arriving, Graphs, Recording
from paceline.cuda.recorded_head import LONGEST, MOST_DRAFTED, HeadShape
from paceline.cuda.rows import BLOCK_SIZE
from paceline.heads.rows import BurstInput
from paceline.models.attention import LayerCache

MOST_ROUNDS = 64  # in a row: to begin costs as much as a round, and slots are reserved for all of them
MOST_ROWS = 256  # of the target's pass: more of them take time, so that of many requests drafts are short
_PATHS = [tuple(range(count)) for count in range(MOST_ROWS + 1)]  # of a chain, by its accepted nodes
HEAD_COLUMNS = ("places", "wanted", "written", "next_positions", "next_slots", "limits")


@triton.jit
def _slot_of(table: tensor, at: tensor, limit: tensor, trash: tensor, stride: constexpr) -> tensor:
    """Of positions below the limit; the others have the trash slot."""
    inside = at < limit
    found = tl.load(table + at // BLOCK_SIZE * stride, mask=inside, other=0)
    return tl.where(inside, found * BLOCK_SIZE + at % BLOCK_SIZE, trash)


@triton.jit(do_not_specialize=["trash", "head_trash"])
def _advance(
    target: DeviceBatch, picked_ptr: tensor, places_ptr: tensor, limits_ptr: tensor, trash: tensor,
    head: DeviceBatch, head_places_ptr: tensor, wanted_ptr: tensor, written_ptr: tensor,
    next_positions_ptr: tensor, next_slots_ptr: tensor, head_limits_ptr: tensor, head_trash: tensor,
    results_ptr: tensor, number_ptr: tensor, rounds_ptr: tensor, STEPS: constexpr, ROWS: constexpr,
    TABLE: constexpr, HEAD_TABLE: constexpr, RESULTS: constexpr, NEXT: constexpr,
) -> None:  # fmt: skip
    """A program a request. TABLE, HEAD_TABLE, RESULTS, NEXT: widths of rows in memory; ROWS: > STEPS."""
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
    limit, head_limit = tl.load(limits_ptr + request), tl.load(head_limits_ptr + request)
    token = tl.maximum(picked, 0)
    tl.debug_barrier()  # all is read

    said = rounds_ptr + (number * tl.num_programs(0) + request) * (3 * STEPS + 1)
    tl.store(said + i, drafted, mask=is_step)
    tl.store(said + STEPS + i, chances, mask=is_step)
    tl.store(said + 2 * STEPS + i, picked, mask=is_row)
    tl.store(number_ptr + request, number + 1)

    prefix = tl.minimum(prefix, limit)
    at = prefix + i
    tl.store(target.prefix_lens + request, prefix)
    tl.store(target.positions + first + i, at, mask=is_row)
    tl.store(places_ptr + first + i, (at + 1).to(tl.int64), mask=is_row)
    slot = _slot_of(target.block_tables + request, at, limit, trash, TABLE)
    tl.store(target.slots + first + i, slot, mask=is_row)
    tl.store(target.input_ids + first, tl.sum(tl.where(i == accepted, token, 0), 0))

    head_prefix = tl.minimum(head_prefix, head_limit)
    at = head_prefix + i
    slot = _slot_of(head.block_tables + request, at, head_limit, head_trash, HEAD_TABLE)
    tl.store(head.prefix_lens + request, head_prefix)
    tl.store(head.input_ids + first + i, token, mask=is_row)
    tl.store(head.positions + first + i, at, mask=is_row)
    tl.store(written_ptr + first + i, slot, mask=is_row)
    tl.store(head.slots + first + i, slot, mask=is_row)
    tl.store(wanted_ptr + request, (first + accepted).to(tl.int64))
    tl.store(head_places_ptr + request, head_place)
    at = head_prefix + accepted + 1 + i
    tl.store(next_positions_ptr + i * NEXT + request, at, mask=i < STEPS - 1)
    slot = _slot_of(head.block_tables + request, at, head_limit, head_trash, HEAD_TABLE)
    tl.store(next_slots_ptr + i * NEXT + request, slot, mask=i < STEPS - 1)


def advance(
    target: Mapping[str, Tensor],  # inputs of its pass (cuda/batch.py)
    picked: Tensor,  # [T or more] int64: what came of it
    head: Mapping[str, Tensor],  # inputs of its passes (cuda/chain_head.py)
    trash: tuple[int, int],  # slots of both that no request owns
    results: Tensor,  # [2, K, R or more] int32: tokens, and chances as the bits of float32
    number: Tensor,  # [R] int32: rounds so far
    rounds: Tensor,  # [rounds, R, 3 K + 1] int32: drafted tokens, their chances, what was picked
) -> None:
    """Launched after all before it has ended: others read where rows lie before they wait for anything. Both
    have `limits`: the positions reserved for a request."""
    num_requests, steps = len(number), results.shape[1]
    batches, columns = (DeviceBatch.of(target), DeviceBatch.of(head)), [head[name] for name in HEAD_COLUMNS]
    rows = num_requests * (steps + 1)
    assert min(len(target["slots"]), len(head["slots"])) >= rows, "rows of all"
    assert rounds.shape[1:] == (num_requests, 3 * steps + 1), "a line a request"
    widths = [each.block_tables.shape[1] for each in batches]
    _advance[(num_requests,)](
        batches[0], picked, target["places"], target["limits"], trash[0], batches[1], *columns, trash[1],
        results, number, rounds, steps, triton.next_power_of_2(steps + 1), *widths, results.shape[2],
        head["next_slots"].shape[1], num_warps=1,
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
        said = self._rounds[number].array[: len(roots)]  # [requests, 3 * steps + 1]
        steps, name = said.shape[1] // 3, self._given.names[1]
        drafted, chances, picked = np.split(said, (steps, 2 * steps), 1)
        reach = np.ascontiguousarray(chances).view(np.float32).cumprod(1).tolist()
        # What follows a token that is not finite is an error only if the text comes so far.
        is_kept = (drafted == picked[:, :-1]) & (picked[:, 1:] >= 0)
        counts = (1 + is_kept.cumprod(1).sum(1)).tolist()
        drafts = [
            Draft(Tree.chain(root, tokens), name, None, (1.0, *paths))
            for root, tokens, paths in zip(roots, drafted.tolist(), reach, strict=True)
        ]
        verdicts = [
            Verdict(_PATHS[count], tuple(tokens[:count]), steps) if tokens[0] >= 0 else None
            for count, tokens in zip(counts, picked.tolist(), strict=True)
        ]
        return Round(drafts, verdicts)


class CudaBurstBackend:
    most_rounds, most_requests, is_weighing = MOST_ROUNDS, MOST_DRAFTED, False

    def __init__(
        self, head: CudaChainHead, decoder: CudaDecoder, kv: Sequence[LayerCache], steps: int
    ) -> None:
        """steps: tokens of a draft, at most."""
        self._head, self._decoder, self._kv, self.device = head, decoder, kv, decoder.device
        self._layers, self._graphs = tuple(dict.fromkeys(head.taps)), Graphs(decoder.capture)
        self._steps = steps

    def longest(self, num_requests: int) -> int:
        return min(self._steps, MOST_ROWS // next_size(REQUESTS, num_requests) - 1)

    @torch.inference_mode()
    def record(self, _steps: int) -> None:
        for requests in (size for size in REQUESTS if size <= MOST_DRAFTED and self.longest(size) > 0):
            self._recorded(requests)

    @torch.inference_mode()
    def launch(self, batch: Batch, given: BurstInput) -> CudaBurst:
        """batch: the target's rows of the first round, chains of which only the roots are known; slots are
        reserved for all that a request can still say. feeds: no more rows than a chain has. One round is sent
        now."""
        feeds, count, columns = given.feeds, given.num_rounds, batch.columns
        rows = len(columns.rows) // len(feeds)
        assert 1 <= count <= self.most_rounds, "there is room for no more rounds"
        assert rows == self.longest(len(feeds)) + 1, "drafts of the recorded length"
        assert all(1 <= len(feed.tokens) <= rows for feed in feeds), "as many to read as a round shows"
        num_blocks = len(columns.block_tables) // len(feeds)
        limits, head_limits = [], []
        for feed, prefix, more in zip(feeds, columns.prefix_lens, given.rooms, strict=True):
            assert prefix + more <= num_blocks * BLOCK_SIZE.value, "slots are reserved"
            limits.append(prefix + more)
            head_limits.append(feed.start + len(feed.tokens) + more)
            feed.place.reserve(head_limits[-1])  # first: with more memory there are other recordings
        (replay, _, _), room = self._recorded(next_size(REQUESTS, len(feeds)))
        head_values = self._head.values(room.shape, feeds, given.samplers, rows)
        room.head.fill(head_values | {"limits": head_limits})
        room.target.fill(batch_values(room.bucket, columns, batch.picks) | {"limits": limits})
        room.number.zero_()
        self._decoder.latest = None  # a round's picks lie where a pass's do
        burst = CudaBurst(replay, room, self._layers, given)
        burst.more()
        return burst

    def _recorded(self, requests: int) -> tuple[Recording, _Room]:
        key = (requests, self._head.generation)
        return self._graphs.record(key, partial(self._prepare, requests, self.longest(requests)))

    def _prepare(self, requests: int, steps: int) -> tuple[Callable[[], None], _Room]:
        decoder, device, layers, rows = self._decoder, self.device, self._layers, requests * (steps + 1)
        bucket = Bucket(rows, requests, next_size(LONGEST, steps + 1), decoder.num_blocks)
        shape = HeadShape(bucket, steps, wanted=requests)
        draft, head = self._head.prepare(shape)
        bucket = bucket._replace(max_rows=steps + 1)  # not rounded up: attention is split by it
        check, target = decoder.prepare(PassSpec(bucket, decoder.config.num_layers, layers), self._kv)
        sizes = (len(layers), bucket.rows, decoder.config.hidden_size)
        hidden = torch.zeros(sizes, dtype=decoder.weights.dtype, device=device)
        said = (self.most_rounds, requests, 3 * steps + 1)
        rounds, number = (torch.zeros(size, dtype=torch.int32, device=device) for size in (said, requests))
        for each in (head, target):
            each.pin()
        room = _Room(shape, head, bucket, target, hidden, number, rounds)
        # [rows of the head, taps] int64: where the hidden states of the round before lie
        taps = [hidden[layers.index(tap)] for tap in self._head.taps]
        lines = [[tap[row].data_ptr() for tap in taps] for row in range(rows)]
        addresses = torch.tensor(lines, dtype=torch.int64, device=device)
        return partial(self._run, room, draft, check, addresses), room

    def _run(
        self, room: _Room, draft: Callable[[], Any], check: Callable[[], Any], addresses: Tensor
    ) -> None:
        head, target, requests = room.head.on_device, room.target.on_device, len(room.number)
        results = draft()  # [2, steps, requests or more]
        target["input_ids"].view(requests, -1)[:, 1:] = results[0, :, :requests].T
        _, picked, hidden = check()
        trash = self._kv[0][0].shape[0] - 1, self._head.trash_slot
        advance(target, picked, head, trash, results, room.number, room.rounds)
        room.hidden.copy_(hidden)
        head["addresses"].copy_(addresses)
