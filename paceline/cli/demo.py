"""`paceline demo`: the same prompt twice, plain and with drafts, and what the drafts changed: the time alone.
A terminal sees both as a race (race.py), a pipe the texts as they come. Invariant: runs are timed one after
the other, never together; a speed is only named where something was timed; the tokens of the first step came
with the prompt and are not.
"""

from __future__ import annotations

import codecs
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

import paceline
from paceline import SamplingParams
from paceline.api.results import Chunk
from paceline.cli import console, options, race
from paceline.cli.console import ESCAPES, Answer
from paceline.cli.options import JSON_HELP, LOADING, MAIN, Drafting, Given, group
from paceline.cli.race import Lane, Race, Step
from paceline.core.errors import ConfigError
from paceline.core.options import option, options_of, require
from paceline.measure.results import Table, cell

LETTER = """Correct the grammar of this letter:

Dear Anna,

thank you for the lovely weekend at the lake. The children talk about the boat trip every day, and Tom have \
already asked when we can come again. We would like to invites you and Martin to our house in July. Please \
brings your bicycles, because the path along the river is open now. My sister will joins us on Sunday. We \
can all have lunch in the garden. Please let us know which weekend suits you best.

Best wishes,
Clara"""
LEGEND = "τ: tokens a step of the target; α: share of drafted tokens accepted; time: decoding alone.\n"
UNTIMED = "There is nothing to time: the whole answer came with the first step; raise --max-tokens.\n"


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Show plain and speculative decoding of one prompt side by side.

    Examples:

      paceline demo --slow 5

      paceline demo --method early_exit --prompt "Tell me about tides." --max-tokens 64"""

    engine: Given = group([*LOADING, *options_of(Drafting)])
    prompt: str | None = option(None, MAIN, "Your own text, or a shipped prompt's number; else a letter.")
    max_tokens: int = option(128, MAIN, "Stop after this many tokens.")
    temperature: float = option(0.0, MAIN, "Above 0 both runs use the same seed.")
    slow: float = option(1.0, MAIN, "Replay the race this many times slower.")
    svg: Path | None = option(None, MAIN, "Also save what is shown as a picture.")
    gif: Path | None = option(None, MAIN, "Also save the race as a moving picture.")
    json: bool = option(False, MAIN, JSON_HELP)


def demo(asked: Demo) -> None:
    options.check_target("--svg", asked.svg)
    options.check_target("--gif", asked.gif)
    require(1 <= asked.slow <= 1000, "--slow", asked.slow, "give a number from 1 to 1000")
    font = None if asked.gif is None else race.load_font()
    engine = options.engine_options(asked.engine)
    config = engine.speculative_config
    if config is None:
        what = f"--method is {asked.engine['method']}, so there is nothing to compare"
        raise ConfigError(f"{what}; use auto, suffix, ngram, draft_model or another")
    text = console.checked_prompt(_prompt(asked.prompt))
    seed = None if asked.temperature == 0 else 7
    params = SamplingParams(temperature=asked.temperature, seed=seed, max_tokens=asked.max_tokens)
    method = config if isinstance(config, str) else config["method"]
    screen = console.stdout(asked.json)
    is_live = screen.is_interactive and screen.file.isatty() and not asked.json
    with paceline.LLM(engine) as llm:
        prompt = console.as_prompt(llm, text)
        _warm_up(llm, prompt)
        _show_prompt(screen, text)
        if is_live:  # in words that stand still: what moves would take time from what is timed
            console.hint("timing both, one after the other")
        # Drafts first: a drafter that remembers answers must not have seen plain decoding give this one.
        shown = console.stdout(is_live or asked.json)
        drafted, steps = _run(shown, llm, prompt, method, params)
        plain, plain_steps = _run(shown, llm, prompt, "plain", replace(params, num_speculative_tokens=0))
    run = Race((Lane("plain", plain_steps), Lane(method, steps)), asked.slow)
    if is_live:
        run.show(screen)
    found = {"prompt": text, "method": method} | _figures(plain, drafted)
    _show_figures(screen, found)
    if asked.json:
        console.write_json(console.stdout(), found)
    if asked.svg is not None:
        canvas = race.canvas()
        _show_prompt(canvas, text)
        canvas.print(replace(run, slow=1.0).frame(canvas, run.seconds))  # which stands still
        _show_figures(canvas, found)
        canvas.save_svg(str(asked.svg), title="paceline demo")
    if asked.gif is not None and font is not None:
        race.save_gif(run, race.canvas(), font, asked.gif)
    if not found["identical"]:
        raise typer.Exit(1)


def _prompt(asked: str | None) -> str:
    if asked is None or not asked.isdigit():
        return LETTER if asked is None else asked
    from paceline.measure import prompts

    shipped = {p.id: p.text for p in prompts.load()}
    remedy = f"the shipped prompts are {min(shipped)} to {max(shipped)}; use one of them or your own text"
    require(asked in shipped, "--prompt", asked, remedy)
    return shipped[asked]


def _figures(plain: Answer, drafted: Answer) -> dict[str, Any]:
    found, speeds = dict[str, Any](), (plain.speed, drafted.speed)
    for name, answer, speed in zip(("plain", "drafted"), (plain, drafted), speeds, strict=True):
        assert answer.completion is not None, "a stream that was not interrupted ends with its result"
        rate, stats = None if speed is None else round(speed, 2), answer.completion.stats
        found[name] = {"text": answer.text, "token_ids": answer.token_ids, "tokens_per_second": rate}
        found[name]["finish_reason"] = answer.completion.finish_reason
    found["tau"], found["alpha"] = round(stats.tau, 4), round(stats.alpha, 4) if stats.num_drafted else None
    found["speedup"] = round(speeds[1] / speeds[0], 4) if speeds[0] and speeds[1] else None
    return found | {"identical": plain.token_ids == drafted.token_ids}


def _show_prompt(screen: Console, text: str) -> None:
    screen.rule("prompt", style="dim")
    if screen.is_terminal:
        screen.print(Text(text.translate(ESCAPES)))
    else:
        console.write(screen, text + "\n")


def _show_figures(screen: Console, found: dict[str, Any]) -> None:
    same = "[green]yes[/green]" if found["identical"] else "[bold red]no[/bold red]"
    rates = [cell(found[name]["tokens_per_second"], "{:.1f}") for name in ("plain", "drafted")]
    tau, alpha, speedup = cell(found["tau"], "{:.2f}"), cell(found["alpha"], "{:.2f}"), found["speedup"]
    first = ("plain", rates[0], "1.00", "-", "-" if speedup is None else "1.00x", "")
    rows = [first, (found["method"], rates[1], tau, alpha, cell(speedup, "{:.2f}x"), same)]
    console.show(screen, Table("", ("",), ("tokens/s", "τ", "α", "speedup", "identical"), rows))
    console.write(screen, LEGEND + (UNTIMED if speedup is None else ""), style="dim")


def _warm_up(llm: paceline.LLM, prompt: list[int]) -> None:
    """Compile, page the weights in and cache the prompt, so that both runs are timed under the same
    conditions; of its answer no drafter may learn more than the two tokens that caching takes."""
    words: str | list[int] = "one two one two one"
    with console.stderr().status("warming up"):
        for text, length, limit in ((words, 8, 0), (words, 8, None), (prompt, 2, 0)):
            params = SamplingParams(temperature=0, max_tokens=length, num_speculative_tokens=limit)
            llm.generate([text], params)


def _run(
    screen: Console, llm: paceline.LLM, prompt: list[int], title: str, params: SamplingParams
) -> tuple[Answer, list[Step]]:
    """One run, shown as it comes, and when each of its steps did."""
    to_text = codecs.getincrementaldecoder("utf-8")("replace").decode  # a token may be a part of a character
    steps, started = list[Step](), 0.0

    def show(chunk: Chunk) -> None:
        nonlocal started
        now, hidden = time.perf_counter(), llm.tokenizer.special_ids
        started = started or now
        pieces = [b"" if each.id in hidden else llm.tokenizer.token_bytes(each.id) for each in chunk.tokens]
        tokens = [(to_text(piece), each.source) for piece, each in zip(pieces, chunk.tokens, strict=True)]
        if tokens:
            steps.append(Step(now - started, tokens))
        console.write(screen, "".join(text for text, _ in tokens))

    screen.rule(title, style="dim")
    answer = console.collect(llm.stream(prompt, params), show)
    console.write(screen, "\n")
    if answer.is_interrupted:
        raise KeyboardInterrupt
    return answer, steps
