"""AsyncLLM: the same engine for asyncio, by vLLM's names. One thread steps it; all else is done in the loops
of those who ask.

Invariant: that thread alone touches the engine. A task hands it a call and is handed outputs; one that is
cancelled, or stops reading, takes its call back. What is not read yet is bounded by the call's own tokens.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from paceline.api.inbox import Inbox, result_of
from paceline.api.intake import Prompt, per_prompt
from paceline.api.llm import CLOSED, LLM
from paceline.api.options import EngineOptions
from paceline.api.results import Result
from paceline.core.errors import RequestError
from paceline.core.options import is_whole, require
from paceline.core.params import RequestOutputKind, SamplingParams
from paceline.loaders.tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class _Call:
    """One `generate`, as the thread and the task that reads it share it."""

    name: str
    prompt: Prompt
    params: SamplingParams
    priority: int
    loop: asyncio.AbstractEventLoop
    is_aborted: bool = False
    inboxes: list[Inbox] = field(default_factory=list)  # the thread's, as are:
    num_seen: list[int] = field(default_factory=list)  # emissions of each that were told
    outputs: deque[Result | Exception] = field(default_factory=deque)  # the task's
    has_more: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, output: Result | Exception) -> None:
        with suppress(RuntimeError):  # its loop is closed
            self.loop.call_soon_threadsafe(self._take, output)

    def _take(self, output: Result | Exception) -> None:
        if self.params.output_kind is RequestOutputKind.CUMULATIVE and isinstance(output, Result):
            self.outputs.clear()  # the last holds all
        self.outputs.append(output)
        self.has_more.set()

    def news(self) -> Result | None:
        """What the task is told after a step, if anything."""
        inboxes, kind = self.inboxes, self.params.output_kind
        is_over = all(inbox.request.is_finished for inbox in inboxes)
        counts = [len(inbox.emissions) for inbox in inboxes]
        new = [i for i, count in enumerate(counts) if count > self.num_seen[i]]
        if not is_over and (not new or kind is RequestOutputKind.FINAL_ONLY):
            return None
        if kind is RequestOutputKind.DELTA:
            outputs = [inboxes[i].completion(i, self.num_seen[i]) for i in new or range(len(inboxes))]
        else:
            outputs = [inbox.completion(i) for i, inbox in enumerate(inboxes)]
        self.num_seen = counts
        return result_of(inboxes, outputs, self.name)


class AsyncLLM:
    """Takes what LLM takes. Use it in `async with`, or call `shutdown` at the end."""

    def __init__(self, model: str | EngineOptions = "default", **options: Any) -> None:
        self.llm = LLM(model, **options)
        self._calls: dict[str, _Call] = {}  # by request id
        self._work = threading.Condition()
        self._is_closed, self._num_calls = False, 0
        self._thread = threading.Thread(target=self._step_on, name="paceline-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_engine_args(cls, engine_args: EngineOptions | Mapping[str, Any]) -> AsyncLLM:
        return cls(engine_args) if isinstance(engine_args, EngineOptions) else cls(**engine_args)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """End the thread, refuse the calls that still wait, and give back all memory."""
        with self._work:
            self._is_closed = True
            self._work.notify()
        self._thread.join()
        self.llm.close()

    async def get_tokenizer(self) -> Tokenizer:
        return self.llm.tokenizer

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None,
        *, lora_request: None = None, priority: int = 0,
    ) -> AsyncIterator[Result]:  # fmt: skip
        """Outputs as they are written: all so far, or what is new, as sampling_params.output_kind says."""
        (params,) = per_prompt(sampling_params, 1, self.llm.get_default_sampling_params(), lora_request)
        require(is_whole(priority), "priority", priority, "give a whole number")
        with self._work:
            if self._is_closed:
                raise RequestError(CLOSED)
            self._num_calls += 1
            name = f"a{self._num_calls}" if request_id is None else request_id
            if name in self._calls:
                raise RequestError(f"request_id is {name!r:.60}, which is being answered; give another")
            call = _Call(name, prompt, params, priority, asyncio.get_running_loop())
            self._calls[name] = call
            self._work.notify()
        try:
            while True:
                await call.has_more.wait()
                call.has_more.clear()
                while call.outputs:
                    output = call.outputs.popleft()
                    if isinstance(output, Exception):
                        raise output
                    yield output
                    if output.finished:
                        return
        finally:
            self._abort(call)

    async def abort(self, request_id: str) -> None:
        """Stop a request: its reader gets a last output with finish_reason "abort"."""
        if (call := self._calls.get(request_id)) is not None:
            self._abort(call)

    def _abort(self, call: _Call) -> None:
        with self._work:
            call.is_aborted = True

    def _step_on(self) -> None:
        failure: Exception = RequestError(CLOSED)
        try:
            while calls := self._wait():
                with self.llm._lock:
                    for call in calls:
                        self._begin(call)
                    if self.llm.engine.has_work:
                        self.llm._pump()
                    for call in calls:
                        if call.inboxes:
                            self._report(call)
        except Exception as error:  # a fault of ours: the engine's state may be wrong now
            failure = error
        with self._work:
            self._is_closed, calls = True, list(self._calls.values())
        for call in calls:
            call.tell(failure)

    def _wait(self) -> list[_Call]:
        """What is to be answered, as soon as there is something; nothing at the end."""
        with self._work:
            self._work.wait_for(lambda: self._is_closed or self._calls)
            return [] if self._is_closed else list(self._calls.values())

    def _begin(self, call: _Call) -> None:
        try:
            if not call.inboxes:
                prompt = self.llm._intake.encode(call.prompt)
                requests = self.llm._requests(prompt, call.params, call.priority)
                for request in requests:
                    request.is_streamed = call.params.output_kind is not RequestOutputKind.FINAL_ONLY
                (call.inboxes,) = self.llm._add([(prompt, requests)])
                call.num_seen = [0] * len(requests)
            if call.is_aborted:
                self._forget(call)
        except Exception as error:  # whatever is wrong with it, the others go on
            self._forget(call)
            call.tell(error)

    def _report(self, call: _Call) -> None:
        output = call.news()
        if output is None:
            return
        if output.finished:
            self._forget(call)
        failed = output.outputs[0].error if len(call.inboxes) == 1 else None
        call.tell(failed or output)

    def _forget(self, call: _Call) -> None:
        for inbox in call.inboxes:
            self.llm._drop(inbox.request)
        with self._work:
            self._calls.pop(call.name, None)
