"""How families of models write tool calls and reasoning, and which of these ways a chat template shows.
Invariant: a row says only what is written; reading.py alone reads.
"""

from __future__ import annotations

import itertools
import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# What stands before a call's arguments; the last group is the function's name. No quantifier goes back:
# whatever a model writes is read in linear time.
_NAMED = r'"name"\s*+:\s*+"([^"\\]++)"\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)'
JSON_HEAD = re.compile(rf'\s*+(?:\[\s*+)?+\{{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?+{_NAMED}')
MISTRAL_HEAD = re.compile(
    rf"{JSON_HEAD.pattern}|\s*+([\w.-]++)(?:\[CALL_ID\]\w*+)?+(?:\[ARGS\])?+\s*+(?=\{{)"
)
# Where a message of gpt-oss goes: whom it calls, before or after its channel, and how it is written.
_TO = r"(?:\s*+to=functions\.(?P<{}>[\w.-]++))?+"
HARMONY_HEAD = re.compile(
    rf"(?:<\|start\|>assistant)?+{_TO.format('before')}\s*+<\|channel\|>(?P<channel>\w++)"
    rf"{_TO.format('after')}[^<]*+(?:<\|constrain\|>[^<]*+)?+<\|message\|>"
)
# In tags may stand JSON, or what Qwen3-Coder and GLM write: a name, and its arguments in further tags.
TAGGED_HEAD = re.compile(
    rf"{JSON_HEAD.pattern}|\s*+(?:<function=)?+(?P<tagged>[\w.-]++)(?:>|\s*+(?=<arg_key>|</tool_call>))"
)
Fields = dict[str, Any]  # of a JSON object
Tools = Mapping[str, Mapping[str, Any]]  # by name: the schema of a function's arguments


@dataclass(frozen=True, slots=True)
class Format:
    opens: tuple[str, ...]  # what begins a call, or a message
    ends: tuple[str, ...] = ()  # what ends it
    head: re.Pattern[str] = JSON_HEAD
    also: tuple[str, ...] = ()  # further tokens that must be seen as text
    has_short_ids: bool = False  # templates of Mistral take no others
    is_channels: bool = False  # all is in messages with a header

    @property
    def tokens(self) -> tuple[str, ...]:
        return (*self.opens, *self.ends, *self.also)


HERMES = Format(("<tool_call>",), ("</tool_call>",), TAGGED_HEAD)
CODER = Format(("<tool_call>", "<function="), ("</tool_call>", "</function>"), TAGGED_HEAD)  # in one or both
HARMONY = Format(
    ("<|start|>", "<|channel|>"),
    ("<|end|>", "<|call|>", "<|return|>"),
    HARMONY_HEAD,
    ("<|message|>", "<|constrain|>"),
    is_channels=True,
)
FORMATS = {  # by vLLM's names
    "hermes": HERMES,
    "qwen3_coder": CODER,
    "glm45": HERMES,
    "llama3_json": Format(("<|python_tag|>",)),
    "mistral": Format(("[TOOL_CALLS]",), (), MISTRAL_HEAD, ("[ARGS]", "[CALL_ID]"), has_short_ids=True),
    "granite": Format(("<|tool_call|>",)),
    "openai": HARMONY,
}
# What of a template shows the format; the first that is found.
SIGNS = {
    "<|channel|>": "openai",
    "[TOOL_CALLS]": "mistral",
    "<function=": "qwen3_coder",
    "<tool_call>": "hermes",
    "<|tool_call|>": "granite",
    "<|start_header_id|>": "llama3_json",
}
THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


class Thoughts(NamedTuple):
    """The tags around reasoning. It stands at the beginning of an answer alone, or between any of them."""

    opens: str
    closes: str
    is_anywhere: bool = False

    def num_tokens(self, tokens: Sequence[bytes], prompt_end: str) -> int:
        """How many of an answer's tokens are reasoning, which the prompt's end may have opened."""
        opens, closes = re.escape(self.opens), re.escape(self.closes)
        if not self.is_anywhere:
            opens = r"\A" if prompt_end.rstrip().endswith(self.opens) else rf"\A\s*+{opens}"
        inside = re.compile(rf"{opens}(.*?)(?:{closes}|\Z)".encode(), re.DOTALL)
        ends = list(itertools.accumulate(map(len, tokens)))
        spans = (found.span(1) for found in inside.finditer(b"".join(tokens)))
        return sum(bisect_right(ends, end) - bisect_right(ends, start) for start, end in spans)


ANALYSIS = Thoughts("<|channel|>analysis<|message|>", "<|end|>", is_anywhere=True)


def described(template: str) -> dict[str, Any]:
    """What a chat template shows of how its model answers."""
    signs = SIGNS if "tools" in template else {}  # others are told of tools in the words of core/content.py
    named = next((name for sign, name in signs.items() if sign in template), "hermes")
    thinking = next((tags for tags in THINKING if tags[1] in template), None)
    return {"format": named, "thinking": thinking, "has_developer": "developer" in template}


def calls_in(text: str, tools: Tools) -> list[tuple[str, str]]:
    """The calls in what stands between tags, each a name and JSON; none if it is no call of the tools."""
    found = []
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    for each in value if isinstance(value, list) else [value]:
        if not isinstance(each, dict) or str(each.get("name")) not in tools:
            return []
        arguments = each.get("arguments", each.get("parameters")) or {}
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        found.append((str(each["name"]), written))
    return found


def forced_schema(tools: Sequence[Fields], name: str | None) -> Fields:
    """A JSON schema whose texts are calls of one of the tools, or of the one that is named."""
    calls, shared, closed = list[Fields](), Fields(), {"type": "object", "additionalProperties": False}
    for function in (tool["function"] for tool in tools):
        if name in (None, function["name"]):
            arguments = function.get("parameters") or {"type": "object"}
            if isinstance(own := arguments.get("$defs"), dict):
                shared |= own  # references to them begin at the schema's root
            properties = {"name": {"const": function["name"]}, "arguments": arguments}
            calls.append({**closed, "properties": properties, "required": list(properties)})
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return schema | {"$defs": shared} if shared else schema
