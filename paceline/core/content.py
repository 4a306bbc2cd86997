"""Messages of a chat as templates know them: content is text, the arguments of tool calls are objects.

Clients write content as a text, as a list of parts or as nothing beside tool calls, and arguments as JSON.
Invariant: a message that is as templates know it stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.errors import RequestError

TEXTS = ("text", "input_text", "output_text", "refusal")  # types of parts that hold text


def text_of(content: Any) -> str:
    """The text of a message's content: parts of text are joined as they are, None is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        remedy = "give a text, or a list of parts such as {'type': 'text', 'text': ...}"
        raise RequestError(f"a message's content is {content!r:.60}; {remedy}")
    return "".join(part if isinstance(part, str) else _text_of_part(part) for part in content)


def _text_of_part(part: Any) -> str:
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    text = part.get(kind, part.get("text")) if kind in TEXTS else None
    if not isinstance(text, str):
        what = f"of type {kind!r:.40}" if kind is not None else f"{part!r:.40}"
        raise RequestError(f"a message's content has a part {what}; this model reads text only")
    return text


def plain_messages(messages: Any, keeps_parts: bool = False) -> list[dict[str, Any]]:
    """One conversation, ready for a template. keeps_parts: for one that goes through the parts itself."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    for message in messages if is_list else [messages]:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            example = [{"role": "user", "content": "Hello"}]
            raise RequestError(f"a message is {message!r:.60}; give a list of messages such as {example}")
    made = []
    for message in messages:
        known = {key: value for key, value in message.items() if key not in ("content", "tool_calls")}
        has_parts = keeps_parts and not isinstance(message.get("content"), str | None)
        known["content"] = message["content"] if has_parts else text_of(message.get("content"))
        if message.get("tool_calls"):
            known["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
        made.append(known)
    return made


def _plain_call(call: Any) -> Any:
    """A tool call whose arguments are an object; one of another shape is the template's to refuse."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        remedy = "give an object, or its JSON text"
        raise RequestError(f"a tool call's arguments are {function['arguments']!r:.60}; {remedy}") from None
    return {**call, "function": {**function, "arguments": arguments}}
