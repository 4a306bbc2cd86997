"""`paceline bench serve`: one client, any OpenAI-compatible server, one load after the other; or `paceline
serve` and llama.cpp's server in turns. Invariant: what was measured before an interrupt is reported; an
interrupted level is marked, and its unfinished requests are not in it.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import signal
import threading
from dataclasses import replace
from typing import Any

from paceline.core.errors import ConfigError, RequestError
from paceline.core.options import json_object
from paceline.measure import beside, load, prompts
from paceline.measure.endpoint import Endpoint, Refused, endpoint_of
from paceline.measure.load import CHAT, Job, Level, Load, Record, run_level
from paceline.measure.options import Serve
from paceline.measure.results import Table, Tell, cell, table_of

COMPLETIONS = "/v1/completions"
LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "between pieces", "e2el": "e2e"}
COLUMNS = {
    "done": ("completed", "{}"),
    "failed": ("failed", "{}"),
    "req/s": ("request_throughput", "{:.2f}"),
    "goodput": ("request_goodput", "{:.2f}"),
    "tok/s": ("output_throughput", "{:,.1f}"),
    "in flight": ("peak_in_flight", "{}"),
    "cached": ("cached_prompt_tokens", "{}"),
    "τ": ("acceptance_length", "{:.2f}"),
    "α": ("acceptance_rate", "{:.2f}"),
}
NO_DRAFTS = {"acceptance_length": None, "acceptance_rate": None}
LEGEND = """TTFT, TPOT, e2e: milliseconds to the first token, for each further one, and to the end, from when
it was due; goodput: requests a second that met every goal; cached: prompt tokens that the server
had read before; τ, α: tokens a draft led to and share of drafted tokens accepted, by its own counters.
"""


class Run:
    is_interrupted = False

    def __init__(self, asked: Serve) -> None:
        if asked.endpoint not in (CHAT, COMPLETIONS):
            raise ConfigError(f"--endpoint is {asked.endpoint!r}; use {CHAT} or {COMPLETIONS}")
        for name, value in (("--burstiness", asked.burstiness), ("--timeout", asked.timeout)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value:g}; give a number above 0")
        if asked.peers is not None and asked.max_concurrency is None:
            asked = replace(asked, max_concurrency=beside.LEVELS)
        self.asked, self.prompts, self.levels = asked, prompts.load(asked.prompts), _levels(asked)
        self.percents = _numbers("--metric-percentiles", asked.metric_percentiles, "50,90,99")
        if max(self.percents) > 100:
            remedy = "write numbers up to 100: 50,90,99"
            raise ConfigError(f"--metric-percentiles is {asked.metric_percentiles!r}; {remedy}")
        self.server = endpoint_of(asked.base_url, asked.api_key)
        self.goals = load.goals_of(asked.goodput)
        self.extra = json_object("--extra-body", asked.extra_body) if asked.extra_body else {}
        self.num_turns = asked.num_warmups + len(self.levels) * asked.num_prompts
        if asked.peers is not None:
            self.turns = beside.Turns(asked, self.prompts, self.levels)
            self.num_turns = self.turns.num_turns

    def report(self, tell: Tell) -> dict[str, Any]:
        """Ctrl-C ends the load, not the report."""
        return self.turns.report(tell) if self.asked.peers is not None else asyncio.run(self._report(tell))

    async def _report(self, tell: Tell) -> dict[str, Any]:
        asked, task = self.asked, asyncio.current_task()
        if threading.current_thread() is threading.main_thread() and task is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
        model = asked.model or await _first_model(self.server)
        chosen = random.Random(asked.seed).sample(self.prompts, len(self.prompts))
        jobs = [load.job_of(asked, model, self.extra, prompt) for prompt in chosen]
        await self._warm_up(jobs, tell)
        levels = []
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
        requests = [load.record_json(record) for record in sorted(records, key=lambda record: record.due)]
        return {**report, "speculative_decoding": drafting, "requests": requests}

    async def _metrics(self) -> dict[str, float]:
        try:
            return await load.metrics(self.server)
        except (Refused, ValueError):
            return {}

    async def _warm_up(self, jobs: list[Job], tell: Tell) -> None:
        """Untimed. A server that refuses these would refuse all, so the reason is told at once."""
        records = list[Record]()
        given = Load(self.server, self.asked.timeout, records.append)
        for i in range(self.asked.num_warmups):
            await run_level(given, Level(math.inf, 1), [jobs[-1 - i % len(jobs)]])
            tell("warming up", 1)
            if (why := records[-1].error) is not None:
                remedy = "mend that, or give --num-warmups 0"
                raise RequestError(f"the server refused a request of the warm-up ({why}); {remedy}")


def _levels(asked: Serve) -> list[Level]:
    """Every rate with every cap."""
    is_paced = asked.request_rate is None and asked.max_concurrency
    rate = "inf" if is_paced else asked.request_rate or "1,2,4"
    rates, caps = _numbers("--request-rate", rate, "2 or 1,2,4 or inf"), list[int | None]([None])
    if asked.max_concurrency is not None:
        found = _numbers("--max-concurrency", asked.max_concurrency, "16 or 1,4,16")
        if not all(cap.is_integer() for cap in found):
            remedy = "write whole numbers: 16 or 1,4,16"
            raise ConfigError(f"--max-concurrency is {asked.max_concurrency!r}; {remedy}")
        caps = [int(cap) for cap in found]
    return [Level(rate, cap) for rate in rates for cap in caps]


def _numbers(option: str, text: str, example: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(number > 0 for number in numbers):
        raise ConfigError(f"{option} is {text!r}; write numbers above 0: {example}")
    return numbers


async def _first_model(server: Endpoint) -> str:
    try:
        models = json.loads(await server.get("/v1/models"))["data"]
        return str(models[0]["id"])
    except Refused as error:
        where = f"{'https' if server.is_tls else 'http'}://{server.host}:{server.port}{server.folder}"
        is_key = "401" in str(error)
        remedy = "give --api-key" if is_key else "start the server (`paceline serve`), or check --base-url"
        raise ConfigError(f"{where} does not answer ({error}); {remedy}") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise ConfigError("the server's /v1/models names no model; give --model") from None


def tables(report: dict[str, Any]) -> list[Table]:
    if "servers" in report:
        return beside.tables(report)
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
