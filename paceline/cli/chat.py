"""`paceline chat`: a conversation at the terminal, or one question a line from a pipe.

Invariant: Ctrl-C stops the answer, not the session; what had been said by then stays in the history.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from paceline.cli import console, options, parsing
from paceline.cli.options import Given, Sampling
from paceline.cli.streaming import checked_prompt, collect, on_interrupt
from paceline.core.errors import RequestError
from paceline.core.options import options_of

if TYPE_CHECKING:
    from paceline.api.llm import LLM
    from paceline.api.results import Chunk
    from paceline.cli.streaming import Answer
    from paceline.core.params import SamplingParams

HELP = (
    "/exit or Ctrl-D leaves, /reset forgets the conversation, /stats shows how fast it went, Ctrl-C stops an "
    "answer."
)


def chat(
    engine: options.Engine,
    sampling: Annotated[
        Given, options_of(Sampling, "temperature", "top_p", "top_k", "min_p", "seed", "stop")
    ],
    system: options.System = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", rich_help_panel="Sampling")] = 512,
    as_json: options.Json = False,
) -> None:
    """Talk with a model. /help lists what else can be typed.

    Examples:

      paceline chat --method ngram

      printf 'Hello\\nWhat did I just say?\\n' | paceline chat --temperature 0 --json
    """
    from paceline import LLM

    params, chosen = parsing.sampling_params(sampling, max_tokens=max_tokens), parsing.engine_options(engine)
    source = console.stdin()
    with LLM(chosen) as llm, on_interrupt(lambda *_: None):  # between turns there is nothing to stop
        conversation = Conversation(llm, params, system, as_json)
        if source.isatty():
            console.stderr().print(HELP, style="dim")
        for line in _lines(source):
            if line == "/exit":
                break
            conversation.hear(line)


def _lines(source: TextIO) -> Iterator[str]:
    """What the user types, without empty lines. At a terminal with line editing and history."""
    if not source.isatty():
        yield from (line.strip() for line in source if line.strip())
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
        screen = console.stdout()

        def show(chunk: Chunk) -> None:
            if not self.as_json:
                console.write(screen, chunk.text)

        self.messages.append({"role": "user", "content": text})
        try:
            checked_prompt(text)
            answer = collect(self.llm.stream_chat(self.messages, self.params), show)
        except RequestError as error:  # most often the conversation no longer fits: the session goes on
            self.messages.pop()
            console.print_error(RequestError(f"{error} (in a conversation: /reset starts a new one)"))
            return
        self.messages.append({"role": "assistant", "content": answer.text})
        self.answers.append(answer)
        if self.as_json:
            console.write_json(screen, answer.to_json())
        else:
            console.write(screen, "\n")
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
            f"{len(self.answers)} answers ({len(self.answers) - len(done)} stopped), {num_tokens} tokens, "
            f"{num_steps} steps (τ {tau:.2f}), {accepted} of {drafted} drafted tokens accepted, "
            f"{speed:.1f} tokens/s"
        )
