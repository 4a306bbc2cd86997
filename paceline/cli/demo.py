"""`paceline demo`: the same prompt twice, plain and with drafts, and what the drafts changed: the time, and nothing else."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import console, options
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.cli.streaming import Answer
    from paceline.llm import LLM
    from paceline.params import SamplingParams
    from paceline.results import Chunk

DEFAULT_PROMPT = "203"
COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")


def demo(
    model: options.Model = "default",
    method: options.Method = "ngram",
    num_speculative_tokens: options.NumSpeculative = None,
    draft_model: options.DraftModel = None,
    prompt: Annotated[str, typer.Option(help="Your own text, or the number of a shipped prompt.")] = DEFAULT_PROMPT,
    max_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="Above 0 both runs use the same seed.")] = 0.0,
    svg: Annotated[Path | None, typer.Option(help="Also save what is shown as a picture.")] = None,
) -> None:
    """Show plain and speculative decoding of one prompt side by side.

    Examples:

      paceline demo

      paceline demo --method early_exit --prompt "Tell me about tides." --max-tokens 64
    """
    from paceline import LLM, SamplingParams
    from paceline.cli.streaming import as_prompt

    if svg is not None and not svg.absolute().parent.is_dir():
        raise ConfigError(f"--svg {svg}: there is no folder {svg.absolute().parent}; make it first")
    config = options.speculative_config(None, method, num_speculative_tokens, draft_model)
    if config is None:
        raise ConfigError(f"--method is {method}, so there is nothing to compare; use ngram, draft_model, early_exit or quantized")
    text = _find_prompt(prompt)
    seed = None if temperature == 0 else 7
    drafted = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    plain = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, num_speculative_tokens=0)
    with LLM(model, speculative_config=config) as llm:
        prompt_ids = as_prompt(llm, text)
        _warm_up(llm, prompt_ids)
        screen = console.stdout(is_recorded=svg is not None)
        screen.rule("prompt", style="dim")
        console.write(screen, text + "\n")
        answers = [_run(screen, llm, prompt_ids, name, params) for name, params in (("plain", plain), (config["method"], drafted))]
    is_same = _print_table(screen, config["method"], *answers)
    if svg is not None:
        screen.save_svg(str(svg), title="paceline demo")
    if not is_same:
        raise typer.Exit(1)


def _find_prompt(prompt: str) -> str:
    if not prompt.isdigit():
        return prompt
    from paceline import prompts

    shipped = {p.id: p.text for p in prompts.load()}
    if prompt not in shipped:
        raise ConfigError(
            f"--prompt {prompt} is not the number of a shipped prompt; use one of {min(shipped)} to {max(shipped)}, or your own text"
        )
    return shipped[prompt]


def _warm_up(llm: LLM, prompt: str | list[int]) -> None:
    """Compile, page the weights in and cache the prompt, so that both runs are timed under the same conditions."""
    from paceline import SamplingParams

    with console.stderr().status("warming up (the first time kernels are compiled: about 20 s)"):
        for limit in (0, None):
            llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8, num_speculative_tokens=limit))


def _run(screen: Console, llm: LLM, prompt: str | list[int], title: str, params: SamplingParams) -> Answer:
    from paceline.cli.streaming import collect

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
    answer = collect(llm.stream(prompt, params), show)
    console.write(screen, "\n")
    if answer.is_interrupted:
        raise KeyboardInterrupt
    for source, colour in colour_of.items():
        console.write(screen, "■ ", style=colour)
        console.write(screen, f"drafted by {source} and accepted; the rest is the target's own\n", style="dim")
    return answer


def _print_table(screen: Console, method: str, plain: Answer, drafted: Answer) -> bool:
    from rich.table import Table

    table = Table(title_justify="left")
    for heading in ("", "tokens/s", "τ", "α", "speedup", "identical"):
        table.add_column(heading, justify="left" if heading in ("", "identical") else "right")
    is_same = plain.token_ids == drafted.token_ids
    rows = (("plain", plain, ""), (method, drafted, "[green]yes[/green]" if is_same else "[bold red]no[/bold red]"))
    for name, answer, same in rows:
        assert answer.completion is not None, "a stream that was not interrupted ends with its result"
        stats = answer.completion.stats
        ratio = answer.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0
        alpha = f"{stats.alpha:.2f}" if stats.num_drafted else "-"
        table.add_row(name, f"{answer.tokens_per_second:.1f}", f"{stats.tau:.2f}", alpha, f"{ratio:.2f}x", same)
    screen.print(table)
    console.write(screen, "τ: tokens a step of the target; α: share of drafted tokens accepted; time: decoding alone.\n", style="dim")
    return is_same
