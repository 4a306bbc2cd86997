"""Answers in OpenAI's shapes: whole ones, and the chunks of a stream. Chats and completions differ in names
only.

Invariant: the texts of a stream's chunks, joined, are the text of the whole answer.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.server import usage
from paceline.server.calls import Call, Delta
from paceline.server.tools import ToolReader
from paceline.server.translate import Job

FINISHED = {"stop": "stop", "length": "length", "abort": "stop"}


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

    async def whole(self) -> dict[str, Any]:
        deltas = await self.call.everything()
        for delta in deltas:
            delta.text = self._echo(delta.index) + delta.text
        choices = [self._choice_json(delta, "message") for delta in deltas]
        return {**self._frame(False), "choices": choices, **self._figures()}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Nothing before the first token, so that a client's clock for it is right."""
        is_first = True
        while news := await self.call.news():
            if is_first and (self.is_chat or self.job.echo):
                for index in range(self.call.total_choices):
                    yield self._chunk(self._opening(index))
            is_first = False
            for delta in news:
                written = self._choice_json(delta, "delta")
                if written is not None:
                    yield self._chunk(written)
        if self.job.has_usage:
            yield {**self._frame(True), "choices": [], **self._figures()}

    def _frame(self, is_chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {"id": self.name, "object": kind, "created": self.created, "model": self.model}

    def _figures(self) -> dict[str, Any]:
        metrics = {"speculative_decoding": usage.spec_decode(self.call.stats(), self.num_spec_tokens)}
        return {"usage": self.call.usage(), "metrics": metrics}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._frame(True), "choices": [choice]}
        return chunk | {"usage": None} if self.job.has_usage else chunk

    def _echo(self, index: int) -> str:
        return self.call.echoes[index // self.call.num_choices] if self.job.echo else ""

    def _opening(self, index: int) -> dict[str, Any]:
        said = (
            {"delta": {"role": "assistant", "content": ""}} if self.is_chat else {"text": self._echo(index)}
        )
        return {"index": index, **said, "logprobs": None, "finish_reason": None}

    def _choice_json(self, delta: Delta, key: Literal["message", "delta"]) -> dict[str, Any] | None:
        """One choice, whole or a piece. None where nothing can be shown yet: half a character, or what may
        become a stop string or a call."""
        text, calls = self._read_tools(delta.index, delta.text, is_last=delta.end is not None)
        if not (text or calls or delta.logprobs or delta.details or delta.end):
            return None
        reason = FINISHED[delta.end] if delta.end else None
        logprobs = self._logprobs_json(delta.index, delta.logprobs)
        written: dict[str, Any] = {"index": delta.index, "logprobs": logprobs}
        if self.is_chat:
            first = self._num_calls.get(delta.index, 0)
            self._num_calls[delta.index] = first + len(calls)
            if key == "message":
                message = {
                    "role": "assistant",
                    "content": text if text or not calls else None,
                    "refusal": None,
                }
            else:
                message = {"content": text} if text else {}
                calls = [{"index": first + i, **call} for i, call in enumerate(calls)]
            written[key] = message | ({"tool_calls": calls} if calls else {})
            has_called = self._num_calls[delta.index] > 0 and reason == "stop"
            written["finish_reason"] = "tool_calls" if has_called else reason
        else:
            written |= {"text": text, "finish_reason": reason}
        if delta.details is not None or (self.job.has_details and key == "message"):
            written["speculative"] = delta.details or {"tokens": [], "steps": []}
        return written

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
        tops = [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries]
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }
