"""The terminal: data to stdout, all about the work (progress, errors, hints) to stderr; prompts, and answers
as they come. Invariant: unstyled text reaches a pipe or a file byte for byte (rich, which expands tabs and
drops control characters, only styles); Ctrl-C takes effect between chunks, never inside an engine step, so
the engine can go on with the next request.
"""

from __future__ import annotations

import io
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

import paceline
from paceline.api.results import Chunk, Completion
from paceline.core.errors import ConfigError, RequestError
from paceline.measure.results import Table, Tell

ESCAPES = {0x1B: None, 0x9B: None}  # what begins a command to a terminal


def stdin() -> TextIO:
    """UTF-8 whatever the locale; bytes that are not become surrogates, which `as_prompt` refuses by name."""
    if sys.stdin is None or sys.stdin.closed:
        raise ConfigError("stdin is closed; pipe text into it, or give the prompt as an argument")
    if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    return sys.stdin


def stdout(is_quiet: bool = False) -> Console:
    """A quiet one shows nothing, for those who want JSON."""
    return Console(highlight=False, quiet=is_quiet)


def stderr() -> Console:
    return Console(stderr=True, highlight=False)


def hint(text: str) -> None:
    stderr().print(text, style="dim", markup=False)


def write(console: Console, text: str, style: str | None = None) -> None:
    """Text as it is: no markup, no wrapping, no line end."""
    if console.quiet:
        return
    if console.record or (style is not None and console.color_system is not None):
        console.print(text, style=style, end="", markup=False, emoji=False, soft_wrap=True)
        return
    console.file.write(text.translate(ESCAPES) if console.is_terminal else text)
    console.file.flush()


def write_json(console: Console, value: Any) -> None:
    """One line. A stream that is not UTF-8 gets escapes, so that nothing is lost."""
    is_utf8 = (getattr(console.file, "encoding", None) or "utf-8").lower().replace("-", "").startswith("utf8")
    write(console, json.dumps(value, ensure_ascii=not is_utf8) + "\n")


def print_error(error: Exception | str) -> None:
    """One line, however the message was written."""
    console = stderr()
    write(console, "error: ", style="bold red")
    write(console, " ".join(str(error).split()).translate(ESCAPES) + "\n", style="red")


@contextmanager
def telling(num_turns: int | None) -> Iterator[Tell]:
    """A progress bar on stderr. `num_turns` None: not known beforehand."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr()) as progress:
        task = progress.add_task("starting", total=num_turns)
        is_terminal, said = progress.console.is_terminal, set[str]()

        def tell(what: str, num_done: int) -> None:
            progress.update(task, description=what, advance=num_done)
            if not is_terminal and what not in said:
                said.add(what)
                write(progress.console, f"{what}\n")  # a log gets a line where a terminal gets a bar

        yield tell


def show(screen: Console, table: Table) -> None:
    """Columns of words, then columns of numbers; long words may fold where the terminal is narrow."""
    look: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
    made = RichTable(title=table.title, title_justify="left", **look)
    for name in table.names:  # several columns of words hold short ones, which should stay whole
        made.add_column(name, overflow="fold", no_wrap=len(table.names) > 2)
    for name in table.numbers:
        made.add_column(name, justify="right", overflow="fold")
    before: Sequence[str] = ()
    for row in table.rows:  # a name is written once for all its rows
        names = tuple(row[: len(table.names)])
        is_repeated = bool(names) and names == before
        made.add_row(*(("",) * len(names) if is_repeated else names), *row[len(table.names) :])
        before = names
    if table.rows:
        screen.print(made)
    for note in table.notes:
        write(screen, f"{note}\n", style="yellow")


@dataclass(slots=True)
class Answer:
    """What has come so far, and when."""

    started: float = field(default_factory=time.perf_counter)
    first_at: float = 0.0
    last_at: float = 0.0
    num_first: int = 0  # tokens of the first chunk: they came with the prefill, so they are not timed
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    completion: Completion | None = None  # set by the last chunk
    is_interrupted: bool = False

    def add(self, chunk: Chunk) -> None:
        self.last_at = time.perf_counter()
        if chunk.tokens and not self.token_ids:
            self.first_at, self.num_first = self.last_at, len(chunk.tokens)
        self.text += chunk.text
        self.token_ids += [token.id for token in chunk.tokens]
        if chunk.result is not None:
            self.completion = chunk.result.outputs[0]

    @property
    def speed(self) -> float | None:
        """Tokens a second from the first chunk to the last; None where nothing came after the first."""
        seconds, count = self.last_at - self.first_at, len(self.token_ids) - self.num_first
        return count / seconds if count > 0 and seconds > 0 else None

    def to_json(self) -> dict[str, Any]:
        said = {"text": self.text, "token_ids": self.token_ids, "finish_reason": "abort"}
        if self.completion is not None:
            said = completion_json(self.completion)
        first, total = (round(at - self.started, 4) for at in (self.first_at, self.last_at))
        speed = round(self.speed or 0.0, 2)
        return {**said, "timings": {"first_token_s": first, "total_s": total, "tokens_per_second": speed}}


def checked_prompt(text: str) -> str:
    """Refuse what no model can answer, before one is loaded."""
    if not text.strip():
        raise RequestError("the prompt is empty; write something to answer")
    try:
        text.encode("utf-8")  # bytes that were not UTF-8 have become surrogates, which cannot be encoded
    except UnicodeEncodeError:
        raise RequestError("the prompt is not UTF-8 text; convert it, for instance with iconv") from None
    return text


def given_prompt(text: str) -> str:
    """What a verb's argument says: the prompt, or - for what stdin holds."""
    return checked_prompt(stdin().read() if text == "-" else text)


def as_prompt(llm: paceline.LLM, text: str, is_raw: bool = False, system: str | None = None) -> list[int]:
    """The tokens of a text as the chat template puts it; of the text itself if raw or without a template."""
    checked_prompt(text)
    if is_raw or llm.checkpoint.tokenizer_source().chat_template is None:
        if system is not None:
            what = f"the system text is {system[:40]!r} but the model has no chat template for it"
            raise ConfigError(f"{what}; put it into the prompt")
        return llm.tokenizer.encode(text)
    before = [{"role": "system", "content": system}] if system is not None else []
    return llm.tokenizer.encode_chat([*before, {"role": "user", "content": text}])


def collect(chunks: Iterator[Chunk], show: Callable[[Chunk], None]) -> Answer:
    """Read chunks to the end or to the first Ctrl-C, showing each."""
    answer, interrupts = Answer(), list[int]()

    def note(number: int, frame: FrameType | None) -> None:
        if interrupts:
            raise KeyboardInterrupt  # a second one, for the impatient
        interrupts.append(number)

    with on_interrupt(note):
        for chunk in chunks:
            answer.add(chunk)
            show(chunk)
            if interrupts:
                answer.is_interrupted = answer.completion is None
                break
    if close := getattr(chunks, "close", None):
        close()  # aborts the request if it is still running
    return answer


def print_answer(chunks: Iterator[Chunk], as_json: bool) -> Answer:
    """On stdout: the text as it comes, or all that is known about it as one line of JSON."""
    screen = stdout(is_quiet=as_json)
    answer = collect(chunks, lambda chunk: write(screen, chunk.text))
    write(screen, "\n")
    if as_json:
        write_json(stdout(), answer.to_json())
    return answer


@contextmanager
def on_interrupt(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Within, Ctrl-C calls this handler."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def completion_json(completion: Completion) -> dict[str, Any]:
    logprobs = completion.token_logprobs
    told = None if logprobs is None else [entry._asdict() for entry in logprobs]
    said = {"text": completion.text, "token_ids": list(completion.token_ids)}
    more = {"finish_reason": completion.finish_reason, "logprobs": told}
    return {**said, **more, "stats": completion.stats.to_dict()}
