"""The roofline: what a pass must read and multiply, what a machine can do at best, and the time that follows.
A pass reads every weight (of experts those that its rows wake, as if each row chose for itself) and each
request's cached keys and values once, and multiplies for every row. It takes the longer of the two times;
while that is reading, further rows are free, which is what a draft lives on. All times are lower bounds. And
the formulas of speculative decoding, where α is the probability that a drafted token is accepted given that
all before it were (one for all depths, or one for each), and costs are relative to a pass over one token.
Invariant: drafting nothing gains exactly 1.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

from paceline.models.config import ModelConfig
from paceline.models.shard import TILE, Shard

GB, TERA = 10**9, 10**12
THIS = "this"
# Bytes a weight: int8 has a scale of 2 bytes for each 64 weights, int4 a scale and a minimum for each 32, FP8
# a scale of 4 for each 128, MXFP4 one for each 32.
WIDTHS = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1 + 2 / 64, "int4": 0.5 + 4 / 32}
WIDTHS |= {"fp8": 1 + 4 / 128, "mxfp4": 0.5 + 1 / 32}
# Of the output layer and the embedding: rounding to int4 costs them most, and files in MXFP4 have 16 bits.
WIDE = {"int4": "int8", "mxfp4": "bfloat16"}
KV_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
KEY_SCALES = 16  # bytes behind an integer key, as in runtime/kv_cache.py
MOST_K = 32  # longer drafts are not considered
MOST_ROWS = 1 << 20
TOKENS_A_PARAMETER = 20  # of training text, where compute is spent best (Hoffmann et al. 2022)
FLOPS_A_TOKEN = 6  # and parameter: forward and backward
TRAINED_AT = 0.4  # of the arithmetic limit: what training runs reach
WHOLE = Shard()
Alpha = float | Sequence[float]
PRECISION = 1e-9  # of a break-even α


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


class Link(NamedTuple):
    """What connects two devices."""

    bandwidth: float  # bytes a second, one way
    latency: float  # seconds that devices need to give each other their parts of anything, however small


@dataclass(frozen=True, slots=True)
class Hardware:
    """Limits of a machine, each a second: its maker's figures, dense and without a boost, or measured."""

    name: str
    bandwidth: float  # bytes
    half_flops: float  # with weights of 16 bits, and of fewer where only the weights are small
    float_flops: float  # with float32
    memory: float  # bytes it has
    int8_flops: float | None = None  # where activations are int8 too, as on CPUs
    threads: int | None = None  # of the measured ones
    lone_bandwidth: float | None = None  # bytes that one of several threads reads while the others rest
    link: Link | None = None  # between devices of a node; None: it is one device
    network: Link | None = None  # between nodes

    def device(self, devices: int, active: int) -> Hardware:
        """One of so many, of which some work at once. A machine's threads share what is measured of it; other
        figures are a device's own."""
        if self.threads is None or devices == 1:
            return self
        part, lone = 1 / devices, (self.lone_bandwidth or self.bandwidth) * self.threads / devices
        ints = None if self.int8_flops is None else self.int8_flops * part
        speeds: dict[str, Any] = {
            "half_flops": self.half_flops * part,
            "float_flops": self.float_flops * part,
        }
        bandwidth = min(lone, self.bandwidth / active)
        return replace(self, bandwidth=bandwidth, int8_flops=ints, memory=self.memory * part, **speeds)

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


# One way, by their makers: half of what is advertised for NVLink; PCIe 4 with 16 lanes. Latencies: assumed,
# as kernels that write to each other's memory reach in a node, and NCCL between nodes, for a few kilobytes.
NVLINK_4, NVLINK_3, PCIE_4 = Link(450 * GB, 6e-6), Link(300 * GB, 6e-6), Link(32 * GB, 12e-6)
INFINIBAND = Link(50 * GB, 15e-6)  # 400 Gb/s, an adapter for each device
HARDWARE = {
    name: Hardware(name, read * GB, half * TERA, single * TERA, memory * GB, link=link, network=INFINIBAND)
    for name, read, half, single, memory, link in (  # GB/s, TFLOP/s with 16 bits and with float32, GB
        ("h200", 4800, 989, 67, 141, NVLINK_4),
        ("h100", 3350, 989, 67, 80, NVLINK_4),
        ("a100", 2039, 312, 19.5, 80, NVLINK_3),
        ("rtx4090", 1008, 165, 82.6, 24, PCIE_4),
        ("l4", 300, 121, 30.3, 24, PCIE_4),
        ("m2", 100, 3.6, 3.6, 24, None),
    )
}


@dataclass
class Deployment:
    """A model on a machine, or a part of it: `batch` requests of `context` cached tokens each."""

    config: ModelConfig
    hardware: Hardware
    dtype: str
    kv_dtype: str
    batch: int = 1
    context: int = 1024
    layers: range | None = None  # of a stage of a pipeline; None: all
    shard: Shard = WHOLE  # a rank's part of them

    def __post_init__(self) -> None:
        config, shard = self.config, self.shard
        layers = range(config.num_layers) if self.layers is None else self.layers
        has_head, has_embedding = layers.stop == config.num_layers, layers.start == 0
        shapes = {name: shape for name, shape in config.weight_names().items() if _layer_of(name) in layers}
        sizes = {name: self._size(name, shape) for name, shape in shapes.items()}
        self.num_parameters = sum(map(math.prod, config.weight_names().values()))
        # Norms and the embedding lookup multiply nothing worth counting.
        matrices = sum(sizes[n] for n in sizes if len(shapes[n]) == 2)
        routed = sum(size for name, size in sizes.items() if ".mlp.experts." in name)
        self._layers = matrices - routed  # of every pass
        count = shard.of(config.experts.count) if config.experts and shard.is_by_expert else None
        self._num_experts = (
            count.stop - count.start if count else config.experts.count if config.experts else 0
        )
        self._expert = routed // self._num_experts if config.experts else 0  # one of each layer
        rows, self._width = shard.of(config.vocab_size, TILE), WIDTHS[self.dtype]
        wide = WIDTHS[WIDE.get(self.dtype, self.dtype)]
        beside = wide if self.dtype == "mxfp4" and config.experts else self._width  # experts alone are so
        self._head = (rows.stop - rows.start) * config.hidden_size * has_head
        self._always = self._layers * beside + self._head * wide
        self.bytes_read = self._weights_read(1)  # of weights, in a pass over a row of each request
        # In memory: an embedding, whole on every rank, that is not the head too is only looked up.
        embedding = config.vocab_size * config.hidden_size * has_embedding
        is_shared = config.tie_embeddings and has_embedding
        ends = embedding + (0 if is_shared else self._head)
        self.weight_bytes = self._layers * beside + routed * self._width + ends * wide
        scales = KEY_SCALES if self.kv_dtype == "int8" else 0
        self._heads, width = shard.own(config), KV_WIDTHS[self.kv_dtype]
        self._attending = [i for i in layers if not config.is_recurrent(i)]
        # by kind of layer: bytes of its keys and values of a token
        self._kv = [kind.num_kv_heads * (2 * kind.head_dim * width + scales) for kind in self._heads.kinds]
        self.kv_bytes_per_token = self._over_layers(self._kv, 1.0)
        self.kv_bytes = self.batch * self.context * self.kv_bytes_per_token

    def _size(self, name: str, shape: tuple[int, ...]) -> int:
        """Numbers of a weight that this rank holds."""
        rows = self.shard.rows(self.config, name)
        return (rows.stop - rows.start) * math.prod(shape[1:])

    def woken(self, num_rows: int) -> float:
        """Distinct experts of a layer in a pass with `num_rows` rows for each request; of several ranks with
        whole experts, on the one that has most of them (what chance adds is at most that)."""
        experts, all_held = self.config.experts, self._num_experts
        if experts is None:
            return 0.0
        found, ranks = experts.expected_woken(self.batch * num_rows), self.shard.size
        if all_held == experts.count:
            return found
        variance = found / ranks * (1 - 1 / ranks) * (experts.count - found) / (experts.count - 1)
        return min(found / ranks + math.sqrt(2 * variance * math.log(ranks)), all_held, found)

    def _weights_read(self, num_rows: int) -> float:
        return self._always + self.woken(num_rows) * self._expert * self._width

    @property
    def active_parameters(self) -> int:
        """That a token is multiplied with."""
        return self._head + self._layers + round(self._per_row(1) * self._expert)

    def _per_row(self, num_rows: int) -> float:
        """Experts of a layer that a row is multiplied with here."""
        experts = self.config.experts
        if experts is None:
            return 0.0
        return experts.per_token * self.woken(num_rows) / experts.expected_woken(self.batch * num_rows)

    def _over_layers(self, each: Sequence[float], length: float) -> float:
        """What a token that is seen costs in each kind of layer, added up over the tokens that a row sees and
        the layers that attend: those with a sliding window see no more than it."""
        config, window = self.config, self.config.sliding_window or length
        seen = ((i, min(length, window) if config.is_local(i) else length) for i in self._attending)
        return sum(each[config.kind_of(i)] * length for i, length in seen)

    def work(self, num_rows: int, num_logits: int | None = None) -> Work:
        """Of a pass with `num_rows` rows for each request, in which row i sees the i rows before it."""
        config, rows = self._heads, self.batch * num_rows
        logits = rows if num_logits is None else self.batch * num_logits
        read = self._over_layers(self._kv, self.context + num_rows)
        # The scores q·k and the sum of values, a multiply-add each; integer sums have weights of two bytes.
        is_integer = self.kv_dtype == "int8"
        each = [(6 if is_integer else 4) * config.num_heads * kind.head_dim for kind in config.kinds]
        attention = self._over_layers(each, self.context + (num_rows + 1) / 2) * rows
        multiplied = self._layers + self._per_row(num_rows) * self._expert
        products = 2.0 * (multiplied * rows + self._head * logits)
        wide = "float32" if self.dtype == "float32" else "bfloat16"
        scores = Work(**{self.hardware.kind("int8" if is_integer else wide): attention})
        read = self._weights_read(num_rows) + self.batch * read
        work = Work(read, **{self.hardware.kind(self.dtype): products})
        return work.plus(scores)

    def seconds(self, num_rows: int) -> float:
        return self.hardware.seconds(self.work(num_rows))

    def is_memory_bound(self, num_rows: int) -> bool:
        reading, multiplying = self.hardware.times(self.work(num_rows))
        return reading >= multiplying

    def relative(self, num_rows: int) -> float:
        return self.seconds(num_rows) / self.seconds(1)

    @property
    def free_rows(self) -> int:
        """The most rows a request may have while the pass is bound by memory and reads no more weights; 0
        where one is too many."""
        if self.config.experts is not None:  # further rows wake further ones
            return min(1, self.is_memory_bound(1))
        return bisect_left(range(1, MOST_ROWS), True, key=lambda rows: not self.is_memory_bound(rows))


def _layer_of(name: str) -> int:
    """-1: none."""
    return int(name.split(".")[1]) if name.startswith("layers.") else -1


def expected_tokens(alpha: Alpha, k: int) -> float:
    """Of a pass that checks a chain of k, on average and with the target's own: (1 - α^(k+1)) / (1 - α)."""
    alphas = [alpha] * k if isinstance(alpha, (int, float)) else alpha[:k]
    return sum(accumulate(alphas, mul), 1.0)


def speedup(alpha: Alpha, k: int, draft_cost: float, verify_cost: float) -> float:
    """Over plain decoding: tokens a step gives, over what the step costs."""
    return expected_tokens(alpha, k) / (k * draft_cost + verify_cost)


def best_k(alpha: Alpha, draft_cost: float, verify_cost: Callable[[int], float], most: int) -> int:
    """The length of draft that gains most, 0 if none gains; the shortest of equally good ones."""
    gains = [speedup(alpha, k, draft_cost, verify_cost(k + 1)) for k in range(most + 1)]
    return max(range(most + 1), key=lambda k: (gains[k], -k))


def break_even_alpha(k: int, draft_cost: float, verify_cost: float) -> float | None:
    """The α from which drafting k tokens pays; None where even perfect drafts cost more than they give."""
    if speedup(1.0, k, draft_cost, verify_cost) < 1:
        return None
    low, high = 0.0, 1.0
    while high - low > PRECISION:
        middle = (low + high) / 2
        low, high = (low, middle) if speedup(middle, k, draft_cost, verify_cost) >= 1 else (middle, high)
    return high


def training(budget: float, target: Deployment) -> dict[str, float | None]:
    """How to spend a budget of FLOPs: C = 6 N D with D = 20 N; draft_cost is relative to the target."""
    parameters, hardware = math.sqrt(budget / (FLOPS_A_TOKEN * TOKENS_A_PARAMETER)), target.hardware
    tokens, hours = TOKENS_A_PARAMETER * parameters, budget / (TRAINED_AT * hardware.half_flops) / 3600
    products = {hardware.kind(target.dtype): 2 * target.batch * parameters}
    work = Work(num_bytes=parameters * WIDTHS[target.dtype], **products)
    cost = hardware.seconds(work) / target.seconds(1)
    edge = break_even_alpha(4, cost, target.relative(5))  # from which drafts of four tokens pay
    spent = {"flops": budget, "parameters": parameters, "tokens": tokens, "hours": hours}
    return {**spent, "draft_cost": cost, "pays_from": edge}
