"""Conversations of blocks, on the chat underneath. Responses and Messages both speak of a turn as a row of
blocks (reasoning, text, calls), where a chat has one message: `Conversation` joins their blocks to messages,
`Blocks` cuts the chunks of the chat's answer into blocks. Invariants: the assistant's blocks in a row are one
message, so all doors ask the model the same; the pieces of a block, joined, are its text, and a whole answer
is what its stream adds up to.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Literal

from paceline.server.formats import Fields
from paceline.server.responses import ApiError
from paceline.server.writer import Writer

Kind = Literal["reasoning", "text", "call"]
Move = Literal["open", "piece", "close"]


@dataclass(slots=True)
class Conversation:
    messages: list[Fields]
    field: str  # of the body, for errors

    def say(self, role: str, text: str) -> None:
        if role == "assistant":
            self._own()["content"] += text
        else:
            self.messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        own = self._own()
        own["reasoning_content"] = own.get("reasoning_content", "") + text

    def call(self, name: str, call_id: str, arguments: str) -> None:
        made = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._own().setdefault("tool_calls", []).append(made)

    def answer(self, call_id: str, text: str) -> None:
        known = {call["id"] for message in self.messages for call in message.get("tool_calls", ())}
        if call_id not in known:
            what = f"{self.field} answers the call {call_id!r:.80}, which was not made; send the call before"
            raise ApiError(400, what, param=self.field)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _own(self) -> Fields:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


@dataclass(slots=True)
class Block:
    kind: Kind
    text: str = ""  # so far; of a call the arguments, as JSON
    call_id: str = ""
    name: str = ""  # of the function
    number: int = 0  # of the call among the calls
    index: int = 0
    is_cut: bool = False  # the tokens ended before it did


@dataclass(slots=True)
class Blocks:
    """Reads one chat's answer."""

    writer: Writer
    found: list[Block] = field(default_factory=list)
    finish: str = "stop"

    async def read(self) -> AsyncIterator[tuple[Move, Block, str]]:
        """Every move, with its block and, for a piece, its text. An answer without words is an empty text."""
        now: Block | None = None
        async for chunk in self.writer.chunks():
            for choice in chunk["choices"]:
                self.finish = choice["finish_reason"] or self.finish
                for new in self._said(choice["delta"]):
                    if now is None or (new.kind, new.number) != (now.kind, now.number):
                        if now is not None:
                            yield "close", now, ""
                        now = self._opened(new)
                        yield "open", now, ""
                    if new.text:
                        now.text += new.text
                        yield "piece", now, new.text
        if now is None:
            now = self._opened(Block("text"))
            yield "open", now, ""
        now.is_cut = self.finish == "length"
        yield "close", now, ""

    def _opened(self, new: Block) -> Block:
        opened = Block(new.kind, "", new.call_id, new.name, new.number, len(self.found))
        self.found.append(opened)
        return opened

    @staticmethod
    def _said(delta: Fields) -> Iterator[Block]:
        if text := delta.get("reasoning_content"):
            yield Block("reasoning", text)
        if text := delta.get("content"):
            yield Block("text", text)
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            arguments = function.get("arguments", "")
            yield Block("call", arguments, call.get("id", ""), function.get("name", ""), call["index"])
