"""`paceline bench serve`: load on a running server, ours or any other that speaks OpenAI's protocol."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import console, parsing
from paceline.cli.bench_console import new_table, telling
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.measure.load import Level

_LOAD, _REQUESTS, _REPORT = "Load", "Requests", "Report"
INTERRUPTED = 130
LEGEND = """TTFT, TPOT, e2e: milliseconds to the first token, for each further one, and to the end, counted from when a request was due;
goodput: requests a second that met every goal; cached: share of prompt tokens that the server had read before; τ, α: tokens a draft
led to and share of drafted tokens accepted, by the server's own counters.
"""


def serve(
    base_url: Annotated[
        str, typer.Option(help="Where the server is, with or without /v1.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="The name to ask for; left out: the first the server has."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.", show_envvar=True)
    ] = None,
    endpoint: Annotated[
        str, typer.Option(help="/v1/chat/completions or /v1/completions.")
    ] = "/v1/chat/completions",
    request_rate: Annotated[
        str | None,
        typer.Option(
            help="Requests a second, several separated by commas; inf: as fast as may be.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    max_concurrency: Annotated[
        str | None,
        typer.Option(
            help="Most in flight, several separated by commas; alone it paces the load.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Requests of each load.", rich_help_panel=_LOAD)
    ] = 32,
    burstiness: Annotated[
        float,
        typer.Option(help="1: Poisson arrivals; less: in bursts; more: more even.", rich_help_panel=_LOAD),
    ] = 1.0,
    seed: Annotated[
        int, typer.Option(help="Of arrivals and the order of prompts.", rich_help_panel=_LOAD)
    ] = 0,
    num_warmups: Annotated[
        int, typer.Option(min=0, help="Requests beforehand, untimed.", rich_help_panel=_LOAD)
    ] = 1,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Your prompts (.jsonl or .txt) instead of the shipped ones.", rich_help_panel=_REQUESTS
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of an answer.", rich_help_panel=_REQUESTS)
    ] = 128,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Always so many (vLLM's and Paceline's servers).", rich_help_panel=_REQUESTS
        ),
    ] = False,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.", rich_help_panel=_REQUESTS)] = 0.0,
    extra_body: Annotated[
        str | None,
        typer.Option(
            help='JSON added to every body: {"speculative": "off"}; null takes a field out.',
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a request has failed.", rich_help_panel=_REQUESTS)
    ] = 600.0,
    goodput: Annotated[
        str,
        typer.Option(
            help="Goals in milliseconds: any of ttft, tpot, e2el; or none.", rich_help_panel=_REPORT
        ),
    ] = "ttft:1000,tpot:100",
    metric_percentiles: Annotated[
        str, typer.Option(help="Separated by commas.", rich_help_panel=_REPORT)
    ] = "50,90,99",
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Also write everything, request by request, to this file.", rich_help_panel=_REPORT
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Also draw latency and throughput over the loads into this folder.", rich_help_panel=_REPORT
        ),
    ] = None,
) -> None:
    """Put load on a running server and tell its latencies, throughput and goodput.

    Requests are sent when they are due (Poisson arrivals at each rate in turn, the same ones for the same
    seed), whether or not earlier ones have been answered. With --max-concurrency alone, so many are always in
    flight. Every request is streamed over a connection of its own. Any server with OpenAI's protocol can be
    measured; where it lets /metrics be read, speculation is reported as well. Ctrl-C ends the load and
    reports what was measured.

    Examples:

      paceline bench serve --request-rate 1,2,4 --json load.json --plot plots

      paceline bench serve --base-url http://127.0.0.1:8080 --max-concurrency 1,4,16 --ignore-eos
    """
    from paceline.measure import load_plots, plots
    from paceline.measure import prompts as prompt_files
    from paceline.measure.endpoint import endpoint_of
    from paceline.measure.load_report import goals_of
    from paceline.measure.serve import CHAT, COMPLETIONS, Options, num_turns, run

    parsing.check_target("--json", json_file)
    if endpoint not in (CHAT, COMPLETIONS):
        raise ConfigError(f"--endpoint is {endpoint!r}; use {CHAT} or {COMPLETIONS}")
    for name, value in (("--burstiness", burstiness), ("--timeout", timeout)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value:g}; give a number above 0")
    options = Options(
        server=endpoint_of(base_url, api_key), model=model, path=endpoint, levels=_levels(request_rate, max_concurrency),
        prompts=tuple(prompt_files.load(prompts)), num_prompts=num_prompts, burstiness=burstiness, max_new_tokens=max_new_tokens,
        temperature=temperature, ignores_eos=ignore_eos, extra=parsing.parse_json_object("--extra-body", extra_body) if extra_body else {},
        goals=goals_of(goodput), percents=_percents(metric_percentiles), num_warmups=num_warmups, timeout_s=timeout, seed=seed,
    )  # fmt: skip
    if plot is not None:
        plots.check(plot)
    with telling(num_turns(options)) as tell:
        report = run(options, tell)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _print(console.stdout(), report)
    for path in load_plots.draw(report, plot) if plot is not None else ():
        console.write(console.stderr(), f"drawn: {path}\n")
    if report["is_interrupted"]:
        raise typer.Exit(INTERRUPTED)


def _levels(request_rate: str | None, max_concurrency: str | None) -> tuple[Level, ...]:
    """Every rate with every cap."""
    from paceline.measure.load import Level

    rates = (
        [math.inf]
        if request_rate is None and max_concurrency
        else _numbers("--request-rate", request_rate or "1,2,4", "2 or 1,2,4 or inf")
    )
    caps: list[int | None] = [None]
    if max_concurrency is not None:
        found = _numbers("--max-concurrency", max_concurrency, "16 or 1,4,16")
        if any(cap != int(cap) for cap in found if cap != math.inf) or math.inf in found:
            raise ConfigError(f"--max-concurrency is {max_concurrency!r}; write whole numbers: 16 or 1,4,16")
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


def _percents(text: str) -> tuple[float, ...]:
    found = _numbers("--metric-percentiles", text, "50,90,99")
    if max(found) > 100:
        raise ConfigError(f"--metric-percentiles is {text!r}; write numbers up to 100: 50,90,99")
    return tuple(found)


def _print(screen: Console, report: dict[str, Any]) -> None:
    if not report["levels"]:
        console.write(screen, "nothing was measured\n", style="yellow")
        return
    goals = ", ".join(f"{name} ≤ {value:g} ms" for name, value in report["goals_ms"].items())
    columns = ("done", "failed", "req/s", "goodput", "tok/s", "in flight", "cached", "τ", "α")
    table = new_table(
        f"{report['model']}: throughput" + (f"; goals {goals}" if goals else ""), ("load",), columns
    )
    for level in report["levels"]:
        table.add_row(level["load"], *_throughput(level))
    screen.print(table)
    keys = list(next((level["ttft_ms"] for level in report["levels"] if level["ttft_ms"]), {}))
    latencies = new_table("latency, ms", ("load", ""), keys)
    for level in report["levels"]:
        for i, (name, title) in enumerate(
            (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "between pieces"), ("e2el", "e2e"))
        ):
            found = level[f"{name}_ms"] or {}
            latencies.add_row(
                level["load"] if i == 0 else "",
                title,
                *(f"{found[key]:,.1f}" if key in found else "-" for key in keys),
            )
    screen.print(latencies)
    console.write(screen, LEGEND, style="dim")
    for level in report["levels"]:
        _print_troubles(screen, level)
    if report["is_interrupted"]:
        console.write(screen, "interrupted: the last load is not complete\n", style="yellow")


def _throughput(level: dict[str, Any]) -> list[str]:
    drafting = level["speculative_decoding"] or {}
    cached = level["cached_prompt_tokens"] / level["prompt_tokens"] if level["prompt_tokens"] else None
    return [
        f"{level['completed']}/{level['asked']}",
        str(level["failed"]),
        f"{level['request_throughput']:.2f}",
        _or_dash(level["request_goodput"], "{:.2f}"),
        f"{level['output_throughput']:,.1f}",
        str(level["peak_in_flight"]),
        _or_dash(cached, "{:.0%}"),
        _or_dash(drafting.get("acceptance_length"), "{:.2f}"),
        _or_dash(drafting.get("acceptance_rate"), "{:.2f}"),
    ]


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _print_troubles(screen: Console, level: dict[str, Any]) -> None:
    for reason, count in level["errors"].items():
        console.write(screen, f"{level['load']}: {count} failed: {reason}\n", style="red")
    if level["tokens_counted_by"] != "server" and level["completed"]:
        console.write(
            screen,
            f"{level['load']}: the server counts no tokens; each piece of text was taken for one\n",
            style="yellow",
        )
