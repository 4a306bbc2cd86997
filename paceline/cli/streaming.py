"""Reading a stream of chunks at a terminal: collect the answer, time it, and stop it on Ctrl-C. Invariant: an
interrupt takes effect between chunks, never inside an engine step, so the engine can go on with the next
request.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

from paceline.cli import console
from paceline.core.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from paceline.api.llm import LLM
    from paceline.api.results import Chunk, Completion


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
    return checked_prompt(console.stdin().read() if text == "-" else text)


def as_prompt(llm: LLM, text: str, is_raw: bool = False, system: str | None = None) -> list[int]:
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
    screen = console.stdout(is_quiet=as_json)
    answer = collect(chunks, lambda chunk: console.write(screen, chunk.text))
    console.write(screen, "\n")
    if as_json:
        console.write_json(console.stdout(), answer.to_json())
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
    logprobs = completion.logprobs
    told = None if logprobs is None else [entry._asdict() for entry in logprobs]
    said = {"text": completion.text, "token_ids": list(completion.token_ids)}
    more = {"finish_reason": completion.finish_reason, "logprobs": told}
    return {**said, **more, "stats": completion.stats.to_dict()}
