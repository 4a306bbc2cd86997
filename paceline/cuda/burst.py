"""Bursts on a GPU: a head drafts a chain, the target checks it, and both go on from what was
accepted.

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

from paceline.core.tree import Tree
from paceline.core.types import Batch, Draft, Round
from paceline.cuda import batch as device_batch
from paceline.cuda.advance import Drafted, Ring, Verified, advance
from paceline.cuda.batch import REQUESTS, Buffer, Inputs, bucket_for, context_for, next_size
from paceline.cuda.chain_head import CudaChainHead
from paceline.cuda.decoder import CudaDecoder, PassSpec
from paceline.cuda.graphs import Graphs
from paceline.cuda.head_inputs import ChainShape, rows_for, table_of_rounds, warm_contexts
from paceline.heads.rows import BurstInput
from paceline.models.attention import LayerCache

MOST_ROUNDS = 32  # in a row: taking off costs as much as a round, and slots are reserved for as many
# under way at a time, so that the device never waits for the host: what arrives waits for so many, and so
# many may be in vain
MOST_REQUESTS = 4  # of more, a pass hides what the host does, and each number of them is recorded for


class _Shape(NamedTuple):
    """What a recording is made for."""

    requests: int
    head: ChainShape
    target: device_batch.Bucket


class _Room(NamedTuple):
    """What a recording reads and writes. The cache is kept too: another at the same address would be taken
    for it.
    """

    buffer: Buffer
    inputs: Inputs
    hidden: torch.Tensor  # [layers, T, hidden]: of the round before, which the head reads
    ring: Ring
    host: torch.Tensor  # as the ring's rounds
    kv: Sequence[LayerCache]


class CudaBurst:
    """What rounds emit, each on its way to the host: reading one waits for it. The next burst overwrites
    them.
    """

    def __init__(
        self, replay: Callable[[], None], room: _Room, layers: Sequence[int], most: int, head_name: str
    ) -> None:
        """layers: of the hidden states; most: rounds that there is room for."""
        self._replay, self._room, self._layers, self._most = replay, room, layers, most
        self._head_name = head_name
        self._arrivals: list[torch.cuda.Event] = []
        self._count = 0

    @property
    def num_left(self) -> int:
        return self._most - self._count

    def hidden(self, number: int) -> dict[int, torch.Tensor]:
        """The last round's: the next has read those before it."""
        if number < self._count - 1:
            return {}
        return dict(zip(self._layers, self._room.hidden.clone(), strict=True))

    @torch.inference_mode()
    def more(self) -> None:
        room, number = self._room, self._count
        self._replay()
        room.host[number].copy_(room.ring.rounds[number], non_blocking=True)
        if room.host.device != room.ring.rounds.device:
            self._arrivals.append(torch.cuda.Event())
            self._arrivals[-1].record()
        self._count += 1

    def __len__(self) -> int:
        return self._count

    def round(self, number: int, roots: Sequence[int]) -> Round:
        if self._arrivals:
            self._arrivals[number].synchronize()
        said = self._room.host[number].numpy()  # [requests, 3 * steps + 1]
        steps = said.shape[1] // 3
        reach = np.ascontiguousarray(said[:, steps : 2 * steps]).view(np.float32).cumprod(1).tolist()
        chains = zip(roots, said[:, :steps].tolist(), reach, strict=True)
        drafts = [
            Draft(Tree.chain(root, tokens), self._head_name, None, (1.0, *paths))
            for root, tokens, paths in chains
        ]
        return Round(drafts, said[:, 2 * steps :].tolist())


class CudaBurstBackend:
    most_rounds, most_requests, is_weighing = MOST_ROUNDS, MOST_REQUESTS, False

    def __init__(self, head: CudaChainHead, decoder: CudaDecoder, kv: Sequence[LayerCache]) -> None:
        self._head, self._decoder, self._kv, self.device = head, decoder, kv, decoder.device
        self._graphs = Graphs(decoder.capture)

    def can_run(self, temperature: float) -> bool:
        return True

    @torch.inference_mode()
    def launch(self, batch: Batch, given: BurstInput) -> CudaBurst:
        """batch: the target's rows of the first round, chains of which only the roots are known; of each
        request slots are reserved for all rounds, one of which is sent now. feeds: no more rows than a chain
        has.
        """
        feeds, count, columns = given.feeds, given.num_rounds, batch.columns
        rows = len(columns.rows) // len(feeds)
        assert 1 <= count <= self.most_rounds, "the ring holds no more rounds"
        assert all(1 <= len(feed.tokens) <= rows for feed in feeds), (
            "something to read, and no more than a round shows"
        )
        for feed in feeds:  # before anything is recorded: more memory makes recordings useless
            feed.place.reserve(feed.start + len(feed.tokens) + count * rows)
        length = max(*columns.prefix_lens, *(feed.start + len(feed.tokens) for feed in feeds))
        shape = self._shape(len(feeds), rows - 1, context_for(length + count * rows))
        assert shape.target._replace(context=0) == bucket_for(columns)._replace(context=0), (
            "the bucket of a usual step"
        )
        recording, room = self._graphs.get(self._key(shape), lambda: self._prepare(shape))
        table = table_of_rounds(feeds, self._head.taps, rows, self._head.nowhere)
        room.buffer.fill(self._head.values(shape.head, table, feeds, given.samplers))
        room.inputs.fill(columns, batch.picks)
        room.ring.number.zero_()
        self._decoder.latest = None  # a round's picks lie where a pass's do
        burst = CudaBurst(recording.replay, room, self._layers, count, given.head_name)
        burst.more()
        return burst

    @torch.inference_mode()
    def warm_up(self, steps: int) -> None:
        """Record what a request alone will need."""
        for context in warm_contexts(self._decoder.config.max_context):
            shape = self._shape(1, steps, context)
            self._graphs.get(self._key(shape), partial(self._prepare, shape))

    @property
    def _layers(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self._head.taps))

    def _key(self, shape: _Shape) -> Any:
        return shape, self._head.generation, id(self._kv)

    def _shape(self, requests: int, steps: int, context: int) -> _Shape:
        """context: of the last round that is possible, for head and target alike, since each pair of them is
        recorded for.
        """
        rows, most = requests * (steps + 1), next_size(REQUESTS, requests)
        target = device_batch.bucket_of(rows, requests, steps + 1, context)
        return _Shape(requests, ChainShape(rows_for(rows), most, most, context, steps, is_true=True), target)

    def _prepare(self, shape: _Shape) -> tuple[Callable[[], None], _Room]:
        head, device, size = self._head, self._decoder.device, self._decoder.config.hidden_size
        draft, buffer = head.prepare(shape.head)
        spec = PassSpec(shape.target, self._decoder.config.num_layers, self._layers, has_picks=True)
        check, inputs = self._decoder.prepare(spec, self._kv)
        hidden = torch.zeros(
            (len(self._layers), shape.target.rows, size), dtype=self._decoder.weights.dtype, device=device
        )
        said = torch.zeros(
            (self.most_rounds, shape.requests, 3 * shape.head.steps + 1), dtype=torch.int32, device=device
        )
        ring = Ring(torch.zeros(shape.requests, dtype=torch.int32, device=device), said)
        room = _Room(
            buffer,
            inputs,
            hidden,
            ring,
            torch.zeros(said.shape, dtype=said.dtype, pin_memory=device.type == "cuda"),
            self._kv,
        )
        return partial(self._run, shape, draft, check, room, self._addresses(shape, hidden)), room

    def _addresses(self, shape: _Shape, hidden: torch.Tensor) -> torch.Tensor:
        """[rows of the head, taps] int64: where the hidden states of the round before lie."""
        found = torch.full((shape.head.rows, len(self._head.taps)), self._head.nowhere, dtype=torch.int64)
        for row in range(shape.requests * (shape.head.steps + 1)):
            for i, layer in enumerate(self._head.taps):
                found[row, i] = hidden[self._layers.index(layer), row].data_ptr()
        return found.to(hidden.device)

    def _run(
        self,
        shape: _Shape,
        draft: Callable[[], Any],
        check: Callable[[], Any],
        room: _Room,
        addresses: torch.Tensor,
    ) -> None:
        requests, steps, at, batch = (
            shape.requests,
            shape.head.steps,
            room.buffer.on_device,
            room.inputs.batch,
        )
        results = draft()
        chains = batch.input_ids[: requests * (steps + 1)].view(requests, steps + 1)
        chains[:, 1:] = results[0, :, :requests].T
        _, picked, hidden = check()
        verified = Verified(
            picked,
            batch.input_ids,
            batch.positions,
            batch.slots,
            batch.starts,
            batch.prefix_lens,
            batch.block_tables,
            room.inputs.places,
        )
        drafted = Drafted(
            results, at["tokens"], at["positions"], at["slots"], at["stands"], at["prefixes"], at["tables"],
            at["wanted"], at["places"],
            at["next_positions"], at["next_slots"],
        )  # fmt: skip
        advance(verified, drafted, room.ring, requests)
        room.hidden.copy_(hidden)
        at["addresses"].copy_(addresses)
