"""How a model is told of tools, and the schema of a call that is forced. What of an answer is a call: test_reading."""

from __future__ import annotations

from paceline.core.content import for_plain_template
from paceline.server.formats import forced_schema


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


def test_definitions_stand_at_the_root_of_a_forced_schema() -> None:
    parameters = {"$defs": {"Gear": {"enum": [1, 2]}}, "properties": {"gear": {"$ref": "#/$defs/Gear"}}}
    tool = {"type": "function", "function": {"name": "shift", "parameters": parameters}}
    assert forced_schema([tool], "shift")["$defs"] == {"Gear": {"enum": [1, 2]}}
