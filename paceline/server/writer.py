"""Answers in OpenAI's shapes: whole ones, and the chunks of a stream. Chats and completions differ in names
only. Invariant: the texts of a stream's chunks, joined, are the text of the whole answer.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

from paceline.server.calls import Call, Delta
from paceline.server.formats import Fields
from paceline.server.reading import AnswerReader
from paceline.server.translate import Job


@dataclass(slots=True)
class Writer:
    """Writes one call's answer. `is_chat` chooses the shape."""

    job: Job
    call: Call
    model: str
    is_chat: bool
    num_spec_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))
    _readers: dict[int, AnswerReader] = field(default_factory=dict)  # by choice
    _offsets: dict[int, int] = field(default_factory=dict)  # by choice: characters of its tokens so far

    @property
    def name(self) -> str:
        return ("chatcmpl-" if self.is_chat else "cmpl-") + self.call.name

    async def whole(self) -> Fields:
        said = {delta.index: delta for delta in await self.call.news(is_whole=True)}
        deltas = [said.get(index, Delta(index, end="stop")) for index in range(self.call.total_choices)]
        for delta in deltas:
            delta.text = self._echo(delta.index) + delta.text
        choices = [self._choice_json(delta, "message") or {} for delta in deltas]
        whole = {**self._frame(""), "choices": choices, **self._figures()}
        for shown in [whole] if self.is_chat else choices:  # where vLLM has them
            first = shown.get("index", 0) // self.call.num_choices * self.call.num_choices
            shown["prompt_logprobs"] = self.call.ends.get(first, {}).get("prompt_logprobs")
        return whole

    async def chunks(self) -> AsyncIterator[Fields]:
        """Nothing before the first token, so that a client's clock for it is right."""
        frame = self._frame(".chunk")
        head = frame | {"usage": None} if self.job.has_usage else frame
        is_first = self.is_chat or self.job.echo
        while news := await self.call.news(is_whole=False):
            for index in range(self.call.total_choices if is_first else 0):
                opening: Fields = {"index": index, "logprobs": None, "finish_reason": None}
                empty = {"delta": {"role": "assistant", "content": ""}}
                opening |= empty if self.is_chat else {"text": self._echo(index)}
                yield {**head, "choices": [opening]}
            is_first = False
            if self.job.has_counts:
                head = frame | {"usage": self.call.counts()}
            for delta in news:
                if (written := self._choice_json(delta, "delta")) is not None:
                    yield {**head, "choices": [written]}
        if self.job.has_usage:
            yield {**frame, "choices": [], **self._figures()}

    def _frame(self, suffix: str) -> Fields:
        kind = f"chat.completion{suffix}" if self.is_chat else "text_completion"
        return {"id": self.name, "object": kind, "created": self.created, "model": self.model}

    def _figures(self) -> Fields:
        speculation = self.call.speculation() | {"num_spec_tokens": self.num_spec_tokens}
        return {"usage": self.call.usage(), "metrics": {"speculative_decoding": speculation}}

    def _echo(self, index: int) -> str:
        return self.call.echoes[index // self.call.num_choices] if self.job.echo else ""

    def _choice_json(self, delta: Delta, key: Literal["message", "delta"]) -> Fields | None:
        """One choice, whole or a piece. None where nothing can be shown yet: half a character, or what may
        become a stop string or a call."""
        if (reader := self._readers.get(delta.index)) is None:
            end = self.call.prompt_ends[delta.index // self.call.num_choices]
            reader = self._readers[delta.index] = AnswerReader(self.job.reading, end)
        said = reader.read(delta.text, is_last=delta.end is not None)
        text, calls, thought = said.content, said.calls, said.reasoning if self.job.has_reasoning else ""
        if not (text or calls or thought or delta.logprobs or delta.details or delta.end):
            return None
        reason = "stop" if delta.end == "abort" else delta.end
        logprobs = self._logprobs_json(delta.index, delta.logprobs) if self.job.has_logprobs else None
        written: Fields = {"index": delta.index, "logprobs": logprobs, "finish_reason": reason}
        if self.is_chat:
            if key == "message":
                content = text if text or not (calls or said.reasoning) else None
                message: Fields = {"role": "assistant", "content": content, "refusal": None}
                for call in calls:
                    del call["index"]
            else:
                message = {"content": text} if text else {}
            if thought:  # by its older name, and the newer
                message |= {"reasoning_content": thought, "reasoning": thought}
            written[key] = message | ({"tool_calls": calls} if calls else {})
            if reader.num_calls and reason == "stop":
                written["finish_reason"] = "tool_calls"
        else:
            written["text"] = text
        if delta.details or (self.job.has_details and key == "message"):
            written["speculative"] = delta.details or {"tokens": [], "steps": []}
        return written

    def _logprobs_json(self, index: int, entries: list[Fields]) -> Fields:
        if self.is_chat:
            return {"content": entries, "refusal": None}
        tokens, offset = [entry["token"] for entry in entries], self._offsets.get(index, 0)
        offsets = list(itertools.accumulate(map(len, tokens), initial=offset))
        self._offsets[index] = offsets.pop()
        return {
            "tokens": tokens,
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [{top["token"]: top["logprob"] for top in e["top_logprobs"]} for e in entries],
            "text_offset": offsets,
        }
