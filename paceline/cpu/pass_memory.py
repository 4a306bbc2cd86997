"""Memory in which a decoder's passes compute: what ranks share, what each has for itself, and what a pass is
told.

Invariant: all that another rank reads or writes is in the group's memory; without a group there is one rank.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import numpy as np

from paceline.core.types import Batch
from paceline.cpu.attend import FEW_ROWS, TOGETHER
from paceline.cpu.compile import numbers
from paceline.cpu.draw import BATCH, PIECES
from paceline.cpu.forward import Pass
from paceline.cpu.layer import COLUMNS, Work
from paceline.cpu.parallel import CpuGroup
from paceline.cpu.recycle import Recycled, Workspace, address
from paceline.cpu.sync import Team, num_threads
from paceline.cpu.tables import room_of_experts
from paceline.cpu.tiles import PLACE
from paceline.cpu.value_tiles import CHUNK
from paceline.models.config import ModelConfig
from paceline.models.quantize import padded
from paceline.models.shard import Shard

FIELDS = Pass._fields
NUM_FIELDS, CACHES, TAPS, SOURCE = len(FIELDS), *map(FIELDS.index, ("caches", "taps", "source"))
OWN = ("caches", "picked", "draw", "choices")  # of a Pass: rank 0's alone
SIZES = ("rows", "num_requests", "max_blocks", "block_size", "span", "num_outputs", "depth")
# the others are addresses; that of `source` may be 0
PLACES = [FIELDS.index(name) for name in FIELDS if name not in (*OWN, *SIZES, "source")]


class Widths(NamedTuple):
    """Of a pass's rows, in numbers."""

    widest: int  # what a product reads
    wide: int  # of the products within a layer
    narrow: int  # of those that leave it


class PassMemory:
    def __init__(self, config: ModelConfig, widths: Widths, group: CpuGroup | None = None) -> None:
        self._config, self._group = config, group
        self.shard = Shard() if group is None else group.shard
        self.own = self.shard.own(config)  # with the heads of this rank
        # the first of them
        self.first_head = self.shard.of(config.num_kv_heads).start * (config.num_heads // config.num_kv_heads)
        self._widths = widths._replace(widest=padded(widths.widest, COLUMNS))
        more: dict[str, Any] = {} if group is None else {"zeros": group.take}
        self._common: Workspace[dict[str, int]] = Workspace(self._common_sizes, dict, **more)
        self._workspace: Workspace[dict[str, int]] = Workspace(self._sizes, dict)
        self._work, self._work_of, self._table = array("q"), (object(), object()), np.empty(0, np.int64)
        self._elsewhere = dict.fromkeys(self._common_sizes(1), 0)  # rank 0's common parts, of another rank
        self.team, self.woken = Team(), array("q", [0])  # experts, in all layers of a pass

    @property
    def threads(self) -> int:
        """Of this rank."""
        return max(1, num_threads() // self.shard.size)

    def recycled(self) -> Recycled:
        """For what passes write."""
        return Recycled() if self._group is None else Recycled(self._group.floats)

    def mail(self, batch: Batch, taps: array[int]) -> tuple[np.ndarray, list[int]]:
        """Room for a Pass, then the taps and the batch's columns; and where those columns lie."""
        flat, before = np.frombuffer(batch.flat, np.int64), NUM_FIELDS + len(taps)
        size = 8 * (before + len(flat))
        mail = (np.empty(size, np.uint8) if self._group is None else self._group.take(size)).view(np.int64)
        mail[NUM_FIELDS:before], mail[before:] = taps, flat
        moved = address(mail) + 8 * before - address(flat)
        return mail, [at + moved for at in batch.addresses()]

    def work(self, spec: Pass) -> int:
        """Where the numbers of a Work lie that has room for a pass."""
        rows = spec.rows if self._group is None else 1 << (spec.rows - 1).bit_length()
        return self._work_with(spec, self._common.get(rows))

    def arguments(self, given: tuple[int, ...], caches: array[int]) -> tuple[np.ndarray, int, int]:
        """Of a rank above 0, what rank 0 has ordered: a Pass as it is here, and where Work and logits lie."""
        assert self._group is not None, "rank 0 orders"
        (at, table, logits), group = given, self._group
        found = group.read(at, NUM_FIELDS + self._config.num_layers + 1).copy()  # with the taps behind it
        taps = found[NUM_FIELDS:]
        taps[taps != 0] += group.distance
        found[PLACES] += group.distance
        found[SOURCE] += group.distance * (found[SOURCE] != 0)
        found[CACHES], found[TAPS] = caches.buffer_info()[0], address(taps)
        common = (group.read(table, len(self._elsewhere)) + group.distance).tolist()
        if common != list(self._elsewhere.values()):
            self._elsewhere = dict(zip(self._elsewhere, common, strict=True))
        work = self._work_with(Pass(*found[:NUM_FIELDS].tolist()), self._elsewhere)
        return found, work, logits + group.distance

    def _work_with(self, spec: Pass, common: dict[str, int]) -> int:
        places = spec.num_requests * spec.max_blocks * spec.block_size
        own = self._workspace.get(spec.rows, spec.span, places, self.threads)
        if self._work_of[0] is not common or self._work_of[1] is not own:
            if self._group is not None and self.shard.rank == 0:
                self._table = self._group.take(8 * len(common)).view(np.int64)
                self._table[:] = list(common.values())
            columns = self.first_head * self._config.head_dim
            more = {"widest": self._widths.widest, "woken": self.woken.buffer_info()[0]}
            more |= {"attended": common["ready"] + 4 * columns, "common": address(self._table)}
            more |= {"rank": self.shard.rank, "num_ranks": self.shard.size}
            more |= {"group": 0 if self._group is None else self._group.at}
            self._work, self._work_of = numbers(Work(self.team.at, **common, **own, **more)), (common, own)
        return self._work.buffer_info()[0]

    def _common_sizes(self, rows: int) -> dict[str, int]:
        """Bytes of what ranks share."""
        hidden, (widest, wide, narrow) = self._config.hidden_size, self._widths
        sizes = {
            "h": rows * hidden * 4,
            "ready": rows * widest * 4,
            "wide": rows * wide * 4,
            "narrow": rows * narrow * 4,
            "values": rows * widest * 4,
            "scales": rows * widest // 32 * 4,
            "sums": rows * widest // 32 * 4,
        }
        more = room_of_experts(self._config.experts, hidden, rows)
        return sizes | {name: max(size, sizes.get(name, 0)) for name, size in more.items()}

    def _sizes(self, rows: int, span: int, places: int, threads: int) -> dict[str, int]:
        """Bytes of what each rank has for itself."""
        config, recurrent, kinds = self.own, self.own.recurrent, len(self.own.kinds)
        kv_heads, dim = (
            max(getattr(kind, size) for kind in config.kinds) for size in ("num_kv_heads", "head_dim")
        )
        together = threads * TOGETHER * config.num_heads // min(kind.num_kv_heads for kind in config.kinds)
        queries = max(min(rows, FEW_ROWS) * config.num_heads, together)
        return {
            # kernels look this far beyond the end of a list
            "paths": kinds * (rows * (rows + 1) + 2 * CHUNK) * PLACE,
            "places": kinds * (places + 2 * CHUNK) * PLACE,
            "queries": rows * config.num_heads * dim * 4,
            "scores": queries * span * 4,
            "value_scales": max(min(rows, FEW_ROWS) * kv_heads, threads * TOGETHER) * span * 4,
            "mixed": queries * dim * 8,
            "totals": queries * 4,
            "largest": rows * threads * 8,
            "found": BATCH * threads * 16,
            "near": BATCH * config.vocab_size * 4,
            "masses": BATCH * PIECES * 8,
            "state": 0 if recurrent is None else recurrent.state_bytes,
            "tail": 0 if recurrent is None else recurrent.tail_bytes,
            "gated": threads * self.shard.size * COLUMNS * 4,
        }
