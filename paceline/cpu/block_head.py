"""DFlash on the CPU: its weights in int8, its sequences, and what the calls of cpu/blocks.py are given.

Invariant: the kernels read and write where they are told, so every address handed to them lies in memory that
this call keeps alive, and a sequence has room for its context and a block.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from paceline.cpu.blocks import Block, Call, Context, RequestNumbers, draft_blocks
from paceline.cpu.compile import numbers, place_of
from paceline.cpu.decoder import CpuDecoder
from paceline.cpu.head_memory import (
    NO_WORK,
    NOTHING,
    Memory,
    Place,
    Room,
    Tensors,
    address,
    draft_ids,
    sources_of,
)
from paceline.cpu.heads import Rows, Work
from paceline.cpu.layer import Model
from paceline.cpu.matmul import Matrix
from paceline.cpu.sync import num_threads
from paceline.heads.config import DflashConfig
from paceline.heads.rows import Feed, Guesses, Row, Sampler

CHUNK = 256  # rows read in one pass
MOST_ROWS = 16  # usually, beside those of a prompt
GREEDY = Sampler(0.0, 0, 0)
CONTEXT, ROWS, BLOCK, WORK = (place_of(Call, name) for name in ("context", "rows", "block", "work"))
NUM, STEPS, IS_GUESSING = (place_of(Call, "block", name) for name in ("num", "steps", "is_guessing"))
NUM_COLUMNS = len(RequestNumbers._fields)


class BlockHead:
    def __init__(self, config: DflashConfig, tensors: Tensors, target: CpuDecoder) -> None:
        self.config, self._memory = config, Memory()
        memory, rank = self._memory, config.markov_rank
        fuse, balance = memory.balanced(tensors["fc.weight"])
        markov = memory.output(tensors["markov_w2.weight"], fill=0.0) if rank else NOTHING
        prefixes = [f"layers.{i}." for i in range(config.num_layers)]
        self.model, threads = memory.describe(config, prefixes, tensors, target), num_threads()
        widest = max(fuse.k, config.intermediate_size, config.num_heads * config.head_dim, rank)
        self._room, self._ids = Room.of(self.model, widest, threads), draft_ids(tensors)
        self._words = {int(token): i for i, token in enumerate(self._ids)}
        self._layers = config.hidden_layers
        before = memory.vector(tensors["markov_w1.weight"]) if rank else 0
        self._constants = Constants(
            threads, config.block_size, config.mask_token_id, 0 if config.sample_from_anchor else 1,
            config.num_drafts, self._ids, rank, before, markov, len(config.taps), fuse, balance,
            memory.vector(tensors["hidden_norm.weight"]),
        )  # fmt: skip
        self._call = BlockCall(self._constants, self.model, 1, MOST_ROWS)
        self._warm_up()

    def _warm_up(self) -> None:
        """What is compiled on first use is not the first request's to wait for, nor a cost of drafting."""
        nothing = torch.zeros(1, self.config.hidden_size)
        row = Row(0, dict.fromkeys(self._layers, nothing), 0)
        self.guess([Feed(self.place(), 0, [0], [row])], [GREEDY], 1)

    def place(self) -> Place:
        return Place(self.model.num_layers * self.config.num_kv_heads, self.config.head_dim)

    def fork(self, place: Place, length: int) -> Place:
        return place.fork(length)

    def can_guess(self, temperature: float) -> bool:
        return True

    def read(self, feed: Feed) -> None:
        """Take features into a sequence; nothing is guessed."""
        for first in range(0, len(feed.rows), CHUNK):
            part = feed._replace(start=feed.start + first, rows=feed.rows[first : first + CHUNK])
            self._run([part], [GREEDY], 0, is_guessing=False)

    def guess(self, feeds: Sequence[Feed], samplers: Sequence[Sampler], steps: int) -> Guesses:
        return self._run(feeds, samplers, steps, is_guessing=True).guesses(len(feeds), steps)

    def logits(self, feeds: Sequence[Feed], steps: int) -> torch.Tensor:
        """[steps, requests, draft vocabulary], without the Markov head."""
        found = self._run(feeds, [GREEDY] * len(feeds), steps, is_guessing=False).logits(len(feeds), steps)
        return torch.from_numpy(found[:, :, : self.config.draft_vocab_size].copy())

    def word(self, token: int) -> int:
        """A token of the target as a draft id; the last one is for all others."""
        return self._words.get(token, self.config.draft_vocab_size) if len(self._ids) else token

    def _run(
        self, feeds: Sequence[Feed], samplers: Sequence[Sampler], steps: int, *, is_guessing: bool
    ) -> BlockCall:
        """The call that was made, which knows what came of it."""
        size = self.config.block_size if steps else 0
        rows = longest = 0
        for feed in feeds:
            end = feed.start + len(feed.rows) + size
            feed.place.reserve(end)
            rows, longest = rows + len(feed.rows), max(longest, end)
        sources = sources_of([row for feed in feeds for row in feed.rows], self._layers, self.model.hidden)
        if len(feeds) > self._call.most_requests or rows > self._call.most_rows:
            most = max(len(feeds), self._call.most_requests), max(rows, self._call.most_rows)
            self._call = BlockCall(self._constants, self.model, *most)
        work = self._room.get(max(rows, len(feeds) * size), longest)
        words = [self.word(feed.tokens[-1]) for feed in feeds]
        self._call.open(feeds, words, sources, samplers, work)
        self._call.run(steps, is_guessing)
        return self._call


class Constants(NamedTuple):
    """What is the same in all calls of a head."""

    threads: int
    size: int  # rows of a block
    mask: int
    first: int
    most_steps: int
    ids: np.ndarray  # of the draft's vocabulary in the target's; empty where they are the same
    rank: int
    before: int
    markov: Matrix
    num_sources: int
    fuse: Matrix
    balance: int
    hidden_norm: int


class BlockCall:
    """A call with nothing made anew, as chain_call.py's: its addresses are of memory that never moves."""

    def __init__(self, constants: Constants, model: Model, most_requests: int, most_rows: int) -> None:
        """With memory for `most_requests` requests and `most_rows` rows of features."""
        self.most_requests, self.most_rows = most_requests, most_rows
        self._constants, self._model, self._work, self._count = constants, model, NO_WORK, 0
        rows, steps = most_requests * constants.size, constants.most_steps * most_requests
        shares, sources = most_requests * constants.threads, most_rows * constants.num_sources
        sizes = [most_requests * NUM_COLUMNS, *[most_rows] * 4, *[rows] * 7, steps, sources, shares]
        starts = np.cumsum([0, *sizes]).tolist()
        self._tokens, self._sources = starts[12:14]
        self._numbers = array("q", [0] * starts[-1])
        self._seeds, self._temperatures = array("Q", [0] * most_requests), array("d", [0.0] * most_requests)
        self._chances, self._sums = array("d", [0.0] * steps), array("d", [0.0] * shares)
        self._mixed = np.empty((most_requests, model.head.n), np.float32)
        self._logits = np.empty((steps, model.head.n), np.float32)
        base = self._numbers.buffer_info()[0]
        self._call = numbers(self._first_call([base + 8 * start for start in starts]))
        self._at = self._call.buffer_info()[0]

    def _first_call(self, at: Sequence[int]) -> Call:
        """Of nothing yet. at: addresses of the arrays of whole numbers."""
        k = self._constants
        tokens, places, keys, values, rooms, seen, zeros = at[5:12]
        context = Context(
            0, at[13], k.num_sources, k.fuse, k.balance, k.hidden_norm, at[1], at[2], at[3], at[4]
        )
        rows = Rows(0, tokens, places, keys, values, rooms, places, seen, 0, zeros, 0)
        temperatures, seeds = self._temperatures.buffer_info()[0], self._seeds.buffer_info()[0]
        chances, sums = self._chances.buffer_info()[0], self._sums.buffer_info()[0]
        block = Block(
            0, at[0], k.size, k.mask, k.first, 0, temperatures, seeds, address(k.ids), len(k.ids), k.rank,
            k.before, k.markov, address(self._mixed), address(self._logits), at[12], chances, at[14], sums,
            False,
        )  # fmt: skip
        return Call(context, rows, block, self._model, NO_WORK)

    def open(
        self, feeds: Sequence[Feed], words: Sequence[int], sources: Sequence[int],
        samplers: Sequence[Sampler], work: Work,
    ) -> None:  # fmt: skip
        """words: the feeds' roots as draft ids; sources: addresses of all rows' features."""
        given, at, self._count = self._numbers, 0, len(feeds)
        for i, (feed, word, sampler) in enumerate(zip(feeds, words, samplers, strict=True)):
            place, start, count = feed.place, feed.start, len(feed.rows)
            own = (
                place.keys_at,
                place.values_at,
                place.blocks,
                start,
                count,
                feed.tokens[-1],
                word,
                sampler.position,
            )
            given[at : at + NUM_COLUMNS] = array("q", own)
            self._temperatures[i], self._seeds[i] = sampler.temperature, sampler.seed
            at += NUM_COLUMNS
        given[self._sources : self._sources + len(sources)] = array("q", sources)
        self._call[CONTEXT] = len(sources) // self._constants.num_sources
        if work is not self._work:
            self._work = work
            self._call[WORK : WORK + len(work)] = array("q", work)

    def run(self, steps: int, is_guessing: bool) -> None:
        """Without steps nothing is guessed."""
        call = self._call
        call[ROWS] = self._count * self._constants.size if steps else 0
        call[NUM], call[STEPS], call[IS_GUESSING] = self._count, steps, is_guessing
        draft_blocks(self._at, self._constants.threads)

    def guesses(self, count: int, steps: int) -> Guesses:
        """Of the last call, with `count` requests."""
        tokens, chances = self._numbers[self._tokens : self._tokens + steps * count], self._chances
        starts = range(0, steps * count, count)
        return Guesses(
            [tokens[i : i + count].tolist() for i in starts],
            [chances[i : i + count].tolist() for i in starts],
        )

    def logits(self, count: int, steps: int) -> np.ndarray:
        """[steps, requests, outputs] of the last call; the next one overwrites them."""
        return self._logits[: steps * count].reshape(steps, count, -1)
