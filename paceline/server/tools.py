"""Tools: what a chat's functions look like to the model, and what of its words is a call.

A template that knows tools writes them itself; for others they stand in the system message, as most open
models were trained: JSON between <tool_call> tags. Calls are read from those tags, and from answers that are
nothing but JSON naming a function: other families' way, and that of a forced call. Invariant: text that is no
call comes out unchanged, in order; a call comes out once, whole.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.content import CLOSE, OPEN
from paceline.core.content import for_plain_template as for_plain_template

_CLOSED = {"type": "object", "additionalProperties": False}
Fields = dict[str, Any]  # of a JSON object
Calls = list[Fields]


def forced_schema(tools: Sequence[Fields], name: str | None) -> Fields:
    """A JSON schema whose texts are calls of one of the tools, or of the one that is named."""
    calls = []
    for function in (tool["function"] for tool in tools):
        if name in (None, function["name"]):
            arguments = function.get("parameters") or {"type": "object"}
            properties = {"name": {"const": function["name"]}, "arguments": arguments}
            calls.append({**_CLOSED, "properties": properties, "required": list(properties)})
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _as_calls(text: str, names: frozenset[str]) -> Calls:
    """The calls in a JSON text; none if it is not JSON, or names no known function."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = []
    for each in value if isinstance(value, list) else [value]:
        if not isinstance(each, dict) or each.get("name") not in names:
            return []
        arguments = each.get("arguments", each.get("parameters", {}))
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        function = {"name": each["name"], "arguments": written}
        calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
    return calls


@dataclass(slots=True)
class ToolReader:
    """Reads an answer piece by piece."""

    names: frozenset[str]  # none: all is text
    num_calls: int = 0
    _held: str = ""  # not yet known to be text or call
    _is_bare: bool | None = None  # it begins like JSON: maybe a call without tags; None: nothing seen yet
    _is_after_call: bool = False  # line ends between calls are not text

    def read(self, text: str, is_last: bool = False) -> tuple[str, Calls]:
        """What is certainly text by now, and the calls that are complete. At the end what was held is a call
        if it can be read as one, else text."""
        if not self.names:
            return text, []
        said, calls = list[str](), Calls()
        self._held += text
        if self._is_bare is None and self._held.strip():
            self._is_bare = self._held.lstrip()[0] in "{["
        if self._is_bare is False:
            self._split(said, calls)
        if is_last:
            inside = self._held.removeprefix(OPEN).strip()
            last = _as_calls(inside, self.names) if self._is_bare or self._held.startswith(OPEN) else []
            calls += last
            said += [] if last else [self._held]
        self.num_calls += len(calls)
        return "".join(said), calls

    def _split(self, said: list[str], calls: Calls) -> None:
        """Move what is certain out of the held text."""
        while True:
            if self._is_after_call:
                self._held = self._held.lstrip("\n")
            before, tag, rest = self._held.partition(OPEN)
            inside, end, after = rest.partition(CLOSE)
            if not tag:  # the last characters may begin one
                size = next(n for n in range(len(OPEN) - 1, -1, -1) if before.endswith(OPEN[:n]))
                before, rest = before[: len(before) - size], OPEN[:size]
            said.append(before)
            self._is_after_call = self._is_after_call and not before
            if not end:
                self._held = tag + rest
                return
            found = _as_calls(inside.strip(), self.names)
            calls += found
            said += [] if found else [OPEN + inside + CLOSE]  # tags around something else: the model's words
            self._held, self._is_after_call = after, bool(found)
