"""OpenAI's Responses on the chat underneath: the items of a request become its messages, and the chat's
answer becomes items, whole or as typed events. Invariant: the last event of a stream holds the response that
a request without a stream is given; every event has the next sequence number.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.server.blocks import Block, Blocks, Conversation, Move
from paceline.server.formats import Fields
from paceline.server.openai_types import ChatRequest
from paceline.server.responses import ApiError
from paceline.server.responses_types import Common, NamedTool, ResponseRequest

# What the chat underneath calls a field, and what it is called here.
NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}
PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
EVENTS = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}


def as_messages(items: Sequence[Fields], earlier: list[Fields]) -> list[Fields]:
    """The messages so far, and those of further items."""
    talk = Conversation(earlier, "input")
    for item in items:
        match item["type"]:
            case "message":
                talk.say(item["role"], _text(item["content"]))
            case "reasoning":
                talk.think(_text(item["content"] or item["summary"]))
            case "function_call":
                talk.call(item["name"], item["call_id"], item["arguments"])
            case _:
                talk.answer(item["call_id"], _text(item["output"]))
    return talk.messages


def _text(parts: Sequence[Fields]) -> str:
    return "".join(part["text"] for part in parts)


def as_chat(body: ResponseRequest, messages: list[Fields]) -> ChatRequest:
    asked = body.model_dump(include={*Common.model_fields}, exclude_none=True)
    asked["messages"] = messages
    if body.instructions is not None:
        asked["messages"] = [{"role": "system", "content": body.instructions}, *messages]
    if body.tools:
        tools = (tool.model_dump(exclude_none=True, exclude={"type"}) for tool in body.tools)
        asked["tools"] = [{"type": "function", "function": tool} for tool in tools]
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        asked["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice != "auto":  # which is usual where there are no tools, too
        asked["tool_choice"] = choice
    if body.text and body.text.format:
        form = body.text.format.model_dump(exclude_none=True)
        asked["response_format"] = {"type": form.pop("type"), "json_schema": form or None}
    if body.reasoning and (effort := body.reasoning.effort):
        asked["reasoning_effort"] = effort
    more = {"max_tokens": body.max_output_tokens, "parallel_tool_calls": body.parallel_tool_calls}
    return ChatRequest.model_validate(asked | more)


@dataclass(slots=True, kw_only=True)
class ResponseWriter(Blocks):
    body: ResponseRequest
    keep: Callable[[Fields], None]  # is given the response when it is complete
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def name(self) -> str:
        return f"resp_{self.writer.call.name}"

    async def whole(self) -> Fields:
        *_, last = [event async for event in self._events()]
        return dict(last["response"])

    async def chunks(self) -> AsyncIterator[Fields]:
        try:
            async for event in self._events():
                yield event
        except ApiError as error:
            why = {"code": error.code or "server_error", "message": error.message}
            yield self._event("failed", response=self._response("failed", error=why))

    async def _events(self) -> AsyncIterator[Fields]:
        for name in ("created", "in_progress"):
            yield self._event(name, response=self._response("in_progress"))
        async for move, block, piece in self.read():
            for event in self._moved(move, block, piece):
                yield event
        is_cut = self.finish == "length"
        status, why = ("incomplete", {"reason": "max_output_tokens"}) if is_cut else ("completed", None)
        output = [self._item(block, _status(block)) for block in self.found]
        response = self._response(status, incomplete_details=why, output=output, usage=self._usage())
        self.keep(response)
        yield self._event(status, response=response)

    def _moved(self, move: Move, block: Block, piece: str) -> Iterator[Fields]:
        item = self._item(block, _status(block) if move == "close" else "in_progress")
        place: Fields = {"item_id": item["id"], "output_index": block.index}
        kind, is_call, done = EVENTS[block.kind], block.kind == "call", {"text": block.text}
        if is_call:
            done = {"arguments": block.text, "name": block.name}
        else:
            place["content_index"] = 0
        logprobs: Fields = {"logprobs": []} if block.kind == "text" else {}
        if move == "open":
            yield self._event("output_item.added", output_index=block.index, item=item)
            if not is_call:
                yield self._event("content_part.added", **place, part=_part(block))
        elif move == "piece":
            yield self._event(f"{kind}.delta", **place, delta=piece, **logprobs)
        else:
            yield self._event(f"{kind}.done", **place, **done, **logprobs)
            if not is_call:
                yield self._event("content_part.done", **place, part=_part(block))
            yield self._event("output_item.done", output_index=block.index, item=item)

    def _event(self, kind: str, /, **fields: Any) -> Fields:
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **fields}

    def _item(self, block: Block, status: str) -> Fields:
        own = {"id": f"{PREFIXES[block.kind]}_{self.writer.call.name}{block.index:02d}", "status": status}
        if block.kind == "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {"type": "function_call", **own, **call}
        content = [] if status == "in_progress" else [_part(block)]
        if block.kind == "reasoning":
            return {"type": "reasoning", **own, "summary": [], "content": content}
        return {"type": "message", **own, "role": "assistant", "content": content}

    def _response(self, status: str, **more: Any) -> Fields:
        body, told = self.body, self.body.model_dump(exclude_none=True)
        params = self.writer.job.parts[0]["params"]
        same = ("instructions", "max_output_tokens", "previous_response_id", "user", "metadata", "reasoning")
        return {
            "id": self.name,
            "object": "response",
            "created_at": self.writer.created,
            "status": status,
            "model": self.writer.model,
            "output": [],
            "background": False,
            "error": None,
            "incomplete_details": None,
            **{name: told.get(name) for name in same},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "store": body.store is not False,
            "temperature": params.get("temperature", 1.0),
            "top_p": params.get("top_p", 1.0),
            "text": {"format": told.get("text", {}).get("format", {"type": "text"})},
            "tool_choice": told.get("tool_choice", "auto"),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "truncation": "disabled",
            "usage": None,
            **more,
        }

    def _usage(self) -> Fields:
        usage = self.writer.call.usage()
        reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage["total_tokens"],
        }


def _status(block: Block) -> str:
    return "incomplete" if block.is_cut else "completed"


def _part(block: Block) -> Fields:
    more: Fields = {"annotations": [], "logprobs": []} if block.kind == "text" else {}
    return {"type": EVENTS[block.kind], "text": block.text, **more}
