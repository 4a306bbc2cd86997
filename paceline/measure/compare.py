"""`paceline bench`: starts a worker process for each row, lets them take turns, stops them, whatever happens.

Invariant: at most one worker computes at any moment. Lengths come first: an untimed plain run of ours says
how long each answer naturally is, and then every row writes exactly that many tokens, end token ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError
from paceline.drafters.registry import parse
from paceline.loaders.checkpoint import Checkpoint, open_checkpoint
from paceline.measure import rows as planning
from paceline.measure.models import gguf_file, hf_folder, main_type
from paceline.measure.options import Compare
from paceline.measure.processes import Worker, WorkerError, peer_worker
from paceline.measure.prompts import Prompt, chosen
from paceline.measure.report import Sample, report_rows
from paceline.measure.results import OVERALL, Table, Tell, cell, table_of
from paceline.measure.rows import AUTO, OURS, PLAIN, RAW, Row, Task, Unit

LEAST_TOKENS = 8  # of an answer
CURVE_SIZES = list(range(1, 17))
# Peers get a context that just holds the longest request, rounded up; drafts need a little more.
CONTEXT_STEP, CONTEXT_SPARE = 256, 32
FIGURES = {  # of the table over all tasks
    "tok/s": ("tokens_per_second", "{:.1f}"),
    "±": ("spread", "{:.0%}"),
    "speedup": ("speedup", "{:.2f}"),
    "τ": ("tau", "{:.2f}"),
    "α": ("alpha", "{:.2f}"),
    "same": ("same", "{}"),
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
    rows: list[Row]
    prompts: list[Prompt]


def prepare(asked: Compare) -> Plan:
    prompts = chosen(asked.prompts, asked.limit)
    methods = planning.methods_of(asked.methods, asked.draft_model)
    peers = planning.peer_rows(asked.peers, methods, asked.concurrency)
    rows = planning.our_rows(asked.dtypes, methods) + peers
    if not rows:
        remedy = "so there is nothing to measure; name an engine"
        raise ConfigError(f"--dtypes and --peers are both none, {remedy}")
    for row in rows:
        planning.peer_python(row.peer)
    return Plan(asked, rows, prompts)


def num_turns(plan: Plan) -> int:
    """Of the timed repeats."""
    is_alone = plan.asked.concurrency == 1
    num_units = len(plan.prompts) if is_alone else len({prompt.category for prompt in plan.prompts})
    return plan.asked.repeats * num_units * len(plan.rows)


def run(plan: Plan, tell: Tell) -> dict[str, Any]:
    checkpoint, asked = open_checkpoint(plan.asked.model), plan.asked
    with ExitStack() as stack:
        row = next((row for row in plan.rows if row.peer == OURS), Row(OURS, "float32", PLAIN))
        reader = stack.enter_context(peer_worker(row, _options(asked, row, None, checkpoint, tell), tell))
        tasks = _encode(plan, reader, tell)
        context = _context(tasks, checkpoint)
        workers: dict[Row, Worker] = {}
        for row in plan.rows:
            is_reader = row.peer == OURS and not workers  # the first of ours has read the prompts
            options = {} if is_reader else _options(asked, row, context, checkpoint, tell)
            workers[row] = reader if is_reader else stack.enter_context(peer_worker(row, options, tell))
        samples = _take_turns(asked, workers, planning.units_of(tasks, asked.concurrency), tell)
        names = {row: _engine_name(row, checkpoint, tell) for row in plan.rows}
        peaks = {row: worker.peak_mb() for row, worker in workers.items()}
        records = report_rows(plan.rows, samples, peaks, names)
        notes = {names[row]: worker.note for row, worker in workers.items() if worker.note}
        is_curve = asked.plot is not None and reader in workers.values()
        return {"rows": records, "notes": notes, "verify_cost": _curve(reader) if is_curve else None}


def _curve(ours: Worker) -> dict[str, Any]:
    seconds = ours.ask("verify_cost", sizes=CURVE_SIZES)["seconds"]
    relative = [round(s / seconds[0], 4) for s in seconds]
    return {"engine": ours.name, "tokens": CURVE_SIZES, "relative": relative}


def _encode(plan: Plan, worker: Worker, tell: Tell) -> list[Task]:
    """Prompts as token ids, with the length of each answer."""
    tell("reading the prompts", 0)
    texts, most = {prompt.id: prompt.text for prompt in plan.prompts}, plan.asked.max_new_tokens
    limits = {"max_tokens": most, "min_tokens": min(LEAST_TOKENS, most)}
    found = worker.ask("encode", seconds=60 + 60 * len(texts), texts=texts, **limits)["prompts"]
    return [
        Task(p.id, p.category, tuple(found[p.id]["ids"]), found[p.id]["num_tokens"]) for p in plan.prompts
    ]


def _options(
    asked: Compare, row: Row, context: int | None, checkpoint: Checkpoint, tell: Tell
) -> dict[str, Any]:
    """What a worker is loaded with."""
    shared: dict[str, Any] = {"in_flight": asked.concurrency, "context": context}
    if row.peer == OURS:
        config = speculative_config(row.method, asked.draft_model)
        return {**shared, "model": asked.model, "dtype": row.variant, "speculative_config": config}
    is_gguf = row.peer == "llama.cpp"
    path = _gguf(row, checkpoint, tell) if is_gguf else hf_folder(checkpoint, tell)
    return {**shared, "model": str(path)}


def _gguf(row: Row, checkpoint: Checkpoint, tell: Tell) -> Any:
    return gguf_file(checkpoint, row.variant.removesuffix(RAW), tell)


def _engine_name(row: Row, checkpoint: Checkpoint, tell: Tell) -> str:
    """With the quantization that a GGUF file really has."""
    if row.peer != "llama.cpp":
        return row.engine
    return f"llama.cpp {main_type(_gguf(row, checkpoint, tell))}" + RAW * row.is_raw


def speculative_config(method: str, draft_model: str | None) -> dict[str, Any] | str | None:
    """A drafter by its name drafts its usual length at every step; only "auto" chooses."""
    if method in (PLAIN, AUTO):
        return None if method == PLAIN else AUTO
    config = {"method": method, **({"model": draft_model} if method == "draft_model" else {})}
    return {**config, "num_speculative_tokens": parse(config)[1].num_speculative_tokens}


def _context(tasks: list[Task], checkpoint: Checkpoint) -> int:
    longest = max(len(task.ids) + task.num_tokens for task in tasks) + CONTEXT_SPARE
    return min(-(-longest // CONTEXT_STEP) * CONTEXT_STEP, checkpoint.config.max_context)


def _take_turns(asked: Compare, workers: Mapping[Row, Worker], units: list[Unit], tell: Tell) -> list[Sample]:
    first, rows = planning.warm_up_of(units), list(workers)
    for _, index, row in planning.turns(rows, first, 1):
        tell(f"warming up {row}", 0)
        _run_unit(asked, workers[row], 0, row, first[index])
    samples = []
    for repeat, index, row in planning.turns(rows, units, asked.repeats):
        tell(str(row), 0)
        samples.append(_run_unit(asked, workers[row], repeat, row, units[index]))
        tell(str(row), 1)
    return samples


def _run_unit(asked: Compare, worker: Worker, repeat: int, row: Row, unit: Unit) -> Sample:
    prompts = [{"ids": task.ids, "num_tokens": task.num_tokens} for task in unit]
    # Slower than a token a second is no answer.
    seconds = 60 + sum(task.num_tokens + 0.2 * len(task.ids) for task in unit)
    answer = worker.ask("generate", seconds=seconds, prompts=prompts, in_flight=asked.concurrency)
    for task, got in zip(unit, answer["answers"], strict=True):
        if got["num_tokens"] != task.num_tokens:
            wrote = f"wrote {got['num_tokens']} tokens for prompt {task.id}"
            raise WorkerError(f"{row} {wrote} where {task.num_tokens} were asked for")
    return Sample(row, repeat, unit, answer["wall_s"], answer["answers"])


def tables(report: dict[str, Any]) -> list[Table]:
    """Everything over all tasks, then speeds by task."""
    overall = [dict(row) for row in report["rows"] if row["task"] == OVERALL]
    for row in overall:
        row["same"] = None if row["identical"] is None else f"{row['identical']}/{row['prompts']}"
    notes = [f"{engine}: {note}" for engine, note in report["notes"].items()]
    title = f"overall, {overall[0]['prompts']} prompts"
    return [
        table_of(title, ("engine", "method"), FIGURES, overall)._replace(notes=notes),
        _by_task(report["rows"], "tokens/s, by task", "tokens_per_second", "{:.1f}"),
        _by_task(report["rows"], "speedup over plain, by task", "speedup", "{:.2f}"),
    ]


def _by_task(rows: list[dict[str, Any]], title: str, name: str, form: str) -> Table:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    engines = list(dict.fromkeys((row["engine"], row["method"]) for row in rows))
    cells = {(row["engine"], row["method"], row["task"]): cell(row[name], form) for row in rows}
    lines = [(*engine, *(cells[*engine, task] for task in tasks)) for engine in engines]
    return Table(title, ("engine", "method"), tasks, lines)
