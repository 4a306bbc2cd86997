"""Answers in OpenAI's shapes: whole ones, and the chunks of a stream. Chats and completions differ in names
only.

Invariant: the texts of a stream's chunks, joined, are the text of the whole answer.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from paceline.server import usage
from paceline.server.calls import Call, Delta
from paceline.server.tools import ToolReader
from paceline.server.translate import Job

FINISHED = {"stop": "stop", "length": "length", "abort": "stop"}


@dataclass(slots=True)
class _Choice:
    """What has been said so far where a client wants the whole."""

    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, list[Any]] = field(default_factory=lambda: {"tokens": [], "steps": []})
    end: str = "stop"


@dataclass(slots=True)
class Writer:
    """Writes one call's answer. `is_chat` chooses the shape."""

    job: Job
    call: Call
    model: str
    is_chat: bool
    num_spec_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))
    _readers: dict[int, ToolReader] = field(default_factory=dict)
    _num_calls: dict[int, int] = field(default_factory=dict)
    _offsets: dict[int, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return ("chatcmpl-" if self.is_chat else "cmpl-") + self.call.name

    def _frame(self, is_chunk: bool) -> dict[str, Any]:
        kind = (
            ("chat.completion.chunk" if is_chunk else "chat.completion")
            if self.is_chat
            else "text_completion"
        )
        return {"id": self.name, "object": kind, "created": self.created, "model": self.model}

    def _metrics(self) -> dict[str, Any]:
        return {"speculative_decoding": usage.spec_decode(self.call.stats(), self.num_spec_tokens)}

    # The whole

    async def whole(self) -> dict[str, Any]:
        choices = [_Choice(text=self._echo(index)) for index in range(self.call.total_choices)]
        while news := await self.call.news():
            for delta in news:
                choice = choices[delta.index]
                choice.text += delta.text
                choice.logprobs += delta.logprobs
                choice.end = delta.end or choice.end
                if delta.details is not None:
                    choice.details = {key: choice.details[key] + delta.details[key] for key in choice.details}
        written = [self._choice_json(index, choice) for index, choice in enumerate(choices)]
        return {
            **self._frame(False),
            "choices": written,
            "usage": self.call.usage(),
            "metrics": self._metrics(),
        }

    def _echo(self, index: int) -> str:
        return self.call.echoes[index // self.call.num_choices] if self.job.echo else ""

    def _choice_json(self, index: int, choice: _Choice) -> dict[str, Any]:
        reason = FINISHED[choice.end]
        written: dict[str, Any] = {"index": index, "logprobs": self._logprobs_json(index, choice.logprobs)}
        if not self.is_chat:
            written |= {"text": choice.text, "finish_reason": reason}
        else:
            text, calls = self._read_tools(index, choice.text, is_last=True)
            message: dict[str, Any] = {
                "role": "assistant",
                "content": text if text or not calls else None,
                "refusal": None,
            }
            if calls:
                message["tool_calls"] = calls
            written |= {
                "message": message,
                "finish_reason": "tool_calls" if calls and reason == "stop" else reason,
            }
        if self.job.has_details:
            written["speculative"] = choice.details
        return written

    # Piece by piece

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Nothing before the first token, so that a client's clock for it is right."""
        is_first = True
        while news := await self.call.news():
            for chunk in self._opening() if is_first else ():
                yield chunk
            is_first = False
            for delta in news:
                written = self._delta_json(delta)
                if written is not None:
                    yield self._chunk([written])
        if self.job.has_usage:
            yield {**self._frame(True), "choices": [], "usage": self.call.usage(), "metrics": self._metrics()}

    def _opening(self) -> Iterator[dict[str, Any]]:
        if not self.is_chat and not self.job.echo:
            return
        for index in range(self.call.total_choices):
            said = (
                {"delta": {"role": "assistant", "content": ""}}
                if self.is_chat
                else {"text": self._echo(index)}
            )
            yield self._chunk([{"index": index, **said, "logprobs": None, "finish_reason": None}])

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._frame(True), "choices": choices}
        return chunk | {"usage": None} if self.job.has_usage else chunk

    def _delta_json(self, delta: Delta) -> dict[str, Any] | None:
        """None where nothing can be shown yet: half a character, or what may become a stop string or a
        call.
        """
        text, calls = self._read_tools(delta.index, delta.text, is_last=delta.end is not None)
        if not (text or calls or delta.logprobs or delta.details or delta.end):
            return None
        written: dict[str, Any] = {
            "index": delta.index,
            "logprobs": self._logprobs_json(delta.index, delta.logprobs),
        }
        reason = FINISHED[delta.end] if delta.end else None
        if not self.is_chat:
            written |= {"text": text, "finish_reason": reason}
        else:
            first = self._num_calls.get(delta.index, 0)
            self._num_calls[delta.index] = first + len(calls)
            listed = (
                {"tool_calls": [{"index": first + i, **call} for i, call in enumerate(calls)]}
                if calls
                else {}
            )
            has_called = self._num_calls[delta.index] > 0 and reason == "stop"
            written |= {
                "delta": ({"content": text} if text else {}) | listed,
                "finish_reason": "tool_calls" if has_called else reason,
            }
        if delta.details is not None:
            written["speculative"] = delta.details
        return written

    # What both have

    def _read_tools(self, index: int, text: str, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        if not self.job.tool_names:
            return text, []
        reader = self._readers.setdefault(index, ToolReader(self.job.tool_names))
        said, calls = reader.read(text)
        if not is_last:
            return said, calls
        more, last = reader.finish()
        return said + more, calls + last

    def _logprobs_json(self, index: int, entries: list[dict[str, Any]]) -> dict[str, Any] | None:
        if not self.job.has_logprobs:
            return None
        if self.is_chat:
            return {"content": entries, "refusal": None}
        offset, offsets = self._offsets.get(index, 0), []
        for entry in entries:
            offsets.append(offset)
            offset += len(entry["token"])
        self._offsets[index] = offset
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries
            ],
            "text_offset": offsets,
        }
