"""A head that drafts token by token, on the CPU: EAGLE-3, EAGLE-1 or a distilled model, as cpu/chains.py
computes it.

Invariant: the kernels read and write where they are told, so every address handed to them lies in memory that
this call keeps alive, and a sequence has room for all places that are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from paceline.cpu.chains import EAGLE_1, EAGLE_3, PLAIN, Entry, Task, call_of, draft_chains
from paceline.cpu.decoder import CpuDecoder
from paceline.cpu.head_memory import (
    NOTHING,
    Flat,
    Memory,
    Place,
    Tensors,
    Workspace,
    address,
    describe,
    sources_of,
)
from paceline.cpu.heads import Rows, Work
from paceline.cpu.single_feed import MOST_ROWS, MOST_STEPS, SingleFeed
from paceline.heads.config import DraftConfig, EagleConfig, LayeredConfig
from paceline.heads.others import Eagle1Config
from paceline.heads.rows import Feed, Guesses, Node, Row, Said, Speaker

CHUNK = 256  # rows read in one pass


GREEDY = Speaker(0.0, 0, 0)


class ChainHead:
    def __init__(
        self,
        config: LayeredConfig,
        tensors: Tensors,
        target: CpuDecoder,
        feature_norm: torch.Tensor | None = None,
    ) -> None:
        """feature_norm: the target's last norm, for heads that read what comes out of it."""
        self.config, memory = config, Memory()
        self._layers = config.hidden_layers
        self.num_sources = len(self._layers)
        self._memory = memory
        kind = (
            EAGLE_1
            if isinstance(config, Eagle1Config)
            else EAGLE_3
            if isinstance(config, EagleConfig)
            else PLAIN
        )
        names = (
            ["midlayer."]
            if kind != PLAIN
            else [f"layers.{i}." for i in range(config.num_layers)]
            if isinstance(config, DraftConfig)
            else []
        )
        rows = [memory.layer(tensors, name, config.intermediate_size) for name in names]
        fuse, balance = (
            memory.balanced(tensors["fc.weight"], tensors.get("fc.bias")) if kind != PLAIN else (NOTHING, 0)
        )
        self.shape = describe(config, rows, tensors, target, memory, fuse)
        self._entry = Entry(
            kind, max(self.num_sources, 1), memory.vector(feature_norm) if feature_norm is not None else 0, balance,
            getattr(config, "norm_before_residual", False), getattr(config, "norm_output", False),
        )  # fmt: skip
        width = config.hidden_size
        self._workspace = Workspace(
            self.shape,
            max(fuse.k, 2 * width, config.intermediate_size, config.num_heads * config.head_dim),
            width,
        )
        ids = tensors.get("draft_ids")
        self._ids = np.empty(0, np.int64) if ids is None else ids.to(torch.int64).numpy()
        self._logits = np.empty((0, self.shape.num_outputs), np.float32)
        self._single = SingleFeed(self.shape, self._entry, self._ids)
        self._warm_up()

    def _warm_up(self) -> None:
        """What is compiled on first use is not the first request's to wait for, nor to be taken for a
        cost.
        """
        nothing = torch.zeros(1, self.config.hidden_size)
        row = Row(0, dict.fromkeys(self.config.hidden_layers, nothing), 0)
        self.guess([Feed(self.place(), 0, [0], [row])], [GREEDY], 1, 0.0)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._memory.kept)

    def read(self, feeds: Sequence[Feed]) -> None:
        """Take rows into the sequences; nobody speaks."""
        for feed in feeds:
            for first in range(0, len(feed.tokens), CHUNK):
                part = slice(first, first + CHUNK)
                self._run(
                    [Feed(feed.place, feed.start + first, feed.tokens[part], feed.rows[part])], [], 0, 0.0
                )

    def place(self) -> Place:
        return Place(self.shape.num_layers * self.config.num_kv_heads, self.config.head_dim)

    def fork(self, place: Place, length: int) -> Place:
        return place.fork(length)

    def can_guess(self, temperature: float) -> bool:
        return True

    def guess(self, feeds: Sequence[Feed], speakers: Sequence[Speaker], steps: int, least: float) -> Guesses:
        """Chains after the last row of each feed, until no chance reaches `least`."""
        if len(feeds) == 1 and len(feeds[0].tokens) <= MOST_ROWS and steps <= MOST_STEPS:
            sources, work = self._made_ready(feeds[0], steps)
            return self._single.guess(feeds[0], sources, speakers[0], steps, least, work)
        _, tokens, chances = self._run(feeds, speakers, steps, least)
        return Guesses(tokens.tolist(), chances.tolist())

    def open(
        self, feed: Feed, speaker: Speaker, steps: int, least: float, num_more: int
    ) -> tuple[int, int, int, int]:
        """For whoever calls the kernel several times (cpu/flights.py): with room for so many rows more.
        Addresses, as SingleFeed's.
        """
        sources, work = self._made_ready(feed, num_more + steps)
        self._single.open(feed, sources, speaker, steps, least, work)
        return self._single.addresses

    def _made_ready(self, feed: Feed, num_more: int) -> tuple[list[int], Work]:
        end = feed.start + len(feed.tokens) + num_more
        feed.place.reserve(end)
        return sources_of(feed.rows, self._layers, self.shape.hidden), self._workspace.get(MOST_ROWS, end)

    def begin(self, feeds: Sequence[Feed]) -> Said:
        """The logits after the last row of each feed."""
        return self._run(feeds, [GREEDY] * len(feeds), 0, 0.0)[0]

    def level(self, nodes: Sequence[Node]) -> Said:
        """The logits after each node of a tree's level."""
        for node in nodes:
            node.place.reserve(node.at + 1)
        most = max(len(node.others) for node in nodes)
        others = [[*node.others, *[0] * (most - len(node.others))] for node in nodes]
        columns = [
            [n.token for n in nodes], [n.position for n in nodes], [n.place.keys_at for n in nodes],
            [n.place.values_at for n in nodes], [n.place.blocks for n in nodes], [n.at for n in nodes], [n.seen for n in nodes],
        ]  # fmt: skip
        sources = list(chain.from_iterable([address(n.source)] * self._entry.num_sources for n in nodes))
        table = _Table(
            columns,
            sources,
            list(chain.from_iterable(others)),
            [len(n.others) for n in nodes],
            list(range(len(nodes))),
        )
        longest = max(n.seen for n in nodes) + most
        return self._call(table, [], [GREEDY] * len(nodes), 0, 0.0, longest, is_fused=False)[0]

    def outputs(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """[feeds, hidden] after the last row of each; the next call may write there, too."""
        if len(feeds) == 1 and len(feeds[0].tokens) <= MOST_ROWS:
            return torch.from_numpy(self._single.output(feeds[0], *self._made_ready(feeds[0], 0)))
        said, _, _ = self._run(feeds, [GREEDY] * len(feeds), 0, 0.0, is_speaking=False)
        return torch.from_numpy(np.stack(said.outputs))

    def _run(
        self,
        feeds: Sequence[Feed],
        speakers: Sequence[Speaker],
        steps: int,
        least: float,
        is_speaking: bool = True,
    ) -> tuple[Said, np.ndarray, np.ndarray]:
        tokens: list[int] = []
        places: list[int] = []
        keys: list[int] = []
        values: list[int] = []
        rooms: list[int] = []
        sources: list[int] = []
        speaking: list[int] = []
        for feed in feeds:
            count, end = len(feed.tokens), feed.start + len(feed.tokens)
            feed.place.reserve(end + steps)
            tokens.extend(feed.tokens)
            places.extend(range(feed.start, end))
            keys.extend([feed.place.keys_at] * count)
            values.extend([feed.place.values_at] * count)
            rooms.extend([feed.place.blocks] * count)
            sources.extend(sources_of(feed.rows, self.config.hidden_layers, self.config.hidden_size))
            speaking.append(len(tokens) - 1)
        seen = [place + 1 for place in places]
        nobody = [0] * len(tokens)
        table = _Table(
            [tokens, places, keys, values, rooms, places, seen],
            sources or [0],
            [0],
            nobody,
            speaking if speakers else [],
        )
        longest = max(seen) + steps
        return self._call(
            table, _following(table), speakers, steps, least, longest, is_fused=True, is_speaking=is_speaking
        )

    def _call(
        self,
        table: _Table,
        then: list[list[int]],
        speakers: Sequence[Speaker],
        steps: int,
        least: float,
        longest: int,
        *,
        is_fused: bool,
        is_speaking: bool = True,
    ) -> tuple[Said, np.ndarray, np.ndarray]:
        flat, count, width = Flat(), len(speakers), self.config.hidden_size
        outputs = np.empty((count, width), np.float32)
        tokens, chances = np.empty((steps, count), np.int64), np.empty((steps, count))
        if len(self._logits) < count:
            self._logits = np.empty((count, self.shape.num_outputs), np.float32)
        own = [address(outputs) + 4 * width * i for i in range(count) for _ in range(self._entry.num_sources)]
        first = [flat.add(column) for column in table.columns]
        rest = [flat.add(column) for column in then]
        extra = [
            flat.add(column)
            for column in (table.others, table.num_others, table.sources, own, table.speaking, range(count))
        ]
        done, at = flat.add((0, 0)), flat.add([s.position for s in speakers])
        temperatures = np.array([s.temperature for s in speakers], np.float64)
        seeds = np.array([s.seed for s in speakers], np.uint64)
        base = flat.close()
        most = len(table.others) // max(len(table.columns[0]), 1)
        rows = Rows(len(table.columns[0]), *_seven(base, first), base + extra[0], base + extra[1], most)
        further = Rows(len(then[0]), *_seven(base, rest), 0, base + extra[1], 0) if then else rows
        task = Task(
            base + extra[2], is_fused, base + extra[4], count, steps, address(temperatures), address(seeds), base + at,
            address(self._ids), len(self._ids), least, address(self._logits) if is_speaking else 0, address(outputs), address(tokens),
            address(chances), base + done,
        )  # fmt: skip
        following = task._replace(sources=base + extra[3], is_fused=False, speaking=base + extra[5])
        work = self._workspace.get(len(table.columns[0]), longest)
        call = call_of(rows, further, self.shape, self._entry, task, following, work)
        draft_chains(call.buffer_info()[0], self.shape.threads)
        made = int(flat.array[done // 8])
        vocab = self.config.draft_vocab_size
        return (
            Said(torch.from_numpy(self._logits[:count, :vocab]), list(outputs)),
            tokens[:made],
            chances[:made],
        )


class _Table(NamedTuple):
    """Rows of a first pass, column by column as in `Rows`."""

    columns: list[list[int]]
    sources: list[int]
    others: list[int]
    num_others: list[int]
    speaking: list[int]


def _following(table: _Table) -> list[list[int]]:
    """One row for each that speaks, a place further."""
    _, positions, keys, values, rooms, places, seen = (
        [column[row] for row in table.speaking] for column in table.columns
    )
    ahead = [[n + 1 for n in column] for column in (positions, places, seen)]
    return [[0] * len(keys), ahead[0], keys, values, rooms, ahead[1], ahead[2]]


def _seven(base: int, offsets: list[int]) -> tuple[int, int, int, int, int, int, int]:
    """Addresses of the columns of `Rows`."""
    tokens, positions, keys, values, rooms, places, seen = (base + offset for offset in offsets)
    return tokens, positions, keys, values, rooms, places, seen
