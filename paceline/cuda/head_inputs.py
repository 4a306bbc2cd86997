"""What a pass of a learned head reads, in the memory of a GPU: one buffer a bucket, filled by one copy.

Columns that the host knows before a draft begins (where the rows of every step lie, what they see, with which
noise tokens are chosen) are all here, so that the steps of a draft follow each other without the host.
Invariant: what is not given is padding that writes to the trash slot and sees only itself; the copy before
must have arrived, so whoever fills a buffer again has waited for the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.cuda.batch import BLOCK_SIZE, REQUESTS, WORD, context_for, mask_words, next_size
from paceline.cuda.head_cache import PagedPlace
from paceline.heads.rows import Feed, Guesses, Node, Row, Speaker

ALIGNED = 4  # numbers of 32 bits
ROWS = (8, 32, 128, 256)  # of texts in a pass; beyond, kernel by kernel


TAIL = 32  # rows of one text, at most; what is more is read before
WARM = 2048  # contexts up to this are recorded before anybody waits for a draft


def rows_for(count: int) -> int:
    """The bucket of so many rows."""
    return next_size(ROWS, count)


def warm_contexts(most: int) -> list[int]:
    """Buckets that a model of this context may soon need."""
    return sorted({context_for(length) for length in (1, WARM // 2, WARM) if length <= most})


def is_bucket(rows: int, requests: int) -> bool:
    """Small enough to be recorded."""
    return rows in ROWS and requests in REQUESTS


class Column(NamedTuple):
    shape: tuple[int, ...]
    dtype: type[np.generic] = np.int32  # or int64, float64
    padding: int = 0


class Buffer:
    """Named columns, here and on the device."""

    def __init__(self, columns: Mapping[str, Column], device: torch.device) -> None:
        sizes = {
            name: int(np.prod(each.shape)) * np.dtype(each.dtype).itemsize for name, each in columns.items()
        }
        total = sum(
            -(-size // 16) * 16 for size in sizes.values()
        )  # aligned: else kernels would be compiled for every way to be not
        self._host = torch.zeros(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(total, dtype=torch.uint8, device=device)
        self._columns, first = columns, 0
        self._flat: dict[str, np.ndarray] = {}
        self.on_device: dict[str, torch.Tensor] = {}
        for name, column in columns.items():
            end = first + sizes[name]
            self._flat[name] = self._host.numpy()[first:end].view(column.dtype)
            dtype = torch.from_numpy(np.empty(0, column.dtype)).dtype
            self.on_device[name] = self._device[first:end].view(dtype).view(column.shape)
            first += -(-sizes[name] // 16) * 16

    def fill(self, values: Mapping[str, Any]) -> None:
        """Flat numbers of each column, from its start; what is missing is padding."""
        for name, column in self._columns.items():
            to, given = self._flat[name], values.get(name, ())
            to[: len(given)] = given
            to[len(given) :] = column.padding
        self._device.copy_(self._host, non_blocking=True)


class Table(NamedTuple):
    """Rows of a pass, flat over sequences."""

    tokens: list[int]
    positions: list[int]
    slots: list[int]  # where keys and values are written
    stands: list[int]  # where they are read: elsewhere for rows of passes before
    masks: list[int]  # bit i: the row sees row i of its sequence in this pass
    addresses: list[int]  # of features, as many for each row
    starts: list[int]
    prefixes: list[int]  # rows that all see
    places: list[PagedPlace]
    speaking: list[int]


def addresses_of(rows: Sequence[Row], layers: Sequence[int]) -> list[int]:
    """Where the hidden states of each row lie."""
    found = []
    for row in rows:
        for layer in layers:
            hidden = row.hidden[layer]
            found.append(hidden.data_ptr() + row.at * hidden.stride(0) * hidden.element_size())
    return found


def table_of_feeds(feeds: Sequence[Feed], layers: Sequence[int]) -> Table:
    """Rows of texts; the last of each speaks."""
    table = Table([], [], [], [], [], [], [0], [], [], [])
    for feed in feeds:
        count, end = len(feed.tokens), feed.start + len(feed.tokens)
        feed.place.reserve(end)
        slots = feed.place.slots(feed.start, end)
        table.tokens.extend(feed.tokens)
        table.positions.extend(range(feed.start, end))
        table.slots.extend(slots)
        table.stands.extend(slots)
        table.masks.extend((2 << i) - 1 for i in range(count))
        table.addresses.extend(addresses_of(feed.rows, layers) if layers else ())
        table.starts.append(len(table.tokens))
        table.prefixes.append(feed.start)
        table.places.append(feed.place)
        table.speaking.append(len(table.tokens) - 1)
    return table


def table_of_rounds(feeds: Sequence[Feed], layers: Sequence[int], count: int, nowhere: int) -> Table:
    """The same with `count` rows each: what follows the last of a text is junk, behind what is seen, and
    overwritten before it could be.
    """
    missing = [count - len(feed.tokens) for feed in feeds]
    table = table_of_feeds(
        [
            Feed(f.place, f.start, [*f.tokens, *[0] * extra], ())
            for f, extra in zip(feeds, missing, strict=True)
        ],
        (),
    )
    for feed, extra in zip(feeds, missing, strict=True):
        table.addresses.extend([*addresses_of(feed.rows, layers), *[nowhere] * (extra * len(layers))])
    return table._replace(speaking=[i * count + len(feed.tokens) - 1 for i, feed in enumerate(feeds)])


def table_of_nodes(nodes: Sequence[Node], trash_slot: int, nowhere: int, has_sources: bool) -> Table:
    """A level of trees. Nodes of levels before stand in the pass for their keys alone: what is computed there
    is thrown away.
    """
    table, speaking = Table([], [], [], [], [], [], [0], [], [], []), [0] * len(nodes)
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
            table.tokens[row], table.positions[row], table.slots[row] = (
                node.token,
                node.position,
                table.stands[row],
            )
            table.masks[row] = sum(1 << (other - seen) for other in node.others)
            if has_sources:
                table.addresses[row] = node.source.data_ptr()
            speaking[i] = row
        table.starts.append(len(table.tokens))
        table.prefixes.append(seen)
        table.places.append(place)
    return table._replace(speaking=speaking)


def block_tables(places: Sequence[PagedPlace], width: int) -> np.ndarray:
    """Flat [places, width]."""
    tables = np.zeros((len(places), width), np.int32)
    for i, place in enumerate(places):
        count = min(len(place.blocks), width)
        tables[i, :count] = place.blocks[:count]
    return tables.reshape(-1)


def row_columns(
    rows: int, requests: int, speaking: int, context: int, features: int, trash_slot: int, nowhere: int
) -> dict[str, Column]:
    """Of a pass over a Table. The last request is one more than there are, and has all padding rows."""
    return {
        "addresses": Column((rows, features), np.int64, nowhere),
        "masks": Column((rows, -(-rows // WORD)), np.int64),
        "tokens": Column((rows,)), "positions": Column((rows,)), "slots": Column((rows,), padding=trash_slot),
        "stands": Column((rows,), padding=trash_slot), "starts": Column((requests + 2,)), "prefixes": Column((requests + 1,)),
        "tables": Column((requests + 1, context // BLOCK_SIZE)), "speaking": Column((speaking,), np.int64),
    }  # fmt: skip


def row_values(table: Table, rows: int, requests: int, context: int) -> dict[str, Any]:
    count = len(table.tokens)
    padding = [1 << i for i in range(rows - count)]
    starts = [*table.starts, *[count] * (requests + 1 - len(table.starts)), rows]
    return {
        "addresses": table.addresses, "masks": mask_words([*table.masks, *padding], -(-rows // WORD)).reshape(-1),
        "tokens": table.tokens, "positions": table.positions, "slots": table.slots, "stands": table.stands, "starts": starts,
        "prefixes": table.prefixes, "tables": block_tables(table.places, context // BLOCK_SIZE), "speaking": table.speaking,
    }  # fmt: skip


NO_ROWS = Table([], [], [], [], [], [], [0], [], [], [])


def speaker_columns(requests: int) -> dict[str, Column]:
    """How each request's tokens are chosen."""
    return {
        "temperatures": Column((requests,), np.float64),
        "seeds": Column((requests,), np.int64),
        "places": Column((requests,), np.int64),  # position of the first token that is guessed
    }


def speaker_values(speakers: Sequence[Speaker]) -> dict[str, Any]:
    return {
        "temperatures": [speaker.temperature for speaker in speakers],
        "seeds": np.array([speaker.seed for speaker in speakers], np.uint64).view(np.int64),
        "places": [speaker.position for speaker in speakers],
    }


def guesses_of(results: torch.Tensor, count: int) -> Guesses:
    """results [2, steps, R or more] int32: tokens, and chances of single steps as the bits of float32. Waits
    for the device.
    """
    tokens, chances = results.cpu().numpy()[:, :, :count]
    return Guesses(tokens.tolist(), np.ascontiguousarray(chances).view(np.float32).cumprod(0).tolist())
