"""Messages of a chat as templates know them: content is text, the arguments of tool calls are objects.

Clients write content as a text, as a list of parts or as nothing beside tool calls, and arguments as JSON.
Tools are for the template to write; for one that knows none they stand in the system message, as most open
models were trained. Invariant: a message that is as templates know it stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.errors import RequestError

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SAYS_HOW = (
    "You may call functions. They are described within <tools></tools>:\n<tools>\n{tools}\n</tools>\n"
    "For each call, write a JSON object with its name and arguments within tags:\n"
    '<tool_call>\n{{"name": "...", "arguments": {{...}}}}\n</tool_call>'
)
TEXTS = ("text", "input_text", "output_text", "refusal")  # types of parts that hold text


def plain_text(content: Any) -> str | None:
    """A message's content: a text, None, or a list of parts, whose texts become lines, as in vLLM."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise RequestError(f"content is {content!r:.40}; give a text or a list of parts with text")
    return "\n".join(part if isinstance(part, str) else _part_text(part) for part in content)


def _part_text(part: Any) -> str:
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if kind is not None and kind not in TEXTS:
        raise RequestError(f"content has a part of type {kind!r:.40}; this model reads text only")
    text = part.get(kind, part.get("text")) if kind is not None else None
    if not isinstance(text, str):
        raise RequestError(f"content has a part without text: {part!r:.60}; give its text")
    return text


def text_of(content: Any) -> str:
    return plain_text(content) or ""


def plain_messages(messages: Any, keeps_parts: bool = False) -> list[dict[str, Any]]:
    """One conversation, ready for a template. keeps_parts: for one that goes through the parts itself."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    given = messages if is_list else [messages]
    for message in given:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            example = [{"role": "user", "content": "Hello"}]
            raise RequestError(f"a message is {message!r:.60}; give a list of messages such as {example}")
    made = []
    for message in given:
        known = {key: value for key, value in message.items() if key not in ("content", "tool_calls")}
        has_parts = keeps_parts and not isinstance(message.get("content"), str | None)
        known["content"] = message["content"] if has_parts else text_of(message.get("content"))
        if message.get("tool_calls"):
            calls = message["tool_calls"]
            many = calls if isinstance(calls, list) else [calls]
            known["tool_calls"] = [_plain_call(call) for call in many]
        made.append(known)
    return made


def _plain_call(call: Any) -> Any:
    """A tool call whose arguments are an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        remedy = "give a list of {'function': {'name': ..., 'arguments': {...}}}"
        raise RequestError(f"a tool call is {call!r:.60}; {remedy}")
    given = function.get("arguments")
    try:
        arguments = json.loads(given or "{}") if isinstance(given, str | None) else given
    except (ValueError, RecursionError):
        remedy = "give an object, or its JSON text"
        raise RequestError(f"a tool call's arguments are {given!r:.60}; {remedy}") from None
    return {**call, "function": {**function, "arguments": arguments}}


def for_plain_template(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """The same conversation for a template that knows neither tools nor their answers."""
    written = [_in_words(message) for message in messages]
    if not tools:
        return written
    text = _SAYS_HOW.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if written and written[0]["role"] == "system":
        first = {**written[0], "content": f"{written[0]['content']}\n\n{text}"}
        return [first, *written[1:]]
    return [{"role": "system", "content": text}, *written]


def _in_words(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] in ("tool", "function"):
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    functions = (json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"])
    calls = [f"{OPEN}\n{function}\n{CLOSE}" for function in functions]
    content = [message["content"], *calls] if message["content"] else calls
    return {"role": message["role"], "content": "\n".join(content)}
