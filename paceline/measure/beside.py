"""`paceline bench serve --peers`: `paceline serve` and llama.cpp's server under the same load, taking turns.

A client sends its next prompt when its last answer is complete. A round gives every server the same new
prompts at every level, so no server meets a prompt twice. Both keep the beginnings of prompts they have read
and have a place for every client; the reading of prompts counts. The ratio is to a level's fastest peer.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import defaultdict
from contextlib import ExitStack
from itertools import islice
from typing import Any

from paceline.core.errors import ConfigError
from paceline.loaders.checkpoint import open_checkpoint
from paceline.measure.endpoint import Endpoint, endpoint_of
from paceline.measure.load import Level, Load, Record, job_of, run_level
from paceline.measure.models import gguf_file
from paceline.measure.options import Serve
from paceline.measure.processes import our_server, peer_worker
from paceline.measure.prompts import Prompt
from paceline.measure.results import Table, Tell
from paceline.measure.rows import OURS, PLAIN, VARIANTS, Row, in_turn, names_of, peer_python

LEVELS = "1,4,16"
QUIET_S = 0.3  # between servers: the last one's threads may still be spinning
FEWEST, TURNS = 4, 2  # prompts of a level are at least FEWEST, and that many for each client, times TURNS
CONTEXT = 4096  # tokens of a place of llama.cpp's

Round = tuple[int, float, int]  # tokens, the seconds in which they were written, and requests that failed


class Turns:
    def __init__(self, asked: Serve, prompts: list[Prompt], levels: list[Level]) -> None:
        self.asked, self.levels, self.peers = asked, levels, names_of("--peers", asked.peers or "")
        peer_python("llama.cpp")
        for name in self.peers:
            if name.removesuffix("+ngram") not in VARIANTS["llama.cpp"]:
                known = f"llama.cpp runs as {', '.join(VARIANTS['llama.cpp'])}, each with +ngram or without"
                raise ConfigError(f"--peers holds {name!r}; {known}")
        if any(not math.isinf(level.rate) for level in levels):
            raise ConfigError("--peers and --request-rate exclude each other; --max-concurrency is the load")
        self.counts = {level: max(level.concurrency or 1, FEWEST) * TURNS for level in levels}
        needed = FEWEST + sum(self.counts.values()) * asked.rounds
        if needed > len(prompts):
            remedy = "give more --prompts or fewer --rounds"
            raise ConfigError(f"{needed} prompts are needed and there are {len(prompts)}; {remedy}")
        self.unused = iter(random.Random(asked.seed).sample(prompts, len(prompts)))
        self.num_turns = asked.rounds * len(levels) * (1 + len(self.peers))
        self.servers: dict[str, tuple[Endpoint, dict[str, Any]]] = {}  # with what every body holds

    def report(self, tell: Tell) -> dict[str, Any]:
        model, clients = self.asked.model or "default", max(level.concurrency or 1 for level in self.levels)
        with ExitStack() as stack:
            tell(f"loading {OURS}", 0)
            options = f"--max-num-seqs {clients} {self.asked.server_options}"
            self.servers[OURS] = stack.enter_context(our_server(model, options)).endpoint, {"model": None}
            for name in self.peers:
                kind, _, method = name.partition("+")
                path = gguf_file(open_checkpoint(model), kind, tell)
                given = {"model": str(path), "in_flight": clients, "context": CONTEXT}
                row = Row("llama.cpp", kind, method or PLAIN)
                worker = stack.enter_context(peer_worker(row, given, tell))
                self.servers[name] = endpoint_of(worker.ask("address")["url"], None), {"cache_prompt": True}
            found = asyncio.run(self._rounds(tell))
        summaries = [_summary(level.concurrency or 1, found[level]) for level in self.levels]
        is_ok = all(level["ratio"] >= 1 and not level["failed"] for level in summaries)
        return {"servers": list(self.servers), "levels": summaries, "is_ok": is_ok}

    async def _rounds(self, tell: Tell) -> dict[Level, dict[str, list[Round]]]:
        """By level and server."""
        found: dict[Level, dict[str, list[Round]]] = defaultdict(lambda: defaultdict(list))
        warm_up = list(islice(self.unused, FEWEST))
        for name in self.servers:
            tell(f"warming up {name}", 0)
            await self._measure(name, Level(math.inf, FEWEST), warm_up)
        for number in range(self.asked.rounds):
            for level in self.levels:
                chosen = list(islice(self.unused, self.counts[level]))
                for name in in_turn(self.servers, number):
                    found[level][name].append(await self._measure(name, level, chosen))
                    tell(f"{name}, {level}", 1)
        return found

    async def _measure(self, name: str, level: Level, prompts: list[Prompt]) -> Round:
        (endpoint, extra), records = self.servers[name], list[Record]()
        jobs = [job_of(self.asked, name, extra, prompt) for prompt in prompts]
        await run_level(Load(endpoint, self.asked.timeout, records.append), level, jobs)
        await asyncio.sleep(QUIET_S)
        seconds = max(record.end for record in records) - min(record.sent for record in records)
        num_failed = sum(record.error is not None for record in records)
        return sum(record.num_tokens for record in records), seconds, num_failed


def _summary(clients: int, found: dict[str, list[Round]]) -> dict[str, Any]:
    sums = {name: [sum(column) for column in zip(*rounds, strict=True)] for name, rounds in found.items()}
    speeds = {name: tokens / seconds for name, (tokens, seconds, _) in sums.items()}
    fastest = max((name for name in speeds if name != OURS), key=lambda name: speeds[name])
    pairs = zip(found[OURS], found[fastest], strict=True)
    return {
        "clients": clients,
        "tokens_per_s": {name: round(speed, 1) for name, speed in speeds.items()},
        "fastest_peer": fastest,
        "ratio": round(speeds[OURS] / speeds[fastest], 3),
        "ratios_by_round": [round(a[0] / a[1] / (b[0] / b[1]), 3) for a, b in pairs],
        "failed": sum(failed for _, _, failed in sums.values()),
    }


def tables(report: dict[str, Any]) -> list[Table]:
    names, rows = report["servers"], []
    for level in report["levels"]:
        speeds = [f"{level['tokens_per_s'][name]:,.1f}" for name in names]
        ratio = f"{level['ratio']:.2f} ({level['fastest_peer']})"
        rows.append((str(level["clients"]), *speeds, ratio, str(level["failed"])))
    columns = [*(name if name == OURS else f"llama.cpp {name}" for name in names), "ratio", "failed"]
    return [Table("tokens/s of servers, reading prompts included", ("clients",), columns, rows)]
