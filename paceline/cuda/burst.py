"""Bursts on a GPU: a head drafts chains or trees, the target checks them, and both go on from what was
accepted.

A round is one CUDA graph, replayed as often as rounds are wanted; the host fills the inputs of the first,
learns how far the text has come from what each of them says while the next is running, and sends another
after it. Between two rounds one launch says what was accepted and where the rows of the next lie (advance.py
for chains, walk.py for trees). Recorded are a few numbers of requests, each with its K and its trees; the
others are padded. Invariant: between two rounds nothing but numbers at fixed addresses changes, and rows
beyond what is reserved for a request, which has ended without the device knowing it, write to the trash slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.types import Batch, Round
from paceline.cuda.advance import advance
from paceline.cuda.batch import REQUESTS, Bucket, Buffer, batch_values, next_size
from paceline.cuda.chain_head import CudaChainHead
from paceline.cuda.decoder import CudaDecoder, PassSpec
from paceline.cuda.graphs import Arriving, Graphs, Recording
from paceline.cuda.move import Caches, move
from paceline.cuda.recorded_head import LONGEST, MOST_DRAFTED, HeadShape
from paceline.cuda.rounds import chains_of, trees_of
from paceline.cuda.rows import BLOCK_SIZE
from paceline.cuda.tree_head import TreeDraft
from paceline.cuda.tree_nodes import choose
from paceline.cuda.walk import Walked, walk
from paceline.heads.rows import BurstInput, TreeShape
from paceline.models.attention import LayerCache

MOST_ROUNDS = 64  # in a row: to begin costs as much as a round, and slots are reserved for all of them
MOST_ROWS = 256  # of the target's pass: more of them take time, so that of many requests drafts are short
MOST_TREES = 4  # requests for which trees are recorded: of more, rows are worth more than likely siblings


class _Room(NamedTuple):
    """What a recording reads and writes."""

    shape: HeadShape
    head: Buffer
    bucket: Bucket  # of the target
    target: Buffer
    hidden: Tensor  # [layers, T, hidden]: of the round before, which the head reads
    number: Tensor  # [R] int32: rounds so far
    rounds: Tensor  # [rounds, R, numbers] int32: what the host will read
    # [rows of the target, taps] int64: where the hidden states of the round before lie
    addresses: Tensor


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
        said, name = self._rounds[number].array[: len(roots)], self._given.names[1]  # [requests, numbers]
        return chains_of(said, roots, name) if self._given.tree is None else trees_of(said, roots, name)


class CudaBurstBackend:
    most_rounds, most_requests, is_weighing = MOST_ROUNDS, MOST_DRAFTED, False

    def __init__(
        self, head: CudaChainHead, decoder: CudaDecoder, kv: Sequence[LayerCache], steps: int,
        trees: Sequence[TreeShape] = (),
    ) -> None:  # fmt: skip
        """steps: tokens of a chain, at most; 0: none are drafted."""
        self._head, self._decoder, self._kv, self.device = head, decoder, kv, decoder.device
        self._layers, self._graphs = tuple(dict.fromkeys(head.taps)), Graphs(decoder.capture)
        self._steps, self._trees = steps, tuple(trees)

    def longest(self, num_requests: int) -> int:
        return min(self._steps, MOST_ROWS // next_size(REQUESTS, num_requests) - 1)

    def trees(self, num_requests: int) -> Sequence[TreeShape]:
        size = next_size(REQUESTS, num_requests)
        return [each for each in self._trees if size <= MOST_TREES and size * (each.nodes + 1) <= MOST_ROWS]

    @torch.inference_mode()
    def record(self, _steps: int) -> None:
        for requests in (size for size in REQUESTS if size <= MOST_DRAFTED):
            if self.longest(requests) > 0:
                self._recorded(requests, None)
            for tree in self.trees(requests):
                self._recorded(requests, tree)

    @torch.inference_mode()
    def launch(self, batch: Batch, given: BurstInput) -> CudaBurst:
        """batch: the target's rows of the first round, of whose drafts only the roots are known; slots are
        reserved for all that a request can still say. feeds: no more rows than a round shows. One round is
        sent now."""
        feeds, count, columns, tree = given.feeds, given.num_rounds, batch.columns, given.tree
        length, nodes = self._sizes(len(feeds), tree)
        assert 1 <= count <= self.most_rounds, "there is room for no more rounds"
        assert len(columns.rows) == len(feeds) * (nodes + 1), "drafts of the recorded size"
        assert all(1 <= len(feed.tokens) <= length + 1 for feed in feeds), "as many as a round shows"
        num_blocks = len(columns.block_tables) // len(feeds)
        behind = 0 if tree is None else tree.width * tree.depth  # a tree's rows lie behind the text's
        limits, head_limits = [], []
        for feed, prefix, more in zip(feeds, columns.prefix_lens, given.rooms, strict=True):
            assert prefix + more <= num_blocks * BLOCK_SIZE.value, "slots are reserved"
            limits.append(prefix + more)
            head_limits.append(feed.start + len(feed.tokens) + more + behind)
            feed.place.reserve(head_limits[-1])  # first: with more memory there are other recordings
        (replay, _, _), room = self._recorded(next_size(REQUESTS, len(feeds)), tree)
        head_values = self._head.values(room.shape, feeds, given.samplers, length + 1)
        room.head.fill(head_values | {"limits": head_limits})
        room.target.fill(batch_values(room.bucket, columns, batch.picks) | {"limits": limits})
        room.number.zero_()
        self._decoder.latest = None  # a round's picks lie where a pass's do
        burst = CudaBurst(replay, room, self._layers, given)
        burst.more()
        return burst

    def _sizes(self, num_requests: int, tree: TreeShape | None) -> tuple[int, int]:
        """Of a draft: tokens of its longest path, and nodes that are checked."""
        steps = self.longest(num_requests)
        return (steps, steps) if tree is None else (tree.depth, tree.nodes)

    def _recorded(self, requests: int, tree: TreeShape | None) -> tuple[Recording, _Room]:
        key = (requests, tree, self._head.generation)
        return self._graphs.record(key, partial(self._prepare, requests, tree))

    def _prepare(self, requests: int, tree: TreeShape | None) -> tuple[Callable[[], None], _Room]:
        decoder, device, layers = self._decoder, self.device, self._layers
        length, nodes = self._sizes(requests, tree)
        bucket = Bucket(requests * (length + 1), requests, next_size(LONGEST, length + 1), decoder.num_blocks)
        shape = HeadShape(bucket, 0 if tree else length, tree is None, requests, tree=tree)
        grown = None if tree is None else TreeDraft(self._head, shape)
        draft, head = self._head.prepare(shape) if grown is None else (grown, grown.buffer)
        rows = requests * (nodes + 1)
        bucket = bucket._replace(rows=rows, max_rows=nodes + 1)  # not rounded up: attention is split by it
        check, target = decoder.prepare(PassSpec(bucket, decoder.config.num_layers, layers), self._kv)
        sizes = (len(layers), bucket.rows, decoder.config.hidden_size)
        hidden = torch.zeros(sizes, dtype=decoder.weights.dtype, device=device)
        said = (self.most_rounds, requests, 3 * length + 1 if tree is None else 4 * nodes + 1)
        rounds, number = (torch.zeros(size, dtype=torch.int32, device=device) for size in (said, requests))
        for each in (head, target):
            each.pin()
        taps = [hidden[layers.index(tap)] for tap in self._head.taps]
        lines = [[tap[row].data_ptr() for tap in taps] for row in range(rows)]
        addresses = torch.tensor(lines, dtype=torch.int64, device=device)
        room = _Room(shape, head, bucket, target, hidden, number, rounds, addresses)
        if grown is None:
            return partial(self._run, room, draft, check), room
        drafted = torch.zeros((requests, 3, nodes), dtype=torch.int32, device=device)
        parts = drafted, Walked.of(grown.shape, requests, device), Caches.of(self._kv)
        return partial(self._run_tree, room, grown, check, *parts), room

    @property
    def _trash(self) -> tuple[int, int]:
        return self._kv[0][0].shape[0] - 1, self._head.trash_slot

    def _run(self, room: _Room, draft: Callable[[], Any], check: Callable[[], Any]) -> None:
        head, target, requests = room.head.on_device, room.target.on_device, len(room.number)
        results = draft()  # [2, steps, requests or more]
        target["input_ids"].view(requests, -1)[:, 1:] = results[0, :, :requests].T
        _, picked, hidden = check()
        advance(target, picked, head, self._trash, results, room.number, room.rounds)
        room.hidden.copy_(hidden)
        head["addresses"].copy_(room.addresses)

    def _run_tree(
        self, room: _Room, draft: TreeDraft, check: Callable[[], Any], drafted: Tensor, walked: Walked,
        caches: Caches,
    ) -> None:  # fmt: skip
        """The head reads the accepted rows anew, so that only the target's keys and values move."""
        head, target = room.head.on_device, room.target.on_device
        choose(draft(), target, draft.shape, drafted)
        _, picked, hidden = check()
        walk(target, picked, head, self._trash, drafted, walked, room.number, room.rounds)
        move(caches, walked.accepted, walked.sources, walked.targets)
        room.hidden.copy_(hidden)
        torch.index_select(room.addresses, 0, walked.rows.view(-1), out=head["addresses"])
