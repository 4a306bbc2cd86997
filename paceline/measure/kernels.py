"""`paceline bench kernels`: products, attention and whole passes of ours, and llama.cpp's passes over as many
tokens, each beside what the machine allows (timed.py).

Invariant: a product runs over all layers of the model, so that weights come from memory and not from a cache,
with all threads inside one compiled region, each on its share of every matrix, as in cpu/forward.py. Its
inputs are made up: what they hold changes no time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import carray, prange

from paceline.core.errors import ConfigError
from paceline.core.types import BLOCK_SIZE
from paceline.cpu.decoder import CpuDecoder
from paceline.cpu.lanes import int_pointer
from paceline.cpu.matmul import SCALE_SHIFT, Matrix, product_4, product_8, product_32
from paceline.cpu.sync import num_threads
from paceline.loaders.checkpoint import Checkpoint, open_checkpoint
from paceline.loaders.packed import LINEARS, Tensors
from paceline.measure import limits
from paceline.measure import rows as planning
from paceline.measure.engines import cpu_backend
from paceline.measure.models import gguf_file, main_type, matrix_bytes
from paceline.measure.options import Kernels
from paceline.measure.processes import Worker, peer_worker
from paceline.measure.results import Table, Tell, table_of
from paceline.measure.roofline import Deployment, Hardware, Work
from paceline.measure.rows import PLAIN, Row
from paceline.measure.timed import Subject, limits_json, take_turns
from paceline.models.config import ModelConfig
from paceline.models.quantize import DOT_ROWS, FLOAT_ROWS, GROUP, bits_of, head_bits
from paceline.runtime.executor import LocalExecutor
from paceline.runtime.timing import STRIDE, Timed

SIZES = tuple(range(1, 33))
PREFILL = 512
SPARE = 64  # tokens of a peer's context beyond what is asked of it
QUIET_S = 0.02  # threads that have just worked still spin: they must sleep before another process is timed
PASSES_SHOWN, KERNELS_SHOWN = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32), (1, 2, 4, 8, 16, 32)  # the file has all
FIGURES = {
    "tokens": ("tokens", "{}"),
    "ms": ("ms", "{:.2f}"),
    "×1": ("ratio", "{:.2f}"),
    "GB/s": ("gb_s", "{:.1f}"),
    "GMAC/s": ("gmac_s", "{:.0f}"),
    "floor": ("floor_ms", "{:.2f}"),
    "reached": ("of_floor", "{:.0%}"),
}
LEGEND = """×1: time relative to one token; floor: the longer of two times, reading all weights and cached
tokens at the measured bandwidth and doing all multiply-adds at the measured rate; reached: its share of the
time, 100 % is the limit.
"""


class Plan(NamedTuple):
    asked: Kernels
    dtypes: list[str]
    peers: list[Row]  # of llama.cpp


def prepare(asked: Kernels) -> Plan:
    names = [row.variant for row in planning.our_rows(asked.dtypes, [PLAIN])]
    if not names:
        raise ConfigError("--dtypes is none, but the kernels are Paceline's own; name int8, float32 or int4")
    usual = "llama.cpp:Q8_0" if planning.is_installed("llama.cpp") else "none"  # the nearest to int8
    rows = planning.peer_rows(usual if asked.peers == "auto" else asked.peers, [PLAIN], 1)
    for row in rows:
        if row.peer != "llama.cpp":
            remedy = "name llama.cpp, none or auto"
            raise ConfigError(f"--peers holds {row.peer}, whose passes cannot be timed alone; {remedy}")
        planning.peer_python(row.peer)
    return Plan(asked, names, [row for row in rows if not row.is_raw])


def num_turns(plan: Plan) -> int:
    """Repeats of the prompts, of the passes and of the kernels, the uncounted first ones included."""
    return 3 * (plan.asked.repeats + 1)


def run(plan: Plan, tell: Tell) -> dict[str, Any]:
    context, repeats = plan.asked.context, plan.asked.repeats
    checkpoint = open_checkpoint(plan.asked.model)
    length, room = min(PREFILL, checkpoint.config.max_context), checkpoint.config.max_context - SIZES[-1]
    if context > room:
        raise ConfigError(f"--context is {context}; the model's own leaves room for {room}")
    tell("measuring the machine", 0)
    found = limits.measure()
    tell("loading the models", 0)
    models = [Model(checkpoint, dtype, found, max(length, context + SIZES[-1])) for dtype in plan.dtypes]
    with ExitStack() as stack:
        peers = [_llamacpp(row, checkpoint, found, context, stack, tell) for row in plan.peers]
        prompts = [model.forward(0, 1) for model in models] + [peer.forward(0) for peer in peers]
        prompt = take_turns(prompts, [length], repeats, found, tell)
        passes = [model.forward(context) for model in models] + [peer.forward(context) for peer in peers]
        forward = take_turns(passes, SIZES, repeats, found, tell)
    parts = [*(part for model in models for part in model.products()), models[0].attention(context)]
    kernels = take_turns(parts, SIZES, repeats, found, tell)
    return {"limits": limits_json(found), "forward": forward + prompt, "kernels": kernels}


class Model:
    """One precision of ours: its products, and passes with the same weights."""

    def __init__(self, checkpoint: Checkpoint, dtype: str, found: Hardware, longest: int) -> None:
        self._on = Deployment(checkpoint.config, found, dtype, found.kv_dtype(dtype))
        blocks = -(-longest // BLOCK_SIZE)
        executor = LocalExecutor.load(cpu_backend(), checkpoint, blocks, dtype=dtype)
        assert isinstance(executor.decoder, CpuDecoder), "the CPU's backend loads it"
        self._kinds = list(kinds_of(checkpoint.config, executor.decoder.tensors, bits_of(dtype)))
        self._passes = Timed(executor, longest)

    def _seconds(self, tokens: int, context: int, num_logits: int | None = None) -> float:
        """Right after another pass, as in decoding: the threads are awake and the code is in the caches."""
        self._passes.seconds(1, context)
        return self._passes.seconds(tokens, context, num_logits)

    def products(self) -> Iterator[Subject]:
        for kind in self._kinds:
            labels = {"kernel": kind.name, "shape": kind.shape, "dtype": self._on.dtype}
            yield Subject(labels, Product(kind, SIZES[-1]).seconds, kind.work)

    def forward(self, context: int, num_logits: int | None = None) -> Subject:
        """Passes with the logits of all rows, or of the last ones."""
        labels = {"engine": "paceline", "dtype": self._on.dtype, "context": context}
        labels["logits"] = "last" if num_logits else "all"
        on = replace(self._on, context=context)
        return Subject(
            labels, lambda n: self._seconds(n, context, num_logits), lambda n: on.work(n, num_logits)
        )

    def attention(self, context: int) -> Subject:
        """What a pass takes longer over the context than over none."""
        config, over, alone = self._on.config, self.forward(context), self.forward(0)
        shape = f"{config.num_heads}/{config.num_kv_heads}x{config.head_dim}"
        return Subject(
            {"kernel": "attention", "shape": shape, "dtype": self._on.kv_dtype, "context": context},
            lambda tokens: over.seconds(tokens) - alone.seconds(tokens),
            lambda tokens: over.work(tokens).plus(alone.work(tokens), times=-1),
        )


class Llamacpp(NamedTuple):
    """llama.cpp's passes, through its reading of prompts whose beginning is cached. It computes the last
    token's logits only."""

    worker: Worker
    variant: str
    on: Deployment
    num_bytes: int  # of its file that every pass reads

    def forward(self, context: int) -> Subject:
        vocab_size, on = self.on.config.vocab_size, replace(self.on, context=context)
        prefix, turns = [(STRIDE * i) % vocab_size for i in range(context)], iter(range(1, 1 << 30))

        def seconds(tokens: int) -> float:
            turn = next(turns)  # new tokens each time: what it has read already it would not read again
            new = [(11 * i + 13 * turn + context) % vocab_size for i in range(tokens)]
            time.sleep(QUIET_S)
            found = float(self.worker.ask("read_prompt", ids=prefix + new, num_cached=context)["seconds"])
            time.sleep(QUIET_S)
            return found

        def work(tokens: int) -> Work:
            return on.work(tokens, 1).plus(Work(num_bytes=self.num_bytes - on.bytes_read))

        labels = {"engine": "llama.cpp", "dtype": self.variant, "context": context, "logits": "last"}
        return Subject(labels, seconds, work)


def _llamacpp(
    row: Row, checkpoint: Checkpoint, found: Hardware, context: int, stack: ExitStack, tell: Tell
) -> Llamacpp:
    path = gguf_file(checkpoint, row.variant, tell)
    options = {"model": str(path), "context": max(context + SIZES[-1], PREFILL) + SPARE}
    worker = stack.enter_context(peer_worker(row, options, tell))
    variant = main_type(path)
    dtype = "float32" if variant == "F32" else "int8"
    on = Deployment(checkpoint.config, found, dtype, "float16")
    return Llamacpp(worker, variant, on, matrix_bytes(path))


class Inputs(NamedTuple):
    """Where the input of a product lies."""

    values: int
    scales: int
    sums: int


def _over_all(product: Any) -> Any:
    """A kernel that multiplies with one matrix after another, all threads in one region."""

    @numba.njit(nogil=True, error_model="numpy", parallel=True)
    def run(matrices_at, count, x, y, rows, threads):  # type: ignore[no-untyped-def]
        for part in prange(threads):
            f = carray(int_pointer(matrices_at), (count, 4))
            for i in range(count):
                product(np.int64(part), threads, Matrix(f[i, 0], f[i, 1], f[i, 2], f[i, 3]), x, y, rows)

    return run


RUN = {bits: _over_all(product) for bits, product in ((32, product_32), (8, product_8), (4, product_4))}


class Kind(NamedTuple):
    """All layers' matrices of one kind, and what one token's product with them is."""

    name: str  # qkv, out, gate_up, down or head
    bits: int
    table: np.ndarray  # [layers, 4] int64: fields of a Matrix each
    num_bytes: int

    @property
    def shape(self) -> str:
        """Outputs x inputs, as they lie in memory."""
        return f"{self.table[0, 3]}x{self.table[0, 2]}"

    @property
    def macs(self) -> int:
        return int((self.table[:, 2] * self.table[:, 3]).sum())

    def work(self, tokens: int) -> Work:
        flops = 2.0 * self.macs * tokens
        kind = {"float_flops": flops} if self.bits == 32 else {"int8_flops": flops}
        return Work(num_bytes=float(self.num_bytes), **kind)


def kinds_of(config: ModelConfig, tensors: Tensors, bits: int) -> Iterator[Kind]:
    """The products of a packed model; `tensors` must outlive them."""
    for name in LINEARS:
        yield _kind(name, bits, tensors, [f"layers.{i}.{name}" for i in range(config.num_layers)])
    yield _kind("head", head_bits(bits), tensors, ["embedding" if config.tie_embeddings else "head"])


def _kind(name: str, bits: int, tensors: Tensors, names: list[str]) -> Kind:
    weights, biases = ([tensors[f"{each}.{part}"] for each in names] for part in ("weight", "bias"))
    tiles, across, _ = weights[0].shape
    k, n = (across, tiles * FLOAT_ROWS) if bits == 32 else (across * GROUP[bits], tiles * DOT_ROWS)
    rows = [[weight.data_ptr(), bias.data_ptr(), k, n] for weight, bias in zip(weights, biases, strict=True)]
    return Kind(name, bits, np.array(rows, np.int64), sum(w.numel() * w.element_size() for w in weights))


class Product:
    """One kind, ready to be run with up to `widest` tokens."""

    def __init__(self, kind: Kind, widest: int) -> None:
        self.kind = kind
        k, n = (int(size) for size in kind.table[0, 2:])
        generator = torch.Generator().manual_seed(0)
        if kind.bits == 32:
            self._values = torch.randn(widest * k, generator=generator)
        else:
            self._values = torch.randint(-127, 128, (widest * k,), dtype=torch.int8, generator=generator)
        groups = k // GROUP.get(kind.bits, k)
        # Scales of a usual size: tiny results would be slow ones.
        self._scales = torch.full((groups * widest,), 2.0 ** (SCALE_SHIFT - 7))
        self._sums = torch.ones(groups * widest, dtype=torch.int32)
        self._y = torch.empty(widest * n)

    def seconds(self, tokens: int) -> float:
        x = Inputs(self._values.data_ptr(), self._scales.data_ptr(), self._sums.data_ptr())
        run, table = RUN[self.kind.bits], self.kind.table
        started = time.perf_counter()
        run(table.ctypes.data, len(table), x, self._y.data_ptr(), tokens, num_threads())
        return time.perf_counter() - started


def tables(report: dict[str, Any]) -> list[Table]:
    found, context = report["limits"], report["forward"][0]["context"]
    said = (
        f"limits of {found['threads']} threads: reading {found['read_gb_s']:.1f} GB/s, "
        f"int8 {found['int8_gmac_s']:.0f} GMAC/s, float32 {found['float32_gmac_s']:.0f} GMAC/s"
    )
    passes = [r for r in report["forward"] if r["context"] and r["tokens"] in PASSES_SHOWN]
    prompts = [r for r in report["forward"] if not r["context"]]
    parts = [r for r in report["kernels"] if r["tokens"] in KERNELS_SHOWN]
    engine, kernel = ("engine", "dtype"), ("kernel", "shape", "dtype")
    return [
        table_of(f"passes, {context} tokens cached", engine, FIGURES, passes)._replace(notes=[said]),
        table_of("prompts", engine, FIGURES, prompts),
        table_of("kernels, all layers together", kernel, FIGURES, parts),
    ]
