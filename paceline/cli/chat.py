"""`paceline chat`: a conversation at the terminal, or one question a line from a pipe.

Invariant: Ctrl-C stops the answer, not the session; what had been said by then stays in the history.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import console, options
from paceline.errors import RequestError

if TYPE_CHECKING:
    from paceline.cli.streaming import Answer
    from paceline.llm import LLM
    from paceline.params import SamplingParams
    from paceline.results import Chunk

HELP = "/exit or Ctrl-D leaves, /reset forgets the conversation, /stats shows how fast it went, Ctrl-C stops an answer."


def chat(
    model: options.Model = "default",
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", rich_help_panel="Sampling")] = 512,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    method: options.Method = None,
    num_speculative_tokens: options.NumSpeculative = None,
    draft_model: options.DraftModel = None,
    speculative_config: options.SpeculativeConfig = None,
    as_json: options.Json = False,
) -> None:
    """Talk with a model. /help lists what else can be typed.

    Examples:

      paceline chat --method ngram

      printf 'Hello\\nWhat did I just say?\\n' | paceline chat --temperature 0 --json
    """
    from paceline import LLM, SamplingParams
    from paceline.cli.streaming import on_interrupt

    sampling = options.given(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    config = options.speculative_config(speculative_config, method, num_speculative_tokens, draft_model)
    with LLM(model, speculative_config=config) as llm, on_interrupt(lambda *_: None):  # between turns there is nothing to stop
        conversation = Conversation(llm, params, system, as_json)
        if sys.stdin.isatty():
            console.stderr().print(HELP, style="dim")
        for line in _lines():
            if line == "/exit":
                break
            conversation.hear(line)


def _lines() -> Iterator[str]:
    """What the user types, without empty lines. At a terminal with line editing and history."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    import readline  # noqa: F401  (importing it is what gives input() its history)

    while True:
        try:
            line = _ask().strip()
        except EOFError:
            console.write(console.stderr(), "\n")
            return
        except KeyboardInterrupt:
            console.stderr().print("\n/exit or Ctrl-D leaves", style="dim")
            continue
        if line:
            yield line


def _ask() -> str:
    from paceline.cli.streaming import on_interrupt

    with on_interrupt(signal.default_int_handler):
        if sys.stdout.isatty():
            return input("> ")
        console.write(console.stderr(), "> ")  # stdout is being collected: keep it to the answers
        return input()


@dataclass(slots=True)
class Conversation:
    llm: LLM
    params: SamplingParams
    system: str | None
    as_json: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system is not None else []

    def hear(self, line: str) -> None:
        if line == "/help":
            console.stderr().print(HELP, style="dim")
        elif line == "/reset":
            self.reset()
            console.stderr().print("forgotten", style="dim")
        elif line == "/stats":
            self.print_stats()
        elif line.startswith("/"):
            console.stderr().print(f"there is no {line.split()[0]}; {HELP}", style="yellow", markup=False)
        else:
            self.answer(line)

    def answer(self, text: str) -> None:
        from paceline.cli.streaming import collect

        screen = console.stdout()

        def show(chunk: Chunk) -> None:
            if not self.as_json:
                console.write(screen, chunk.text)

        self.messages.append({"role": "user", "content": text})
        try:
            answer = collect(self.llm.stream_chat(self.messages, self.params), show)
        except RequestError as error:  # most often a conversation that no longer fits: the session can go on without it
            self.messages.pop()
            console.print_error(RequestError(f"{error} (in a conversation: /reset starts a new one)"))
            return
        self.messages.append({"role": "assistant", "content": answer.text})
        self.answers.append(answer)
        console.write(screen, json.dumps(answer.to_json(), ensure_ascii=False) + "\n" if self.as_json else "\n")
        if answer.is_interrupted:
            console.stderr().print("(stopped)", style="dim")

    def print_stats(self) -> None:
        done = [a.completion.stats for a in self.answers if a.completion is not None]
        num_tokens, num_steps = sum(s.num_tokens for s in done), sum(s.num_steps for s in done)
        drafted, accepted = sum(s.num_drafted for s in done), sum(s.num_accepted for s in done)
        timed = [a for a in self.answers if a.last_at > a.first_at]
        seconds = sum(a.last_at - a.first_at for a in timed)
        speed = sum(len(a.token_ids) - a.num_first for a in timed) / seconds if seconds else 0.0
        tau = num_tokens / num_steps if num_steps else 0.0
        console.stderr().print(
            f"{len(self.answers)} answers ({len(self.answers) - len(done)} stopped), {num_tokens} tokens, {num_steps} steps (τ {tau:.2f}), "
            f"{accepted} of {drafted} drafted tokens accepted, {speed:.1f} tokens/s"
        )
