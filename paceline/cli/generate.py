"""`paceline generate`: one prompt in, text out as it is made. With --json: one object with everything known
about it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import console, options, parsing
from paceline.cli.streaming import Prompt, as_prompt, checked_prompt, collect, completion_json
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from paceline.api.llm import LLM
    from paceline.api.results import Chunk
    from paceline.core.params import SamplingParams, StructuredOutputs

_PANEL = "Structure"


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt, or - to read it from stdin.")],
    model: options.Model = "default",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    exact: options.Exact = False,
    load_format: options.LoadFormat = "auto",
    kv_cache_dtype: options.KvCacheDtype = "auto",
    system: options.System = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = options.DEFAULT_TEMPERATURE,
    top_p: options.TopP = options.DEFAULT_TOP_P,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    stop_token_id: options.StopTokenId = None,
    min_tokens: options.MinTokens = None,
    ignore_eos: options.IgnoreEos = False,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    logit_bias: options.LogitBias = None,
    bad_word: options.BadWord = None,
    n: Annotated[
        int | None, typer.Option("--n", "-n", help="How many answers.", rich_help_panel="Sampling")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Report this many likely tokens beside each (in --json).")
    ] = None,
    json_schema: Annotated[
        str | None, typer.Option(help="A JSON schema: a file or the text.", rich_help_panel=_PANEL)
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="The answer matches this expression.", rich_help_panel=_PANEL)
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="The answer is one of these; repeat it.", rich_help_panel=_PANEL)
    ] = None,
    grammar: Annotated[
        str | None, typer.Option(help="A Lark grammar: a file or the text.", rich_help_panel=_PANEL)
    ] = None,
    method: options.Method = None,
    num_speculative_tokens: options.NumSpeculative = None,
    draft_model: options.DraftModel = None,
    speculative_config: options.SpeculativeConfig = None,
    max_model_len: options.MaxModelLen = None,
    kv_cache_memory: options.KvCacheMemory = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Give the prompt to the model as it is, without the chat template.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Complete one prompt.

    Examples:

      paceline generate "Why is the sky blue?" --temperature 0 --method ngram

      echo "2 + 2 =" | paceline generate - --raw --max-tokens 8 --json

      paceline generate "Is water wet?" --choice yes --choice no
    """
    from paceline import SamplingParams

    params = SamplingParams(**parsing.given(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, stop=stop, n=n,
        stop_token_ids=stop_token_id, min_tokens=min_tokens, ignore_eos=ignore_eos, repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, logit_bias=parsing.logit_bias(logit_bias),
        bad_words=bad_word, logprobs=logprobs, structured_outputs=_structured_outputs(json_schema, regex, choice, grammar),
    ))  # fmt: skip
    config = parsing.speculative_config(speculative_config, method, num_speculative_tokens, draft_model)
    if raw and system is not None:
        raise ConfigError(
            f"--system is {system[:40]!r} but --raw leaves the chat template out; put it into the prompt"
        )
    text = checked_prompt(console.stdin().read() if prompt == "-" else prompt)
    limits: dict[str, Any] = {
        "max_model_len": max_model_len,
        "kv_cache_memory": parsing.memory(kv_cache_memory),
        "dtype": dtype,
    }
    limits |= {"device": device, "exact": exact, "load_format": load_format, "kv_cache_dtype": kv_cache_dtype}
    _run(model, config, limits, lambda llm: as_prompt(llm, text, raw, system), params, as_json)


def _run(
    model: str,
    config: dict[str, Any] | str | None,
    limits: dict[str, Any],
    prompt: Callable[[LLM], Prompt],
    params: SamplingParams,
    as_json: bool,
) -> None:
    from paceline import LLM

    with LLM(model, speculative_config=config, **limits) as llm:
        answer = _answer_many if params.n > 1 else _answer_one
        answer(llm, prompt(llm), params, as_json)


def _structured_outputs(
    schema: str | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> StructuredOutputs | None:
    from paceline.core.params import StructuredOutputs

    wanted = parsing.given(json=schema, regex=regex, choice=choice, grammar=grammar)
    if len(wanted) > 1:
        raise ConfigError(
            "--json-schema, --regex, --choice and --grammar exclude each other; use one of them"
        )
    if regex == "":
        raise ConfigError(
            "--regex is empty, which allows no text; write an expression, for instance '[a-z]+'"
        )
    if schema is not None:
        wanted["json"] = parsing.parse_json_object(
            "--json-schema", parsing.file_or_text("--json-schema", schema)
        )
    if grammar is not None:
        wanted["grammar"] = parsing.file_or_text("--grammar", grammar)
    return StructuredOutputs(**wanted) if wanted else None


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
        report: dict[str, Any] = {
            **completions[0],
            "timings": {"total_s": round(seconds, 4)},
            "outputs": completions,
        }
        console.write_json(screen, report)
        return
    for number, completion in enumerate(result.outputs, start=1):
        console.write(screen, f"[{number}]\n", style="dim")
        console.write(screen, completion.text + "\n")
