"""`paceline bench`: starts a worker process for each row, lets them take turns, stops them, whatever happens.

Invariant: at most one worker computes at any moment. Lengths come first: an untimed plain run of ours says
how long each answer naturally is, and then every row writes exactly that many tokens, end token ignored.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError
from paceline.drafters.registry import parse
from paceline.loaders.checkpoint import Checkpoint, open_checkpoint
from paceline.measure import rows as planning
from paceline.measure.models import gguf_file, hf_folder, main_type
from paceline.measure.options import Compare
from paceline.measure.processes import Worker, WorkerError
from paceline.measure.prompts import Prompt, chosen
from paceline.measure.report import OVERALL, Sample, report_rows
from paceline.measure.results import Tell, num_threads
from paceline.measure.rows import AUTO, OURS, PLAIN, RAW, Row, Task, Unit
from paceline.measure.tables import Table, cell

MODULES = {
    OURS: "run_paceline",
    "llama.cpp": "run_llamacpp",
    "transformers": "run_transformers",
    "vllm": "run_vllm",
}
LEAST_TOKENS = 8  # of an answer
CURVE_SIZES = list(range(1, 17))
# Peers get a context that just holds the longest request, rounded up; drafts need a little more.
CONTEXT_STEP, CONTEXT_SPARE = 256, 32
FIGURES = {  # of the table over all tasks: heading -> field, form
    "tok/s": ("tokens_per_second", "{:.1f}"),
    "±": ("spread", "{:.0%}"),
    "speedup": ("speedup", "{:.2f}"),
    "τ": ("tau", "{:.2f}"),
    "α": ("alpha", "{:.2f}"),
    "same": ("identical", "{}"),
    "TTFT": ("ttft_ms", "{:.0f}"),
    "TPOT": ("tpot_ms", "{:.1f}"),
    "e2e": ("end_to_end_tokens_per_second", "{:.1f}"),
    "MB": ("peak_mb", "{:.0f}"),
}
LEGEND = """tok/s, speedup: of decoding, after the first token; ±: (largest - smallest) / median of repeats;
τ: tokens a step; α: share of drafted tokens accepted; same: answers equal to plain decoding's; TTFT, TPOT:
milliseconds to the first token and for each further one; e2e: tokens a second, reading the prompt included;
MB: most memory the process held.
"""


class Plan(NamedTuple):
    asked: Compare
    rows: tuple[Row, ...]
    prompts: tuple[Prompt, ...]


def prepare(asked: Compare) -> Plan:
    prompts = chosen(asked.prompts, asked.limit)
    methods = planning.methods_of(asked.methods, asked.draft_model)
    peers = planning.peer_rows(asked.peers, methods, asked.concurrency)
    rows = planning.our_rows(asked.dtypes, methods) + peers
    if not rows:
        raise ConfigError(
            "--dtypes and --peers are both none, so there is nothing to measure; name an engine"
        )
    for row in rows:
        planning.peer_python(row.peer)
    return Plan(asked, tuple(rows), tuple(prompts))


def num_turns(plan: Plan) -> int:
    """Of the timed repeats."""
    is_alone = plan.asked.concurrency == 1
    num_units = len(plan.prompts) if is_alone else len({prompt.category for prompt in plan.prompts})
    return plan.asked.repeats * num_units * len(plan.rows)


def run(plan: Plan, tell: Tell) -> dict[str, Any]:
    checkpoint = open_checkpoint(plan.asked.model)
    logs = Path(tempfile.mkdtemp(prefix="paceline-bench-"))
    is_needed = False
    try:
        with ExitStack() as stack:
            workers = Workers(plan, checkpoint, logs, stack, tell)
            tasks = workers.encode()
            workers.start_all(_context(tasks, checkpoint))
            units = planning.units_of(tasks, plan.asked.concurrency)
            return _report(plan, workers, _take_turns(plan, workers, units, tell))
    except WorkerError:
        is_needed = True  # the error names the log
        raise
    finally:
        if not is_needed:
            shutil.rmtree(logs)


def _report(plan: Plan, workers: Workers, samples: list[Sample]) -> dict[str, Any]:
    peaks = {row: worker.peak_mb() for row, worker in workers.by_row.items()}
    records = report_rows(plan.rows, samples, peaks)
    for record in records:
        record["engine"] = workers.names.get(record["engine"], record["engine"])
    ours = next((worker for row, worker in workers.by_row.items() if row.peer == OURS), None)
    curve = None
    if plan.asked.plot is not None and ours is not None:
        seconds = ours.ask("verify_cost", sizes=CURVE_SIZES)["seconds"]
        relative = [round(s / seconds[0], 4) for s in seconds]
        curve = {"engine": ours.name, "tokens": CURVE_SIZES, "relative": relative}
    notes = {workers.names.get(engine, engine): note for engine, note in workers.notes.items()}
    return {"rows": records, "notes": notes, "verify_cost": curve}


@dataclass(slots=True)
class Workers:
    """One for each row. The stack stops them."""

    plan: Plan
    checkpoint: Checkpoint
    logs: Path
    stack: ExitStack
    tell: Tell
    by_row: dict[Row, Worker] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # engine -> what its worker says about itself
    names: dict[str, str] = field(default_factory=dict)  # engine -> a better name, known once the file is

    def encode(self) -> list[Task]:
        """Prompts as token ids, with the length of each answer, by a worker of ours: one of the rows, or one
        just for this.
        """
        row = next((row for row in self.plan.rows if row.peer == OURS), None)
        worker = self._start(row or Row(OURS, "float32", PLAIN), context=None)
        self.tell("reading the prompts", 0)
        prompts, most = self.plan.prompts, self.plan.asked.max_new_tokens
        texts = {prompt.id: prompt.text for prompt in prompts}
        limits = {"max_tokens": most, "min_tokens": min(LEAST_TOKENS, most)}
        found = worker.ask("encode", seconds=60 + 60 * len(texts), texts=texts, **limits)["prompts"]
        if row is None:
            worker.stop()
        else:
            self.by_row[row] = worker
        return [Task(p.id, p.category, tuple(found[p.id]["ids"]), found[p.id]["num_tokens"]) for p in prompts]

    def start_all(self, context: int) -> None:
        for row in self.plan.rows:
            if row not in self.by_row:
                self.by_row[row] = self._start(row, context)

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
        asked = self.plan.asked
        is_raw = row.variant.endswith(RAW)
        shared: dict[str, Any] = {"threads": num_threads(), "in_flight": asked.concurrency}
        shared |= {"context": context, "method": row.method, "is_raw": is_raw}
        if row.peer == OURS:
            config = speculative_config(row.method, asked.draft_model)
            return {**shared, "model": asked.model, "dtype": row.variant, "speculative_config": config}
        if row.peer != "llama.cpp":
            return {**shared, "model": str(hf_folder(self.checkpoint, self.tell))}
        path = gguf_file(self.checkpoint, row.variant.removesuffix(RAW), self.tell)
        self.names[row.engine] = f"llama.cpp {main_type(path)}" + RAW * is_raw
        return {**shared, "model": str(path)}


def speculative_config(method: str, draft_model: str | None) -> dict[str, Any] | str | None:
    """A drafter by its name drafts its usual length at every step; only "auto" chooses."""
    if method in (PLAIN, AUTO):
        return None if method == PLAIN else AUTO
    config = {"method": method, **({"model": draft_model} if method == "draft_model" else {})}
    return {**config, "num_speculative_tokens": parse(config)[1].num_speculative_tokens}


def _context(tasks: list[Task], checkpoint: Checkpoint) -> int:
    longest = max(len(task.ids) + task.num_tokens for task in tasks) + CONTEXT_SPARE
    return min(-(-longest // CONTEXT_STEP) * CONTEXT_STEP, checkpoint.config.max_context)


def _take_turns(plan: Plan, workers: Workers, units: list[Unit], tell: Tell) -> list[Sample]:
    first = planning.warm_up_of(units)
    for _, index, row in planning.turns(plan.rows, first, 1):
        tell(f"warming up {row}", 0)
        _run_unit(plan, workers, 0, row, first[index])
    samples = []
    for repeat, index, row in planning.turns(plan.rows, units, plan.asked.repeats):
        tell(str(row), 0)
        samples.append(_run_unit(plan, workers, repeat, row, units[index]))
        tell(str(row), 1)
    return samples


def _run_unit(plan: Plan, workers: Workers, repeat: int, row: Row, unit: Unit) -> Sample:
    prompts = [{"ids": task.ids, "num_tokens": task.num_tokens} for task in unit]
    # Slower than a token a second is no answer.
    seconds = 60 + sum(task.num_tokens + 0.2 * len(task.ids) for task in unit)
    in_flight = plan.asked.concurrency
    answer = workers.by_row[row].ask("generate", seconds=seconds, prompts=prompts, in_flight=in_flight)
    for task, got in zip(unit, answer["answers"], strict=True):
        if got["num_tokens"] != task.num_tokens:
            wrote = f"wrote {got['num_tokens']} tokens for prompt {task.id}"
            raise WorkerError(f"{row} {wrote} where {task.num_tokens} were asked for")
    return Sample(row, repeat, unit, answer["wall_s"], answer["answers"])


def tables(report: dict[str, Any]) -> list[Table]:
    """Everything over all tasks, then speeds by task."""
    overall = [row for row in report["rows"] if row["task"] == OVERALL]
    rows = [(row["engine"], row["method"], *_cells(row)) for row in overall]
    title = f"overall, {overall[0]['prompts']} prompts"
    notes = [f"{engine}: {note}" for engine, note in report["notes"].items()]
    by_task = [
        _by_task(report["rows"], "tokens/s, by task", "tokens_per_second", "{:.1f}"),
        _by_task(report["rows"], "speedup over plain, by task", "speedup", "{:.2f}"),
    ]
    return [Table(title, ("engine", "method"), tuple(FIGURES), rows, notes), *by_task]


def _by_task(rows: list[dict[str, Any]], title: str, name: str, form: str) -> Table:
    """Whichever there is more of, engines or tasks, goes down the page."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    engines = list(dict.fromkeys((row["engine"], row["method"]) for row in rows))
    cells = {(row["engine"], row["method"], row["task"]): cell(row[name], form) for row in rows}
    if len(engines) >= len(tasks):
        lines = [(*engine, *(cells[*engine, task] for task in tasks)) for engine in engines]
        return Table(title, ("engine", "method"), tasks, lines)
    lines = [(task, *(cells[*engine, task] for engine in engines)) for task in tasks]
    return Table(title, ("task",), [", ".join(engine) for engine in engines], lines)


def _cells(row: dict[str, Any]) -> list[str]:
    same = None if row["identical"] is None else f"{row['identical']}/{row['prompts']}"
    return [cell({**row, "identical": same}[name], form) for name, form in FIGURES.values()]
