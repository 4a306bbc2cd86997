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

from paceline.core.types import BLOCK_SIZE
from paceline.cuda.batch import REQUESTS, WORD, Column, context_for, mask_words, next_size
from paceline.cuda.recorded_head import PagedPlace
from paceline.heads.rows import Feed, Guesses, Node, Row, Sampler

ALIGNED = 4  # numbers of 32 bits
ROWS = (8, 32, 128, 256)  # of texts in a pass; beyond, kernel by kernel
TAIL = 32  # rows of one text, at most; what is more is read before
WARM = 2048  # contexts up to this are recorded before the first draft


def rows_for(count: int) -> int:
    """The bucket of this many rows."""
    return next_size(ROWS, count)


def requests_for(count: int) -> int:
    return next_size(REQUESTS, count)


def warm_contexts(most: int) -> list[int]:
    """Buckets that a model of this context may soon need."""
    return sorted({context_for(length) for length in (1, WARM // 2, WARM) if length <= most})


def is_recordable(rows: int, requests: int) -> bool:
    """Whether a pass is small enough for a recording."""
    return rows in ROWS and requests in REQUESTS


class ChainShape(NamedTuple):
    """What the passes of a chain, or of a level of trees, are recorded for."""

    rows: int
    requests: int
    wanted: int  # rows whose logits are wanted
    context: int
    steps: int  # tokens of a chain; 0: logits
    is_true: bool  # features are the target's, else outputs of this head


@dataclass(slots=True)
class PassRows:
    """Rows of a pass, flat over sequences."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)  # where keys and values are written
    stands: list[int] = field(default_factory=list)  # where they are read: not so for rows of passes before
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


def addresses_of(rows: Sequence[Row], layers: Sequence[int]) -> list[int]:
    """Where the hidden states of each row lie."""
    found = []
    for row in rows:
        for layer in layers:
            hidden = row.hidden[layer]
            found.append(hidden.data_ptr() + row.at * hidden.stride(0) * hidden.element_size())
    return found


def table_of_feeds(feeds: Sequence[Feed], layers: Sequence[int]) -> PassRows:
    """Rows of texts; the logits of each one's last are wanted."""
    table = PassRows()
    for feed in feeds:
        end = feed.start + len(feed.tokens)
        feed.place.reserve(end)
        slots = feed.place.slots(feed.start, end)
        table.tokens.extend(feed.tokens)
        table.positions.extend(range(feed.start, end))
        table.slots.extend(slots)
        table.stands.extend(slots)
        table.masks.extend((2 << i) - 1 for i in range(len(feed.tokens)))
        table.addresses.extend(addresses_of(feed.rows, layers))
        table.wanted.append(len(table.tokens) - 1)
        table.end_sequence(feed.place, feed.start)
    return table


def table_of_rounds(feeds: Sequence[Feed], layers: Sequence[int], count: int, nowhere: int) -> PassRows:
    """The same with `count` rows each: those after a text's last are overwritten before they are seen."""
    missing = [count - len(feed.tokens) for feed in feeds]
    padded = [f._replace(tokens=[*f.tokens, *[0] * n], rows=()) for f, n in zip(feeds, missing, strict=True)]
    table = table_of_feeds(padded, ())
    for feed, extra in zip(feeds, missing, strict=True):
        table.addresses.extend([*addresses_of(feed.rows, layers), *[nowhere] * (extra * len(layers))])
    table.wanted = [i * count + len(feed.tokens) - 1 for i, feed in enumerate(feeds)]
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
        table.tokens.extend([0] * count)
        table.positions.extend([0] * count)
        table.slots.extend([trash_slot] * count)
        table.stands.extend(place.slots(seen, seen + count))
        table.masks.extend(1 << i for i in range(count))
        table.addresses.extend([nowhere] * (count * has_sources))
        for i in members:
            node, row = nodes[i], first + nodes[i].at - seen
            assert node.seen == seen, "nodes of a tree see the same text"
            table.tokens[row], table.positions[row] = node.token, node.position
            table.slots[row] = table.stands[row]
            table.masks[row] = sum(1 << (other - seen) for other in node.others)
            if has_sources:
                table.addresses[row] = node.source.data_ptr()
            table.wanted[i] = row
        table.end_sequence(place, seen)
    return table


def block_tables(places: Sequence[PagedPlace], width: int) -> np.ndarray:
    """Flat [places, width]."""
    tables = np.zeros((len(places), width), np.int32)
    for i, place in enumerate(places):
        count = min(len(place.blocks), width)
        tables[i, :count] = place.blocks[:count]
    return tables.reshape(-1)


def row_columns(shape: ChainShape, num_features: int, trash_slot: int, nowhere: int) -> dict[str, Column]:
    """Of a pass over PassRows. The last request is one more than there are, and has all padding rows."""
    rows, requests = shape.rows, shape.requests
    each, slots = Column((rows,)), Column((rows,), padding=trash_slot)
    return {
        "addresses": Column((rows, num_features), np.int64, nowhere),
        "masks": Column((rows, -(-rows // WORD)), np.int64),
        "tokens": each, "positions": each, "slots": slots, "stands": slots,
        "starts": Column((requests + 2,)), "prefixes": Column((requests + 1,)),
        "tables": Column((requests + 1, shape.context // BLOCK_SIZE)),
        "wanted": Column((shape.wanted,), np.int64),
    }  # fmt: skip


def row_values(table: PassRows, shape: ChainShape) -> dict[str, Any]:
    count, rows = len(table.tokens), shape.rows
    masks = [*table.masks, *(1 << i for i in range(rows - count))]
    starts = [*table.starts, *[count] * (shape.requests + 1 - len(table.starts)), rows]
    return {
        "addresses": table.addresses, "masks": mask_words(masks, -(-rows // WORD)).reshape(-1),
        "tokens": table.tokens, "positions": table.positions, "slots": table.slots, "stands": table.stands,
        "starts": starts, "prefixes": table.prefixes, "wanted": table.wanted,
        "tables": block_tables(table.places, shape.context // BLOCK_SIZE),
    }  # fmt: skip


def choice_columns(requests: int) -> dict[str, Column]:
    """How each request's tokens are chosen; places: positions of the first tokens that are guessed."""
    whole = Column((requests,), np.int64)
    return {"temperatures": Column((requests,), np.float64), "seeds": whole, "places": whole}


def choice_values(samplers: Sequence[Sampler]) -> dict[str, Any]:
    return {
        "temperatures": [sampler.temperature for sampler in samplers],
        "seeds": np.array([sampler.seed for sampler in samplers], np.uint64).view(np.int64),
        "places": [sampler.position for sampler in samplers],
    }


def guesses_of(results: torch.Tensor, count: int) -> Guesses:
    """results [2, steps, R or more] int32: tokens, and chances of steps as bits of float32. Waits."""
    tokens, chances = results.cpu().numpy()[:, :, :count]
    return Guesses(tokens.tolist(), np.ascontiguousarray(chances).view(np.float32).cumprod(0).tolist())
