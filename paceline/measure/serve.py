"""`paceline bench serve`: one client, any OpenAI-compatible server, one load after the other. Invariant: what
was measured before an interrupt is reported; an interrupted level is marked, and its unfinished requests are
not in it. With --peers our server and llama.cpp's take turns (`Turns`): a round gives every server the same
new prompts at every level, so none meets a prompt twice. The ratio is to a level's fastest peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import signal
import threading
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError, RequestError
from paceline.core.options import json_object, require
from paceline.loaders.checkpoint import open_checkpoint
from paceline.measure import load, prompts
from paceline.measure.endpoint import Endpoint, Refused, endpoint_of
from paceline.measure.load import CHAT, Job, Level, Load, Record, job_of, run_level
from paceline.measure.models import gguf_file
from paceline.measure.options import Serve
from paceline.measure.processes import our_server, peer_worker
from paceline.measure.prompts import Prompt
from paceline.measure.results import Table, Tell, cell, table_of
from paceline.measure.rows import OURS, PLAIN, VARIANTS, Row, in_turn, names_of, peer_python, sizes_of

COMPLETIONS = "/v1/completions"
LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "between pieces", "e2el": "e2e"}
COLUMNS = {"done": "{completed}", "failed": "{failed}", "req/s": "{request_throughput:.2f}"}
COLUMNS |= {"goodput": "{request_goodput:.2f}", "tok/s": "{output_throughput:,.1f}"}
COLUMNS |= {"in flight": "{peak_in_flight}", "cached": "{cached_prompt_tokens}"}
COLUMNS |= {"τ": "{acceptance_length:.2f}", "α": "{acceptance_rate:.2f}"}
NO_DRAFTS = {"acceptance_length": None, "acceptance_rate": None}
LEGEND = """TTFT, TPOT, e2e: milliseconds to the first token, for each further one, and to the end, from when
it was due; goodput: requests a second that met every goal; cached: prompt tokens that the server
had read before; τ, α: tokens a draft led to and share of drafted tokens accepted, by its own counters.
"""
LEVELS = "1,4,16"
QUIET_S = 0.3  # between servers: the last one's threads may still be spinning
FEWEST, TURNS = 4, 2  # prompts of a level are at least FEWEST, and that many for each client, times TURNS
CONTEXT = 4096  # tokens of a place of llama.cpp's


class Round(NamedTuple):
    num_tokens: int
    seconds: float  # in which they were written
    num_failed: int
    gaps: list[float]  # ms between pieces of a stream


class Run:
    is_interrupted = False

    def __init__(self, asked: Serve) -> None:
        path, remedy = asked.endpoint, f"use {CHAT} or {COMPLETIONS}"
        require(path in (CHAT, COMPLETIONS), "--endpoint", path, remedy)
        for name, value in (("--burstiness", asked.burstiness), ("--timeout", asked.timeout)):
            require(0 < value < math.inf, name, value, "give a number above 0")
        if asked.peers is not None and asked.max_concurrency is None:
            asked = replace(asked, max_concurrency=LEVELS)
        self.asked, self.prompts, cap = asked, prompts.load(asked.prompts), asked.max_concurrency
        rates = asked.request_rate or ("inf" if cap else "1,2,4")
        caps = sizes_of("--max-concurrency", cap) if cap is not None else [None]
        # every rate with every cap
        rated = _numbers("--request-rate", rates, math.inf, "2 or 1,2,4 or inf")
        self.levels = [Level(rate, each) for rate in rated for each in caps]
        self.percents = _numbers("--metric-percentiles", asked.metric_percentiles, 100, "50,90,99")
        self.server = endpoint_of(asked.base_url, asked.api_key)
        self.goals = load.goals_of(asked.goodput)
        self.extra = json_object("--extra-body", asked.extra_body) if asked.extra_body else {}
        self.num_turns = asked.num_warmups + len(self.levels) * asked.num_prompts
        if asked.peers is not None:
            self.turns = Turns(asked, self.prompts, self.levels)
            self.num_turns = self.turns.num_turns

    def report(self, tell: Tell) -> dict[str, Any]:
        """Ctrl-C ends the load, not the report."""
        return self.turns.report(tell) if self.asked.peers is not None else asyncio.run(self._report(tell))

    async def _report(self, tell: Tell) -> dict[str, Any]:
        asked, task = self.asked, asyncio.current_task()
        if threading.current_thread() is threading.main_thread() and task is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
        model = asked.model or await self._first_model()
        chosen = random.Random(asked.seed).sample(self.prompts, len(self.prompts))
        jobs = [job_of(asked, model, self.extra, prompt) for prompt in chosen]
        levels, records = [], list[Record]()
        for i in range(asked.num_warmups):  # untimed; a server that refuses these would refuse all
            warm_up = Load(self.server, asked.timeout, records.append)
            await run_level(warm_up, Level(math.inf, 1), [jobs[-1 - i % len(jobs)]])
            tell("warming up", 1)
            if (why := records[-1].error) is not None:
                remedy = "mend that, or give --num-warmups 0"
                raise RequestError(f"the server refused a request of the warm-up ({why}); {remedy}")
        for number, level in enumerate(self.levels):
            taken = number * asked.num_prompts  # a longer run begins again at the first
            mine = [jobs[(taken + i) % len(jobs)] for i in range(asked.num_prompts)]
            levels.append(await self._level(level, mine, tell))
            if self.is_interrupted:
                break
        report = {name: getattr(asked, name) for name in ("endpoint", "seed", "max_new_tokens")}
        report |= {"model": model, "prompts": len(jobs), "goals_ms": self.goals}
        return {**report, "is_interrupted": self.is_interrupted, "levels": levels}

    async def _level(self, level: Level, jobs: list[Job], tell: Tell) -> dict[str, Any]:
        records = list[Record]()

        def ended(record: Record) -> None:
            records.append(record)
            tell(str(level), 1)

        tell(str(level), 0)
        before = await self._metrics()
        due = load.due_times(len(jobs), level.rate, self.asked.burstiness, self.asked.seed)
        try:
            await run_level(Load(self.server, self.asked.timeout, ended), level, jobs, due)
        except asyncio.CancelledError:
            self.is_interrupted = True
        report = load.level_report(level, records, len(jobs), self.percents, self.goals)
        drafting = load.difference(before, await self._metrics())
        requests = [record.to_json() for record in sorted(records, key=lambda record: record.due)]
        return {**report, "speculative_decoding": drafting, "requests": requests}

    async def _first_model(self) -> str:
        try:
            models = json.loads(await self.server.get("/v1/models"))["data"]
            return str(models[0]["id"])
        except Refused as error:
            start = "start the server (`paceline serve`), or check --base-url"
            remedy = "give --api-key" if "401" in str(error) else start
            raise ConfigError(f"{self.asked.base_url} does not answer ({error}); {remedy}") from None
        except (ValueError, KeyError, IndexError, TypeError):
            raise ConfigError("the server's /v1/models names no model; give --model") from None

    async def _metrics(self) -> dict[str, float]:
        with contextlib.suppress(Refused, ValueError):
            return await load.metrics(self.server)
        return {}


def _numbers(option: str, text: str, most: float, example: str) -> list[float]:
    numbers = list[float]()
    with contextlib.suppress(ValueError):
        numbers = [float(part) for part in text.split(",")]
    is_ok = bool(numbers) and all(0 < number <= most for number in numbers)
    require(is_ok, option, text, f"write numbers above 0 and up to {most:g}: {example}")
    return numbers


def tables(report: dict[str, Any]) -> list[Table]:
    if "servers" in report:
        names, rows, gaps = report["servers"], [], []
        for level in report["levels"]:
            spreads = [level["gap_ms"][name] or {} for name in names]
            told = (" / ".join(cell(each.get(key), "{:.1f}") for key in ("p50", "p99")) for each in spreads)
            gaps.append((str(level["clients"]), *told))
            speeds = [f"{level['tokens_per_s'][name]:,.1f}" for name in names]
            ratio = f"{level['ratio']:.2f} ({level['fastest_peer']})"
            rows.append((str(level["clients"]), *speeds, ratio, str(level["failed"])))
        columns = [*(name if name == OURS else f"llama.cpp {name}" for name in names), "ratio", "failed"]
        speed = Table("tokens/s of servers, reading prompts included", ("clients",), columns, rows)
        return [speed, Table("ms between pieces of a stream, p50 / p99", ("clients",), columns[:-2], gaps)]
    levels = report["levels"]
    if not levels:
        return [Table("", (), (), (), ["nothing was measured"])]
    goals = ", ".join(f"{name} ≤ {value:g} ms" for name, value in report["goals_ms"].items())
    title = f"{report['model']}: throughput" + (f"; goals {goals}" if goals else "")
    keys = list(next((level["ttft_ms"] for level in levels if level["ttft_ms"]), {}))
    latencies, notes = [], []
    for level in levels:
        for name, called in LATENCIES.items():
            found = level[f"{name}_ms"] or {}
            latencies.append((level["load"], called, *(cell(found.get(key), "{:,.1f}") for key in keys)))
        notes += [f"{level['load']}: {count} failed: {reason}" for reason, count in level["errors"].items()]
        if level["tokens_counted_by"] != "server" and level["completed"]:
            why = "the server counts no tokens; each piece of text was taken for one"
            notes.append(f"{level['load']}: {why}")
    notes += ["interrupted: the last load is not complete"] * report["is_interrupted"]
    figures = [{**level, **(level["speculative_decoding"] or NO_DRAFTS)} for level in levels]
    throughput = table_of(title, ("load",), COLUMNS, figures)
    return [throughput, Table("latency, ms", ("load", ""), keys, latencies, notes)]


class Turns:
    def __init__(self, asked: Serve, prompts: list[Prompt], levels: list[Level]) -> None:
        self.asked, self.levels, self.peers = asked, levels, names_of("--peers", asked.peers or "")
        peer_python("llama.cpp")
        known = VARIANTS["llama.cpp"]
        for name in self.peers:
            remedy = f"llama.cpp runs as {', '.join(known)}, each with +ngram or without"
            require(name.removesuffix("+ngram") in known, "--peers", name, remedy)
        if any(not math.isinf(level.rate) for level in levels):
            raise ConfigError("--peers and --request-rate exclude each other; --max-concurrency is the load")
        self.counts = {level: max(level.concurrency or 1, FEWEST) * TURNS for level in levels}
        needed = FEWEST + sum(self.counts.values()) * asked.rounds
        remedy = f"{needed} prompts are needed; give more --prompts or fewer --rounds"
        require(needed <= len(prompts), "the number of prompts", len(prompts), remedy)
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
        gaps = [gap for record in records for gap in record.latencies()["itl"]]
        return Round(sum(record.num_tokens for record in records), seconds, num_failed, gaps)


def _summary(clients: int, found: dict[str, list[Round]]) -> dict[str, Any]:
    speeds, gaps = dict[str, float](), dict[str, list[float]]()
    for name, rounds in found.items():
        speeds[name] = sum(each.num_tokens for each in rounds) / sum(each.seconds for each in rounds)
        gaps[name] = [gap for each in rounds for gap in each.gaps]
    fastest = max((name for name in speeds if name != OURS), key=lambda name: speeds[name])
    pairs = zip(found[OURS], found[fastest], strict=True)
    return {
        "clients": clients,
        "tokens_per_s": {name: round(speed, 1) for name, speed in speeds.items()},
        "fastest_peer": fastest,
        "ratio": round(speeds[OURS] / speeds[fastest], 3),
        "ratios_by_round": [round(a[0] / a[1] / (b[0] / b[1]), 3) for a, b in pairs],
        "gap_ms": {name: load.spread(values, (50, 99)) for name, values in gaps.items()},
        "failed": sum(each.num_failed for rounds in found.values() for each in rounds),
    }
