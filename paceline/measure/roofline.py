"""The roofline: what a pass must read and multiply, what a machine can do at best, and the time that follows.

A pass reads every weight once, however many rows it has, and each request's cached keys and values once; it
multiplies for every row. It takes the longer of the two times. While reading is the longer one, further rows
are free: that is what a draft lives on. Arithmetic of several precisions shares the units, so its times add
up. Invariant: pure arithmetic. A limit is never reached in full, so times computed from it are bounds, and
their ratios estimates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from paceline.core import formulas
from paceline.core.errors import ConfigError
from paceline.core.options import nearest
from paceline.models.config import ModelConfig

GB, TERA = 10**9, 10**12
THIS = "this"
# Bytes a weight: int8 has a scale of 2 bytes for each 64 weights, int4 a scale and a minimum for each 32.
WIDTHS = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1 + 2 / 64, "int4": 0.5 + 4 / 32}
KV_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
KEY_SCALES = 16  # bytes behind an integer key, as in runtime/kv_cache.py
MOST_K = 32  # longer drafts are not considered
MOST_ROWS = 1 << 20
TOKENS_A_PARAMETER = 20  # of training text, where compute is spent best (Hoffmann et al. 2022)
FLOPS_A_TOKEN = 6  # and parameter: forward and backward
TRAINED_AT = 0.4  # of the arithmetic limit: what training runs reach


class Work(NamedTuple):
    """What must be read and multiplied, however cleverly it is written; operations by their precision."""

    num_bytes: float = 0.0
    int8_flops: float = 0.0
    half_flops: float = 0.0
    float_flops: float = 0.0

    def plus(self, other: Work, times: float = 1.0) -> Work:
        return Work(*(a + times * b for a, b in zip(self, other, strict=True)))

    @property
    def flops(self) -> float:
        return self.int8_flops + self.half_flops + self.float_flops

    @property
    def intensity(self) -> float:
        """Operations for each byte read."""
        return self.flops / self.num_bytes


@dataclass(frozen=True, slots=True)
class Hardware:
    """Limits of a machine, each a second. The named ones are their makers' figures, dense and without a boost
    of the clock; "this" is measured."""

    name: str
    bandwidth: float  # bytes
    half_flops: float  # with weights of 16 bits, and of fewer where only the weights are small
    float_flops: float  # with float32
    memory: float  # bytes it has
    int8_flops: float | None = None  # where activations are int8 too, as on CPUs
    threads: int | None = None  # of the measured ones

    def kind(self, dtype: str) -> str:
        """The precision that products with such weights are computed in."""
        if dtype in ("int8", "int4") and self.int8_flops is not None:
            return "int8_flops"
        return "float_flops" if dtype == "float32" else "half_flops"

    def product_flops(self, dtype: str) -> float:
        return float(getattr(self, self.kind(dtype)))

    def kv_dtype(self, dtype: str) -> str:
        """How the engine keeps keys and values: as integers where activations are."""
        if self.kind(dtype) == "int8_flops":
            return "int8"
        return "float32" if dtype == "float32" or self.int8_flops is not None else "bfloat16"

    def ridge(self, dtype: str) -> float:
        """Operations for each byte read from which arithmetic, not memory, sets the pace."""
        return self.product_flops(dtype) / self.bandwidth

    def times(self, work: Work) -> tuple[float, float]:
        """Seconds of reading, and of multiplying."""
        multiplying = work.half_flops / self.half_flops + work.float_flops / self.float_flops
        if self.int8_flops is not None:
            multiplying += work.int8_flops / self.int8_flops
        return work.num_bytes / self.bandwidth, multiplying

    def seconds(self, work: Work) -> float:
        return max(self.times(work))


HARDWARE = {
    hardware.name: hardware
    for hardware in (
        Hardware("h200", 4800 * GB, 989 * TERA, 67 * TERA, 141 * GB),
        Hardware("h100", 3350 * GB, 989 * TERA, 67 * TERA, 80 * GB),
        Hardware("a100", 2039 * GB, 312 * TERA, 19.5 * TERA, 80 * GB),
        Hardware("rtx4090", 1008 * GB, 165 * TERA, 82.6 * TERA, 24 * GB),
        Hardware("l4", 300 * GB, 121 * TERA, 30.3 * TERA, 24 * GB),
        Hardware("m2", 100 * GB, 3.6 * TERA, 3.6 * TERA, 24 * GB),
    )
}


def named(name: str) -> Hardware:
    if name == THIS:
        from paceline.measure.limits import measure

        return measure()
    if name not in HARDWARE:
        remedy = f"{nearest(name, [*HARDWARE, THIS])}, or give --bandwidth, --flops and --memory"
        raise ConfigError(f"--hardware is {name!r}; {remedy}")
    return HARDWARE[name]


def explicit(
    bandwidth: float | None, flops: float | None, memory: float | None, base: Hardware | None
) -> Hardware:
    """From the user's own figures, in GB/s, TFLOP/s and GB; what is not given is taken from `base`."""
    given = {"--bandwidth": bandwidth, "--flops": flops, "--memory": memory}
    for option, value in given.items():
        if value is not None and not 0 < value < 1e9:
            raise ConfigError(f"{option} is {value}; give a positive number (GB/s, TFLOP/s or GB)")
    missing = [option for option, value in given.items() if value is None]
    if base is None and missing:
        remedy = "give all of --bandwidth, --flops and --memory, or name --hardware as well"
        raise ConfigError(f"{', '.join(missing)} left out; {remedy}")
    changes: dict[str, Any] = {"name": f"{base.name}, changed" if base else "given"}
    if bandwidth is not None:
        changes["bandwidth"] = bandwidth * GB
    if flops is not None:
        changes |= {"half_flops": flops * TERA, "float_flops": flops * TERA, "int8_flops": None}
    if memory is not None:
        changes["memory"] = memory * GB
    return replace(base or Hardware("given", 0, 0, 0, 0), **changes)


@dataclass(frozen=True)
class Deployment:
    """A model on a machine: `batch` requests of `context` cached tokens each."""

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
        """Parameters of the products of all layers; norms and the embedding lookup have none."""
        shapes = self.config.weight_names().items()
        return sum(
            math.prod(shape) for name, shape in shapes if name.startswith("layers.") and len(shape) == 2
        )

    @property
    def _head_width(self) -> float:
        """Rounding to int4 costs embedding and head most, so they stay int8."""
        return WIDTHS["int8" if self.dtype == "int4" else self.dtype]

    @cached_property
    def bytes_read(self) -> float:
        """Of weights, in a pass."""
        return self._layers * WIDTHS[self.dtype] + self._head * self._head_width

    @cached_property
    def weight_bytes(self) -> float:
        """In memory: an embedding that is not the head too is only looked up."""
        return self.bytes_read + (0 if self.config.tie_embeddings else self._head * self._head_width)

    @cached_property
    def _head_bytes(self) -> int:
        """Of the key and the value of one head."""
        scales = KEY_SCALES if self.kv_dtype == "int8" else 0
        return 2 * self.config.head_dim * KV_WIDTHS[self.kv_dtype] + scales

    @cached_property
    def kv_bytes_per_token(self) -> int:
        return self.config.num_layers * self.config.num_kv_heads * self._head_bytes

    @property
    def kv_bytes(self) -> int:
        """Of the whole batch."""
        return self.batch * self.context * self.kv_bytes_per_token

    def _seen(self, length: float) -> float:
        """Tokens that a row sees, added over layers: those with a sliding window see no more than it."""
        config, window = self.config, self.config.sliding_window or length
        return sum(min(length, window) if config.is_local(i) else length for i in range(config.num_layers))

    def work(self, num_rows: int, num_logits: int | None = None) -> Work:
        """Of a pass with `num_rows` rows for each request, in which row i sees the i rows before it."""
        config, rows = self.config, self.batch * num_rows
        logits = rows if num_logits is None else self.batch * num_logits
        read = self._seen(self.context + num_rows) * config.num_kv_heads * self._head_bytes
        seen = self._seen(self.context + (num_rows + 1) / 2)
        # The scores q·k and the sum of values, a multiply-add each; integer sums have weights of two bytes.
        is_integer = self.kv_dtype == "int8"
        attention = (6 if is_integer else 4) * config.num_heads * config.head_dim * seen * rows
        products = 2.0 * (self._layers * rows + self._head * logits)
        wide = "float32" if self.dtype == "float32" else "bfloat16"
        kinds = self.hardware.kind(self.dtype), self.hardware.kind("int8" if is_integer else wide)
        total = Work(num_bytes=self.bytes_read + self.batch * read)
        for kind, flops in zip(kinds, (products, attention), strict=True):
            total = total.plus(Work(**{kind: flops}))
        return total

    def seconds(self, num_rows: int) -> float:
        return self.hardware.seconds(self.work(num_rows))

    def is_memory_bound(self, num_rows: int) -> bool:
        reading, multiplying = self.hardware.times(self.work(num_rows))
        return reading >= multiplying

    def relative(self, num_rows: int) -> float:
        return self.seconds(num_rows) / self.seconds(1)

    @cached_property
    def free_rows(self) -> int:
        """The most rows a request may have while the pass is bound by memory; 0 where one is too many."""
        low, high = 0, MOST_ROWS
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.is_memory_bound(middle) else (low, middle - 1)
        return low

    def most_requests(self, other_bytes: float = 0.0, other_kv: float = 0.0) -> int:
        """How many of this context fit into the memory, beside another model's weights and its K/V for a
        request."""
        left = self.hardware.memory - self.weight_bytes - other_bytes
        return max(0, int(left / (self.context * self.kv_bytes_per_token + other_kv)))


@dataclass(frozen=True)
class Gains:
    """What drafts would gain: the formulas of core/formulas.py with the roofline's costs."""

    target: Deployment
    draft: Deployment | None = None  # None: drafts cost nothing, as looking text up does

    @cached_property
    def draft_cost(self) -> float:
        """Of drafting one token, relative to a pass of the target over one."""
        return self.draft.seconds(1) / self.target.seconds(1) if self.draft is not None else 0.0

    def speedup(self, alpha: float, k: int) -> float:
        return formulas.speedup(alpha, k, self.draft_cost, self.target.relative(k + 1))

    def best_k(self, alpha: float) -> int:
        return formulas.best_k(alpha, self.draft_cost, self.target.relative, MOST_K)

    def break_even(self, k: int) -> float | None:
        return formulas.break_even_alpha(k, self.draft_cost, self.target.relative(k + 1))


class Training(NamedTuple):
    """How to spend a training budget: C = 6 N D with D = 20 N."""

    flops: float
    parameters: float
    tokens: float
    hours: float
    draft_cost: float  # of the trained drafter, relative to the target
    pays_from: float | None  # the α from which drafts of four tokens pay


def training(budget: float, target: Deployment) -> Training:
    parameters = math.sqrt(budget / (FLOPS_A_TOKEN * TOKENS_A_PARAMETER))
    hardware = target.hardware
    products = {hardware.kind(target.dtype): 2 * target.batch * parameters}
    work = Work(num_bytes=parameters * WIDTHS[target.dtype], **products)
    hours = budget / (TRAINED_AT * hardware.half_flops) / 3600
    cost = hardware.seconds(work) / target.seconds(1)
    edge = formulas.break_even_alpha(4, cost, target.relative(5))
    return Training(budget, parameters, TOKENS_A_PARAMETER * parameters, hours, cost, edge)
