"""`paceline bench kernels`: products, attention and whole passes of ours, and llama.cpp's passes over as many
tokens, each beside what the machine allows (step.py). A product runs over all layers, so that weights come
from memory, with all threads inside one compiled region, each on its share of every matrix, as in a pass.
"""

from __future__ import annotations

import time
from collections import namedtuple
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import carray, prange

from paceline.core.options import require
from paceline.core.types import BLOCK_SIZE
from paceline.cpu.decoder import CpuDecoder
from paceline.cpu.lanes import int_pointer
from paceline.cpu.matmul import SCALE_SHIFT, Matrix, product_4, product_8, product_32
from paceline.cpu.sync import num_threads
from paceline.loaders.checkpoint import open_checkpoint
from paceline.loaders.gguf_parts import main_type
from paceline.loaders.packed import DENSE, Tensors
from paceline.measure import limits
from paceline.measure.models import gguf_file, matrix_bytes
from paceline.measure.options import Kernels
from paceline.measure.processes import Worker, peer_worker
from paceline.measure.results import Table, Tell, table_of
from paceline.measure.roofline import Deployment, Work
from paceline.measure.rows import DTYPES, PLAIN, is_installed, names_of, peer_python, peer_rows
from paceline.measure.step import Labels, Subject, limits_json, passes_of, take_turns
from paceline.models.quantize import DOT_ROWS, FLOAT_ROWS, GROUP, bits_of, head_bits
from paceline.runtime.backend import backend_for
from paceline.runtime.executor import LocalExecutor
from paceline.runtime.timing import STRIDE, Timed

SIZES = tuple(range(1, 33))
PREFILL = 512
SPARE = 64  # tokens of a peer's context beyond what is asked of it
QUIET_S = 0.02  # threads that have just worked still spin: they must sleep before another process is timed
PASSES_SHOWN, KERNELS_SHOWN = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32), (1, 2, 4, 8, 16, 32)  # the file has all
FIGURES = {"tokens": "{tokens}", "ms": "{ms:.2f}", "×1": "{ratio:.2f}", "GB/s": "{gb_s:.1f}"}
FIGURES |= {"GMAC/s": "{gmac_s:.0f}", "floor": "{floor_ms:.2f}", "reached": "{of_floor:.0%}"}
LEGEND = """×1: time relative to one token; floor: the longer of two times, reading all weights and cached
tokens at the measured bandwidth and doing all multiply-adds at the measured rate; reached: its share of the
time, 100 % is the limit.
"""


class Run:
    def __init__(self, asked: Kernels) -> None:
        self.asked, self.dtypes = asked, names_of("--dtypes", asked.dtypes, DTYPES)
        usual = "llama.cpp:Q8_0" if is_installed("llama.cpp") else "none"  # the nearest to int8
        rows = peer_rows(usual if asked.peers == "auto" else asked.peers, [PLAIN], 1)
        for row in rows:
            alone = "its passes cannot be timed alone; name llama.cpp, none or auto"
            require(row.peer == "llama.cpp", "--peers", row.peer, alone)
            peer_python(row.peer)
        self.peers = [row for row in rows if not row.is_raw]
        # of the prompts, of the passes and of the kernels, the uncounted first ones included
        self.num_turns = 3 * (asked.repeats + 1)

    def report(self, tell: Tell) -> dict[str, Any]:
        context, repeats = self.asked.context, self.asked.repeats
        checkpoint = open_checkpoint(self.asked.model)
        length, room = min(PREFILL, checkpoint.config.max_context), checkpoint.config.max_context - SIZES[-1]
        require(context <= room, "--context", context, f"the model's own leaves room for {room}")
        tell("measuring the machine", 0)
        found = limits.measure()
        tell("loading the models", 0)
        longest = max(length, context + SIZES[-1])
        models, num_blocks = list[Model](), -(-longest // BLOCK_SIZE)
        for dtype in self.dtypes:
            backend = backend_for(torch.device("cpu"), "exact", False)
            executor = LocalExecutor.load(backend, checkpoint, num_blocks, dtype=dtype)
            assert isinstance(executor.decoder, CpuDecoder), "the CPU's backend loads it"
            on = Deployment(checkpoint.config, found, dtype, found.kv_dtype(dtype))
            models.append(Model(on, executor.decoder.tensors, Timed(executor, longest)))
        with ExitStack() as stack:
            prompts = [model.forward(0, 1) for model in models]
            passes = [model.forward(context) for model in models]
            for row in self.peers:
                path = gguf_file(checkpoint, row.variant, tell)
                options = {"model": str(path), "context": max(context + SIZES[-1], PREFILL) + SPARE}
                worker = stack.enter_context(peer_worker(row, options, tell))
                dtype = "float32" if main_type(path) == "F32" else "int8"
                for subjects, cached in ((prompts, 0), (passes, context)):
                    on = Deployment(checkpoint.config, found, dtype, "float16", context=cached)
                    subjects.append(llamacpp_passes(worker, path, on))
            prompt = take_turns(prompts, [length], repeats, found, tell)
            forward = take_turns(passes, SIZES, repeats, found, tell)
        parts = [*(part for model in models for part in model.products()), models[0].attention(context)]
        kernels = take_turns(parts, SIZES, repeats, found, tell)
        return {"limits": limits_json(found), "forward": forward + prompt, "kernels": kernels}


class Model(NamedTuple):
    """One precision of ours: its products, and passes with the same weights."""

    on: Deployment
    tensors: Tensors
    timed: Timed

    def products(self) -> Iterator[Subject]:
        config, bits = self.on.config, bits_of(self.on.dtype)
        layers = [f"layers.{i}." for i in range(config.num_layers)]
        dense = {name: [at + name for at in layers if f"{at}{name}.weight" in self.tensors] for name in DENSE}
        kinds = {name: (bits, names) for name, names in dense.items() if names}
        kinds["head"] = head_bits(bits), ["embedding" if config.tie_embeddings else "head"]
        for name, (width, names) in kinds.items():
            yield product_of(width, self.tensors, names, {"kernel": name, "dtype": self.on.dtype})

    def forward(self, context: int, num_logits: int | None = None) -> Subject:
        """Passes with the logits of all rows, or of the last ones."""
        labels = {"engine": "paceline", "dtype": self.on.dtype, "context": context}
        labels["logits"] = "last" if num_logits else "all"
        return passes_of(self.timed, replace(self.on, context=context), num_logits, labels)

    def attention(self, context: int) -> Subject:
        """What a pass takes longer over the context than over none."""
        config, over, alone = self.on.config, self.forward(context), self.forward(0)
        shape = f"{config.num_heads}/{config.num_kv_heads}x{config.head_dim}"
        return Subject(
            {"kernel": "attention", "shape": shape, "dtype": self.on.kv_dtype, "context": context},
            lambda tokens: over.seconds(tokens) - alone.seconds(tokens),
            lambda tokens: over.work(tokens).plus(alone.work(tokens), times=-1),
        )


def llamacpp_passes(worker: Worker, path: Path, on: Deployment) -> Subject:
    """llama.cpp's passes: it reads prompts whose beginning is cached, and computes the last logits only."""
    vocab_size, context, turns = on.config.vocab_size, on.context, count(1)
    prefix = [(STRIDE * i) % vocab_size for i in range(context)]
    further = Work(num_bytes=matrix_bytes(path) - on.bytes_read)

    def seconds(tokens: int) -> float:
        turn = next(turns)  # new tokens each time: what it has read already it would not read again
        new = [(11 * i + 13 * turn + context) % vocab_size for i in range(tokens)]
        time.sleep(QUIET_S)
        found = float(worker.ask("read_prompt", ids=prefix + new, num_cached=context)["seconds"])
        time.sleep(QUIET_S)
        return found

    labels = {"engine": "llama.cpp", "dtype": main_type(path), "context": context, "logits": "last"}
    return Subject(labels, seconds, lambda tokens: on.work(tokens, 1).plus(further))


def _over_all(product: Any) -> Any:
    """A kernel that multiplies with one matrix after another, all threads in one region."""

    @numba.njit(nogil=True, error_model="numpy", parallel=True)
    def run(matrices_at, count, x, y, rows, threads):  # type: ignore[no-untyped-def]
        for part in prange(threads):
            f = carray(int_pointer(matrices_at), (count, 4))
            for i in range(count):
                product(np.int64(part), threads, Matrix(f[i, 0], f[i, 1], f[i, 2], f[i, 3]), x, y, rows)

    return run


Inputs = namedtuple("Inputs", "values scales sums")  # where the input of a product lies
RUN = {bits: _over_all(product) for bits, product in ((32, product_32), (8, product_8), (4, product_4))}


def product_of(bits: int, tensors: Tensors, names: list[str], labels: Labels) -> Subject:
    """All layers' matrices of one kind times made-up tokens. `tensors` must outlive it."""
    weights, biases = ([tensors[f"{each}.{part}"] for each in names] for part in ("weight", "bias"))
    (tiles, across, _), widest = weights[0].shape, SIZES[-1]
    k, n = (across, tiles * FLOAT_ROWS) if bits == 32 else (across * GROUP[bits], tiles * DOT_ROWS)
    rows = [[w.data_ptr(), b.data_ptr(), k, n] for w, b in zip(weights, biases, strict=True)]
    table = np.array(rows, np.int64)  # [layers, 4]: fields of a Matrix each
    num_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    floats = torch.randn(widest * k, generator=torch.Generator().manual_seed(0))
    values = floats if bits == 32 else (40 * floats).clamp(-127, 127).to(torch.int8)
    groups = k // GROUP.get(bits, k)
    # Scales of a usual size: tiny results would be slow ones.
    scales = torch.full((groups * widest,), 2.0 ** (SCALE_SHIFT - 7))
    sums, y = torch.ones(groups * widest, dtype=torch.int32), torch.empty(widest * n)
    flops = {"float_flops" if bits == 32 else "int8_flops": 2.0 * len(rows) * k * n}

    def seconds(tokens: int) -> float:
        x = Inputs(values.data_ptr(), scales.data_ptr(), sums.data_ptr())
        started = time.perf_counter()
        RUN[bits](table.ctypes.data, len(table), x, y.data_ptr(), tokens, num_threads())
        return time.perf_counter() - started

    def work(tokens: int) -> Work:
        return Work(float(num_bytes), **{kind: tokens * count for kind, count in flops.items()})

    return Subject({**labels, "shape": f"{n}x{k}"}, seconds, work)  # the shape as it lies in memory


def tables(report: dict[str, Any]) -> list[Table]:
    found, context = report["limits"], report["forward"][0]["context"]
    rates = f"int8 {found['int8_gmac_s']:.0f} GMAC/s, float32 {found['float32_gmac_s']:.0f} GMAC/s"
    said = f"limits of {found['threads']} threads: reading {found['read_gb_s']:.1f} GB/s, {rates}"
    passes = [r for r in report["forward"] if r["context"] and r["tokens"] in PASSES_SHOWN]
    prompts = [r for r in report["forward"] if not r["context"]]
    parts = [r for r in report["kernels"] if r["tokens"] in KERNELS_SHOWN]
    engine, kernel = ("engine", "dtype"), ("kernel", "shape", "dtype")
    return [
        table_of(f"passes, {context} tokens cached", engine, FIGURES, passes)._replace(notes=[said]),
        table_of("prompts", engine, FIGURES, prompts),
        table_of("kernels, all layers together", kernel, FIGURES, parts),
    ]
