"""Anthropic's Messages on the chat underneath: blocks become the chat's messages, and its answer becomes
blocks, whole or as events. Invariant: a stream's events, added up as Anthropic's clients do, are the message
that a request without a stream is given. A call's arguments are sent when they are complete, as an object.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from paceline.server import anthropic_types as types
from paceline.server.blocks import Block, Blocks, Conversation
from paceline.server.formats import Fields
from paceline.server.openai_types import ChatRequest
from paceline.server.responses import ApiError, anthropic_body
from paceline.server.responses_types import Common

NAMES = {"stop": "stop_sequences", "response_format": "output_config"}  # the chat's, and those here
CHOICES = {"auto": None, "any": "required", "none": "none"}
REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}  # by the chat's; all others: end_turn


def as_chat(body: types.CountRequest) -> ChatRequest:
    asked = body.model_dump(include={*Common.model_fields}, exclude_none=True)
    talk = Conversation([], "messages")
    if body.system:
        talk.say("system", _text(body.system))
    for message in body.messages:
        _say(talk, message)
    asked["messages"] = talk.messages
    if talk.messages[-1]["role"] == "assistant":
        what = "messages ends with the assistant's own words, which are not continued here; end with the user"
        raise ApiError(400, what, param="messages")
    if body.tools:
        asked["tools"] = [
            {"type": "function", "function": _function(tool.model_dump(exclude_none=True))}
            for tool in body.tools
        ]
    if choice := body.tool_choice:
        named = {"type": "function", "function": {"name": choice.name or ""}}
        asked["tool_choice"] = named if choice.type == "tool" else CHOICES[choice.type]
        asked["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if body.thinking:
        known = {"enable_thinking": body.thinking.type == "adaptive"}
        asked["chat_template_kwargs"] = known | asked.get("chat_template_kwargs", {})
    if body.output_config and (form := body.output_config.format):
        asked["response_format"] = {"type": form.type, "json_schema": {"schema": form.schema_}}
    if isinstance(body, types.MessageRequest):
        asked |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
    return ChatRequest.model_validate(asked)


def _function(tool: Fields) -> Fields:
    del tool["type"]
    return {**tool, "parameters": tool.pop("input_schema")}


def _say(talk: Conversation, message: types.Message) -> None:
    """Its blocks in order; texts in a row are one."""
    text, is_said = "", False
    for block in message.content:
        if isinstance(block, types.TextBlock):
            text += block.text
            continue
        if text:
            talk.say(message.role, text)
        text, is_said = "", True
        if isinstance(block, types.Thinking):
            talk.think(block.thinking)
        elif isinstance(block, types.ToolUse):
            talk.call(block.name, block.id, json.dumps(block.input, ensure_ascii=False))
        else:
            talk.answer(block.tool_use_id, ("Error: " if block.is_error else "") + _text(block.content))
    if text or not is_said:
        talk.say(message.role, text)


def _text(blocks: Sequence[types.TextBlock]) -> str:
    return "".join(block.text for block in blocks)


@dataclass(slots=True, kw_only=True)
class MessageWriter(Blocks):
    body: types.MessageRequest

    @property
    def name(self) -> str:
        return f"msg_{self.writer.call.name}"

    async def whole(self) -> Fields:
        async for _ in self.read():
            pass
        content = [_block_json(block, is_whole=True) for block in self.found]
        return {**self._frame(), "content": content, **self._end(), "usage": self._usage()}

    async def chunks(self) -> AsyncIterator[Fields]:
        try:
            usage = {"input_tokens": sum(self.writer.call.prompts.values()), "output_tokens": 0}
            empty: Fields = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
            yield {"type": "message_start", "message": {**self._frame(), **empty}}
            yield {"type": "ping"}
            async for move, block, piece in self.read():
                place = {"index": block.index}
                if move == "open":
                    opening = _block_json(block, is_whole=False)
                    yield {"type": "content_block_start", **place, "content_block": opening}
                if delta := _delta(move, block, piece):
                    yield {"type": "content_block_delta", **place, "delta": delta}
                if move == "close":
                    yield {"type": "content_block_stop", **place}
            yield {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
            yield {"type": "message_stop"}
        except ApiError as error:
            yield anthropic_body(error)

    def _frame(self) -> Fields:
        return {"id": self.name, "type": "message", "role": "assistant", "model": self.writer.model}

    def _end(self) -> Fields:
        finish, stop = self.finish, self.writer.call.ends[0]["stop"]
        if finish == "stop" and stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": REASONS.get(finish, "end_turn"), "stop_sequence": None}

    def _usage(self) -> Fields:
        usage = self.writer.call.usage()
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - num_cached,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }


def _block_json(block: Block, is_whole: bool) -> Fields:
    if block.kind == "call":
        arguments = _object(block) if is_whole else {}
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _delta(move: str, block: Block, piece: str) -> Fields | None:
    if block.kind == "call":
        whole = json.dumps(_object(block), ensure_ascii=False)
        return {"type": "input_json_delta", "partial_json": whole} if move == "close" else None
    if move != "piece":
        return None
    kind = "thinking" if block.kind == "reasoning" else "text"
    return {"type": f"{kind}_delta", kind: piece}


def _object(call: Block) -> Fields:
    """Its arguments. The protocol has objects only: of one that was cut there is the beginning, and what is
    none stands in one."""
    value: Any = call.text
    try:
        value = from_json(call.text or "{}", allow_partial=call.is_cut)
        json.dumps(value, allow_nan=False)  # what is read as JSON may hold NaN, which is none
    except (ValueError, RecursionError):
        value = call.text
    return value if isinstance(value, dict) else {"arguments": value}
