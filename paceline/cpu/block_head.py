"""DFlash on the CPU: its weights in int8, its sequences, and the calls of cpu/blocks.py.

Invariant: the kernels read and write where they are told, so every address handed to them lies in memory that this call keeps alive, and
a sequence has room for its context and a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paceline.cpu.blocks import Block, Context, draft_blocks
from paceline.cpu.decoder import CpuDecoder
from paceline.cpu.head_memory import NOTHING, Flat, Memory, Place, Tensors, Workspace, address, describe, sources_of
from paceline.cpu.heads import Rows
from paceline.models.head_config import DflashConfig
from paceline.models.head_rows import BlockFeed, Guesses, Speaker

CHUNK = 256  # rows read in one pass
GREEDY = Speaker(0.0, 0, 0)


class BlockHead:
    def __init__(self, config: DflashConfig, tensors: Tensors, target: CpuDecoder) -> None:
        self.config, self._memory = config, Memory()
        memory = self._memory
        rows = [memory.layer(tensors, f"layers.{i}.", config.intermediate_size) for i in range(config.num_layers)]
        fuse, self._balance = memory.balanced(tensors["fc.weight"])
        markov = memory.output(tensors["markov_w2.weight"], fill=0.0) if config.markov_rank else NOTHING
        self.shape = describe(config, rows, tensors, target, memory, fuse, markov)
        self._hidden_norm = memory.vector(tensors["hidden_norm.weight"])
        self._before = memory.vector(tensors["markov_w1.weight"]) if config.markov_rank else 0
        widest = max(fuse.k, config.intermediate_size, config.num_heads * config.head_dim, config.markov_rank)
        self._workspace = Workspace(self.shape, widest, config.hidden_size)
        ids = tensors.get("draft_ids")
        self._ids = np.empty(0, np.int64) if ids is None else ids.to(torch.int64).numpy()
        self._words = {int(token): i for i, token in enumerate(self._ids)}

    def place(self) -> Place:
        return Place(self.shape.num_layers * self.config.num_kv_heads, self.config.head_dim)

    def fork(self, place: Place, length: int) -> Place:
        return place.fork(length)

    def can_guess(self, temperature: float) -> bool:
        return True

    def read(self, feed: BlockFeed) -> None:
        """Take features into a sequence; nobody speaks."""
        for first in range(0, len(feed.rows), CHUNK):
            self._run([feed._replace(start=feed.start + first, rows=feed.rows[first : first + CHUNK])], [], 0, is_guessing=False)

    def guess(self, feeds: Sequence[BlockFeed], speakers: Sequence[Speaker], steps: int) -> Guesses:
        _, tokens, chances = self._run(feeds, speakers, steps, is_guessing=True)
        return Guesses(tokens.tolist(), chances.cumprod(0).tolist())

    def logits(self, feeds: Sequence[BlockFeed], steps: int) -> torch.Tensor:
        """[steps, requests, draft vocabulary], without the Markov head."""
        found, _, _ = self._run(feeds, [GREEDY] * len(feeds), steps, is_guessing=False)
        return torch.from_numpy(found[:, :, : self.config.draft_vocab_size])

    def word(self, token: int) -> int:
        """A token of the target as a draft id; the last one is for all others."""
        return self._words.get(token, self.config.draft_vocab_size) if len(self._ids) else token

    def _run(
        self, feeds: Sequence[BlockFeed], speakers: Sequence[Speaker], steps: int, *, is_guessing: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        config, flat, count = self.config, Flat(), len(speakers)
        size = config.block_size
        for feed in feeds:
            feed.place.reserve(feed.start + len(feed.rows) + (size if speakers else 0))
        context = self._context(feeds, flat)
        rows, longest = self._block_rows(feeds if speakers else [], flat)
        columns = [flat.add([self.word(feed.root) for feed in feeds]), flat.add([s.position for s in speakers])]
        temperatures, seeds = np.array([s.temperature for s in speakers], np.float64), np.array([s.seed for s in speakers], np.uint64)
        logits = np.empty((steps, count, self.shape.num_outputs), np.float32)
        mixed = np.empty((count, self.shape.num_outputs), np.float32)
        tokens, chances = np.empty((steps, count), np.int64), np.empty((steps, count))
        base = flat.close()
        first = 0 if config.sample_from_anchor else 1
        block = Block(
            count, size, first, steps, base + columns[0], address(temperatures), address(seeds), base + columns[1], address(self._ids),
            len(self._ids), config.markov_rank, self._before, address(mixed), address(logits), address(tokens), address(chances),
            is_guessing,
        )  # fmt: skip
        work = self._workspace.get(max(context.num, rows.num, steps * count), longest)
        draft_blocks(_based(context, base), _based_rows(rows, base), block, self.shape, work)
        return logits, tokens, chances

    def _context(self, feeds: Sequence[BlockFeed], flat: Flat) -> Context:
        places = [feed.start + i for feed in feeds for i in range(len(feed.rows))]
        sources = sources_of([row for feed in feeds for row in feed.rows], self.config.hidden_layers, self.config.hidden_size)
        keys, values = ([getattr(f.place, name) for f in feeds for _ in f.rows] for name in ("keys_at", "values_at"))
        rooms = [feed.place.blocks for feed in feeds for _ in feed.rows]
        columns = [flat.add(column) for column in (sources, places, keys, values, rooms)]
        return Context(len(places), columns[0], len(self.config.taps), self._balance, self._hidden_norm, *columns[1:])

    def _block_rows(self, feeds: Sequence[BlockFeed], flat: Flat) -> tuple[Rows, int]:
        size, mask = self.config.block_size, self.config.mask_token_id
        ends = [feed.start + len(feed.rows) for feed in feeds]
        tokens = [token for feed in feeds for token in (feed.root, *[mask] * (size - 1))]
        places = [end + i for end in ends for i in range(size)]
        keys, values = ([getattr(f.place, name) for f in feeds for _ in range(size)] for name in ("keys_at", "values_at"))
        seen = [end + size for end in ends for _ in range(size)]
        rooms = [feed.place.blocks for feed in feeds for _ in range(size)]
        at = [flat.add(column) for column in (tokens, places, keys, values, rooms, places, seen, [0] * len(tokens))]
        return Rows(len(tokens), at[0], at[1], at[2], at[3], at[4], at[5], at[6], 0, at[7], 0), max(seen, default=size)


def _based(context: Context, base: int) -> Context:
    """Offsets become addresses."""
    moved = {name: getattr(context, name) + base for name in ("sources", "places", "keys", "values", "rooms")}
    return context._replace(**moved)


def _based_rows(rows: Rows, base: int) -> Rows:
    names = ("tokens", "positions", "keys", "values", "rooms", "places", "seen", "num_others")
    return rows._replace(**{name: getattr(rows, name) + base for name in names})
