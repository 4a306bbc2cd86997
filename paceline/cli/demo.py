"""`paceline demo`: the same prompt twice, plain and with drafts, and what the drafts changed: the time, and
nothing else.
"""

from __future__ import annotations

import codecs
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import console, demo_report, options, parsing
from paceline.cli.options import LOADING, Drafting, Given
from paceline.cli.streaming import Answer, Prompt, as_prompt, checked_prompt, collect
from paceline.core.errors import ConfigError
from paceline.core.options import options_of

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.api.llm import LLM
    from paceline.api.results import Chunk
    from paceline.core.params import SamplingParams

COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")


def demo(
    engine: Annotated[Given, [*LOADING, *options_of(Drafting)]],
    prompt: Annotated[str, typer.Option(help="Your own text, or the number of a shipped prompt.")] = "203",
    max_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="Above 0 both runs use the same seed.")] = 0.0,
    svg: Annotated[Path | None, typer.Option(help="Also save what is shown as a picture.")] = None,
    as_json: options.Json = False,
) -> None:
    """Show plain and speculative decoding of one prompt side by side.

    Examples:

      paceline demo

      paceline demo --method early_exit --prompt "Tell me about tides." --max-tokens 64
    """
    from paceline import LLM

    parsing.check_target("--svg", svg)
    if svg is not None and as_json:
        raise ConfigError(f"--svg is {svg} but --json shows nothing to draw; use one of them")
    chosen = parsing.engine_options(engine)
    config = chosen.speculative_config
    if config is None:
        remedy = "use auto, suffix, ngram, draft_model or another"
        raise ConfigError(f"--method is {engine['method']}, so there is nothing to compare; {remedy}")
    text = checked_prompt(_find_prompt(prompt))
    plain, drafted = _params(temperature, max_tokens)
    screen = None if as_json else console.stdout(is_recorded=svg is not None)
    with LLM(chosen) as llm:
        prompt_ids = as_prompt(llm, text)
        _warm_up(llm, prompt_ids)
        if screen is not None:
            screen.rule("prompt", style="dim")
            console.write(screen, text + "\n")
        name_of_drafts = config if isinstance(config, str) else config["method"]
        # Drafts first: a drafter that remembers answers must not have seen plain decoding give this one.
        with_drafts = _run(screen, llm, prompt_ids, name_of_drafts, drafted)
        without = _run(screen, llm, prompt_ids, "plain", plain)
        comparison = demo_report.Comparison(text, name_of_drafts, without, with_drafts)
    if screen is None:
        console.write_json(console.stdout(), comparison.to_json())
    else:
        demo_report.print_table(screen, comparison)
    if svg is not None and screen is not None:
        screen.save_svg(str(svg), title="paceline demo")
    if not comparison.is_same:
        raise typer.Exit(1)


def _params(temperature: float, max_tokens: int) -> tuple[SamplingParams, SamplingParams]:
    """Without drafts and with them, otherwise alike."""
    from paceline import SamplingParams

    seed = None if temperature == 0 else 7
    drafted = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    return dataclasses.replace(drafted, num_speculative_tokens=0), drafted


def _find_prompt(prompt: str) -> str:
    if not prompt.isdigit():
        return prompt
    from paceline.measure import prompts

    shipped = {p.id: p.text for p in prompts.load()}
    if prompt not in shipped:
        remedy = f"use one of {min(shipped)} to {max(shipped)}, or your own text"
        raise ConfigError(f"--prompt {prompt} is not the number of a shipped prompt; {remedy}")
    return shipped[prompt]


def _warm_up(llm: LLM, prompt: Prompt) -> None:
    """Compile, page the weights in and cache the prompt, so that both runs are timed under the same
    conditions; of its answer no drafter may learn more than the two tokens that caching takes."""
    from paceline import SamplingParams

    with console.stderr().status("warming up"):
        for text, length, limit in (
            ("one two one two one", 8, 0),
            ("one two one two one", 8, None),
            (prompt, 2, 0),
        ):
            params = SamplingParams(temperature=0, max_tokens=length, num_speculative_tokens=limit)
            llm.generate([text], params)


def _run(screen: Console | None, llm: LLM, prompt: Prompt, title: str, params: SamplingParams) -> Answer:
    """One run, shown as it comes, or in silence where there is no screen."""
    colour_of: dict[str, str] = {}
    to_text = codecs.getincrementaldecoder("utf-8")("replace").decode  # a token may be a part of a character

    def show(chunk: Chunk) -> None:
        if screen is None:
            return
        for token in chunk.tokens:
            style = None
            if token.source is not None:
                style = colour_of.setdefault(token.source, COLOURS[len(colour_of) % len(COLOURS)])
            if token.id not in llm.tokenizer.special_ids:
                console.write(screen, to_text(llm.tokenizer.token_bytes(token.id)), style=style)

    if screen is not None:
        screen.rule(title, style="dim")
    answer = collect(llm.stream(prompt, params), show)
    if screen is not None:
        console.write(screen, "\n")
    if answer.is_interrupted:
        raise KeyboardInterrupt
    if screen is not None and console.has_colours(screen):  # without colours a legend of colours says nothing
        for source, colour in colour_of.items():
            console.write(screen, "■ ", style=colour)
            told = f"drafted by {source} and accepted; the rest is the target's own\n"
            console.write(screen, told, style="dim")
    return answer
