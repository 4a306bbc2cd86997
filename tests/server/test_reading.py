"""What of an answer is reasoning, text and tool calls, in every family's format: whole, or cut into pieces at any
place, or cut short.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.formats import FORMATS, described
from paceline.server.reading import AnswerReader, Reading, Said

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = {"weather": WEATHER, "rest": {}}
ARGUMENTS = '{"city": "Paris", "note": "a \\"{quote}\\" <b>"}'
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
LLAMA = f'{{"name": "weather", "parameters": {ARGUMENTS}}}'
REST = '{"name": "rest", "arguments": {}}'
CODER = (
    "<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
)
GLM = "weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
TYPED = '{"city": "12", "days": 3}'
TO = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
TURN = "<|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Hm, Paris.<|end|>"
Case = tuple[str, str, str, str, list[tuple[str, str]]]  # format, answer, content, reasoning, calls
ONE, TWO = [("weather", ARGUMENTS)], [("weather", ARGUMENTS), ("rest", "{}")]
CASES: dict[str, Case] = {
    "hermes": ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", "", ONE),
    "after words": ("hermes", f"Well. <tool_call>{CALL}</tool_call>", "Well. ", "", ONE),
    "before words": ("hermes", f"<tool_call>{CALL}</tool_call>\n\n, so", ", so", "", ONE),
    "two": ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{REST}</tool_call>", "", "", TWO),
    "left open": ("hermes", f"<tool_call>\n{CALL}", "", "", ONE),
    "bare": ("hermes", CALL, "", "", ONE),
    "bare list": ("hermes", f" [{CALL}, {REST}]", "", "", TWO),
    "other keys": ("hermes", f'{{"type": "function", {LLAMA[1:]}', "", "", ONE),
    "a key more": ("hermes", f'<tool_call>{CALL[:-1]}, "id": "}}x"}}</tool_call>', "", "", ONE),
    "arguments first": ("hermes", '{"arguments": {"a": 1}, "name": "rest"}', "", "", [("rest", '{"a": 1}')]),
    "arguments as text": ("hermes", '{"name": "rest", "arguments": "{}"}', "", "", [("rest", "{}")]),
    "no arguments": ("hermes", '<tool_call>{"name": "rest"}</tool_call>', "", "", [("rest", "{}")]),
    "a brace less": ("hermes", f"<tool_call>{CALL[:-1]}</tool_call> Done", "Done", "", ONE),
    "two braces less": (
        "hermes",
        '<tool_call>{"name": "rest", "arguments": {"a": 1</tool_call> Done',
        "Done",
        "",
        [("rest", '{"a": 1')],
    ),
    "cut in its arguments": ("hermes", f"<tool_call>{CALL[:50]}", "", "", [("weather", CALL[33:50])]),
    "qwen3-coder": (
        "qwen3_coder",
        f"Ok\n<tool_call>\n{CODER}\n</tool_call>",
        "Ok\n",
        "",
        [("weather", TYPED)],
    ),
    "qwen3-coder, bare": ("qwen3_coder", f"Ok {CODER}\n\nSo", "Ok So", "", [("weather", TYPED)]),
    "qwen3-coder, json": ("qwen3_coder", f"<tool_call>{CALL}</tool_call>, so", ", so", "", ONE),
    "qwen3-coder, a text": (
        "qwen3_coder",
        '<function=weather>\n<parameter=city>\n\na "<b>"\n</p>\\\n\n</parameter>\n</function>',
        "",
        "",
        [("weather", '{"city": "\\na \\"<b>\\"\\n</p>\\\\\\n"}')],
    ),
    "qwen3-coder, values": (
        "qwen3_coder",
        "<function=weather><parameter=days>\n[1, NaN]\n</parameter><parameter=city></parameter><parameter=days>{}</parameter></function>",
        "",
        "",
        [("weather", '{"days": "[1, NaN]", "city": "", "days": {}}')],
    ),
    "qwen3-coder, left open": (
        "qwen3_coder",
        "<tool_call><function=weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n</function>\n</tool_call> So",
        "So",
        "",
        [("weather", '{"city": "Paris", "days": 3}')],
    ),
    "qwen3-coder, two": (
        "qwen3_coder",
        f"<tool_call>{CODER}</tool_call>\n<tool_call><function=rest></function></tool_call>",
        "",
        "",
        [("weather", TYPED), ("rest", "{}")],
    ),
    "qwen3-coder, no key": (
        "qwen3_coder",
        "<function=rest>\n<parameter=a\n<parameter=b>c</parameter></function>",
        "",
        "",
        [("rest", '{"b": "c"}')],
    ),
    "qwen3-coder, cut": ("qwen3_coder", CODER[:38], "", "", [("weather", '{"city": "12')]),
    "qwen3-coder, no tool": ("qwen3_coder", "<function=fly></function>", "<function=fly></function>", "", []),
    "glm": ("glm45", f"<tool_call>{GLM}</tool_call>", "", "", [("weather", TYPED)]),
    "glm, two": (
        "glm45",
        f"<tool_call>{GLM}<tool_call>rest\n</tool_call>",
        "",
        "",
        [("weather", TYPED), ("rest", "{}")],
    ),
    "glm, a text": (
        "glm45",
        "<tool_call>rest<arg_key>a</arg_key><arg_value>\n<b>é\n</arg_value></tool_call>",
        "",
        "",
        [("rest", '{"a": "\\n<b>é\\n"}')],
    ),
    "glm, no value": (
        "glm45",
        "<tool_call>rest<arg_key>a</arg_key>1</tool_call> So",
        "So",
        "",
        [("rest", "{}")],
    ),
    "llama": ("llama3_json", LLAMA, "", "", ONE),
    "llama, tagged": ("llama3_json", f"<|python_tag|>{LLAMA}", "", "", ONE),
    "llama, several": ("llama3_json", f"<|python_tag|>{LLAMA}; {REST}", "", "", TWO),
    "llama, no tool": ("llama3_json", '<|python_tag|>f.call(x="y")', '<|python_tag|>f.call(x="y")', "", []),
    "mistral": ("mistral", f"[TOOL_CALLS] [{CALL}, {REST}]", "", "", TWO),
    "mistral, names": (
        "mistral",
        f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]rest[ARGS]{{}}",
        "",
        "",
        TWO,
    ),
    "mistral, ids": ("mistral", f"Ok[TOOL_CALLS]weather[CALL_ID]abc123xyz[ARGS]{ARGUMENTS}", "Ok", "", ONE),
    "mistral, no tool": ("mistral", "[TOOL_CALLS]fly[ARGS]{}", "[TOOL_CALLS]fly[ARGS]{}", "", []),
    "granite": ("granite", f"<|tool_call|>[{CALL}, {REST}]", "", "", TWO),
    "harmony": ("openai", f"{THOUGHT}{TURN}{TO}{ARGUMENTS}<|call|>", "", "Hm, Paris.", ONE),
    "harmony, role": (
        "openai",
        f"{THOUGHT}{TURN} to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}",
        "",
        "Hm, Paris.",
        ONE,
    ),
    "harmony, final": (
        "openai",
        f"{THOUGHT}{TURN}<|channel|>final<|message|>Sun <3",
        "Sun <3",
        "Hm, Paris.",
        [],
    ),
    "harmony, preamble": (
        "openai",
        f"<|channel|>commentary<|message|>I look.<|end|>{TURN}{TO}{ARGUMENTS}<|call|>",
        "I look.",
        "",
        ONE,
    ),
    "harmony, a wrong header": ("openai", "<|channel|>final??<|message|>Sun", "Sun", "", []),
    "harmony, no header": (
        "openai",
        f"<|channel|>?? <|end|>{TURN}{THOUGHT}",
        "<|channel|>?? ",
        "Hm, Paris.",
        [],
    ),
    "harmony, nothing": ("openai", "Sun", "Sun", "", []),
    "harmony, cut": ("openai", f"{TO}{ARGUMENTS[:9]}", "", "", [("weather", ARGUMENTS[:9])]),
    "harmony, cut thought": ("openai", THOUGHT[:-9], "", "Hm, Pari", []),
    "thinking": ("hermes", f"<think>\nHm {REST}\n</think>\n\nSun", "Sun", f"Hm {REST}\n", []),
    "thinking, then a call": ("hermes", f"<think>Hm</think>\n<tool_call>{CALL}</tool_call>", "", "Hm", ONE),
    "thinking, cut": ("hermes", "<think>Hm</thi", "", "Hm</thi", []),
    "no thought": ("hermes", "Sun <think>", "Sun <think>", "", []),
    "unknown name": (
        "hermes",
        '{"name": "fly", "arguments": {}}',
        '{"name": "fly", "arguments": {}}',
        "",
        [],
    ),
    "unknown in tags": ("hermes", "<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", "", []),
    "a tag inside": ("hermes", f"<tool_call>no <tool_call>{CALL}</tool_call>", "<tool_call>no ", "", ONE),
    "no call": ("hermes", "a < b and <tool", "a < b and <tool", "", []),
    "json that is no call": ("hermes", '{"answer": [42]}', '{"answer": [42]}', "", []),
    "a list that is no call": ("hermes", "[1, 2]", "[1, 2]", "", []),
    "a name that is a list": ("hermes", '{"name": ["rest"]}', '{"name": ["rest"]}', "", []),
    "cut json": ("hermes", '{"name": "weather", "argum', '{"name": "weather", "argum', "", []),
    "empty": ("hermes", "", "", "", []),
}
THINKING = ("<think>", "</think>")


def read(pieces: list[str], reading: Reading, prompt_end: str = "") -> tuple[str, str, list[tuple[str, str]]]:
    """As a client puts the pieces together, which checks their order, too."""
    reader, calls, total = AnswerReader(reading, prompt_end), list[dict[str, Any]](), Said()
    for index, piece in enumerate([*pieces, ""]):
        said = reader.read(piece, is_last=index == len(pieces))
        total.content, total.reasoning = total.content + said.content, total.reasoning + said.reasoning
        for part in said.calls:
            if part["index"] == len(calls):
                assert part["id"]
                assert part["type"] == "function"
                calls.append({"name": part["function"]["name"], "arguments": ""})
            assert part["index"] == len(calls) - 1
            calls[-1]["arguments"] += part["function"]["arguments"]
    return total.content, total.reasoning, [(call["name"], call["arguments"]) for call in calls]


def reading_of(name: str, **more: Any) -> Reading:
    return Reading(FORMATS[name], TOOLS, None if name == "openai" else THINKING, **more)


@pytest.mark.parametrize("case", CASES)
def test_answers_are_read_however_they_are_cut(case: str) -> None:
    name, text, *expected = CASES[case]
    reading = reading_of(name)
    assert read([text], reading) == tuple(expected)
    assert read(list(text), reading) == tuple(expected)
    for at in range(1, len(text)):
        assert read([text[:at], text[at:]], reading) == tuple(expected), text[:at]


@pytest.mark.parametrize("case", CASES)
def test_tokens_of_reasoning_are_those_whose_text_it_is(case: str) -> None:
    name, text, _, reasoning, _ = CASES[case]
    thoughts, is_line = reading_of(name).thoughts, text.startswith("<think>\n")  # which is not shown
    assert thoughts is not None
    assert thoughts.num_tokens([character.encode() for character in text], "") == len(reasoning) + is_line
    pieces = [text[at : at + 3].encode() for at in range(0, len(text), 3)]
    assert abs(3 * thoughts.num_tokens(pieces, "") - len(reasoning) - is_line) < 3
    if text.startswith("<think>"):
        assert thoughts.num_tokens([text[7:].encode()], "<think>\n") == (reasoning == text[7:])


@pytest.mark.parametrize("case", CASES)
def test_answers_cut_short_are_no_error_and_read_alike(case: str) -> None:
    name, text, *_ = CASES[case]
    for end in range(len(text)):
        reading = reading_of(name)
        whole = read([text[:end]], reading)
        assert whole == read(list(text[:end]), reading)
        assert whole[2] == [] or whole[2][0][0] in TOOLS


FRAGMENTS = st.sampled_from(
    [*{token for each in FORMATS.values() for token in each.tokens}, *THINKING, CALL, REST, CODER, GLM, ARGUMENTS]
    + ["<parameter=city>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "weather>"]
    + ["weather", "assistant", "analysis", " to=functions.rest", "{", "}", "[", "]", ",", ";", '"', "\\", "\n", " ", "a<"]
)  # fmt: skip


@pytest.mark.parametrize("name", sorted(FORMATS))
@given(st.lists(FRAGMENTS, max_size=12).map("".join), st.lists(st.integers(0, 400), max_size=8))
def test_any_text_says_the_same_in_any_pieces(name: str, text: str, cuts: list[int]) -> None:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    reading = reading_of(name)
    assert read(pieces, reading) == read([text], reading) == read(list(text), reading)


@given(st.text(max_size=80), st.integers(1, 9))
def test_without_tools_and_thoughts_all_is_text_at_once(text: str, size: int) -> None:
    reader = AnswerReader(Reading())
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert [reader.read(piece).content for piece in pieces] == pieces


@given(st.text(alphabet="ab <>_/\n{}tolcal", max_size=60), st.integers(1, 9))
def test_text_without_a_call_comes_out_unchanged(text: str, size: int) -> None:
    if "<tool_call>" not in text:
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert read(pieces, Reading(tools=TOOLS)) == (text, "", [])


def test_names_and_arguments_are_said_as_they_come() -> None:
    reader, pieces = AnswerReader(reading_of("hermes")), list[dict[str, Any]]()
    for character in f"<tool_call>{CALL}</tool_call>":
        pieces += reader.read(character).calls
    first, *others = [piece["function"] for piece in pieces]
    assert first == {"name": "weather", "arguments": "{"}
    assert [other["arguments"] for other in others] == list(ARGUMENTS[1:])


@pytest.mark.parametrize(
    ("name", "text"), [("qwen3_coder", CODER), ("glm45", f"<tool_call>{GLM}</tool_call>")]
)
def test_arguments_in_tags_are_said_as_they_come(name: str, text: str) -> None:
    """A text by its characters, a number when it is complete."""
    reader, pieces = AnswerReader(reading_of(name)), list[dict[str, Any]]()
    for character in text:
        pieces += reader.read(character).calls
    said = [piece["function"] for piece in pieces]
    assert said[0] == {"name": "weather", "arguments": ""}
    assert [each["arguments"] for each in said[1:]] == ['{"city": "', "1", "2", '"', ', "days": ', "3", "}"]


def test_reasoning_that_the_template_has_opened() -> None:
    reading = reading_of("hermes")
    assert read(list("\nHm</think>\n\nSun"), reading, "assistant\n<think>\n") == ("Sun", "Hm", [])
    assert read(["Sun"], reading, "<think>\n\n</think>\n\n") == ("Sun", "", [])


def test_a_forced_call_that_is_cut_is_a_call() -> None:
    one, any_of = reading_of("hermes", forced=("weather",)), reading_of("hermes", forced=("weather", "rest"))
    for end in range(1, len(CALL)):
        (call,) = read(list(CALL[:end]), one)[2]
        assert call == ("weather", CALL[33:end] if end > 33 else "")
    assert read([CALL[:20]], any_of) == ("", "", [("weather", "")])
    assert read([CALL[:12]], any_of) == (CALL[:12], "", [])


def test_no_more_calls_than_asked_for() -> None:
    text = f"<tool_call>{CALL}</tool_call><tool_call>{REST}</tool_call>"
    assert read(list(text), reading_of("hermes", most_calls=1)) == ("", "", ONE)


def test_ids_are_as_templates_take_them() -> None:
    ids = {name: AnswerReader(reading_of(name)).read(CALL, is_last=True).calls[0]["id"] for name in FORMATS}
    assert len(ids["mistral"]) == 9
    assert ids["mistral"].isalnum()
    assert ids["hermes"].startswith("call_")


@pytest.mark.parametrize(
    ("template", "name", "thinking"),
    [
        ("{{ messages }}", "hermes", None),
        ("<|start_header_id|> {{ messages }}", "hermes", None),
        ("... <tool_call> ... <think></think>", "hermes", THINKING),
        ("tools <tool_call> <function=", "qwen3_coder", None),
        ("<|start_header_id|> {{ tools }}", "llama3_json", None),
        ("[INST] tools [TOOL_CALLS] [THINK] [/THINK]", "mistral", ("[THINK]", "[/THINK]")),
        ("tools <|start|>assistant<|channel|>final", "openai", None),
        ("tools <|tool_call|>[]", "granite", None),
    ],
)
def test_templates_show_the_format(template: str, name: str, thinking: Any) -> None:
    found = described(template)
    assert (found["format"], found["thinking"]) == (name, thinking)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_reading_takes_linear_time(name: str) -> None:
    """Where it is not, these take minutes."""
    opening = FORMATS[name].opens[-1]
    for text in (
        " " * 50_000 + "{" + " " * 50_000,
        "{" * 50_000,
        f"{opening}<parameter=a>" * 5_000,
        "<" * 50_000,
        "weather>" + "<parameter=a></parameter>" * 5_000,
        "weather" + "<arg_key>a</arg_key><arg_value></arg_value>" * 5_000,
    ):
        for ending in ("", "x</tool_call>"):
            read([text + ending], reading_of(name))
            read([opening + text + ending], reading_of(name))


def test_arguments_stay_json() -> None:
    assert json.loads(read([CALL], reading_of("hermes"))[2][0][1])["note"] == 'a "{quote}" <b>'
