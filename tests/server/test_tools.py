"""What of an answer is a tool call: in tags or bare, whole or cut into pieces at any place; all else is text,
unchanged.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.tools import ToolReader, for_plain_template, forced_schema

NAMES = frozenset({"pull", "rest"})
CALL = '{"name": "pull", "arguments": {"rider": "Ada", "note": "<b> {x}"}}'
ANSWERS = {
    "in tags": (f"<tool_call>\n{CALL}\n</tool_call>", "", ["pull"]),
    "after words": (f"Well. <tool_call>{CALL}</tool_call>", "Well. ", ["pull"]),
    "two": (
        f'<tool_call>{CALL}</tool_call>\n<tool_call>{{"name": "rest", "arguments": {{}}}}</tool_call>',
        "",
        ["pull", "rest"],
    ),
    "bare": (CALL, "", ["pull"]),
    "bare list": (f"[{CALL}]", "", ["pull"]),
    "parameters": ('{"name": "rest", "parameters": {"long": true}}', "", ["rest"]),
    "left open": (f"<tool_call>\n{CALL}", "", ["pull"]),
    "unknown name": ('{"name": "fly", "arguments": {}}', '{"name": "fly", "arguments": {}}', []),
    "unknown in tags": ("<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", []),
    "no call": ("a < b and <tool", "a < b and <tool", []),
    "json that is no call": ('{"answer": 42}', '{"answer": 42}', []),
    "cut json": ('{"name": "pull", "argum', '{"name": "pull", "argum', []),
    "empty": ("", "", []),
}


def read(pieces: list[str]) -> tuple[str, list[str]]:
    reader = ToolReader(NAMES)
    said, calls = "", []
    for piece in pieces:
        text, found = reader.read(piece)
        said, calls = said + text, calls + found
    text, found = reader.read("", is_last=True)
    return said + text, [call["function"]["name"] for call in calls + found]


@pytest.mark.parametrize("name", ANSWERS)
def test_calls_are_found_however_the_text_is_cut(name: str) -> None:
    text, said, calls = ANSWERS[name]
    for size in (1, 2, 3, 7, 1000):
        assert read([text[i : i + size] for i in range(0, len(text), size)]) == (said, calls)


@given(st.text(alphabet="ab <>_/\n{}tolcal", max_size=60), st.integers(1, 9))
def test_text_without_a_call_comes_out_unchanged(text: str, size: int) -> None:
    if "<tool_call>" not in text:
        assert read([text[i : i + size] for i in range(0, len(text), size)]) == (text, [])


def test_arguments_are_json_text() -> None:
    (call,) = ToolReader(NAMES).read(CALL, is_last=True)[1]
    assert json.loads(call["function"]["arguments"]) == {"rider": "Ada", "note": "<b> {x}"}


def test_a_plain_template_is_told_of_tools_in_words() -> None:
    tools = [{"type": "function", "function": {"name": "pull"}}]
    call = {"id": "1", "type": "function", "function": {"name": "pull", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "done"},
    ]
    told = for_plain_template(messages, tools)
    assert [m["role"] for m in told] == ["system", "user", "assistant", "user"]
    assert told[0]["content"].startswith("Be short.")
    assert '"pull"' in told[0]["content"]
    assert "<tool_call>" in told[2]["content"]
    assert "done" in told[3]["content"]
    assert for_plain_template(messages[:2], None) == messages[:2]


def test_forced_schemas_name_one_or_any() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("pull", "rest")]
    assert forced_schema(tools, "rest")["properties"]["name"] == {"const": "rest"}
    assert [each["properties"]["name"]["const"] for each in forced_schema(tools, None)["anyOf"]] == [
        "pull",
        "rest",
    ]
