"""`paceline bench serve`: one client, any OpenAI-compatible server, one load after the other.

Invariant: what was measured before an interrupt is reported; an interrupted level is marked, and its
unfinished requests are not in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.errors import ConfigError, RequestError
from paceline.measure import counters
from paceline.measure.endpoint import Endpoint, Refused
from paceline.measure.load import Job, Level, Record, due_times, run_level
from paceline.measure.load_report import Goals, level_report, record_json
from paceline.measure.prompts import Prompt

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Tell = Callable[[str, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    server: Endpoint
    model: str | None  # None: the first one the server names
    path: str = CHAT
    levels: tuple[Level, ...]
    prompts: tuple[Prompt, ...]
    num_prompts: int
    burstiness: float = 1.0
    max_new_tokens: int = 128
    temperature: float = 0.0
    ignores_eos: bool = False
    extra: dict[str, Any] = field(default_factory=dict)  # goes into every body; null takes a field out
    goals: Goals = field(default_factory=dict)
    percents: tuple[float, ...] = (50, 90, 99)
    num_warmups: int = 1
    timeout_s: float = 600.0
    seed: int = 0


def num_turns(options: Options) -> int:
    return options.num_warmups + len(options.levels) * options.num_prompts


def run(options: Options, tell: Tell) -> dict[str, Any]:
    """The report; it is JSON. Ctrl-C ends the load, not the report."""
    return asyncio.run(_run(options, tell))


async def _run(options: Options, tell: Tell) -> dict[str, Any]:
    stop = asyncio.Event()
    with _on_interrupt(stop):
        model = options.model or await _first_model(options.server)
        jobs = [job_of(options, model, prompt) for prompt in shuffled(options)]
        await _warm_up(options, jobs, stop, tell)
        levels, taken = [], 0
        for level in options.levels:
            if stop.is_set():
                break
            mine = [jobs[(taken + i) % len(jobs)] for i in range(options.num_prompts)]
            taken += options.num_prompts
            levels.append(await _level(options, level, mine, stop, tell))
    return {"model": model, "endpoint": options.path, "prompts": len(jobs), "seed": options.seed, "max_new_tokens": options.max_new_tokens,
            "goals_ms": options.goals, "is_interrupted": stop.is_set(), "levels": levels}  # fmt: skip


async def _level(
    options: Options, level: Level, jobs: Sequence[Job], stop: asyncio.Event, tell: Tell
) -> dict[str, Any]:
    tell(str(level), 0)
    before = await counters.read(options.server)
    due = due_times(len(jobs), level.rate, options.burstiness, options.seed)
    records = await run_level(
        options.server, level, jobs, due, options.timeout_s, stop, lambda record: tell(str(level), 1)
    )
    report = level_report(level, records, len(jobs), options.percents, options.goals)
    drafting = counters.difference(before, await counters.read(options.server))
    return {
        **report,
        "speculative_decoding": drafting,
        "requests": [record_json(r) for r in sorted(records, key=lambda r: r.due)],
    }


async def _warm_up(options: Options, jobs: Sequence[Job], stop: asyncio.Event, tell: Tell) -> None:
    """Untimed. A server that refuses these would refuse all, so the reason is told at once."""

    def check(record: Record) -> None:
        tell("warming up", 1)
        if record.error is not None:
            raise RequestError(
                f"the server refused a request of the warm-up ({record.error}); mend that, or give --num-warmups 0"
            )

    one_by_one = Level(float("inf"), 1)
    mine = [jobs[-1 - i % len(jobs)] for i in range(options.num_warmups)]
    await run_level(options.server, one_by_one, mine, [0.0] * len(mine), options.timeout_s, stop, check)


def shuffled(options: Options) -> list[Prompt]:
    """All prompts in an order of the seed's; a longer run begins again at the first."""
    chosen = list(options.prompts)
    random.Random(options.seed).shuffle(chosen)
    return chosen


def job_of(options: Options, model: str, prompt: Prompt) -> Job:
    asked: dict[str, Any] = (
        {"messages": [{"role": "user", "content": prompt.text}]}
        if options.path == CHAT
        else {"prompt": prompt.text}
    )
    body = {
        "model": model,
        **asked,
        "max_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if options.ignores_eos else {}),
        **options.extra,
    }
    return Job(prompt.id, options.path, {name: value for name, value in body.items() if value is not None})


async def _first_model(server: Endpoint) -> str:
    try:
        models = json.loads(await server.get("/v1/models"))["data"]
        return str(models[0]["id"])
    except Refused as error:
        scheme = "https" if server.is_tls else "http"
        where = f"{scheme}://{server.host}:{server.port}{server.folder}"
        remedy = (
            "give --api-key"
            if "401" in str(error)
            else "start the server (`paceline serve`), or check --base-url"
        )
        raise ConfigError(f"{where} does not answer ({error}); {remedy}") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise ConfigError("the server's /v1/models names no model; give --model") from None


@contextlib.contextmanager
def _on_interrupt(stop: asyncio.Event) -> Iterator[None]:
    """Ctrl-C sets `stop`. A second one comes too late to matter: what is left is closing connections."""
    loop = asyncio.get_running_loop()
    is_ours = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if is_ours else None
    with contextlib.suppress(NotImplementedError):  # loops without signals: Windows
        if is_ours:
            loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        yield
    finally:
        if is_ours:
            with contextlib.suppress(NotImplementedError):
                loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, before)
