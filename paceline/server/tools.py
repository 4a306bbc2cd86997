"""The schema of a tool call that is forced. How a model is told of tools: core/content.py; what of an answer
is a call: reading.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CLOSED = {"type": "object", "additionalProperties": False}
Fields = dict[str, Any]  # of a JSON object


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
