"""The verbs that run a model. `paceline generate`: one prompt in, text out as it is made; with --json one
object with everything known about it. `paceline chat`: a conversation at the terminal, or one question a line
from a pipe. `paceline serve`: OpenAI's routes; its flags are the fields of server/config.py.
Invariant: Ctrl-C stops an answer, not the conversation; what had been said by then stays in the history.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from typing import TextIO

import typer

import paceline
from paceline.cli import console, options
from paceline.cli.options import ENGINE, MAIN, SAMPLING, Drafting, Given, Sampling, group
from paceline.core.errors import ConfigError, RequestError
from paceline.core.options import option, options_of
from paceline.server.config import PREFIX, ServerConfig, resolve

HELP = "/exit or Ctrl-D leaves, /reset forgets what was said, /stats tells the speed, Ctrl-C stops an answer."
SETTINGS = [each for each in options_of(ServerConfig) if each[0].name != "model"]


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Complete one prompt.

    Examples:

      paceline generate "Why is the sky blue?" --temperature 0 --method ngram

      echo "2 + 2 =" | paceline generate - --raw --max-tokens 8 --json

      paceline generate "Is water wet?" --choice yes --choice no"""

    prompt: str = option(MISSING, MAIN, options.PROMPT_HELP, is_argument=True)
    engine: Given = group(ENGINE)
    sampling: Given = group(options_of(Sampling))
    system: str | None = option(None, MAIN, options.SYSTEM_HELP)
    raw: bool = option(False, MAIN, options.RAW_HELP)
    json: bool = option(False, MAIN, options.JSON_HELP)


def generate(asked: Generate) -> None:
    params, system = options.sampling_params(asked.sampling), asked.system
    engine = options.engine_options(asked.engine)
    if asked.raw and system is not None:
        what = f"--system is {system[:40]!r} but --raw leaves the chat template out"
        raise ConfigError(f"{what}; put it into the prompt")
    text = console.given_prompt(asked.prompt)
    with paceline.LLM(engine) as llm:
        prompt = console.as_prompt(llm, text, asked.raw, system)
        if params.n == 1:
            if console.print_answer(llm.stream(prompt, params), asked.json).is_interrupted:
                raise KeyboardInterrupt
            return
        started = time.perf_counter()
        outputs = llm.generate([prompt], params)[0].outputs
        seconds = time.perf_counter() - started
    screen = console.stdout()
    if asked.json:
        made = [console.completion_json(completion) for completion in outputs]
        console.write_json(screen, {**made[0], "timings": {"total_s": round(seconds, 4)}, "outputs": made})
        return
    for number, completion in enumerate(outputs, start=1):
        console.write(screen, f"[{number}]\n", style="dim")
        console.write(screen, completion.text + "\n")


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Talk with a model. /help lists what else can be typed.

    Examples:

      paceline chat --method ngram

      printf 'Hello\\nWhat did I just say?\\n' | paceline chat --temperature 0 --json"""

    engine: Given = group(ENGINE)
    sampling: Given = group(options_of(Sampling, "temperature", "top_p", "top_k", "min_p", "seed", "stop"))
    system: str | None = option(None, MAIN, options.SYSTEM_HELP)
    max_tokens: int = option(512, SAMPLING, "Longest answer.")
    json: bool = option(False, MAIN, options.JSON_HELP)


def chat(asked: Chat) -> None:
    params = options.sampling_params(asked.sampling | {"max_tokens": asked.max_tokens})
    engine, source = options.engine_options(asked.engine), console.stdin()
    opening = [{"role": "system", "content": asked.system}] if asked.system is not None else []
    messages, answers = list(opening), list[console.Answer]()
    with paceline.LLM(engine) as llm, console.on_interrupt(lambda *_: None):  # nothing to stop between turns
        if source.isatty():
            console.hint(HELP)
        for line in _lines(source):
            if line == "/exit":
                break
            if line == "/help":
                console.hint(HELP)
            elif line == "/reset":
                messages = list(opening)
                console.hint("forgotten")
            elif line == "/stats":
                _print_stats(answers, llm)
            elif line.startswith("/"):
                console.stderr().print(f"there is no {line.split()[0]}; {HELP}", style="yellow", markup=False)
            else:
                asking = [*messages, {"role": "user", "content": line}]
                try:
                    console.checked_prompt(line)
                    answers.append(console.print_answer(llm.stream_chat(asking, params), asked.json))
                except RequestError as error:  # most often it no longer fits: the session goes on
                    console.print_error(f"{error} (in a conversation: /reset starts a new one)")
                    continue
                messages = [*asking, {"role": "assistant", "content": answers[-1].text}]
                if answers[-1].is_interrupted:
                    console.hint("(stopped)")


def _lines(source: TextIO) -> Iterator[str]:
    """What the user types, without empty lines. At a terminal with line editing and history."""
    if not source.isatty():
        yield from (line.strip() for line in source if line.strip())
        return
    import readline  # noqa: F401  (importing it is what gives input() its history)

    while True:
        try:
            with console.on_interrupt(signal.default_int_handler):
                if not sys.stdout.isatty():  # stdout is being collected: keep it to the answers
                    console.write(console.stderr(), "> ")
                line = input("> " if sys.stdout.isatty() else "").strip()
        except EOFError:
            console.write(console.stderr(), "\n")
            return
        except KeyboardInterrupt:
            console.hint("\n/exit or Ctrl-D leaves")
            continue
        if line:
            yield line


def _print_stats(answers: list[console.Answer], llm: paceline.LLM) -> None:
    totals, num_stopped = llm.engine.totals, sum(a.completion is None for a in answers)
    timed = [a for a in answers if a.last_at > a.first_at]
    seconds = sum(a.last_at - a.first_at for a in timed)
    speed = sum(len(a.token_ids) - a.num_first for a in timed) / seconds if seconds else 0.0
    steps = f"{totals.num_tokens} tokens, {totals.num_steps} steps (τ {totals.tau:.2f})"
    drafts = f"{totals.num_accepted} of {totals.num_drafted} drafted tokens accepted"
    said = f"{len(answers)} answers ({num_stopped} stopped), {steps}, {drafts}, {speed:.1f} tokens/s"
    console.stderr().print(said)


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a model to OpenAI clients.

    Every option can also be a variable (PACELINE_PORT=8001) or a line of a TOML file (port = 8001); flags win
    over variables, variables over the file.

    Examples:

      paceline serve --port 8000

      paceline serve ./llama-8b --api-key-file keys.txt --max-num-seqs 32

      paceline serve --config server.toml --method ngram -k 3

      paceline serve --replicas 2"""

    settings: Given = group([*options_of(Drafting), *SETTINGS])
    model: str | None = option(None, MAIN, options.MODEL_HELP, is_argument=True)
    config: str | None = option(None, MAIN, f"A TOML file with settings; also {PREFIX}CONFIG.")


def serve(asked: Serve) -> None:
    flags = {**asked.settings, "model": asked.model}
    if any(name in flags for name in options.SHORT):
        flags["speculative_config"] = options.speculative_config(asked.settings) or "off"
    chosen = resolve(flags, os.environ, asked.config)
    if chosen.pipeline_parallel_size > 1 and os.environ.get("RANK", "0") != "0":
        from paceline.api.build import follow_if_told

        follow_if_told(chosen)
    try:
        if chosen.spread[1]:
            extra, what = "scale", "--replicas and --autoscale need"
            from paceline.scale.run import serve as run
        else:
            extra, what = "server", "the server needs"
            from paceline.server.run import serve as run
    except ModuleNotFoundError as error:
        remedy = f"run: pip install 'paceline[{extra}]'"
        raise ConfigError(f"{what} {error.name}, which is not installed; {remedy}") from None
    raise typer.Exit(run(chosen))
