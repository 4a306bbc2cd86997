"""Bursts on a GPU: a head drafts a chain, the target checks it, and both go on from what was accepted.

A round is one CUDA graph, replayed as often as rounds are wanted; the host fills the inputs of the first,
learns how far the text has come from what each of them says while the next is running, and sends another
after it. Invariant: between two rounds nothing but numbers at fixed addresses changes (cuda/advance.py), and
the target's pass is the decoder's own over the same bucket of rows, so its bits are those of a usual step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core.tree import Tree
from paceline.core.types import Batch, Draft, Round
from paceline.cuda import head_inputs
from paceline.cuda.advance import advance
from paceline.cuda.batch import Bucket, Buffer, batch_values, bucket_for, bucket_of, context_for
from paceline.cuda.chain_head import CudaChainHead
from paceline.cuda.decoder import CudaDecoder, PassSpec
from paceline.cuda.graphs import Arriving, Graphs, Recording
from paceline.cuda.head_inputs import ChainShape, table_of_feeds, warm_buckets
from paceline.heads.rows import BurstInput
from paceline.models.attention import LayerCache

MOST_ROUNDS = 32  # in a row: to begin costs as much as a round, and slots are reserved for all of them
MOST_REQUESTS = 4  # of more, a pass hides what the host does, and each number of them is recorded for


class _Room(NamedTuple):
    """What a recording reads and writes. The cache is kept too: another at the same address would be taken
    for it."""

    shape: ChainShape
    head: Buffer
    bucket: Bucket  # of the target
    target: Buffer
    hidden: Tensor  # [layers, T, hidden]: of the round before, which the head reads
    number: Tensor  # [R] int32: rounds so far
    rounds: Tensor  # [rounds, R, 3 steps + 1] int32: what the host will read
    kv: Sequence[LayerCache]


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
        said = self._rounds[number].read().numpy()  # [requests, 3 * steps + 1]
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
        length = max(*columns.prefix_lens, *ends) + count * rows
        (replay, _, _), room = self._recorded(len(feeds), rows - 1, context_for(length))
        usual = bucket_for(columns)._replace(context=room.bucket.context)
        assert room.bucket == usual, "the bucket of a usual step"
        table = table_of_feeds(feeds, self._head.taps, rows, self._head.nowhere)
        room.head.fill(self._head.values(room.shape, table, feeds, given.samplers))
        room.target.fill(batch_values(room.bucket, columns, batch.picks))
        room.number.zero_()
        self._decoder.latest = None  # a round's picks lie where a pass's do
        burst = CudaBurst(replay, room, self._layers, given)
        burst.more()
        return burst

    @torch.inference_mode()
    def warm_up(self, steps: int) -> None:
        """Record what a request alone will need."""
        for bucket in warm_buckets(self._decoder.config.max_context):
            self._recorded(1, steps, bucket.context)

    def _recorded(self, requests: int, steps: int, context: int) -> tuple[Recording, _Room]:
        """context: of the last round that is possible, for head and target alike, since each pair of them is
        recorded for."""
        key = (requests, steps, context, self._head.generation, id(self._kv))
        return self._graphs.get(key, partial(self._prepare, requests, steps, context))

    def _prepare(self, requests: int, steps: int, context: int) -> tuple[Callable[[], None], _Room]:
        decoder, device, layers, rows = self._decoder, self.device, self._layers, requests * (steps + 1)
        bucket = head_inputs.bucket_of(rows, requests, context)
        shape = ChainShape(bucket, bucket.requests, steps)
        draft, head = self._head.prepare(shape)
        bucket = bucket_of(rows, requests, steps + 1, context)
        spec = PassSpec(bucket, decoder.config.num_layers, layers, has_picks=True)
        check, target = decoder.prepare(spec, self._kv)
        sizes = (len(layers), bucket.rows, decoder.config.hidden_size)
        hidden = torch.zeros(sizes, dtype=decoder.weights.dtype, device=device)
        said = (self.most_rounds, requests, 3 * steps + 1)
        rounds = torch.zeros(said, dtype=torch.int32, device=device)
        number = torch.zeros(requests, dtype=torch.int32, device=device)
        room = _Room(shape, head, bucket, target, hidden, number, rounds, self._kv)
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
