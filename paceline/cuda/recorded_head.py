"""What learned heads on a GPU share: drafts as CUDA graphs, their inputs, and keys and values in blocks.

What the host knows before a draft begins is all among its inputs (columns of cuda/batch.py): steps follow
each other without it. A place is one sequence's blocks; where blocks run out the memory is made anew, twice
as large, and `generation` counts: what was recorded before is never replayed. Invariant: a block belongs to
one place, until that is gone; padding reads features that are zero and writes to the last slot, of no place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.core.types import BLOCK_SIZE
from paceline.cuda.batch import BEYOND, REQUESTS, Bucket, Buffer, Column, choice_values, next_size
from paceline.cuda.decoder import CudaDecoder
from paceline.cuda.features import gather
from paceline.cuda.graphs import Graphs
from paceline.cuda.layer import Layer
from paceline.cuda.pick import guess
from paceline.cuda.weights import head_reader
from paceline.heads.config import LayeredConfig
from paceline.heads.rows import Feed, Guesses, Row, Sampler, Span, TreeShape
from paceline.loaders.head_files import Head

ALIGNED = 4  # numbers of 32 bits
LONGEST = (8, 32, 128)  # rows of one text: what is compiled for
TAIL = 8  # rows of one text in a draft, at most; what is more is read before
MOST_DRAFTED = 64  # requests of a batch for which drafts are recorded, a power of two
MOST_BYTES = 2**30  # of keys and values, to begin with
TEXTS = 6  # of the longest kind that there is room for beside what runs: finished ones are kept for others


class PagedPlace:
    """The rows of one sequence."""

    __slots__ = ("_cache", "blocks")

    def __init__(self, cache: HeadCache) -> None:
        self._cache, self.blocks = cache, []  # type: HeadCache, list[int]

    def reserve(self, length: int) -> None:
        missing = -(-length // BLOCK_SIZE) - len(self.blocks)
        if missing > 0:
            self.blocks += self._cache.allocate(missing)

    def slots(self, start: int, end: int) -> list[int]:
        return [self.blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(start, end)]

    def slots_at(self, positions: np.ndarray) -> np.ndarray:
        return np.array(self.blocks)[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE

    def export(self, length: int) -> torch.Tensor:
        return self._cache.read(self.blocks[: -(-length // BLOCK_SIZE)])

    def adopt(self, data: torch.Tensor) -> None:
        self._cache.write(self.blocks[: data.shape[2]], data)

    def __del__(self) -> None:
        self._cache.free += self.blocks


class HeadCache:
    def __init__(
        self, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, num_blocks: int
    ) -> None:
        """sizes: layers, KV heads, width of a head. num_blocks: the most needed; it may begin with fewer."""
        per_block = 2 * math.prod(sizes) * BLOCK_SIZE * dtype.itemsize
        self._data = torch.empty((sizes[0], 2, 1, BLOCK_SIZE, *sizes[1:]), dtype=dtype, device=device)
        self.free: list[int] = []
        self.num_blocks, self.generation = 0, -1
        self._grow(max(1, min(num_blocks, MOST_BYTES // per_block)))

    @property
    def trash_slot(self) -> int:
        return (self.num_blocks + 1) * BLOCK_SIZE - 1

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [slots, kv heads, dim] each."""
        keys, values = self._data[index].flatten(1, 2)
        return keys, values

    @torch.inference_mode()
    def fork(self, place: PagedPlace, length: int) -> PagedPlace:
        """Another sequence with the same first rows."""
        fresh = PagedPlace(self)
        fresh.reserve(length)
        self._data[:, :, fresh.blocks] = self._data[:, :, place.blocks[: len(fresh.blocks)]]
        return fresh

    @torch.inference_mode()
    def read(self, blocks: list[int]) -> torch.Tensor:
        """[layers, 2, blocks, BLOCK_SIZE, KV heads, dim] on the host."""
        return self._data[:, :, blocks].cpu()

    @torch.inference_mode()
    def write(self, blocks: list[int], data: torch.Tensor) -> None:
        self._data[:, :, blocks] = data.to(self._data.device)

    def allocate(self, count: int) -> list[int]:
        while len(self.free) < count:
            self._grow(2 * self.num_blocks)
        first = len(self.free) - count
        blocks, self.free[first:] = self.free[first:], []
        return blocks

    def _grow(self, num_blocks: int) -> None:
        before, known = self._data, self.num_blocks
        self._data = before.new_zeros((*before.shape[:2], num_blocks + 1, *before.shape[3:]))
        self._data[:, :, :known] = before[:, :, :known]
        self.free += range(known, num_blocks)
        self.num_blocks, self.generation = num_blocks, self.generation + 1


class HeadShape(NamedTuple):
    """What the passes of a draft, or of a level of trees, are recorded for."""

    bucket: Bucket
    steps: int  # tokens of a draft
    is_guessed: bool = True  # else logits are wanted
    wanted: int = 1  # rows of a chain's first pass whose logits are
    is_true: bool = True  # a chain's features are the target's, else outputs of this head
    tree: TreeShape | None = None  # that grows after such a pass (cuda/tree_head.py)


def sampler_values(samplers: Sequence[Sampler]) -> dict[str, Any]:
    return choice_values(samplers, [sampler.position for sampler in samplers])


class RecordedHead:
    """`prepare` of the subclass makes the passes of a shape and the buffer that they read."""

    most_read = MOST_DRAFTED

    def __init__(
        self, head: Head, decoder: CudaDecoder, num_blocks: int = 0, prefixes: Sequence[str] = ()
    ) -> None:
        """prefixes: of the names of the tensors of each layer that attends."""
        self.device, self.decoder, self.dtype = decoder.device, decoder, decoder.weights.dtype
        ids, config = head.tensors.get("draft_ids"), head.config  # [words]: draft id -> target id
        self.ids = None if ids is None else ids.to(self.device, torch.int32).contiguous()
        self._eps, self._graphs = config.rms_eps, Graphs(decoder.capture)
        self._zeros, self.taps = self._empty(config.hidden_size).zero_(), config.hidden_layers
        self.nowhere = self._zeros.data_ptr()  # address of features for rows that have none
        self._layers: list[Layer] = []
        self._steps = 0  # of drafts that are recorded
        if prefixes:
            assert isinstance(config, LayeredConfig)
            reader, length = head_reader(head, decoder.weights), decoder.config.max_context + BEYOND
            rotary = reader.rotary(config.rope, config.head_dim, length, config.rotary_width)
            self._layers = [reader.layer(prefix, rotary, config.rms_eps) for prefix in prefixes]
            self.scale = config.head_dim**-0.5
            sizes = (len(prefixes), config.num_kv_heads, config.head_dim)
            # Growing makes recordings useless: there is room for what bursts reserve, and for finished texts.
            room = 2 * num_blocks + TEXTS * decoder.num_blocks
            self._cache = HeadCache(sizes, self.dtype, self.device, room)
            self.place, self.fork = partial(PagedPlace, self._cache), self._cache.fork

    @property
    def generation(self) -> int:
        """A recording is good for one of them."""
        return self._cache.generation if self._layers else 0

    @property
    def trash_slot(self) -> int:
        return self._cache.trash_slot

    def bucket(self, num_requests: int, longest: int = TAIL) -> Bucket:
        """longest: rows of one text. As many for each request: what is recorded for a draft depends on the
        number of requests alone."""
        requests, most = next_size(REQUESTS, num_requests), next_size(LONGEST, longest)
        return Bucket(requests * most, requests, most, self.decoder.num_blocks)

    def can_guess(self, temperature: float) -> bool:
        return True

    def prepare(self, shape: HeadShape) -> tuple[Callable[[], Any], Buffer]:
        """What launches the passes of a shape, and what they read."""
        raise NotImplementedError

    def read(self, *feeds: Feed) -> None:
        """Keys and values of texts."""
        raise NotImplementedError

    def _read_columns(self, feeds: Sequence[Feed]) -> Mapping[str, torch.Tensor]:
        """On the device, of all rows of the feeds: tokens, positions, slots, addresses [T, taps]."""
        counts = [len(feed.rows) for feed in feeds]
        for feed, count in zip(feeds, counts, strict=True):
            feed.place.reserve(feed.start + count)
        positions = [np.arange(feed.start, feed.start + n) for feed, n in zip(feeds, counts, strict=True)]
        slots = [feed.place.slots_at(each) for feed, each in zip(feeds, positions, strict=True)]
        values = {
            "tokens": [token for feed, n in zip(feeds, counts, strict=True) for token in feed.tokens[:n]],
            "positions": np.concatenate(positions), "slots": np.concatenate(slots),
            "addresses": np.concatenate([self._addresses(feed.rows) for feed in feeds]),
        }  # fmt: skip
        columns = {name: Column((sum(counts),)) for name in ("tokens", "positions", "slots")}
        columns["addresses"] = Column((sum(counts), len(self.taps)), torch.int64)
        return Buffer(columns, self.device, values).on_device

    def _tails(self, feeds: Sequence[Feed]) -> list[Feed]:
        """The feeds without what is too long for a recording, which is read now: all but the last row."""
        tails = []
        for f in feeds:
            count = len(f.rows) or len(f.tokens)
            if count > TAIL:
                self.read(f._replace(tokens=f.tokens[:-1], rows=f.rows[:-1]))
                f = Feed(f.place, f.start + count - 1, f.tokens[-1:], f.rows[-1:])
            tails.append(f)
        return tails

    def _addresses(self, rows: Sequence[Row]) -> np.ndarray:
        """[rows, taps] int64: where the hidden states of each row lie."""
        if isinstance(rows, Span):
            return self._lines(rows.first.hidden, rows.first.at + np.arange(len(rows)))
        found = [np.empty((0, len(self.taps)), np.int64)]
        for _, shown in groupby(rows, key=lambda row: id(row.hidden)):  # most are of one pass
            same = list(shown)
            found.append(self._lines(same[0].hidden, np.array([row.at for row in same])))
        return np.concatenate(found)

    def _lines(self, shown: Mapping[int, torch.Tensor], at: np.ndarray) -> np.ndarray:
        tensors = [shown[layer] for layer in self.taps]
        starts = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
        steps = np.array([tensor.stride(0) * tensor.element_size() for tensor in tensors], np.int64)
        return starts + at[:, None] * steps

    def _record(self, shape: HeadShape) -> None:
        self._graphs.record((shape, self.generation), partial(self.prepare, shape))

    def _launch(self, shape: HeadShape, values: Mapping[str, Any]) -> Any:
        """The outputs of the passes, which the next call may overwrite."""
        return self._graphs.launch((shape, self.generation), partial(self.prepare, shape), values)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _results(self, steps: int, requests: int) -> torch.Tensor:
        return torch.empty((2, steps, requests), dtype=torch.int32, device=self.device)

    @staticmethod
    def _guesses(results: torch.Tensor, count: int) -> Guesses:
        """results [2, steps, R or more] int32: tokens, and chances of steps as bits of float32. Waits."""
        tokens, chances = results.cpu().numpy()[:, :, :count]
        return Guesses(tokens.tolist(), np.ascontiguousarray(chances).view(np.float32).cumprod(0).tolist())

    def _chosen(self, shape: HeadShape, logits: torch.Tensor, at: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """logits [steps * requests, words] -> results [2, steps, requests] of guesses, or the logits."""
        steps, requests = shape.steps, shape.bucket.requests
        if not shape.is_guessed:
            return logits.view(steps, requests, -1)
        results = self._results(steps, requests)
        guess(logits, at, self.ids, 0, results.flatten(1))
        return results

    def _gathered(self, addresses: torch.Tensor, norm: torch.Tensor | None = None) -> torch.Tensor:
        """[T, parts] -> [T, parts * hidden]: features, normed if there is a norm."""
        return gather(addresses, norm, self._eps, self._zeros)
