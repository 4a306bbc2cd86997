"""`paceline bench serve`: one client, any OpenAI-compatible server, one load after the other; or `paceline
serve` and llama.cpp's server in turns.

Invariant: what was measured before an interrupt is reported; an interrupted level is marked, and its
unfinished requests are not in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError, RequestError
from paceline.core.options import json_object
from paceline.measure import beside, load, prompts
from paceline.measure.endpoint import Endpoint, Refused, endpoint_of
from paceline.measure.load import Job, Level, Load, Record, run_level
from paceline.measure.options import Serve
from paceline.measure.prompts import Prompt
from paceline.measure.results import Table, Tell, cell, table_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
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


class Plan(NamedTuple):
    asked: Serve
    server: Endpoint
    levels: tuple[Level, ...]
    prompts: tuple[Prompt, ...]
    extra: dict[str, Any]  # goes into every body; null takes a field out
    goals: load.Goals
    percents: tuple[float, ...]


def prepare(asked: Serve) -> Plan:
    if asked.endpoint not in (CHAT, COMPLETIONS):
        raise ConfigError(f"--endpoint is {asked.endpoint!r}; use {CHAT} or {COMPLETIONS}")
    for name, value in (("--burstiness", asked.burstiness), ("--timeout", asked.timeout)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value:g}; give a number above 0")
    if asked.peers is not None and asked.max_concurrency is None:
        asked = replace(asked, max_concurrency=beside.LEVELS)
    found, levels = prompts.load(asked.prompts), _levels(asked)
    if asked.peers is not None:
        found = beside.check(asked, found, levels)
    percents = _numbers("--metric-percentiles", asked.metric_percentiles, "50,90,99")
    if max(percents) > 100:
        remedy = "write numbers up to 100: 50,90,99"
        raise ConfigError(f"--metric-percentiles is {asked.metric_percentiles!r}; {remedy}")
    server, goals = endpoint_of(asked.base_url, asked.api_key), load.goals_of(asked.goodput)
    extra = json_object("--extra-body", asked.extra_body) if asked.extra_body else {}
    return Plan(asked, server, levels, tuple(found), extra, goals, tuple(percents))


def _levels(asked: Serve) -> tuple[Level, ...]:
    """Every rate with every cap."""
    is_paced = asked.request_rate is None and asked.max_concurrency
    rate = "inf" if is_paced else asked.request_rate or "1,2,4"
    rates = _numbers("--request-rate", rate, "2 or 1,2,4 or inf")
    caps: list[int | None] = [None]
    if asked.max_concurrency is not None:
        found = _numbers("--max-concurrency", asked.max_concurrency, "16 or 1,4,16")
        if any(cap == math.inf or cap != int(cap) for cap in found):
            remedy = "write whole numbers: 16 or 1,4,16"
            raise ConfigError(f"--max-concurrency is {asked.max_concurrency!r}; {remedy}")
        caps = [int(cap) for cap in found]
    return tuple(Level(rate, cap) for rate in rates for cap in caps)


def _numbers(option: str, text: str, example: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(number > 0 for number in numbers):
        raise ConfigError(f"{option} is {text!r}; write numbers above 0: {example}")
    return numbers


def num_turns(plan: Plan) -> int:
    if plan.asked.peers is not None:
        return beside.num_turns(plan.asked, plan.levels)
    return plan.asked.num_warmups + len(plan.levels) * plan.asked.num_prompts


def run(plan: Plan, tell: Tell) -> dict[str, Any]:
    """Ctrl-C ends the load, not the report."""
    if plan.asked.peers is not None:
        return beside.run(plan.asked, plan.levels, plan.prompts, tell, job_of)
    return asyncio.run(_run(plan, tell))


async def _run(plan: Plan, tell: Tell) -> dict[str, Any]:
    asked, stop = plan.asked, asyncio.Event()
    with _on_interrupt(stop):
        model = asked.model or await _first_model(plan.server)
        chosen = list(plan.prompts)
        random.Random(asked.seed).shuffle(chosen)  # a longer run begins again at the first
        jobs = [job_of(asked, model, plan.extra, prompt) for prompt in chosen]
        await _warm_up(plan, jobs, stop, tell)
        levels, taken = [], 0
        for level in plan.levels:
            if stop.is_set():
                break
            mine = [jobs[(taken + i) % len(jobs)] for i in range(asked.num_prompts)]
            taken += asked.num_prompts
            levels.append(await _level(plan, level, mine, stop, tell))
    return {
        "model": model,
        "endpoint": asked.endpoint,
        "prompts": len(jobs),
        "seed": asked.seed,
        "max_new_tokens": asked.max_new_tokens,
        "goals_ms": plan.goals,
        "is_interrupted": stop.is_set(),
        "levels": levels,
    }


async def _level(
    plan: Plan, level: Level, jobs: Sequence[Job], stop: asyncio.Event, tell: Tell
) -> dict[str, Any]:
    tell(str(level), 0)
    before = await _counters(plan.server)
    due = load.due_times(len(jobs), level.rate, plan.asked.burstiness, plan.asked.seed)
    given = Load(plan.server, plan.asked.timeout, stop, lambda record: tell(str(level), 1))
    records = await run_level(given, level, jobs, due)
    report = load.level_report(level, records, len(jobs), plan.percents, plan.goals)
    drafting = load.difference(before, await _counters(plan.server))
    requests = [load.record_json(record) for record in sorted(records, key=lambda record: record.due)]
    return {**report, "speculative_decoding": drafting, "requests": requests}


async def _counters(server: Endpoint) -> dict[str, float]:
    try:
        return load.counters_of((await server.get("/metrics")).decode("utf-8", "replace"))
    except Refused:
        return {}


async def _warm_up(plan: Plan, jobs: Sequence[Job], stop: asyncio.Event, tell: Tell) -> None:
    """Untimed. A server that refuses these would refuse all, so the reason is told at once."""

    def check(record: Record) -> None:
        tell("warming up", 1)
        if record.error is not None:
            remedy = "mend that, or give --num-warmups 0"
            raise RequestError(f"the server refused a request of the warm-up ({record.error}); {remedy}")

    mine = [jobs[-1 - i % len(jobs)] for i in range(plan.asked.num_warmups)]
    given = Load(plan.server, plan.asked.timeout, stop, check)
    await run_level(given, Level(math.inf, 1), mine, [0.0] * len(mine))


def job_of(asked: Serve, model: str, extra: dict[str, Any], prompt: Prompt) -> Job:
    is_chat = asked.endpoint == CHAT
    body: dict[str, Any] = {"model": model}
    body |= {"messages": [{"role": "user", "content": prompt.text}]} if is_chat else {"prompt": prompt.text}
    body |= {"max_tokens": asked.max_new_tokens, "temperature": asked.temperature, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    body |= {**({"ignore_eos": True} if asked.ignore_eos else {}), **extra}
    kept = {name: value for name, value in body.items() if value is not None}
    return Job(prompt.id, asked.endpoint, kept)


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


@contextlib.contextmanager
def _on_interrupt(stop: asyncio.Event) -> Iterator[None]:
    """Ctrl-C sets `stop`. A second one comes too late to matter: what is left is closing connections."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


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
            notes.append(
                f"{level['load']}: the server counts no tokens; each piece of text was taken for one"
            )
    notes += ["interrupted: the last load is not complete"] * report["is_interrupted"]
    figures = [{**level, **(level["speculative_decoding"] or NO_DRAFTS)} for level in levels]
    throughput = table_of(title, ("load",), COLUMNS, figures)
    return [throughput, Table("latency, ms", ("load", ""), keys, latencies, notes)]
