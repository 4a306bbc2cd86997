"""Many conversations at once through one engine.

A conversation is a generator that asks for a completion and is sent the tokens. New ones are admitted many at
a time, so that most passes are plain decoding (on a GPU one recorded graph) and prompts are read together.
Invariant: what is asked goes through the engine's own step, with a seed, so a run can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

from paceline.api.llm import LLM
from paceline.core.params import SamplingParams
from paceline.core.types import FinishReason, Request
from paceline.train.shards import Written

LOW_WATER = 0.6  # of the batch: below, new conversations are let in


class Ask(NamedTuple):
    """One completion that a conversation wants."""

    prompt: Sequence[int]
    temperature: float
    max_tokens: int
    seed: int
    is_kept: bool = True  # a text to learn from; else a step towards one, such as an invented prompt


Conversation = Generator[Ask, list[int], None]


class Writer:
    """Drives conversations; yields what was written, as it comes."""

    def __init__(self, llm: LLM, batch: int) -> None:
        self.llm, self.batch = llm, batch
        self.num_tokens = 0  # written so far, those that are not kept included
        self._open: dict[str, tuple[Request, Ask, Conversation]] = {}
        self._limit = llm.engine.config.max_model_len

    def write(self, conversations: Iterator[Conversation], is_over: Callable[[], bool]) -> Iterator[Written]:
        """Until the conversations end, or `is_over`: what is unfinished then is dropped."""
        engine = self.llm.engine
        try:
            while not is_over():
                if len(self._open) <= LOW_WATER * self.batch:
                    while len(self._open) < self.batch and (conversation := next(conversations, None)):
                        self._resume(conversation, None)
                if not self._open:
                    return
                for emission in engine.step():
                    self.num_tokens += len(emission.tokens)
                    if emission.request.is_finished and (written := self._finished(emission.request)):
                        yield written
        finally:
            for request, _, conversation in self._open.values():
                engine.abort(request)
                engine.stats.pop(request.id, None)
                conversation.close()
            self._open.clear()

    def _resume(self, conversation: Conversation, answer: list[int] | None) -> None:
        """Let it go on to its next question, and put that to the engine."""
        try:
            ask = next(conversation) if answer is None else conversation.send(answer)
        except StopIteration:
            return
        if not 0 < len(ask.prompt) < self._limit - 1:
            conversation.close()  # grew too long for the context
            return
        params = SamplingParams(temperature=ask.temperature, max_tokens=ask.max_tokens, seed=ask.seed)
        (request,) = self.llm._intake.requests(list(ask.prompt), params)
        request.text_stop = None  # no text is streamed, so none is decoded
        self.llm.engine.add(request)
        self._open[request.id] = request, ask, conversation

    def _finished(self, request: Request) -> Written | None:
        """What was written, if it is kept; the conversation goes on."""
        _, ask, conversation = self._open.pop(request.id)
        self.llm.engine.stats.pop(request.id, None)
        if request.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            conversation.close()
            return None
        self._resume(conversation, request.output)
        return Written(ask.prompt, request.output, ask.temperature) if ask.is_kept else None
