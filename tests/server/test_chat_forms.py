"""Chats as users of OpenAI and vLLM send them, through the official client: forms of messages, tool calls that are
cut or limited, reasoning, channels. All ways of asking say the same.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from typing import Any

import openai
import pytest

from tests.server.harness import Server

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"rider": {"enum": ["Ada", "Bo"]}, "fast": {"type": "boolean"}},
                "required": ["rider", "fast"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("pull", "rest")
]
ASK: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Who pulls?"}], "temperature": 0}
NAMED = {"type": "function", "function": {"name": "pull"}}
CALL = '{"name": "pull", "arguments": {"rider": "Bo", "fast": true}}'
PLAIN = {"speculative": False}


def whole(server: Server, **options: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """Content, reasoning, calls and the reason for the end."""
    choice = server.client.chat.completions.create(**{**ASK, **options}).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    reasoning = getattr(choice.message, "reasoning_content", None) or ""
    assert reasoning == (getattr(choice.message, "reasoning", None) or "")
    return choice.message.content or "", reasoning, calls, choice.finish_reason


def streamed(server: Server, **options: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    said, calls, reason = defaultdict[str, str](str), list[list[str]](), ""
    for chunk in server.client.chat.completions.create(**{**ASK, **options}, stream=True):
        choice = chunk.choices[0]
        said["content"] += choice.delta.content or ""
        said["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.id:
                assert call.index == len(calls)
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
        reason = choice.finish_reason or reason
    return said["content"], said["reasoning"], [(name, arguments) for name, arguments in calls], reason


def every_way(server: Server, **options: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """Streamed or not, with drafts or without."""
    more = options.pop("extra_body", {})
    answer = whole(server, **options, extra_body=more)
    assert streamed(server, **options, extra_body=more) == answer
    assert whole(server, **options, extra_body=more | PLAIN) == answer
    return answer


def tokens(server: Server, *messages: dict[str, Any], **options: Any) -> list[int]:
    answer = server.post("/tokenize", messages=messages, **options)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["tokens"])


def text_part(text: str, kind: str = "text") -> dict[str, str]:
    return {"type": kind, "text": text}


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a part": ({"role": "user", "content": [text_part("Hi")]}, {"role": "user", "content": "Hi"}),
    "parts": (
        {"role": "user", "content": [text_part("Hi"), text_part("you", "input_text")]},
        {"role": "user", "content": "Hi\nyou"},
    ),
    "no part": ({"role": "user", "content": []}, {"role": "user", "content": ""}),
    "a developer": ({"role": "developer", "content": "Be kind."}, {"role": "system", "content": "Be kind."}),
    "a name": ({"role": "user", "name": "ada", "content": "Hi"}, {"role": "user", "content": "Hi"}),
    "a refusal": (
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": "No."},
    ),
    "a refusal apart": (
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": "No."},
    ),
    "a tool's parts": (
        {"role": "tool", "tool_call_id": "1", "content": [text_part("done")]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ),
    "a call alone": (
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", **NAMED}]},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", **NAMED}]},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_messages(tiny_server: Server, form: str) -> None:
    given, plain = FORMS[form]
    last = {"role": "user", "content": "Go on"}
    assert tokens(tiny_server, given, last) == tokens(tiny_server, plain, last)
    answer = tiny_server.client.chat.completions.create(**{**ASK, "messages": [given, last], "max_tokens": 2})
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokens(tiny_server, plain, last))


def test_arguments_that_are_no_json_go_back_to_the_model(tiny_server: Server) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "pull", "arguments": '{"rider": "A'}}
    asked = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "failed"},
    ]
    assert tokens(tiny_server, *asked)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://x.example/a.png"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "x"}},
        {"type": "text"},
    ],
    ids=lambda part: part["type"],
)
def test_what_is_no_text_is_refused_by_name(tiny_server: Server, part: Any) -> None:
    messages: Any = [{"role": "user", "content": [text_part("What is it?"), part]}]
    with pytest.raises(
        openai.BadRequestError, match=r"messages\.0\.content has a part .*(reads text only|its text)"
    ):
        tiny_server.client.chat.completions.create(model="tiny", messages=messages)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_that_is_cut_is_a_call(tiny_server: Server, choice: Any) -> None:
    forced = {"tools": TOOLS, "tool_choice": choice}
    full = every_way(tiny_server, **forced, max_tokens=200)
    assert full[:2] == ("", "")
    ((name, arguments),) = full[2]
    assert set(json.loads(arguments)) == {"rider", "fast"}
    usage = tiny_server.client.chat.completions.create(**ASK, **forced, max_tokens=200).usage
    assert usage is not None
    for fewer in (2, 6):
        most = usage.completion_tokens - fewer
        content, _, ((cut_name, so_far),), reason = every_way(tiny_server, **forced, max_tokens=most)
        assert (content, cut_name, reason) == ("", name, "length")
        assert so_far
        assert arguments.startswith(so_far)
    assert len(so_far) < len(arguments)
    if choice is NAMED:
        assert every_way(tiny_server, **forced, max_tokens=1) == ("", "", [("pull", "")], "length")


def test_at_most_one_call_where_they_are_not_parallel(tiny_server: Server) -> None:
    said = f"<tool_call>{CALL}</tool_call>\\s<tool_call>{CALL.replace('pull', 'rest')}</tool_call>"
    options: Any = {"tools": TOOLS, "max_tokens": 200}
    options["extra_body"] = {
        "guided_regex": said.replace("{", "\\{").replace("}", "\\}").replace("\\s", "\\n")
    }
    names = [name for name, _ in every_way(tiny_server, **options)[2]]
    assert names == ["pull", "rest"]
    assert [name for name, _ in every_way(tiny_server, **options, parallel_tool_calls=False)[2]] == ["pull"]
    assert every_way(tiny_server, **options, tool_choice="none")[2] == []


def test_a_stream_may_count_as_it_goes(tiny_server: Server) -> None:
    counting = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        tiny_server.client.chat.completions.create(**ASK, max_tokens=8, stream=True, stream_options=counting)  # type: ignore[arg-type]
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage and chunk.choices]
    assert counts == sorted(counts)
    assert chunks[-1].usage is not None
    assert counts[-1] == chunks[-1].usage.completion_tokens
    assert not chunks[-1].choices


def test_fields_that_change_no_answer(tiny_server: Server) -> None:
    silent = {"user": "ada", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "seed": 7}
    silent |= {"prediction": {"type": "content", "content": "x"}, "reasoning_effort": "low"}
    assert every_way(tiny_server, max_tokens=8, **silent) == every_way(tiny_server, max_tokens=8)
    assert every_way(tiny_server, max_completion_tokens=8) == every_way(tiny_server, max_tokens=8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"best_of": 3}, "best_of asks for ranked answers"),
        ({"suffix": "end"}, "suffix is not supported"),
        ({"echo": True, "logprobs": 1}, "echo with logprobs"),
    ],
)
def test_what_completions_refuse_by_name(tiny_server: Server, options: Any, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        tiny_server.client.completions.create(model="tiny", prompt="Hi", **options)


def test_reasoning_that_the_template_opens_is_told_apart(thinking_server: Server) -> None:
    content, reasoning, calls, reason = every_way(
        thinking_server, max_tokens=24, extra_body={"ignore_eos": True}
    )
    assert (content, calls, reason) == ("", [], "length")
    answer = thinking_server.client.chat.completions.create(
        **ASK, max_tokens=24, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens == 24
    prompt = tokens(thinking_server, ASK["messages"][0])
    raw = thinking_server.client.completions.create(
        model="tiny", prompt=prompt, max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
    )
    assert reasoning == raw.choices[0].text.lstrip()
    hidden = {"ignore_eos": True, "include_reasoning": False}
    assert every_way(thinking_server, max_tokens=24, extra_body=hidden)[:2] == ("", "")


def test_thinking_may_be_turned_off(thinking_server: Server) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}, "ignore_eos": True}
    content, reasoning, *_ = every_way(thinking_server, max_tokens=12, extra_body=off)
    assert content
    assert not reasoning
    none = {"reasoning_effort": "none", "extra_body": {"ignore_eos": True}}
    assert every_way(thinking_server, max_tokens=12, **none)[1] == ""


def test_json_has_no_room_for_thoughts(thinking_server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [{"a": 1}, {"b": 2}]}}}
    content, reasoning, *_ = every_way(thinking_server, response_format=form, max_tokens=60)
    assert json.loads(content) in ({"a": 1}, {"b": 2})
    assert not reasoning
    _, reasoning, calls, _ = every_way(thinking_server, tools=TOOLS, tool_choice="required", max_tokens=200)
    assert calls[0][0] in ("pull", "rest")
    assert not reasoning


def test_templates_are_told_of_effort_and_earlier_thoughts(thinking_server: Server) -> None:
    user = ASK["messages"][0]
    text = lambda ids: thinking_server.post("/detokenize", tokens=ids).json()["prompt"]  # noqa: E731
    assert "Effort: high" in text(tokens(thinking_server, user, reasoning_effort="high"))
    for name in ("reasoning_content", "reasoning"):
        past = {"role": "assistant", "content": "Ada.", name: "Hm."}
        assert "<think>Hm.</think>Ada." in text(tokens(thinking_server, user, past, user))


def test_a_thought_and_a_call_in_the_models_own_words(thinking_server: Server) -> None:
    said = f"Hm.</think>\n\nWell. <tool_call>{CALL}</tool_call>"
    options: Any = {"tools": TOOLS, "max_tokens": 200, "extra_body": {"guided_choice": [said]}}
    arguments = CALL[CALL.index('{"rider') : -1]
    assert every_way(thinking_server, **options) == ("Well. ", "Hm.", [("pull", arguments)], "tool_calls")
    counted = {"logprobs": True, "stream_options": {"include_usage": True}}
    *_, last = chunks = list(
        thinking_server.client.chat.completions.create(**ASK, **options, **counted, stream=True)
    )
    entries = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content or ()
    ]
    ends = list(itertools.accumulate(len(entry.token) for entry in entries))
    whole_one = thinking_server.client.chat.completions.create(**ASK, **options)
    for usage in (last.usage, whole_one.usage):
        assert usage is not None
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == sum(end <= len("Hm.") for end in ends) > 0


def test_what_is_not_asked_for_is_as_the_model_has_it(harmony_server: Server) -> None:
    """The server was started with defaults: almost greedy."""
    ask = {name: value for name, value in ASK.items() if name != "temperature"}
    answers = [
        harmony_server.client.chat.completions.create(**ask, max_tokens=12, **more).choices[0]
        for more in ({}, {"temperature": 0})
    ]
    assert answers[0].message == answers[1].message
    response = harmony_server.client.responses.create(model="tiny", input="Hi", max_output_tokens=4)
    assert (response.temperature, response.top_p) == (0.5, 0.25)


def test_log_probabilities_of_the_prompt(tiny_server: Server) -> None:
    """Those of a continuation are the ones it had when it was written."""
    prompt = tokens(tiny_server, ASK["messages"][0])
    common: Any = {"model": "tiny", "temperature": 0, "max_tokens": 6}
    shown = {"speculative": {"details": "drafts"}, "ignore_eos": True}
    wrote: Any = tiny_server.client.completions.create(
        **common, prompt=prompt, logprobs=0, extra_body=shown
    ).choices[0]
    ids = [token["id"] for token in wrote.speculative["tokens"]]
    asked: Any = {"prompt_logprobs": 1}
    several: Any = tiny_server.client.completions.create(
        **common, prompt=[prompt, prompt + ids], n=2, extra_body=asked
    )
    assert [len(choice.prompt_logprobs) - len(prompt) for choice in several.choices] == [0, 0, 6, 6]
    first, *_ = scores = several.choices[2].prompt_logprobs
    assert first is None
    for token, logprob, entry in zip(ids, wrote.logprobs.token_logprobs, scores[-6:], strict=True):
        assert entry[str(token)]["logprob"] == logprob
        assert entry[str(token)]["rank"] == 1
        assert entry[str(token)]["decoded_token"]
    chat: Any = tiny_server.client.chat.completions.create(**ASK, max_tokens=1, extra_body=asked)
    assert chat.prompt_logprobs == several.choices[0].prompt_logprobs
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs comes with a whole answer only"):
        tiny_server.client.chat.completions.create(**ASK, stream=True, extra_body=asked)


def test_channels(harmony_server: Server) -> None:
    """Their marks are special tokens: seen in chats, hidden in completions as ever."""
    thought = '<|channel|> "analysis" <|message|> "Hm." <|end|> <|start|> "assistant"'
    final = f'start: {thought} <|channel|> "final" <|message|> "Ada."'
    options: Any = {"max_tokens": 120, "extra_body": {"guided_grammar": final}}
    assert every_way(harmony_server, **options) == ("Ada.", "Hm.", [], "stop")
    raw = harmony_server.client.completions.create(
        model="tiny", prompt="Hi", max_tokens=120, extra_body={"guided_grammar": final}
    )
    assert raw.choices[0].text == "analysisHm.assistantfinalAda."
    shown = {"guided_grammar": final, "skip_special_tokens": False, "spaces_between_special_tokens": False}
    raw = harmony_server.client.completions.create(
        model="tiny", prompt="Hi", max_tokens=120, extra_body=shown
    )
    assert raw.choices[0].text.startswith("<|channel|>analysis<|message|>Hm.<|end|>")
    arguments = '{"rider": "Bo", "fast": true}'
    to = f'<|channel|> "commentary to=functions.pull " <|constrain|> "json" <|message|> {json.dumps(arguments)}'
    options |= {"tools": TOOLS, "extra_body": {"guided_grammar": f"start: {thought} {to}"}}
    assert every_way(harmony_server, **options) == ("", "Hm.", [("pull", arguments)], "tool_calls")
    _, reasoning, calls, _ = every_way(harmony_server, tools=TOOLS, tool_choice=NAMED, max_tokens=200)
    assert (reasoning, [name for name, _ in calls]) == ("", ["pull"])
