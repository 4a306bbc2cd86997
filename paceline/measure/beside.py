"""`paceline bench serve --peers`: `paceline serve` and llama.cpp's server under the same load, taking turns.

A client sends its next prompt when its last answer is complete. A round gives every server the same new
prompts at every level, in an order that turns round, so no server meets a prompt twice. Both keep the
beginnings of prompts they have read, both have a place for every client; the reading of prompts counts.
Invariant: the ratio is to the fastest peer of each level.
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError
from paceline.loaders.checkpoint import open_checkpoint
from paceline.measure.endpoint import Endpoint, endpoint_of
from paceline.measure.load import Job, Level, Load, run_level
from paceline.measure.models import gguf_file
from paceline.measure.options import Serve
from paceline.measure.processes import Worker
from paceline.measure.prompts import Prompt
from paceline.measure.results import Tell, num_threads
from paceline.measure.rows import OURS, VARIANTS, names_of, peer_python
from paceline.measure.servers import our_server
from paceline.measure.tables import Table

LEVELS = "1,4,16"
QUIET_S = 0.3  # between servers: the last one's threads may still be spinning
FEWEST = 4  # prompts of a level, times --turns
CONTEXT = 4096  # tokens of a place of llama.cpp's

JobOf = Callable[[Serve, str, dict[str, Any], Prompt], Job]


class Subject(NamedTuple):
    name: str
    endpoint: Endpoint
    extra: dict[str, Any]  # in every body


def check(asked: Serve, prompts: list[Prompt], levels: Sequence[Level]) -> list[Prompt]:
    """The prompts in the order in which they will be used up."""
    peer_python("llama.cpp")
    for name in names_of("--peers", asked.peers or ""):
        if name.removesuffix("+ngram") not in VARIANTS["llama.cpp"]:
            known = ", ".join(VARIANTS["llama.cpp"])
            raise ConfigError(
                f"--peers holds {name!r}; llama.cpp runs as {known}, each with +ngram or without"
            )
    if any(not math.isinf(level.rate) for level in levels):
        raise ConfigError("--peers and --request-rate exclude each other; --max-concurrency sets the load")
    needed = FEWEST + sum(_num_prompts(asked, level) for level in levels) * asked.rounds
    if needed > len(prompts):
        remedy = "give more --prompts, or fewer --rounds or --turns"
        raise ConfigError(f"{needed} prompts are needed and there are {len(prompts)}; {remedy}")
    chosen = list(prompts)
    random.Random(asked.seed).shuffle(chosen)
    return chosen


def _num_prompts(asked: Serve, level: Level) -> int:
    return max(level.concurrency or 1, FEWEST) * asked.turns


def num_turns(asked: Serve, levels: Sequence[Level]) -> int:
    return asked.rounds * len(levels) * (1 + len(names_of("--peers", asked.peers or "")))


def run(
    asked: Serve, levels: Sequence[Level], prompts: Sequence[Prompt], tell: Tell, job_of: JobOf
) -> dict[str, Any]:
    clients = max(level.concurrency or 1 for level in levels)
    model = asked.model or "default"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-")))
        tell(f"loading {OURS}", 0)
        options = f"--max-num-seqs {clients} {asked.server_options}"
        server = stack.enter_context(our_server(model, options))
        subjects = [Subject(OURS, server.endpoint, {"model": None})]
        for name in names_of("--peers", asked.peers or ""):
            tell(f"loading llama.cpp {name}", 0)
            subjects.append(stack.enter_context(_peer(name, model, clients, folder, tell)))
        found = asyncio.run(_rounds(subjects, levels, iter(prompts), asked, tell, job_of))
    summaries = [_summary(found, level.concurrency or 1) for level in levels]
    is_ok = all(level["ratio"] >= 1 and not level["failed"] for level in summaries)
    return {
        "servers": [subject.name for subject in subjects],
        "levels": summaries,
        "records": found,
        "is_ok": is_ok,
    }


@contextmanager
def _peer(name: str, model: str, clients: int, folder: Path, tell: Tell) -> Iterator[Subject]:
    kind, _, method = name.partition("+")
    path, threads = gguf_file(open_checkpoint(model), kind, tell), num_threads()
    options = {"model": str(path), "in_flight": clients, "context": CONTEXT, "threads": threads}
    python = peer_python("llama.cpp")
    worker = Worker(f"llama.cpp {name}", python, "run_llamacpp", folder / f"{name}.log", threads)
    try:
        if note := worker.load({**options, "method": method or "none", "is_raw": False})["note"]:
            tell(f"llama.cpp: {note}", 0)
        yield Subject(name, endpoint_of(worker.ask("address")["url"], None), {"cache_prompt": True})
    finally:
        worker.stop()


async def _rounds(
    subjects: Sequence[Subject], levels: Sequence[Level], unused: Iterator[Prompt], asked: Serve, tell: Tell,
    job_of: JobOf,
) -> list[dict[str, Any]]:  # fmt: skip
    found: list[dict[str, Any]] = []

    async def measure(subject: Subject, level: Level, prompts: Sequence[Prompt]) -> dict[str, Any]:
        jobs = [job_of(asked, subject.name, subject.extra, prompt) for prompt in prompts]
        load = Load(subject.endpoint, asked.timeout, asyncio.Event(), lambda record: None)
        records = await run_level(load, level, jobs, [0.0] * len(jobs))
        await asyncio.sleep(QUIET_S)
        seconds = max(record.end for record in records) - min(record.sent for record in records)
        errors = [record.error for record in records if record.error is not None]
        tokens = sum(record.num_tokens for record in records)
        return {"server": subject.name, "tokens": tokens, "seconds": seconds, "errors": errors}

    warm_up = [next(unused) for _ in range(FEWEST)]
    for subject in subjects:
        tell(f"warming up {subject.name}", 0)
        await measure(subject, Level(math.inf, FEWEST), warm_up)
    for number in range(asked.rounds):
        for level in levels:
            chosen = [next(unused) for _ in range(_num_prompts(asked, level))]
            for i in range(len(subjects)):
                subject = subjects[(number + i) % len(subjects)]
                tell(f"{subject.name}, {level}", 0)
                measured = await measure(subject, level, chosen)
                found.append({"round": number, "clients": level.concurrency, **measured})
                tell(f"{subject.name}, {level}", 1)
    return found


def _summary(found: Sequence[dict[str, Any]], clients: int) -> dict[str, Any]:
    mine = [record for record in found if record["clients"] == clients]
    speeds, by_round = {}, {}
    for name in dict.fromkeys(record["server"] for record in mine):
        own = [record for record in mine if record["server"] == name]
        speeds[name] = sum(record["tokens"] for record in own) / sum(record["seconds"] for record in own)
        by_round[name] = [record["tokens"] / record["seconds"] for record in own]
    fastest = max((name for name in speeds if name != OURS), key=lambda name: speeds[name])
    ratios = [ours / theirs for ours, theirs in zip(by_round[OURS], by_round[fastest], strict=True)]
    return {
        "clients": clients,
        "tokens_per_s": {name: round(speed, 1) for name, speed in speeds.items()},
        "fastest_peer": fastest,
        "ratio": round(speeds[OURS] / speeds[fastest], 3),
        "ratios_by_round": [round(ratio, 3) for ratio in ratios],
        "failed": sum(len(record["errors"]) for record in mine),
    }


def tables(report: dict[str, Any]) -> list[Table]:
    names = report["servers"]
    rows = []
    for level in report["levels"]:
        speeds = [f"{level['tokens_per_s'][name]:,.1f}" for name in names]
        ratio = f"{level['ratio']:.2f} ({level['fastest_peer']})"
        rows.append((str(level["clients"]), *speeds, ratio, str(level["failed"])))
    columns = [
        *(name if name == OURS else f"llama.cpp {name}" for name in names),
        "ratio to the fastest",
        "failed",
    ]
    return [Table("tokens/s of servers, reading prompts included", ("clients",), columns, rows)]
