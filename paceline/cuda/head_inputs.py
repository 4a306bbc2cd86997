"""What a pass of a learned head reads, as columns of one buffer (cuda/batch.py).

Columns that the host knows before a draft begins (where the rows of every step lie, what they see, with which
noise tokens are chosen) are all here, so that the steps of a draft follow each other without the host.
Invariant: what is not given is padding that writes to the trash slot and sees only itself; a buffer is filled
again only after the results of its last pass were read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.cuda import batch
from paceline.cuda.batch import REQUESTS, Bucket, Column, context_for, next_size
from paceline.cuda.recorded_head import PagedPlace
from paceline.heads.rows import Feed, Guesses, Node, Row, Sampler

ALIGNED = 4  # numbers of 32 bits
ROWS = (8, 32, 128, 256)  # of texts in a pass; beyond, kernel by kernel
TAIL = 32  # rows of one text, at most; what is more is read before
WARM = 2048  # contexts up to this are recorded before the first draft


def bucket_of(num_rows: int, num_requests: int, length: int) -> Bucket:
    """length: rows of one text that are cached. Any number of the rows may be of one text."""
    rows = next_size(ROWS, num_rows)
    return Bucket(rows, next_size(REQUESTS, num_requests), rows, context_for(length))


def warm_buckets(most: int) -> list[Bucket]:
    """What one request of a model of this context may soon need."""
    return sorted({bucket_of(1, 1, length) for length in (1, WARM // 2, WARM) if length <= most})


def is_recordable(bucket: Bucket) -> bool:
    """Whether a pass is small enough for a recording."""
    return bucket.rows in ROWS and bucket.requests in REQUESTS


class ChainShape(NamedTuple):
    """What the passes of a chain, or of a level of trees, are recorded for."""

    bucket: Bucket
    wanted: int  # rows whose logits are wanted
    steps: int  # tokens of a chain; 0: logits
    is_true: bool = True  # features are the target's, else outputs of this head


@dataclass(slots=True)
class PassRows:
    """Rows of a pass, flat over sequences."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)  # slots where keys and values are written
    slots: list[int] = field(default_factory=list)  # where they are read: not so for rows of passes before
    masks: list[int] = field(default_factory=list)  # bit i: the row sees row i of its sequence in this pass
    addresses: list[int] = field(default_factory=list)  # of features, as many for each row
    starts: list[int] = field(default_factory=lambda: [0])
    prefixes: list[int] = field(default_factory=list)  # rows that all see
    places: list[PagedPlace] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)  # rows whose logits are

    def end_sequence(self, place: PagedPlace, prefix: int) -> None:
        self.starts.append(len(self.tokens))
        self.prefixes.append(prefix)
        self.places.append(place)

    def values(self, bucket: Bucket) -> dict[str, Any]:
        count = len(self.tokens)
        masks = [*self.masks, *(1 << i for i in range(bucket.rows - count))]
        words, tables = batch.mask_words(masks, bucket.num_words), block_tables(self.places, bucket)
        where = self.positions, self.slots, batch.padded_starts(self.starts, bucket), self.prefixes
        addresses = np.array(self.addresses, np.int64).reshape(count, len(self.addresses) // max(count, 1))
        others = {"written": self.written, "addresses": addresses, "wanted": self.wanted}
        return batch.by_field(self.tokens, *where, tables, words) | others


def addresses_of(rows: Sequence[Row], layers: Sequence[int]) -> list[int]:
    """Where the hidden states of each row lie."""
    found = []
    for row in rows:
        for layer in layers:
            hidden = row.hidden[layer]
            found.append(hidden.data_ptr() + row.at * hidden.stride(0) * hidden.element_size())
    return found


def table_of_feeds(
    feeds: Sequence[Feed], layers: Sequence[int], count: int | None = None, nowhere: int = 0
) -> PassRows:
    """Rows of texts; the logits of each one's last are wanted. count: as many rows each: those after a text's
    last have features that lie `nowhere`, and are overwritten before they are seen."""
    table = PassRows()
    for feed in feeds:
        extra = 0 if count is None else count - len(feed.tokens)
        end = feed.start + len(feed.tokens) + extra
        feed.place.reserve(end)
        slots = feed.place.slots(feed.start, end)
        table.wanted.append(len(table.tokens) + len(feed.tokens) - 1)
        table.tokens += [*feed.tokens, *[0] * extra]
        table.positions += range(feed.start, end)
        table.written += slots
        table.slots += slots
        table.masks += [(2 << i) - 1 for i in range(end - feed.start)]
        table.addresses += [*addresses_of(feed.rows, layers), *[nowhere] * (extra * len(layers))]
        table.end_sequence(feed.place, feed.start)
    return table


def table_of_nodes(nodes: Sequence[Node], trash_slot: int, nowhere: int, has_sources: bool) -> PassRows:
    """A level of trees. Nodes of levels before stand in the pass for their keys alone."""
    table = PassRows(wanted=[0] * len(nodes))
    groups: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        groups.setdefault(id(node.place), []).append(i)
    for members in groups.values():
        place, seen, first = nodes[members[0]].place, nodes[members[0]].seen, len(table.tokens)
        count = max(nodes[i].at for i in members) + 1 - seen
        place.reserve(seen + count)
        table.tokens += [0] * count
        table.positions += [0] * count
        table.written += [trash_slot] * count
        table.slots += place.slots(seen, seen + count)
        table.masks += [1 << i for i in range(count)]
        table.addresses += [nowhere] * (count * has_sources)
        for i in members:
            node, row = nodes[i], first + nodes[i].at - seen
            assert node.seen == seen, "nodes of a tree see the same text"
            table.tokens[row], table.positions[row] = node.token, node.position
            table.written[row] = table.slots[row]
            table.masks[row] = sum(1 << (other - seen) for other in node.others)
            if has_sources:
                table.addresses[row] = node.source.data_ptr()
            table.wanted[i] = row
        table.end_sequence(place, seen)
    return table


def chain_columns(shape: ChainShape, num_features: int, trash_slot: int, nowhere: int) -> dict[str, Column]:
    """num_features: of a row."""
    rows, requests = shape.bucket.rows, shape.bucket.requests
    columns = batch.batch_columns(shape.bucket, trash_slot)
    columns["addresses"] = Column((rows, num_features), torch.int64, nowhere)
    columns["written"] = Column((rows,), padding=trash_slot)
    columns["wanted"] = Column((shape.wanted,), torch.int64)
    if shape.steps:
        ahead = Column((max(shape.steps - 1, 1), max(requests, ALIGNED)))
        columns |= {"next_positions": ahead, "next_slots": ahead._replace(padding=trash_slot)}
        columns |= batch.choice_columns(requests)
    return columns


def block_tables(places: Sequence[PagedPlace], bucket: Bucket) -> np.ndarray:
    """[places, blocks of the longest]."""
    width = min(max((len(place.blocks) for place in places), default=0), bucket.num_blocks)
    tables = np.zeros((len(places), width), np.int32)
    for i, place in enumerate(places):
        count = min(len(place.blocks), width)
        tables[i, :count] = place.blocks[:count]
    return tables


def speaker_values(samplers: Sequence[Sampler]) -> dict[str, Any]:
    return batch.choice_values(samplers, [sampler.position for sampler in samplers])


def guesses_of(results: torch.Tensor, count: int) -> Guesses:
    """results [2, steps, R or more] int32: tokens, and chances of steps as bits of float32. Waits."""
    tokens, chances = results.cpu().numpy()[:, :, :count]
    return Guesses(tokens.tolist(), np.ascontiguousarray(chances).view(np.float32).cumprod(0).tolist())
