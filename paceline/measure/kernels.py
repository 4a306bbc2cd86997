"""`paceline bench kernels`: products, attention and whole passes of ours, and llama.cpp's passes over as many
tokens, each beside what the machine allows.

Invariant: limits and times come from the same run. Subjects take turns at every number of tokens, so noise
hits all alike and what one left in the caches is gone when its turn comes again.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError
from paceline.core.types import BLOCK_SIZE
from paceline.cpu.decoder import CpuDecoder
from paceline.loaders.checkpoint import Checkpoint, open_checkpoint
from paceline.measure import limits
from paceline.measure import rows as planning
from paceline.measure.compare import MODULES
from paceline.measure.engines import cpu_backend
from paceline.measure.models import gguf_file, main_type, matrix_bytes
from paceline.measure.options import Kernels
from paceline.measure.processes import Worker
from paceline.measure.products import Product, kinds_of
from paceline.measure.results import Tell, num_threads
from paceline.measure.roofline import Deployment, Hardware, Work
from paceline.measure.rows import PLAIN, Row
from paceline.measure.tables import Table, cell
from paceline.models.quantize import bits_of
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
    "±": ("spread", "{:.0%}"),
    "GB/s": ("gb_s", "{:.1f}"),
    "GMAC/s": ("gmac_s", "{:.0f}"),
    "floor": ("floor_ms", "{:.2f}"),
    "reached": ("of_floor", "{:.0%}"),
}
LEGEND = """×1: time relative to one token; ±: (slowest - fastest) / median; floor: the longer of two times,
reading all weights and cached tokens at the measured bandwidth and doing all multiply-adds at the measured
rate; reached: its share of the time, 100 % is the limit.
"""

Times = dict[int, list[float]]  # tokens -> seconds of each repeat


class Subject(NamedTuple):
    """Something timed: `seconds(tokens)` is one run, `work(tokens)` what any implementation must do."""

    labels: dict[str, Any]  # of its records
    seconds: Callable[[int], float]
    work: Callable[[int], Work]


class Plan(NamedTuple):
    asked: Kernels
    dtypes: tuple[str, ...]
    peers: tuple[Row, ...]  # of llama.cpp


def prepare(asked: Kernels) -> Plan:
    names = tuple(row.variant for row in planning.our_rows(asked.dtypes, [PLAIN]))
    if not names:
        raise ConfigError("--dtypes is none, but the kernels are Paceline's own; name int8, float32 or int4")
    rows = _installed() if asked.peers == "auto" else planning.peer_rows(asked.peers, [PLAIN], 1)
    rows = [row for row in rows if not row.variant.endswith(planning.RAW)]
    for row in rows:
        if row.peer != "llama.cpp":
            raise ConfigError(
                f"--peers holds {row.peer}, whose passes cannot be timed alone; name llama.cpp, none or auto"
            )
        planning.peer_python(row.peer)
    return Plan(asked, names, tuple(rows))


def _installed() -> list[Row]:
    """llama.cpp with the weights nearest to int8, if it is there."""
    try:
        planning.peer_python("llama.cpp")
    except ConfigError:
        return []
    return [Row("llama.cpp", "Q8_0", PLAIN)]


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
        engines: list[Model | Llamacpp] = [
            *models,
            *(Llamacpp(row, checkpoint, found, context, stack, tell) for row in plan.peers),
        ]
        prompts = [engine.prefill() for engine in engines]
        prompt = _records(prompts, _take_turns(prompts, [length], repeats, "prompts", tell), found)
        passes = [engine.forward(context) for engine in engines]
        forward = _records(passes, _take_turns(passes, SIZES, repeats, "passes", tell), found)
    parts = [*(part for model in models for part in model.products()), models[0].attention(context)]
    kernels = _records(parts, _take_turns(parts, SIZES, repeats, "kernels", tell), found)
    return {"limits": limits_json(found), "forward": forward + prompt, "kernels": kernels}


def limits_json(found: Hardware) -> dict[str, Any]:
    rates = {"int8_gmac_s": found.int8_flops, "float32_gmac_s": found.float_flops}
    known = {name: round(rate / 2e9, 2) for name, rate in rates.items() if rate is not None}
    return {"threads": found.threads, "read_gb_s": round(found.bandwidth / 1e9, 2), **known}


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

    def products(self) -> list[Subject]:
        made = [Product(kind, SIZES[-1]) for kind in self._kinds]
        labels = [{"kernel": p.kind.name, "shape": p.kind.shape, "dtype": self._on.dtype} for p in made]
        return [Subject(label, p.seconds, p.kind.work) for label, p in zip(labels, made, strict=True)]

    def forward(self, context: int) -> Subject:
        labels = {"engine": "paceline", "dtype": self._on.dtype, "context": context, "logits": "all"}
        on = replace(self._on, context=context)
        return Subject(labels, lambda tokens: self._seconds(tokens, context), on.work)

    def prefill(self) -> Subject:
        labels = {"engine": "paceline", "dtype": self._on.dtype, "context": 0, "logits": "last"}
        on = replace(self._on, context=0)
        return Subject(labels, lambda tokens: self._seconds(tokens, 0, 1), lambda tokens: on.work(tokens, 1))

    def attention(self, context: int) -> Subject:
        """What a pass takes longer over the context than over none."""
        config, over, alone = (
            self._on.config,
            replace(self._on, context=context),
            replace(self._on, context=0),
        )
        shape = f"{config.num_heads}/{config.num_kv_heads}x{config.head_dim}"
        return Subject(
            {"kernel": "attention", "shape": shape, "dtype": self._on.kv_dtype, "context": context},
            lambda tokens: self._seconds(tokens, context) - self._seconds(tokens, 0),
            lambda tokens: over.work(tokens).plus(alone.work(tokens), times=-1),
        )


class Llamacpp:
    """llama.cpp's passes, through its reading of prompts whose beginning is cached. It computes the last
    token's logits only.
    """

    def __init__(
        self, row: Row, checkpoint: Checkpoint, found: Hardware, context: int, stack: ExitStack, tell: Tell
    ) -> None:
        tell(f"loading {row.engine}", 0)
        path = gguf_file(checkpoint, row.variant, tell)
        log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-"))) / "log"
        threads = num_threads()
        self._worker = Worker(row.engine, planning.peer_python(row.peer), MODULES[row.peer], log, threads)
        stack.callback(self._worker.stop)
        longest = max(context + SIZES[-1], PREFILL) + SPARE
        options = {"model": str(path), "method": row.method, "threads": threads, "in_flight": 1}
        self._worker.load({**options, "context": longest, "is_raw": False})
        self._variant, self._num_bytes, self._turn = main_type(path), matrix_bytes(path), 0
        dtype = "float32" if self._variant == "F32" else "int8"
        self._on = Deployment(checkpoint.config, found, dtype, "float16")

    def prefill(self) -> Subject:
        return self.forward(0)

    def forward(self, context: int) -> Subject:
        vocab_size, on = self._on.config.vocab_size, replace(self._on, context=context)
        prefix = [(STRIDE * i) % vocab_size for i in range(context)]

        def seconds(tokens: int) -> float:
            self._turn += 1  # new tokens each time: what it has read already it would not read again
            new = [(11 * i + 13 * self._turn + 1) % vocab_size for i in range(tokens)]
            time.sleep(QUIET_S)
            found = float(self._worker.ask("read_prompt", ids=prefix + new, num_cached=context)["seconds"])
            time.sleep(QUIET_S)
            return found

        def work(tokens: int) -> Work:
            return on.work(tokens, 1).plus(Work(num_bytes=self._num_bytes - on.bytes_read))

        labels = {"engine": "llama.cpp", "dtype": self._variant, "context": context, "logits": "last"}
        return Subject(labels, seconds, work)


def _take_turns(
    subjects: Sequence[Subject], sizes: Sequence[int], repeats: int, what: str, tell: Tell
) -> list[Times]:
    """The first repeat does not count: it compiles and fills caches."""
    times: list[Times] = [{size: [] for size in sizes} for _ in subjects]
    for repeat in range(repeats + 1):
        tell(f"timing {what}", 0)
        for size in sizes:
            for subject, its_times in zip(subjects, times, strict=True):
                seconds = subject.seconds(size)
                if repeat:
                    its_times[size].append(seconds)
        tell(f"timing {what}", 1)
    return times


def _records(subjects: Sequence[Subject], times: Sequence[Times], found: Hardware) -> list[dict[str, Any]]:
    records = []
    for subject, its_times in zip(subjects, times, strict=True):
        first = 1000 * median(its_times[1]) if 1 in its_times else None
        for size, seconds in its_times.items():
            measured = figures(seconds, subject.work(size), found, first)
            records.append({**subject.labels, "tokens": size, **measured})
    return records


def figures(seconds: list[float], work: Work, found: Hardware, first_ms: float | None) -> dict[str, Any]:
    """Of one pass or kernel: its median, its spread, its cost relative to one token, and its distance from
    the floor.
    """
    ms, floor = 1000 * median(seconds), 1000 * found.seconds(work)
    is_known = ms > 0  # a difference of two times can come out as nothing
    spread = 1000 * (max(seconds) - min(seconds)) / ms if is_known and len(seconds) > 1 else None
    return {
        "ms": round(ms, 4),
        "spread": None if spread is None else round(spread, 4),
        "ratio": round(ms / first_ms, 4) if first_ms else None,
        "gb_s": round(work.num_bytes / ms / 1e6, 2) if is_known else None,
        "gmac_s": round(work.flops / 2 / ms / 1e6, 2) if is_known else None,
        "floor_ms": round(floor, 4),
        "of_floor": round(floor / ms, 4) if is_known else None,
    }


def tables(report: dict[str, Any]) -> list[Table]:
    found, context = report["limits"], report["forward"][0]["context"]
    said = (
        f"limits of {found['threads']} threads: reading {found['read_gb_s']:.1f} GB/s, "
        f"int8 {found['int8_gmac_s']:.0f} GMAC/s, float32 {found['float32_gmac_s']:.0f} GMAC/s"
    )
    passes = [record for record in report["forward"] if record["context"]]
    prompts = [record for record in report["forward"] if not record["context"]]
    shown = [record for record in passes if record["tokens"] in PASSES_SHOWN]
    parts = [record for record in report["kernels"] if record["tokens"] in KERNELS_SHOWN]
    engine = ("engine", "dtype")
    return [
        _table(f"passes, {context} tokens cached", engine, shown)._replace(notes=[said]),
        _table("prompts", engine, prompts),
        _table("kernels, all layers together", ("kernel", "shape", "dtype"), parts),
    ]


def _table(title: str, names: Sequence[str], records: Sequence[dict[str, Any]]) -> Table:
    cells = [[cell(record[name], form) for name, form in FIGURES.values()] for record in records]
    words = [[record[name] for name in names] for record in records]
    return Table(title, names, tuple(FIGURES), [[*a, *b] for a, b in zip(words, cells, strict=True)])
