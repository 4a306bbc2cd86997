"""`paceline generate`: one prompt in, text out as it is made. With --json: one object with everything known
about it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import console, options, parsing
from paceline.cli.streaming import Prompt, as_prompt, checked_prompt, collect, completion_json
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from paceline.api.llm import LLM
    from paceline.api.results import Chunk
    from paceline.core.params import SamplingParams


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt, or - to read it from stdin.")],
    engine: options.Engine,
    sampling: options.Sampled,
    system: options.System = None,
    raw: options.Raw = False,
    as_json: options.Json = False,
) -> None:
    """Complete one prompt.

    Examples:

      paceline generate "Why is the sky blue?" --temperature 0 --method ngram

      echo "2 + 2 =" | paceline generate - --raw --max-tokens 8 --json

      paceline generate "Is water wet?" --choice yes --choice no
    """
    from paceline import LLM

    params, chosen = parsing.sampling_params(sampling), parsing.engine_options(engine)
    if raw and system is not None:
        raise ConfigError(
            f"--system is {system[:40]!r} but --raw leaves the chat template out; put it into the prompt"
        )
    text = checked_prompt(console.stdin().read() if prompt == "-" else prompt)
    with LLM(chosen) as llm:
        answer = _answer_many if params.n > 1 else _answer_one
        answer(llm, as_prompt(llm, text, raw, system), params, as_json)


def _answer_one(llm: LLM, prompt: Prompt, params: SamplingParams, as_json: bool) -> None:
    screen = console.stdout()

    def show(chunk: Chunk) -> None:
        if not as_json:
            console.write(screen, chunk.text)

    answer = collect(llm.stream(prompt, params), show)
    if as_json:
        console.write_json(screen, answer.to_json())
    else:
        console.write(screen, "\n")
    if answer.is_interrupted:
        raise KeyboardInterrupt


def _answer_many(llm: LLM, prompt: Prompt, params: SamplingParams, as_json: bool) -> None:
    started = time.perf_counter()
    result = llm.generate([prompt], params)[0]
    seconds = time.perf_counter() - started
    screen = console.stdout()
    if as_json:
        completions = [completion_json(completion) for completion in result.outputs]
        timings = {"total_s": round(seconds, 4)}
        return console.write_json(screen, {**completions[0], "timings": timings, "outputs": completions})
    for number, completion in enumerate(result.outputs, start=1):
        console.write(screen, f"[{number}]\n", style="dim")
        console.write(screen, completion.text + "\n")
    return None
