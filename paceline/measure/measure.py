"""Runs a plan: starts the workers, lets them take turns, stops them, whatever happens.

Invariant: at most one worker computes at any moment. Lengths come first: an untimed plain run of ours says
how long each answer naturally is, and then every row writes exactly that many tokens, end token ignored.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paceline import __version__
from paceline.loaders import hub
from paceline.loaders.checkpoint import Checkpoint, open_checkpoint
from paceline.measure import plan as planning
from paceline.measure.models import gguf_file, hf_folder, main_type
from paceline.measure.plan import OURS, PLAIN, Plan, Row, Task, Unit
from paceline.measure.processes import Worker, WorkerError
from paceline.measure.report import Sample, report_rows

MODULES = {
    OURS: "run_paceline",
    "llama.cpp": "run_llamacpp",
    "transformers": "run_transformers",
    "vllm": "run_vllm",
}
CURVE_SIZES = list(range(1, 17))
CONTEXT_STEP, CONTEXT_SPARE = (
    256,
    32,
)  # peers get a context that just holds the longest request, rounded up; drafts need a little more

Tell = Callable[[str, int], None]  # what is being done, and how many turns have just been finished


class Result(NamedTuple):
    machine: dict[str, Any]
    rows: list[dict[str, Any]]
    notes: dict[str, str]  # engine -> what its worker says about itself
    verify_cost: dict[str, Any] | None  # tokens in a pass, and its time relative to one token


def num_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_turns(plan: Plan) -> int:
    """For the progress bar: turns of the timed repeats."""
    num_units = (
        len(plan.prompts) if plan.concurrency == 1 else len({prompt.category for prompt in plan.prompts})
    )
    return plan.repeats * num_units * len(plan.rows)


def run(plan: Plan, tell: Tell, with_curve: bool = False) -> Result:
    checkpoint = open_checkpoint(plan.model)
    logs = Path(tempfile.mkdtemp(prefix="paceline-bench-"))
    is_needed = False
    try:
        with ExitStack() as stack:
            crew = Crew(plan, checkpoint, logs, stack, tell)
            tasks = crew.encode()
            crew.start_all(_context(tasks, checkpoint))
            samples = _take_turns(plan, crew, planning.units_of(tasks, plan.concurrency), tell)
            return _result(plan, crew, samples, with_curve)
    except WorkerError:
        is_needed = True  # the error names the log
        raise
    finally:
        if not is_needed:
            shutil.rmtree(logs)


def _result(plan: Plan, crew: Crew, samples: list[Sample], with_curve: bool) -> Result:
    peaks = {row: worker.peak_mb() for row, worker in crew.workers.items()}
    records = report_rows(plan.rows, samples, peaks)
    for record in records:
        record["engine"] = crew.names.get(record["engine"], record["engine"])
    ours = next((worker for row, worker in crew.workers.items() if row.peer == OURS), None)
    curve = None
    if with_curve and ours is not None:
        seconds = ours.ask("verify_cost", sizes=CURVE_SIZES)["seconds"]
        curve = {
            "engine": ours.name,
            "tokens": CURVE_SIZES,
            "relative": [round(s / seconds[0], 4) for s in seconds],
        }
    notes = {crew.names.get(engine, engine): note for engine, note in crew.notes.items()}
    return Result(machine(), records, notes, curve)


@dataclass(slots=True)
class Crew:
    """The workers of one run, one for each row. The stack stops them."""

    plan: Plan
    checkpoint: Checkpoint
    logs: Path
    stack: ExitStack
    tell: Tell
    workers: dict[Row, Worker] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # engine -> a better name, known once the file is

    def encode(self) -> list[Task]:
        """Prompts as token ids, with the length of each answer, by a worker of ours: one of the rows, or one
        just for this.
        """
        row = next((row for row in self.plan.rows if row.peer == OURS), None)
        worker = self._start(row or Row(OURS, "float32", PLAIN), context=None)
        self.tell("reading the prompts", 0)
        texts = {prompt.id: prompt.text for prompt in self.plan.prompts}
        limits = {"max_tokens": self.plan.max_new_tokens, "min_tokens": self.plan.min_new_tokens}
        found = worker.ask("encode", seconds=60 + 60 * len(texts), texts=texts, **limits)["prompts"]
        if row is None:
            worker.stop()
        else:
            self.workers[row] = worker
        return [
            Task(p.id, p.category, tuple(found[p.id]["ids"]), found[p.id]["num_tokens"])
            for p in self.plan.prompts
        ]

    def start_all(self, context: int) -> None:
        for row in self.plan.rows:
            if row not in self.workers:
                self.workers[row] = self._start(row, context)

    def _start(self, row: Row, context: int | None) -> Worker:
        options = self._options(row, context)
        self.tell(f"loading {row}", 0)
        log = self.logs / f"{len(list(self.logs.iterdir()))}.log"
        worker = Worker(str(row), planning.peer_python(row.peer), MODULES[row.peer], log, options["threads"])
        self.stack.callback(worker.stop)
        note = worker.load(options).get("note")
        if note:
            self.notes[row.engine] = note
        return worker

    def _options(self, row: Row, context: int | None) -> dict[str, Any]:
        shared = {
            "threads": num_threads(),
            "in_flight": self.plan.concurrency,
            "context": context,
            "method": row.method,
        }
        if row.peer == OURS:
            return {
                **shared,
                "model": self.plan.model,
                "dtype": row.variant,
                "speculative_config": self.plan.speculative_config(row),
            }
        folder = hub.cache_dir() / "bench"

        def say(text: str) -> None:
            self.tell(text, 0)

        if row.peer != "llama.cpp":
            return {**shared, "model": str(hf_folder(self.checkpoint, folder, say))}
        kind = None if row.variant == planning.FILE_AS_IS else row.variant
        path = gguf_file(self.checkpoint, kind, folder, say)
        self.names[row.engine] = f"llama.cpp {main_type(path)}"
        return {**shared, "model": str(path)}


def _context(tasks: list[Task], checkpoint: Checkpoint) -> int:
    longest = max(len(task.ids) + task.num_tokens for task in tasks) + CONTEXT_SPARE
    return min(-(-longest // CONTEXT_STEP) * CONTEXT_STEP, checkpoint.config.max_context)


def _take_turns(plan: Plan, crew: Crew, units: list[Unit], tell: Tell) -> list[Sample]:
    first = planning.warm_up_of(units)
    for _, index, row in planning.turns(plan.rows, first, 1):
        tell(f"warming up {row}", 0)
        _run_unit(plan, crew, 0, row, first[index])
    samples = []
    for repeat, index, row in planning.turns(plan.rows, units, plan.repeats):
        tell(str(row), 0)
        samples.append(_run_unit(plan, crew, repeat, row, units[index]))
        tell(str(row), 1)
    return samples


def _run_unit(plan: Plan, crew: Crew, repeat: int, row: Row, unit: Unit) -> Sample:
    prompts = [{"ids": task.ids, "num_tokens": task.num_tokens} for task in unit]
    seconds = 60 + sum(
        task.num_tokens + 0.2 * len(task.ids) for task in unit
    )  # slower than a token a second is no answer
    answer = crew.workers[row].ask("generate", seconds=seconds, prompts=prompts, in_flight=plan.concurrency)
    for task, got in zip(unit, answer["answers"], strict=True):
        if got["num_tokens"] != task.num_tokens:
            raise WorkerError(
                f"{row} wrote {got['num_tokens']} tokens for prompt {task.id} where {task.num_tokens} were asked for"
            )
    return Sample(row, repeat, unit, answer["wall_s"], answer["answers"])


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    described = {
        "cpu": _cpu_name(),
        "cores": num_threads(),
        "system": platform.system(),
        "architecture": platform.machine(),
    }
    return {**described, "python": platform.python_version(), "paceline": __version__}


def _cpu_name() -> str:
    try:
        lines = subprocess.run(
            ["lscpu"], capture_output=True, text=True, timeout=10, env={**os.environ, "LC_ALL": "C"}
        ).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        lines = []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name")),
        platform.processor() or "unknown",
    )
