"""Runs `paceline bench kernels`: machine limits, then every subject with every number of tokens, in turns,
and the report of it all.

Invariant: limits and times come from the same run. Subjects take turns at every number of tokens, so noise
hits all alike and what one left in the caches is gone when its turn comes again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError
from paceline.loaders import hub
from paceline.loaders.checkpoint import Checkpoint, open_checkpoint
from paceline.measure import limits
from paceline.measure import plan as planning
from paceline.measure.floors import figures
from paceline.measure.limits import Limits
from paceline.measure.measure import MODULES, machine, num_threads
from paceline.measure.models import gguf_file, main_type
from paceline.measure.plan import Row
from paceline.measure.processes import Worker
from paceline.measure.subjects import Llamacpp, Model, Subject

SIZES = tuple(range(1, 33))
PREFILL = 512
SPARE = 64  # tokens of a peer's context beyond what is asked of it

Tell = Callable[[str, int], None]
Times = dict[int, list[float]]  # tokens -> seconds of each repeat


class Options(NamedTuple):
    model: str
    dtypes: tuple[str, ...]
    peers: tuple[Row, ...]  # of llama.cpp
    context: int
    repeats: int


def installed_peer() -> tuple[Row, ...]:
    """llama.cpp with the weights nearest to int8, if it is there."""
    try:
        planning.peer_python("llama.cpp")
    except ConfigError:
        return ()
    return (Row("llama.cpp", "Q8_0", planning.PLAIN),)


def num_turns(options: Options) -> int:
    """For the progress bar: repeats of the prompts, of the passes and of the kernels, the uncounted first
    ones included.
    """
    return 3 * (options.repeats + 1)


def run(options: Options, tell: Tell) -> dict[str, Any]:
    checkpoint = open_checkpoint(options.model)
    length = min(PREFILL, checkpoint.config.max_context)
    if options.context + SIZES[-1] > checkpoint.config.max_context:
        most = checkpoint.config.max_context - SIZES[-1]
        raise ConfigError(f"--context is {options.context}; the model's own leaves room for {most}")
    tell("measuring the machine", 0)
    found = limits.measure()
    tell("loading the models", 0)
    lengths = (
        length,
        options.context + SIZES[-1],
        options.context + SIZES[-1],
        SIZES[-1],
    )  # prompt, pass, attention with and without
    models = [Model(checkpoint, dtype, lengths) for dtype in options.dtypes]
    with ExitStack() as stack:
        peers = [_llamacpp(row, checkpoint, models[0], options.context, stack, tell) for row in options.peers]
        prefills = [*(model.prefill(length) for model in models), *(peer.prefill() for peer in peers)]
        prompt = _records(prefills, _take_turns(prefills, [length], options.repeats, "prompts", tell), found)
        passes = [
            *(model.forward(options.context, SIZES[-1]) for model in models),
            *(peer.forward(options.context) for peer in peers),
        ]
        forward = _records(passes, _take_turns(passes, SIZES, options.repeats, "passes", tell), found)
    parts = [
        *(part for model in models for part in model.products(SIZES[-1])),
        models[0].attention(options.context, SIZES[-1]),
    ]
    kernels = _records(parts, _take_turns(parts, SIZES, options.repeats, "kernels", tell), found)
    return {"machine": machine(), "limits": found.as_dict(), "forward": forward + prompt, "kernels": kernels}


def _llamacpp(
    row: Row, checkpoint: Checkpoint, model: Model, context: int, stack: ExitStack, tell: Tell
) -> Llamacpp:
    tell(f"loading {row.engine}", 0)
    kind = None if row.variant == planning.FILE_AS_IS else row.variant
    path = gguf_file(checkpoint, kind, hub.cache_dir() / "bench", lambda text: tell(text, 0))
    log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-"))) / "log"
    worker = Worker(row.engine, planning.peer_python(row.peer), MODULES[row.peer], log, num_threads())
    stack.callback(worker.stop)
    longest = max(context + SIZES[-1], PREFILL) + SPARE
    options = {
        "model": str(path),
        "method": row.method,
        "threads": num_threads(),
        "in_flight": 1,
        "context": longest,
    }
    worker.load(options)
    return Llamacpp(worker, main_type(path), path, model)


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


def _records(subjects: Sequence[Subject], times: Sequence[Times], found: Limits) -> list[dict[str, Any]]:
    records = []
    for subject, its_times in zip(subjects, times, strict=True):
        first = 1000 * median(its_times[1]) if 1 in its_times else None
        for size, seconds in its_times.items():
            records.append(
                {**subject.labels, "tokens": size, **figures(seconds, subject.work(size), found, first)}
            )
    return records
