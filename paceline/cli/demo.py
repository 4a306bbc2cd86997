"""`paceline demo`: the same prompt twice, plain and with drafts, and what the drafts changed: the time alone.
Invariant: a speed is only named where something was timed; the tokens of the first step came with the prompt
and are not.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

import paceline
from paceline import SamplingParams
from paceline.api.results import Chunk
from paceline.cli import console, options
from paceline.cli.console import Answer
from paceline.cli.options import JSON_HELP, LOADING, MAIN, Drafting, Given, group
from paceline.core.errors import ConfigError
from paceline.core.options import option, options_of, require
from paceline.measure.results import Table, cell

COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")
LEGEND = "τ: tokens a step of the target; α: share of drafted tokens accepted; time: decoding alone.\n"
UNTIMED = "There is nothing to time: the whole answer came with the first step; raise --max-tokens.\n"


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Show plain and speculative decoding of one prompt side by side.

    Examples:

      paceline demo

      paceline demo --method early_exit --prompt "Tell me about tides." --max-tokens 64"""

    engine: Given = group([*LOADING, *options_of(Drafting)])
    prompt: str = option("203", MAIN, "Your own text, or the number of a shipped prompt.")
    max_tokens: int = option(128, MAIN, "Stop after this many tokens.")
    temperature: float = option(0.0, MAIN, "Above 0 both runs use the same seed.")
    svg: Path | None = option(None, MAIN, "Also save what is shown as a picture.")
    json: bool = option(False, MAIN, JSON_HELP)


def demo(asked: Demo) -> None:
    options.check_target("--svg", asked.svg)
    if asked.svg is not None and asked.json:
        raise ConfigError(f"--svg is {asked.svg} but --json shows nothing to draw; use one of them")
    engine = options.engine_options(asked.engine)
    config = engine.speculative_config
    if config is None:
        what = f"--method is {asked.engine['method']}, so there is nothing to compare"
        raise ConfigError(f"{what}; use auto, suffix, ngram, draft_model or another")
    text = asked.prompt
    if text.isdigit():
        from paceline.measure import prompts

        shipped = {p.id: p.text for p in prompts.load()}
        remedy = f"the shipped prompts are {min(shipped)} to {max(shipped)}; use one of them or your own text"
        require(text in shipped, "--prompt", text, remedy)
        text = shipped[text]
    console.checked_prompt(text)
    seed = None if asked.temperature == 0 else 7
    params = SamplingParams(temperature=asked.temperature, seed=seed, max_tokens=asked.max_tokens)
    method = config if isinstance(config, str) else config["method"]
    screen = console.stdout(is_recorded=asked.svg is not None, is_quiet=asked.json)
    with paceline.LLM(engine) as llm:
        prompt = console.as_prompt(llm, text)
        _warm_up(llm, prompt)
        screen.rule("prompt", style="dim")
        console.write(screen, text + "\n")
        # Drafts first: a drafter that remembers answers must not have seen plain decoding give this one.
        drafted = _run(screen, llm, prompt, method, params)
        plain = _run(screen, llm, prompt, "plain", replace(params, num_speculative_tokens=0))
    assert drafted.completion is not None, "a stream that was not interrupted ends with its result"
    stats, speeds = drafted.completion.stats, (plain.speed, drafted.speed)
    found: dict[str, Any] = {"prompt": text, "method": method}
    for name, answer, speed in zip(("plain", "drafted"), (plain, drafted), speeds, strict=True):
        rate = None if speed is None else round(speed, 2)
        found[name] = {"text": answer.text, "token_ids": answer.token_ids, "tokens_per_second": rate}
    found["tau"], found["alpha"] = round(stats.tau, 4), round(stats.alpha, 4) if stats.num_drafted else None
    found["speedup"] = round(speeds[1] / speeds[0], 4) if speeds[0] and speeds[1] else None
    found["identical"] = plain.token_ids == drafted.token_ids
    same = "[green]yes[/green]" if found["identical"] else "[bold red]no[/bold red]"
    rates = [cell(found[name]["tokens_per_second"], "{:.1f}") for name in ("plain", "drafted")]
    tau, alpha, speedup = cell(found["tau"], "{:.2f}"), cell(found["alpha"], "{:.2f}"), found["speedup"]
    first = ("plain", rates[0], "1.00", "-", "-" if speedup is None else "1.00x", "")
    rows = [first, (method, rates[1], tau, alpha, cell(speedup, "{:.2f}x"), same)]
    console.show(screen, Table("", ("",), ("tokens/s", "τ", "α", "speedup", "identical"), rows))
    console.write(screen, LEGEND + (UNTIMED if speedup is None else ""), style="dim")
    if asked.json:
        console.write_json(console.stdout(), found)
    if asked.svg is not None:
        screen.save_svg(str(asked.svg), title="paceline demo")
    if not found["identical"]:
        raise typer.Exit(1)


def _warm_up(llm: paceline.LLM, prompt: list[int]) -> None:
    """Compile, page the weights in and cache the prompt, so that both runs are timed under the same
    conditions; of its answer no drafter may learn more than the two tokens that caching takes."""
    words: str | list[int] = "one two one two one"
    with console.stderr().status("warming up"):
        for text, length, limit in ((words, 8, 0), (words, 8, None), (prompt, 2, 0)):
            params = SamplingParams(temperature=0, max_tokens=length, num_speculative_tokens=limit)
            llm.generate([text], params)


def _run(screen: Console, llm: paceline.LLM, prompt: list[int], title: str, params: SamplingParams) -> Answer:
    """One run, shown as it comes."""
    colour_of: dict[str, str] = {}
    to_text = codecs.getincrementaldecoder("utf-8")("replace").decode  # a token may be a part of a character

    def show(chunk: Chunk) -> None:
        for token in chunk.tokens:
            style = None
            if token.source is not None:
                style = colour_of.setdefault(token.source, COLOURS[len(colour_of) % len(COLOURS)])
            if token.id not in llm.tokenizer.special_ids:
                console.write(screen, to_text(llm.tokenizer.token_bytes(token.id)), style=style)

    screen.rule(title, style="dim")
    answer = console.collect(llm.stream(prompt, params), show)
    console.write(screen, "\n")
    if answer.is_interrupted:
        raise KeyboardInterrupt
    has_colours = screen.record or (screen.color_system is not None and not screen.no_color)
    for source, colour in colour_of.items() if has_colours else ():
        console.write(screen, "■ ", style=colour)
        legend = f"drafted by {source} and accepted; the rest is the target's own\n"
        console.write(screen, legend, style="dim")
    return answer
