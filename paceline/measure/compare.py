"""`paceline bench`: starts a worker process for each row, lets them take turns, stops them, whatever happens.
Invariant: at most one worker computes at any moment. Lengths come first: an untimed plain run of ours says
how long each answer naturally is, and then every row writes exactly that many tokens, end token ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any

from paceline.core.errors import ConfigError
from paceline.drafters.registry import SMALLER
from paceline.loaders.checkpoint import Checkpoint, open_checkpoint
from paceline.loaders.gguf_parts import main_type
from paceline.measure import rows as planning
from paceline.measure.engines import speculation_of
from paceline.measure.models import gguf_file, hf_folder
from paceline.measure.options import Compare
from paceline.measure.processes import Worker, WorkerError, peer_worker
from paceline.measure.prompts import chosen
from paceline.measure.results import OVERALL, Table, Tell, table_of
from paceline.measure.rows import FILE_AS_IS, OURS, PLAIN, RAW, Answer, Row, Task, Unit

LEAST_TOKENS = 8  # of an answer
# Peers get a context that just holds the longest request, rounded up; drafts need a little more.
CONTEXT_STEP, CONTEXT_SPARE = 256, 32
# of the table over all tasks
FIGURES = {"tok/s": "{tokens_per_second:.1f}", "±": "{spread:.0%}", "speedup": "{speedup:.2f}"}
FIGURES |= {"τ": "{tau:.2f}", "α": "{alpha:.2f}", "same": "{same}", "TTFT": "{ttft_ms:.0f}"}
FIGURES |= {"TPOT": "{tpot_ms:.1f}", "e2e": "{end_to_end_tokens_per_second:.1f}", "MB": "{peak_mb:.0f}"}
LEGEND = """tok/s, speedup: of decoding, after the first token; ±: (largest - smallest) / median of repeats;
τ: tokens a step; α: share of drafted tokens accepted; same: answers equal to plain decoding's; TTFT, TPOT:
milliseconds to the first token and for each further one; e2e: tokens a second, reading the prompt included;
MB: most memory the process held.
"""


class Run:
    def __init__(self, asked: Compare) -> None:
        self.asked, self.prompts = asked, chosen(asked.prompts, asked.limit)
        methods = planning.methods_of(asked.methods, asked.draft_model)
        dtypes = planning.dtypes_of(asked.dtypes)
        self.rows = [Row(OURS, dtype, method) for dtype in dtypes for method in methods]
        self.rows += planning.peer_rows(asked.peers, methods, asked.concurrency)
        if not self.rows:
            raise ConfigError("--dtypes and --peers are none: nothing to measure; name an engine")
        for row in self.rows:
            planning.peer_python(row.peer)
        num_units = len({p.id if asked.concurrency == 1 else p.category for p in self.prompts})
        self.num_turns = asked.repeats * num_units * len(self.rows)  # of the timed repeats

    def report(self, tell: Tell) -> dict[str, Any]:
        checkpoint = open_checkpoint(self.asked.model)
        with ExitStack() as stack:

            def start(row: Row, context: int | None) -> Worker:
                options = {"in_flight": self.asked.concurrency, "context": context}
                options |= self._model_options(row, checkpoint, tell)
                return stack.enter_context(peer_worker(row, options, tell))

            first = next((row for row in self.rows if row.peer == OURS), Row(OURS, "float32", PLAIN))
            reader = start(first, None)
            tell("reading the prompts", 0)
            texts, most = {prompt.id: prompt.text for prompt in self.prompts}, self.asked.max_new_tokens
            limits = {"max_tokens": most, "min_tokens": min(LEAST_TOKENS, most)}
            found = reader.ask("encode", seconds=60 + 60 * len(texts), texts=texts, **limits)["prompts"]
            pairs = [(prompt, found[prompt.id]) for prompt in self.prompts]
            tasks = [Task(p.id, p.category, tuple(each["ids"]), each["num_tokens"]) for p, each in pairs]
            longest = max(len(task.ids) + task.num_tokens for task in tasks) + CONTEXT_SPARE
            context = min(-(-longest // CONTEXT_STEP) * CONTEXT_STEP, checkpoint.config.max_context)
            workers = {}
            for row in self.rows:  # with the quantization that a GGUF file really has
                kind = main_type(checkpoint.path) if FILE_AS_IS in row.variant else FILE_AS_IS
                named = row._replace(variant=row.variant.replace(FILE_AS_IS, kind))
                workers[named] = reader if row == first else start(row, context)
            units = units_of(tasks, self.asked.concurrency)
            runners = {row: partial(self._run, row, worker) for row, worker in workers.items()}
            # The first unit of each category is enough to compile, to page weights in, to reach every kernel.
            for unit in {unit[0].category: unit for unit in reversed(units)}.values():
                for row, run in runners.items():
                    tell(f"warming up {row}", 0)
                    run(unit)
            samples = list(chain(*planning.samples_of(runners, units, self.asked.repeats, tell)))
            peaks = {row: worker.peak_mb() for row, worker in workers.items()}
            notes = {row.engine: worker.note for row, worker in workers.items() if worker.note}
            return {"rows": planning.report_rows(list(workers), samples, peaks), "notes": notes}

    def _model_options(self, row: Row, checkpoint: Checkpoint, tell: Tell) -> dict[str, Any]:
        """What a worker loads."""
        if row.peer == "llama.cpp":
            return {"model": str(gguf_file(checkpoint, row.variant.removesuffix(RAW), tell))}
        if row.peer != OURS:
            return {"model": str(hf_folder(checkpoint, tell))}
        model = {"model": self.asked.draft_model} if row.method in SMALLER else {}
        given = {"speculative_config": speculation_of(row.method, **model), "dtype": row.variant}
        return {"model": self.asked.model, "more": given}

    def _run(self, row: Row, worker: Worker, unit: Unit) -> tuple[float, list[Answer]]:
        prompts = [{"ids": list(task.ids), "num_tokens": task.num_tokens} for task in unit]
        # Slower than a token a second is no answer.
        seconds = 60 + sum(task.num_tokens + 0.2 * len(task.ids) for task in unit)
        answer = worker.ask("generate", seconds=seconds, prompts=prompts, in_flight=self.asked.concurrency)
        for task, got in zip(unit, answer["answers"], strict=True):
            if got["num_tokens"] != task.num_tokens:
                wrote = f"wrote {got['num_tokens']} tokens for prompt {task.id}"
                raise WorkerError(f"{row} {wrote} where {task.num_tokens} were asked for")
        return answer["wall_s"], answer["answers"]


def units_of(tasks: Sequence[Task], concurrency: int) -> list[Unit]:
    """What runs together: each prompt alone, or all of a category."""
    groups: dict[str, Unit] = {}
    for task in tasks:
        key = task.id if concurrency == 1 else task.category
        groups[key] = (*groups.get(key, ()), task)
    return list(groups.values())


def tables(report: dict[str, Any]) -> list[Table]:
    """Everything over all tasks, then speeds by task."""
    overall = [dict(row) for row in report["rows"] if row["task"] == OVERALL]
    for row in overall:
        row["same"] = None if row["identical"] is None else f"{row['identical']}/{row['prompts']}"
    notes = [f"{engine}: {note}" for engine, note in report["notes"].items()]
    title, names = f"overall, {overall[0]['prompts']} prompts", ("engine", "method")
    return [
        table_of(title, names, FIGURES, overall)._replace(notes=notes),
        planning.by_task(report["rows"], "tokens/s, by task", "tokens_per_second", "{:.1f}", *names),
        planning.by_task(report["rows"], "speedup over plain, by task", "speedup", "{:.2f}", *names),
    ]
