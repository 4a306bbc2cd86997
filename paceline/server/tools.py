"""Tools, as the model is told of them: by a template that knows tools, or in the system message, as most open
models were trained; and the schema of a call that is forced. What of an answer is a call: see reading.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_SAYS_HOW = (
    "You may call functions. They are described within <tools></tools>:\n<tools>\n{tools}\n</tools>\n"
    "For each call, write a JSON object with its name and arguments within tags:\n"
    '<tool_call>\n{{"name": "...", "arguments": {{...}}}}\n</tool_call>'
)
_CLOSED = {"type": "object", "additionalProperties": False}
Fields = dict[str, Any]  # of a JSON object


def for_plain_template(messages: Sequence[Fields], tools: Sequence[Fields] | None) -> list[Fields]:
    """The same conversation for a template that knows neither tools nor their answers."""
    written = [_in_words(message) for message in messages]
    if not tools:
        return written
    text = _SAYS_HOW.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if written and written[0]["role"] == "system":
        first = {**written[0], "content": f"{written[0]['content']}\n\n{text}"}
        return [first, *written[1:]]
    return [{"role": "system", "content": text}, *written]


def _in_words(message: Fields) -> Fields:
    if message["role"] in ("tool", "function"):
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    functions = (json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"])
    calls = [f"<tool_call>\n{function}\n</tool_call>" for function in functions]
    content = [message["content"], *calls] if message["content"] else calls
    return {"role": message["role"], "content": "\n".join(content)}


def forced_schema(tools: Sequence[Fields], name: str | None) -> Fields:
    """A JSON schema whose texts are calls of one of the tools, or of the one that is named."""
    calls, shared = list[Fields](), Fields()
    for function in (tool["function"] for tool in tools):
        if name in (None, function["name"]):
            arguments = function.get("parameters") or {"type": "object"}
            if isinstance(own := arguments.get("$defs"), dict):
                shared |= own  # references to them begin at the schema's root
            properties = {"name": {"const": function["name"]}, "arguments": arguments}
            calls.append({**_CLOSED, "properties": properties, "required": list(properties)})
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return schema | {"$defs": shared} if shared else schema
