"""`paceline generate`: one prompt in, text out as it is made. With --json: one object with everything known about it."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import console, options
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.params import SamplingParams, StructuredOutputs
    from paceline.results import Chunk

_PANEL = "Structure"


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt, or - to read it from stdin.")],
    model: options.Model = "default",
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    n: Annotated[int | None, typer.Option("--n", "-n", help="How many answers.", rich_help_panel="Sampling")] = None,
    logprobs: Annotated[int | None, typer.Option(help="Report this many likely tokens beside each (in --json).")] = None,
    json_schema: Annotated[str | None, typer.Option(help="A JSON schema: a file or the text.", rich_help_panel=_PANEL)] = None,
    regex: Annotated[str | None, typer.Option(help="The answer matches this expression.", rich_help_panel=_PANEL)] = None,
    choice: Annotated[list[str] | None, typer.Option(help="The answer is one of these; repeat it.", rich_help_panel=_PANEL)] = None,
    grammar: Annotated[str | None, typer.Option(help="A Lark grammar: a file or the text.", rich_help_panel=_PANEL)] = None,
    method: options.Method = None,
    num_speculative_tokens: options.NumSpeculative = None,
    draft_model: options.DraftModel = None,
    speculative_config: options.SpeculativeConfig = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give the prompt to the model as it is, without the chat template.")] = False,
    as_json: options.Json = False,
) -> None:
    """Complete one prompt.

    Examples:

      paceline generate "Why is the sky blue?" --temperature 0 --method ngram

      echo "2 + 2 =" | paceline generate - --raw --max-tokens 8 --json

      paceline generate "Is water wet?" --choice yes --choice no
    """
    from paceline import LLM, SamplingParams
    from paceline.cli.streaming import as_prompt

    structured = _structured_outputs(json_schema, regex, choice, grammar)
    sampling = options.given(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, stop=stop, n=n,
        logprobs=logprobs, structured_outputs=structured,
    )  # fmt: skip
    params = SamplingParams(**sampling)
    config = options.speculative_config(speculative_config, method, num_speculative_tokens, draft_model)
    text = sys.stdin.read() if prompt == "-" else prompt
    with LLM(model, speculative_config=config) as llm:
        answer = _answer_many if params.n > 1 else _answer_one
        answer(llm, as_prompt(llm, text, raw), params, as_json)


def _structured_outputs(schema: str | None, regex: str | None, choice: list[str] | None, grammar: str | None) -> StructuredOutputs | None:
    from paceline.params import StructuredOutputs

    wanted = options.given(json=schema, regex=regex, choice=choice, grammar=grammar)
    if len(wanted) > 1:
        raise ConfigError("--json-schema, --regex, --choice and --grammar exclude each other; use one of them")
    if schema is not None:
        wanted["json"] = options.parse_json_object("--json-schema", options.file_or_text(schema))
    if grammar is not None:
        wanted["grammar"] = options.file_or_text(grammar)
    return StructuredOutputs(**wanted) if wanted else None


def _answer_one(llm: LLM, prompt: str | list[int], params: SamplingParams, as_json: bool) -> None:
    from paceline.cli.streaming import collect

    screen = console.stdout()

    def show(chunk: Chunk) -> None:
        if not as_json:
            console.write(screen, chunk.text)

    answer = collect(llm.stream(prompt, params), show)
    console.write(screen, json.dumps(answer.to_json(), ensure_ascii=False) + "\n" if as_json else "\n")
    if answer.is_interrupted:
        raise KeyboardInterrupt


def _answer_many(llm: LLM, prompt: str | list[int], params: SamplingParams, as_json: bool) -> None:
    from paceline.cli.streaming import completion_json

    started = time.perf_counter()
    result = llm.generate([prompt], params)[0]
    seconds = time.perf_counter() - started
    screen = console.stdout()
    if as_json:
        completions = [completion_json(completion) for completion in result.outputs]
        report: dict[str, Any] = {**completions[0], "timings": {"total_s": round(seconds, 4)}, "outputs": completions}
        console.write(screen, json.dumps(report, ensure_ascii=False) + "\n")
        return
    for number, completion in enumerate(result.outputs, start=1):
        console.write(screen, f"[{number}]\n", style="dim")
        console.write(screen, completion.text + "\n")
