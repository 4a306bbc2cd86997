"""The roofline of speculative decoding, on paper: pure arithmetic on a model's shape and a machine's limits.

A pass reads every weight once, however many rows it has, and each sequence's cached keys and values once; it
multiplies for every row. It takes the longer of the two times. While reading is the longer one, further rows
are free: that is what a draft lives on. Invariant: nothing is measured, read or loaded here, and the same
question has the same answer everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from paceline.engine import costs
from paceline.measure.tuning.hardware import Hardware
from paceline.models.config import ModelConfig

# Bytes a weight: int8 has a scale of 2 bytes for each 64 weights, int4 a scale and a minimum for each 32.
WIDTHS = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1 + 2 / 64, "int4": 0.5 + 4 / 32}
KV_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
KEY_SCALES = 16  # bytes, as in runtime/kv_cache.py
MOST_K = 32  # drafts longer than this are not looked at
MOST_ROWS = 1 << 20
TOKENS_A_PARAMETER = 20  # of training text, where compute is spent best (Hoffmann et al. 2022)
FLOPS_A_TOKEN = 6  # and parameter: forward and backward
TRAINED_AT = 0.4  # of the arithmetic limit: what training runs reach


class Work(NamedTuple):
    """What a pass must do, however cleverly it is written."""

    num_bytes: float
    product_flops: float
    attention_flops: float

    @property
    def flops(self) -> float:
        return self.product_flops + self.attention_flops

    @property
    def intensity(self) -> float:
        """Operations for each byte read."""
        return self.flops / self.num_bytes


@dataclass(frozen=True)
class Footing:
    """A model on a machine: `batch` sequences of `context` cached tokens each."""

    config: ModelConfig
    hardware: Hardware
    dtype: str
    kv_dtype: str
    batch: int = 1
    context: int = 1024

    @cached_property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.config.weight_names().values())

    @cached_property
    def _head(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    @cached_property
    def _layers(self) -> int:
        """Parameters of the products of all layers."""
        shapes = self.config.weight_names().items()
        return sum(
            math.prod(shape) for name, shape in shapes if name.startswith("layers.") and len(shape) == 2
        )

    @property
    def num_multiplied(self) -> int:
        """Parameters that take part in a product for every row: all but norms and the embedding, which is
        looked up.
        """
        return self._layers + self._head

    @property
    def _head_width(self) -> float:
        return WIDTHS[
            "int8" if self.dtype == "int4" else self.dtype
        ]  # int4 costs embedding and head most, so they stay int8

    @cached_property
    def bytes_read(self) -> float:
        """Of weights, in a pass."""
        return self._layers * WIDTHS[self.dtype] + self._head * self._head_width

    @cached_property
    def weight_bytes(self) -> float:
        """In memory: an embedding that is not the head too is only looked up."""
        return self.bytes_read + (0 if self.config.tie_embeddings else self._head * self._head_width)

    @cached_property
    def kv_bytes_per_token(self) -> int:
        return self.config.num_layers * self.config.num_kv_heads * self._head_bytes

    @cached_property
    def _head_bytes(self) -> int:
        """Of the key and the value of one head. Where activations are integers, so are both of quantized
        models, with scales.
        """
        has_integers = self.hardware.int8_flops is not None and self.dtype in ("int8", "int4")
        return (
            2 * self.config.head_dim + KEY_SCALES
            if has_integers
            else 2 * self.config.head_dim * KV_WIDTHS[self.kv_dtype]
        )

    @property
    def kv_bytes(self) -> int:
        """Of the whole batch."""
        return self.batch * self.context * self.kv_bytes_per_token

    def _seen(self, length: int) -> int:
        """Tokens that a row sees, added over layers: those with a sliding window see no more than it."""
        window = self.config.sliding_window or length
        return sum(
            min(length, window) if self.config.is_local(i) else length for i in range(self.config.num_layers)
        )

    def work(self, num_rows: int) -> Work:
        """Of a pass with so many rows for each sequence."""
        config = self.config
        seen = self._seen(self.context + num_rows)
        kv = seen * config.num_kv_heads * self._head_bytes
        rows = self.batch * num_rows
        return Work(
            num_bytes=self.bytes_read + self.batch * kv,
            product_flops=2 * self.num_multiplied * rows,
            attention_flops=4
            * config.num_heads
            * config.head_dim
            * seen
            * rows,  # q·k and the sum of values, a multiply-add each
        )

    def _times(self, num_rows: int) -> tuple[float, float]:
        """Seconds for reading, and for multiplying."""
        work, hardware = self.work(num_rows), self.hardware
        products = hardware.product_flops(self.dtype)
        multiplying = work.product_flops / products + work.attention_flops / (
            hardware.attention_flops or products
        )
        return work.num_bytes / hardware.bandwidth, multiplying

    def seconds(self, num_rows: int) -> float:
        return max(self._times(num_rows))

    def is_memory_bound(self, num_rows: int) -> bool:
        reading, multiplying = self._times(num_rows)
        return reading >= multiplying

    def relative(self, num_rows: int) -> float:
        return self.seconds(num_rows) / self.seconds(1)

    @cached_property
    def free_rows(self) -> int:
        """The most rows a sequence may have while the pass is bound by memory; 0 where one is too many."""
        low, high = 0, MOST_ROWS
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.is_memory_bound(middle) else (low, middle - 1)
        return low

    def most_sequences(self, other_bytes: float = 0.0, other_kv: float = 0.0) -> int:
        """How many sequences of this context fit into the memory, beside another model's weights and its K/V
        a sequence.
        """
        left = self.hardware.memory - self.weight_bytes - other_bytes
        return max(0, int(left / (self.context * self.kv_bytes_per_token + other_kv)))


@dataclass(frozen=True)
class Gains:
    """What drafts would gain: the formulas of engine/costs.py with the roofline's costs."""

    target: Footing
    draft: Footing | None = None  # None: drafts cost nothing, as looking text up does

    @cached_property
    def draft_cost(self) -> float:
        """Of drafting one token, relative to a pass of the target over one."""
        return self.draft.seconds(1) / self.target.seconds(1) if self.draft is not None else 0.0

    def speedup(self, alpha: float, k: int) -> float:
        return costs.speedup(alpha, k, self.draft_cost, self.target.relative(k + 1))

    def best_k(self, alpha: float) -> int:
        return costs.best_k(alpha, self.draft_cost, self.target.relative, MOST_K)

    def break_even(self, k: int) -> float | None:
        return costs.break_even_alpha(k, self.draft_cost, self.target.relative(k + 1))


class Training(NamedTuple):
    """How to spend a training budget: C = 6 N D with D = 20 N."""

    flops: float
    parameters: float
    tokens: float
    hours: float
    draft_cost: float  # of the trained drafter, relative to the target


def training(budget: float, target: Footing) -> Training:
    parameters = math.sqrt(budget / (FLOPS_A_TOKEN * TOKENS_A_PARAMETER))
    hardware = target.hardware
    seconds = budget / (TRAINED_AT * hardware.half_flops)
    reading = parameters * WIDTHS[target.dtype] / hardware.bandwidth
    multiplying = 2 * target.batch * parameters / hardware.product_flops(target.dtype)
    cost = max(reading, multiplying) / target.seconds(1)
    return Training(budget, parameters, TOKENS_A_PARAMETER * parameters, seconds / 3600, cost)


def beside(target: Footing, config: ModelConfig) -> Footing:
    """A draft model under the target's conditions."""
    return replace(target, config=config)
