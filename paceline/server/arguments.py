"""The arguments of a tool call, as they are written: JSON passes unchanged; keys and values in tags, as
Qwen3-Coder and GLM write them, become JSON, a text as it comes and any other value when it is complete.
Invariant: pieces cut anywhere, joined, are what the whole becomes; arguments that were cut short stay open.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

# By the tag before a key: the key with all that stands before its value, and what ends the value, which
# models do not always close. A line's end around a value of Qwen3-Coder belongs to its tags.
_ENDS = ("</parameter>", "</function>", "</tool_call>")
_STOPS = (*_ENDS, *(f"\n{end}" for end in _ENDS), "\n<parameter=")
_GLM_KEY = re.compile(r"<arg_key>([^<]*+)</arg_key>\s*+<arg_value>")
PAIRS = {
    "<parameter=": (re.compile(r"<parameter=([^<>]*+)>(?:\n|(?!\Z))"), _STOPS),
    "<arg_key>": (_GLM_KEY, ("</arg_value>", "</tool_call>")),
}


class JsonPass:
    """One JSON value; or, with depth 1, what is left of an object or a list."""

    def __init__(self, depth: int = 0) -> None:
        self.is_over = False
        self._depth, self._is_quoted, self._is_escaped = depth, False, False

    def take(self, text: str, is_last: bool) -> tuple[str, str]:
        """What belongs to the value, and what is left of the text."""
        for at, character in enumerate(text, 1):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_quoted:
                self._is_escaped, self._is_quoted = character == "\\", character != '"'
            elif character == "<":  # a tag: the value was never finished
                self._depth, at = 0, at - 1
            else:
                self._is_quoted = character == '"'
                self._depth += (character in "{[") - (character in "}]")
            if not self._depth:
                break
        self.is_over = not self._depth
        return text[:at], text[at:]


class TaggedPass:
    """Keys and values in tags. `schema`: of the function's arguments; `ends`: the tags that end a call, which
    are passed, too; `opens`: those that begin the next."""

    def __init__(self, schema: Mapping[str, Any], ends: tuple[str, ...], opens: tuple[str, ...]) -> None:
        self.is_over = False
        self._schemas, self._ends, self._tags = schema.get("properties"), ends, (*PAIRS, *ends, *opens)
        self._num_keys = 0
        self._stops: tuple[str, ...] = ()  # what ends the present value; none between two pairs
        self._is_text = False  # the present value

    def take(self, text: str, is_last: bool) -> tuple[str, str]:
        """The JSON so far of what was not taken before, and what is left of the text."""
        said, seen = "", tuple[Any, ...]()
        while not self.is_over and seen != (text, self._stops):
            seen = text, self._stops
            new, text = self._value(text, is_last) if self._stops else self._key(text)
            said += new
        return said, text

    def _key(self, text: str) -> tuple[str, str]:
        at, tag = first(text, self._tags)
        if not tag:
            return "", text[len(text) - num_begun(text, self._tags) :]
        if tag not in PAIRS:
            self.is_over = True
            return "}" if self._num_keys else "{}", text[at + len(tag) * (tag in self._ends) :]
        head, stops = PAIRS[tag][0].match(text, at), PAIRS[tag][1]
        if head is None:  # not yet, or where another tag follows never
            begun = at + len(tag)
            skipped, follower = first(text[begun:], self._tags)
            return "", text[begun + skipped if follower else at :]
        schema = self._schemas.get(head[1]) if isinstance(self._schemas, Mapping) else None
        self._is_text = not isinstance(schema, Mapping) or schema.get("type") == "string"
        self._stops, self._num_keys = stops, self._num_keys + 1
        opening = f"{', ' if self._num_keys > 1 else '{'}{_json(head[1])}: "
        return opening + '"' * self._is_text, text[head.end() :]

    def _value(self, text: str, is_last: bool) -> tuple[str, str]:
        at, tag = first(text, self._stops)
        if not tag:
            at = len(text) - (0 if is_last else num_begun(text, self._stops)) if self._is_text else 0
            return _json(text[:at])[1:-1], text[at:]
        self._stops = ()
        value = _json(text[:at], self._is_text)
        return value[1:] if self._is_text else value, text[at:]


def _json(text: str, is_text: bool = True) -> str:
    """A text as JSON; one that need not be a text is left as it is where it is JSON."""
    try:
        value = text if is_text else json.loads(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def first(text: str, tags: Iterable[str]) -> tuple[int, str]:
    """Where the first of the tags stands, and which it is; the text's end and none if there is none."""
    found = re.search("|".join(map(re.escape, tags)) or "(?!)", text)
    return (found.start(), found[0]) if found else (len(text), "")


def num_begun(text: str, tags: tuple[str, ...]) -> int:
    """How many of the last characters may begin a tag."""
    longest = max(map(len, tags), default=1) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    return next((n for n in sizes if any(tag.startswith(text[-n:]) for tag in tags)), 0)
