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
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError
from paceline.loaders.checkpoint import open_checkpoint
from paceline.measure.endpoint import Endpoint, endpoint_of
from paceline.measure.engines import rotated
from paceline.measure.load import Job, Level, Load, Record, run_level
from paceline.measure.models import gguf_file
from paceline.measure.options import Serve
from paceline.measure.processes import our_server, peer_worker
from paceline.measure.prompts import Prompt
from paceline.measure.results import Table, Tell
from paceline.measure.rows import OURS, PLAIN, VARIANTS, Row, names_of, peer_python

LEVELS = "1,4,16"
QUIET_S = 0.3  # between servers: the last one's threads may still be spinning
FEWEST, TURNS = 4, 2  # prompts of a level are at least FEWEST, and that many for each client, times TURNS
CONTEXT = 4096  # tokens of a place of llama.cpp's
JobOf = Callable[[Serve, str, dict[str, Any], Prompt], Job]


class Subject(NamedTuple):
    endpoint: Endpoint
    extra: dict[str, Any]  # in every body


def check(asked: Serve, prompts: list[Prompt], levels: Sequence[Level]) -> list[Prompt]:
    """The prompts in the order in which they will be used up."""
    peer_python("llama.cpp")
    for name in names_of("--peers", asked.peers or ""):
        if name.removesuffix("+ngram") not in VARIANTS["llama.cpp"]:
            known = f"llama.cpp runs as {', '.join(VARIANTS['llama.cpp'])}, each with +ngram or without"
            raise ConfigError(f"--peers holds {name!r}; {known}")
    if any(not math.isinf(level.rate) for level in levels):
        raise ConfigError("--peers and --request-rate exclude each other; --max-concurrency sets the load")
    needed = FEWEST + sum(_num_prompts(level) for level in levels) * asked.rounds
    if needed > len(prompts):
        remedy = "give more --prompts or fewer --rounds"
        raise ConfigError(f"{needed} prompts are needed and there are {len(prompts)}; {remedy}")
    return random.Random(asked.seed).sample(prompts, len(prompts))


def _num_prompts(level: Level) -> int:
    return max(level.concurrency or 1, FEWEST) * TURNS


def num_turns(asked: Serve, levels: Sequence[Level]) -> int:
    return asked.rounds * len(levels) * (1 + len(names_of("--peers", asked.peers or "")))


def run(
    asked: Serve, levels: Sequence[Level], prompts: Sequence[Prompt], tell: Tell, job_of: JobOf
) -> dict[str, Any]:
    clients, model = max(level.concurrency or 1 for level in levels), asked.model or "default"
    with ExitStack() as stack:
        tell(f"loading {OURS}", 0)
        server = stack.enter_context(our_server(model, f"--max-num-seqs {clients} {asked.server_options}"))
        subjects = {OURS: Subject(server.endpoint, {"model": None})}
        for name in names_of("--peers", asked.peers or ""):
            kind, _, method = name.partition("+")
            path = gguf_file(open_checkpoint(model), kind, tell)
            options = {"model": str(path), "in_flight": clients, "context": CONTEXT}
            worker = stack.enter_context(peer_worker(Row("llama.cpp", kind, method or PLAIN), options, tell))
            address = endpoint_of(worker.ask("address")["url"], None)
            subjects[name] = Subject(address, {"cache_prompt": True})

        def jobs_of(name: str, mine: Sequence[Prompt]) -> list[Job]:
            return [job_of(asked, name, subjects[name].extra, prompt) for prompt in mine]

        found = asyncio.run(_rounds(subjects, levels, iter(prompts), asked, jobs_of, tell))
    summaries = [_summary(level.concurrency or 1, found[level]) for level in levels]
    is_ok = all(level["ratio"] >= 1 and not level["failed"] for level in summaries)
    return {"servers": list(subjects), "levels": summaries, "is_ok": is_ok}


async def _rounds(
    subjects: dict[str, Subject], levels: Sequence[Level], unused: Iterator[Prompt], asked: Serve,
    jobs_of: Callable[[str, Sequence[Prompt]], list[Job]], tell: Tell,
) -> dict[Level, dict[str, list[list[Record]]]]:  # fmt: skip
    """By level and server, the records of each round."""
    found: dict[Level, dict[str, list[list[Record]]]] = defaultdict(lambda: defaultdict(list))

    async def measure(name: str, level: Level, prompts: Sequence[Prompt]) -> list[Record]:
        load = Load(subjects[name].endpoint, asked.timeout, asyncio.Event(), lambda record: None)
        records = await run_level(load, level, jobs_of(name, prompts), [0.0] * len(prompts))
        await asyncio.sleep(QUIET_S)
        return records

    warm_up = [next(unused) for _ in range(FEWEST)]
    for name in subjects:
        tell(f"warming up {name}", 0)
        await measure(name, Level(math.inf, FEWEST), warm_up)
    for number in range(asked.rounds):
        for level in levels:
            chosen = [next(unused) for _ in range(_num_prompts(level))]
            for name, _ in rotated(subjects, number):
                found[level][name].append(await measure(name, level, chosen))
                tell(f"{name}, {level}", 1)
    return found


def _counted(records: Sequence[Record]) -> tuple[int, float]:
    """Tokens, and the seconds in which they were written."""
    seconds = max(record.end for record in records) - min(record.sent for record in records)
    return sum(record.num_tokens for record in records), seconds


def _summary(clients: int, found: dict[str, list[list[Record]]]) -> dict[str, Any]:
    counts = {name: [_counted(records) for records in rounds] for name, rounds in found.items()}
    speeds = {name: sum(t for t, _ in each) / sum(s for _, s in each) for name, each in counts.items()}
    fastest = max((name for name in speeds if name != OURS), key=lambda name: speeds[name])
    pairs = zip(counts[OURS], counts[fastest], strict=True)
    return {
        "clients": clients,
        "tokens_per_s": {name: round(speed, 1) for name, speed in speeds.items()},
        "fastest_peer": fastest,
        "ratio": round(speeds[OURS] / speeds[fastest], 3),
        "ratios_by_round": [round(a[0] / a[1] / (b[0] / b[1]), 3) for a, b in pairs],
        "failed": sum(
            r.error is not None for rounds in found.values() for records in rounds for r in records
        ),
    }


def tables(report: dict[str, Any]) -> list[Table]:
    names, rows = report["servers"], []
    for level in report["levels"]:
        speeds = [f"{level['tokens_per_s'][name]:,.1f}" for name in names]
        ratio = f"{level['ratio']:.2f} ({level['fastest_peer']})"
        rows.append((str(level["clients"]), *speeds, ratio, str(level["failed"])))
    columns = [*(name if name == OURS else f"llama.cpp {name}" for name in names), "ratio", "failed"]
    return [Table("tokens/s of servers, reading prompts included", ("clients",), columns, rows)]
