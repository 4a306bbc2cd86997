"""What a drafting head owns on the CPU: weights packed in int8, sequences of keys and values, and the memory
of a pass.

Invariant: an address given out here stays valid while the object that gave it lives, but for a sequence's,
which moves when it grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from paceline.cpu.decoder import CpuDecoder
from paceline.cpu.head_attention import BLOCK, SIDE_BY_SIDE
from paceline.cpu.heads import COLUMNS, LayerRow, Shape, Work
from paceline.cpu.lanes import LANES
from paceline.cpu.matmul import Matrix
from paceline.cpu.sync import BYTES, num_threads
from paceline.cpu.taps import address_in
from paceline.heads.config import LayeredConfig
from paceline.heads.rows import Row
from paceline.loaders.packed import gate_up_order
from paceline.models.quantize import pack_linear, padded
from paceline.models.rope import rotary_tables

Tensors = Mapping[str, torch.Tensor]
NOTHING = Matrix(0, 0, 0, 0)
NEVER = -3e38  # the logit of a row that only fills up the last tile


class Place:
    """A sequence's keys and values, [layers * kv heads][blocks][a block's floats]; it moves when it grows."""

    __slots__ = ("_keys", "_shape", "_values", "blocks", "keys_at", "values_at")

    def __init__(self, num_heads: int, dim: int) -> None:
        """num_heads: KV heads of all layers."""
        self._shape = num_heads, dim * BLOCK
        nothing = np.empty((num_heads, 0, dim * BLOCK), np.float32)
        self._move(nothing, nothing)

    def _move(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Asking an array where it lies takes longer than all else that a draft asks of a place."""
        self._keys, self._values, self.blocks = keys, values, keys.shape[1]
        self.keys_at, self.values_at = address(keys), address(values)

    def reserve(self, length: int) -> None:
        """Room for so many positions."""
        if length > self.blocks * BLOCK:
            blocks = max(-(-length // BLOCK), self.blocks + self.blocks // 2, 8)
            self._move(self._grown(self._keys, blocks), self._grown(self._values, blocks))

    def _grown(self, old: np.ndarray, blocks: int) -> np.ndarray:
        new = np.zeros((self._shape[0], blocks, self._shape[1]), np.float32)
        new[:, : old.shape[1]] = old
        return new

    def fork(self, length: int) -> Place:
        """Another sequence with the same first positions."""
        fresh, blocks = Place(self._shape[0], self._shape[1] // BLOCK), -(-length // BLOCK)
        fresh._move(self._keys[:, :blocks].copy(), self._values[:, :blocks].copy())
        return fresh


class Memory:
    """Weights as the kernels read them."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def vector(self, tensor: torch.Tensor) -> int:
        self.kept.append(tensor.float().contiguous())
        return self.kept[-1].data_ptr()

    def matrix(
        self,
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None = None,
        order: Sequence[int] | None = None,
    ) -> Matrix:
        whole = torch.cat([w.float() for w in weights])
        weight, its_bias = pack_linear(whole if order is None else whole[list(order)], bias, 8)
        self.kept += [weight, its_bias]
        return Matrix(weight.data_ptr(), its_bias.data_ptr(), padded(whole.shape[1], COLUMNS), len(its_bias))

    def balanced(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[Matrix, int]:
        """A product whose input is first multiplied by the lengths of the columns, which then all have length
        one. Some channels of a residual stream are a thousand times larger than others: without it they would
        take all of a group's integers."""
        lengths = weight.float().norm(dim=0).clamp(min=1e-30)
        return self.matrix([weight / lengths], bias), self.vector(lengths)

    def output(self, weight: torch.Tensor, fill: float = NEVER) -> Matrix:
        """Filled up to whole lanes with rows that are never the largest."""
        missing = padded(len(weight), LANES) - len(weight)
        bias = torch.cat([torch.zeros(len(weight)), torch.full((missing,), fill)])
        return self.matrix([torch.nn.functional.pad(weight.float(), (0, 0, 0, missing))], bias)

    def layer(self, tensors: Tensors, prefix: str, inner: int) -> LayerRow:
        def norm(name: str) -> int:
            return self.vector(tensors[prefix + name]) if prefix + name in tensors else 0

        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return LayerRow(
            norm("input_layernorm.weight"),
            norm("hidden_norm.weight"),
            self.matrix(
                [tensors[f"{attention}{name}_proj.weight"] for name in "qkv"], _biases(tensors, attention)
            ),
            norm("self_attn.q_norm.weight"),
            norm("self_attn.k_norm.weight"),
            self.matrix([tensors[f"{attention}o_proj.weight"]]),
            norm("post_attention_layernorm.weight"),
            self.matrix(
                [tensors[f"{mlp}{name}_proj.weight"] for name in ("gate", "up")], order=gate_up_order(inner)
            ),
            self.matrix([tensors[f"{mlp}down_proj.weight"]]),
        )


def _biases(tensors: Tensors, attention: str) -> torch.Tensor | None:
    found = [
        tensors[f"{attention}{name}_proj.bias"] for name in "qkv" if f"{attention}{name}_proj.bias" in tensors
    ]
    return torch.cat(found).float() if found else None


def embedding_of(target: CpuDecoder) -> tuple[Matrix, bool]:
    """The target's embedding as it lies in memory, and whether it is float32."""
    weight, bias = target.tensors["embedding.weight"], target.tensors["embedding.bias"]
    is_float = weight.dtype == torch.float32
    width = target.config.hidden_size
    return Matrix(
        weight.data_ptr(), bias.data_ptr(), width if is_float else padded(width, COLUMNS), len(bias)
    ), is_float


def describe(
    config: LayeredConfig,
    rows: Sequence[LayerRow],
    tensors: Tensors,
    target: CpuDecoder,
    memory: Memory,
    *others: Matrix,
) -> Shape:
    """others: the matrices that follow the embedding and the output layer."""
    table = torch.tensor(
        [[n for field in row for n in (field if isinstance(field, Matrix) else (field,))] for row in rows]
    )
    tables = rotary_tables(config.rope, config.head_dim, target.config.max_context)
    embedding, is_float = embedding_of(target)
    head = memory.output(tensors["lm_head.weight"])
    matrices = torch.tensor([embedding, head, *others])
    memory.kept += [table, matrices]
    return Shape(
        table.data_ptr(), len(rows), config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim,
        config.rms_eps, config.head_dim**-0.5, target.config.embed_scale, False, matrices.data_ptr(), is_float, memory.vector(tables.cos),
        memory.vector(tables.sin), memory.vector(tensors["norm.weight"]) if "norm.weight" in tensors else 0, config.draft_vocab_size,
        head.n, num_threads(),
    )  # fmt: skip


class Workspace:
    """Memory of a pass, kept for the next one: it grows to the largest seen."""

    def __init__(self, shape: Shape, widest: int, narrow: int, queries: int = SIDE_BY_SIDE) -> None:
        """widest: of a product's input; narrow: outputs of the products that are neither qkv nor gate_up;
        queries: scored at once.
        """
        self._shape, self._widest, self._narrow, self._queries = (
            shape,
            padded(widest, COLUMNS),
            narrow,
            queries,
        )
        self._sync = np.zeros(BYTES // 8, np.int64)
        self._rows = self._longest = 0
        self._memory = np.empty(0, np.uint8)
        self._work: Work | None = None

    def get(self, rows: int, longest: int) -> Work:
        """longest: positions that a row may see."""
        if self._work is not None and rows <= self._rows and longest <= self._longest:
            return self._work
        self._rows, self._longest = max(rows, self._rows), padded(max(2 * longest, self._longest), LANES)
        sizes = self._sizes(self._rows, self._longest + 4 * LANES)
        starts = np.cumsum([0, *(padded(size, 64) for size in sizes.values())]).tolist()
        self._memory = np.zeros(starts[-1] + 64, np.uint8)
        base = padded(address(self._memory), 64)
        places = {name: base + start for name, start in zip(sizes, starts, strict=False)}
        self._work = Work(
            sync=address(self._sync), longest=self._longest + 4 * LANES, widest=self._widest, **places
        )
        return self._work

    def _sizes(self, rows: int, longest: int) -> dict[str, int]:
        s = self._shape
        qkv = padded((s.num_heads + 2 * s.num_kv_heads) * s.dim, 8)
        return {
            "h": rows * s.hidden * 4,
            "ready": rows * self._widest * 4,
            "wide": rows * max(qkv, 2 * padded(s.inner, 8)) * 4,
            "narrow": rows * padded(max(self._narrow, s.hidden), 8) * 4,
            "values": rows * self._widest,
            "scales": rows * self._widest // COLUMNS * 4,
            "sums": rows * self._widest // COLUMNS * 4,
            "scores": s.threads * self._queries * longest * 4,
        }


def address(array: np.ndarray) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


def sources_of(rows: Sequence[Row], layers: Sequence[int], hidden_size: int) -> list[int]:
    """Addresses of the features, layer by layer; rows of one pass share their tensors."""
    found: list[int] = []
    hidden: Mapping[int, torch.Tensor] | None = None
    starts: list[int] = []
    for row in rows:
        if row.hidden is not hidden:
            hidden = row.hidden
            starts = [address_in(hidden, layer) for layer in layers]
        found.extend(start + 4 * hidden_size * row.at for start in starts)
    return found


class Flat:
    """Columns of whole numbers in one array, and where each begins."""

    __slots__ = ("_numbers", "array")

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self.array = np.empty(0, np.int64)

    def add(self, column: Sequence[int]) -> int:
        """Its offset in bytes."""
        at = 8 * len(self._numbers)
        self._numbers.extend(column)
        return at

    def close(self) -> int:
        """The address to which the offsets are added."""
        self.array = np.array(self._numbers, np.int64)
        return address(self.array)
