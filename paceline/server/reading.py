"""Reads an answer piece by piece: what of it is reasoning, what is text, and what is a tool call.

One machine reads every format of formats.py. It holds back only what may still become a tag or the head of a
call; a call's name is said as soon as it is certain, and its arguments as they come. Invariants:
pieces cut anywhere, joined, say what the whole says, since each decision follows from the text before it;
what is no call is text, unchanged and in order; no answer is an error.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from paceline.server.arguments import JsonPass, TaggedPass, first, num_begun
from paceline.server.formats import ANALYSIS, HERMES, Fields, Format, Thoughts, Tools, calls_in

Kind = Literal["content", "reasoning", "arguments"]
MOST_FAILED = 64  # tags that are no calls, after which all is text: each costs a look at what follows
# JSON that begins so is no call.
_NO_CALL = re.compile(
    r'\s*+\[\s*+[^\s{]|\s*+(?:\[\s*+)?+\{\s*+(?:[^\s"]|"(?!(?:name|type|id|arguments|parameters)")[^"]*+")'
)
_NAME = re.compile(r'\s*+(?:\[\s*+)?+\{\s*+"name"\s*+:\s*+"([^"\\]*+)"')


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers to a request are to be read."""

    format: Format = HERMES
    tools: Tools = field(default_factory=dict)  # none: no call is looked for
    thinking: Sequence[str] | None = None  # the tags around reasoning, of a model that has it
    forced: tuple[str, ...] = ()  # a grammar makes the answer a call of one of these
    most_calls: int | None = None

    @property
    def tokens(self) -> list[str]:
        """Special tokens that must be seen as text."""
        calls = self.format.tokens if self.tools or self.format.is_channels else ()
        return [*calls, *(self.thinking or ())]

    @property
    def thoughts(self) -> Thoughts | None:
        """The tags by which the tokens of reasoning are counted."""
        tags = self.thinking
        return ANALYSIS if self.format.is_channels else Thoughts(tags[0], tags[1]) if tags else None


@dataclass(slots=True)
class Said:
    """What is new. `calls`: OpenAI's pieces of tool calls, one for each call of which something is new."""

    content: str = ""
    reasoning: str = ""
    calls: list[Fields] = field(default_factory=list)


class AnswerReader:
    """`prompt_end`: how the prompt ends, which may have opened the reasoning."""

    def __init__(self, reading: Reading, prompt_end: str = "") -> None:
        self.reading, self.num_calls = reading, 0
        self._held, self._said = "", Said()
        self._kind: Kind = "content"
        self._opening = ""  # the tag before what may be a call
        self._num_failed = 0
        self._is_cutting = False  # white space that comes next is no text
        self._is_enclosed = False  # the arguments that pass are inside an object
        self._is_listed = False  # further calls may follow without a tag
        self._passing: JsonPass | TaggedPass  # the arguments that are being written
        tags = reading.thinking
        self._state = self._begin if reading.tools or tags else self._prose
        if tags and prompt_end.rstrip().endswith(tags[0]):
            self._enter("reasoning")

    def read(self, text: str, is_last: bool = False) -> Said:
        """What is certain by now; with the last piece all is."""
        self._held, self._said = self._held + text, Said()
        while self._held and self._state(is_last):
            pass
        return self._said

    def _enter(self, kind: Kind, is_cutting: bool = True) -> None:
        self._kind, self._state, self._is_cutting = kind, self._prose, is_cutting

    def _begin(self, is_last: bool) -> bool:
        """Before an answer, or after its reasoning: the tag of reasoning, or JSON, which may be a call."""
        start, tag = self._held.lstrip(), (self.reading.thinking or ("",))[0]
        if not is_last and (not start or (tag != start and tag.startswith(start))):
            return False
        if self._is_cutting:
            self._held = start
        if tag and start.startswith(tag):
            self._held = start[len(tag) :]
            self._enter("reasoning")
        elif self.reading.tools and start[:1] in ("{", "["):
            self._opening, self._state = "", self._call
        else:
            self._enter("content", is_cutting=False)
        return True

    def _prose(self, is_last: bool) -> bool:
        """Up to the next tag; where a tag ends the arguments of a call, they are prose, too."""
        if self._is_cutting:
            self._held = self._held.lstrip()
            self._is_cutting = not self._held
        written, tags = self.reading.format, tuple[str, ...]()
        if written.is_channels:
            tags = (*written.opens, *written.ends)
        elif self._kind == "reasoning":
            tags = tuple(self.reading.thinking or ())[1:]
        elif self.reading.tools:
            tags = written.opens
        at, tag = first(self._held, tags)
        if not tag and not is_last:
            at -= num_begun(self._held, tags)
        self._say(self._kind, self._held[:at])
        self._held = self._held[at:]
        if tag in written.opens:
            self._opening, self._state = tag, self._call
        elif tag:
            self._held = self._held[len(tag) :]
            self._enter("content", is_cutting=not written.is_channels)
            self._state = self._prose if written.is_channels else self._begin
        return bool(tag)

    def _call(self, is_last: bool) -> bool:
        """At a tag that opens a call or a message, or at JSON that may be a call."""
        how, size = self.reading, len(self._opening)
        is_channels = how.format.is_channels
        inside = self._held if is_channels else self._held[size:]
        if (head := how.format.head.match(inside)) is None:
            return self._whole_call(inside, is_last)
        name = head["before"] or head["after"] if is_channels else head[head.lastindex or 0]
        if name and name not in how.tools:
            return self._give_up(head.end() if is_channels else size)
        self._held = inside[head.end() :]
        if is_channels:
            is_reasoning = head["channel"] == "analysis"
            self._enter("arguments" if name else "reasoning" if is_reasoning else "content", is_cutting=False)
        else:
            is_tagged, self._state = head.lastgroup == "tagged", self._arguments
            self._is_enclosed, self._is_listed = "{" in head[0], not is_tagged
            tags = how.format.ends, how.format.opens
            self._passing = TaggedPass(how.tools[name], *tags) if is_tagged else JsonPass()
        if name:
            self._open_call(name)
        return True

    def _whole_call(self, inside: str, is_last: bool) -> bool:
        """What may be a call and begins in no usual way is judged when it is complete."""
        how, size, named = self.reading, len(self._opening), _NAME.match(inside)
        at, end = first(inside, how.format.ends if size else ())
        is_known = named is None or named[1] in how.tools
        is_open = not (end or is_last or (not size and _NO_CALL.match(inside)))
        if is_open and is_known:
            return False
        found = calls_in(inside[:at], how.tools)
        if is_last and not found and is_known and (named or len(how.forced) == 1) and how.forced:
            found = [(named[1] if named else how.forced[0], "")]  # cut before its arguments
        if not found:
            return self._give_up(size)
        for name, arguments in found:
            self._open_call(name)
            self._say("arguments", arguments)
        self._held = inside[at + len(end) :]
        self._state, self._is_listed = self._between, False
        return True

    def _give_up(self, size: int) -> bool:
        """The first `size` characters were no call, but text; what follows them is read as text is."""
        self._enter("content", is_cutting=False)
        self._num_failed += 1
        if self._num_failed == MOST_FAILED:
            self.reading = Reading()
        self._say("content", self._held[:size])
        self._held = self._held[size:]
        return True

    def _arguments(self, is_last: bool) -> bool:
        said, self._held = self._passing.take(self._held, is_last)
        self._say("arguments", said)
        if self._passing.is_over:
            self._state = self._tail if self._is_enclosed else self._between
        return self._passing.is_over

    def _tail(self, is_last: bool) -> bool:
        """After the arguments: the rest of the object around them, unless it was never finished."""
        self._held = self._held.lstrip()
        if self._held:
            self._passing = JsonPass(depth=1)
            self._state = self._rest if self._held[0] in ",}" else self._between
        return bool(self._held)

    def _rest(self, is_last: bool) -> bool:
        _, self._held = self._passing.take(self._held, is_last)
        if self._passing.is_over:
            self._state = self._between
        return self._passing.is_over

    def _between(self, is_last: bool) -> bool:
        """After a call: its end tag, further calls of a list, or text."""
        rest, ends = self._held.lstrip(" \t\r\n,;]" if self._is_listed else None), self.reading.format.ends
        if not is_last and (not rest or any(end != rest and end.startswith(rest) for end in ends)):
            return False
        end = next((end for end in ends if rest.startswith(end)), "")
        self._held = rest[len(end) :]
        self._enter("content")
        if not end and self._is_listed and rest.startswith("{"):
            self._opening, self._state = "", self._call
        return True

    def _open_call(self, name: str) -> None:
        self.num_calls += 1
        token = secrets.token_hex(12)
        own = token[:9] if self.reading.format.has_short_ids else f"call_{token}"
        self._piece().update(id=own, type="function", function={"name": name, "arguments": ""})

    def _piece(self) -> Fields:
        """What is new of the present call."""
        index, calls = self.num_calls - 1, self._said.calls
        if self.reading.most_calls is not None and index >= self.reading.most_calls:
            return {"function": {"arguments": ""}}  # which is not read
        if not calls or calls[-1]["index"] != index:
            calls.append({"index": index, "function": {"arguments": ""}})
        return calls[-1]

    def _say(self, kind: Kind, text: str) -> None:
        if text and kind == "arguments":
            self._piece()["function"]["arguments"] += text
        elif kind != "arguments":
            setattr(self._said, kind, getattr(self._said, kind) + text)
