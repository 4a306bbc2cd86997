"""Every feature through the official client, against a live server with a tiny model."""

from __future__ import annotations

import json
import math
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.server.harness import Server

MESSAGES: Any = [
    {"role": "user", "content": "In a paceline, cyclists ride one behind the other. In a paceline,"}
]
PROMPT = "In a paceline, cyclists ride"
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "pull",
            "description": "Ride in front.",
            "parameters": {
                "type": "object",
                "properties": {"rider": {"enum": ["Ada", "Bo"]}, "fast": {"type": "boolean"}},
                "required": ["rider", "fast"],
                "additionalProperties": False,
            },
        },
    }
]


@pytest.fixture(scope="module")
def client(tiny_server: Server) -> openai.OpenAI:
    return tiny_server.client


def chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0, **options}
    )


def complete(client: openai.OpenAI, **options: Any) -> Any:
    return client.completions.create(
        **{"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **options}
    )


def test_a_chat_has_text_reason_and_usage(client: openai.OpenAI) -> None:
    answer = chat(client, extra_body={"ignore_eos": True})
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    usage = answer.usage
    assert usage.completion_tokens == 12
    assert usage.total_tokens == usage.prompt_tokens + 12
    details = usage.completion_tokens_details
    stats = usage.speculative
    assert details.accepted_prediction_tokens == stats["num_accepted"]
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == stats["num_drafted"]
    assert stats["num_tokens"] == 12
    vllm = answer.metrics["speculative_decoding"]
    assert sum(vllm["acceptance_histogram"]) == vllm["num_spec_steps"]
    assert sum(j * n for j, n in enumerate(vllm["acceptance_histogram"])) == vllm["num_accepted_draft_tokens"]


def test_a_stream_says_the_same_and_ends_with_usage(client: openai.OpenAI) -> None:
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        == whole.choices[0].message.content
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({c.id for c in chunks}) == 1


def test_without_include_usage_a_stream_has_none(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True))
    assert all(c.choices and c.usage is None for c in chunks)


def test_n_answers_differ_and_are_numbered(client: openai.OpenAI) -> None:
    answer = chat(client, n=3, temperature=1, seed=5)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert len({c.message.content for c in answer.choices}) == 3
    texts = ["", "", ""]
    for chunk in chat(client, n=3, temperature=1, seed=5, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [c.message.content for c in answer.choices]


def test_a_seed_repeats_the_text_and_another_does_not(client: openai.OpenAI) -> None:
    first, again, other = (
        chat(client, temperature=1, seed=seed).choices[0].message.content for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_the_text(client: openai.OpenAI, stream: bool) -> None:
    text = complete(client, extra_body={"ignore_eos": True}).choices[0].text
    stop = text[5:8]
    answer = complete(client, stop=[stop], stream=stream, extra_body={"ignore_eos": True})
    if stream:
        chunks = list(answer)
        assert "".join(c.choices[0].text for c in chunks) == text[: text.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text[: text.index(stop)], "stop")


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)  # greedy
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
    streamed = [
        e
        for c in chat(client, logprobs=True, top_logprobs=3, stream=True)
        for e in (c.choices[0].logprobs or _None).content
    ]
    assert [e.logprob for e in streamed] == [e.logprob for e in content]


class _None:
    content: tuple[Any, ...] = ()


def test_completion_logprobs(client: openai.OpenAI) -> None:
    logprobs = complete(client, logprobs=2).choices[0].logprobs
    assert (
        len(logprobs.tokens)
        == len(logprobs.token_logprobs)
        == len(logprobs.top_logprobs)
        == len(logprobs.text_offset)
    )
    assert all(-100 < value <= 0 for value in logprobs.token_logprobs)
    assert all(1 <= len(top) <= 2 for top in logprobs.top_logprobs)  # two tokens may look alike


def test_logit_bias_bans_and_forces(client: openai.OpenAI, tiny_server: Server) -> None:
    (token,) = tiny_server.post("/tokenize", prompt="e").json()["tokens"]
    assert complete(client, max_tokens=4, logit_bias={str(token): 100}).choices[0].text == "eeee"
    text = complete(
        client, temperature=1, seed=1, max_tokens=40, logit_bias={str(token): -100}, logprobs=0
    ).choices[0]
    assert "e" not in text.logprobs.tokens


def test_penalties_change_the_text(client: openai.OpenAI) -> None:
    (token,) = [300]
    forced = {"logit_bias": {str(token): 50.0}, "max_tokens": 4}
    plain = complete(client, logprobs=0, **forced).choices[0].logprobs.tokens
    assert len(set(plain)) == 1
    for name in ("presence_penalty", "frequency_penalty"):
        assert (
            complete(client, logprobs=0, **forced, **{name: 2.0}).choices[0].logprobs.tokens == plain
        )  # 2 of 50 is not enough
    # A bias that the penalty can overcome.
    forced = {
        "logit_bias": {str(token): 20.0},
        "max_tokens": 24,
        "logprobs": 0,
        "extra_body": {"ignore_eos": True},
    }
    likely, free = (
        complete(client, **forced, **more).choices[0].logprobs.tokens
        for more in ({"frequency_penalty": 2.0}, {})
    )
    assert len(set(likely)) > len(set(free)) == 1


def test_vllm_extras(client: openai.OpenAI) -> None:
    greedy = complete(client).choices[0].text
    one = complete(client, temperature=1, seed=3, extra_body={"top_k": 1}).choices[0].text
    sure = complete(client, temperature=1, seed=3, extra_body={"min_p": 1.0}).choices[0].text
    assert one == sure == greedy
    long = {"max_tokens": 96, "logprobs": 0}  # long enough for something to come again
    tokens, others = (
        complete(client, **long, extra_body={"ignore_eos": True, **more}).choices[0].logprobs.tokens
        for more in ({}, {"repetition_penalty": 50.0})
    )
    assert len(set(tokens)) < len(set(others))
    some = (
        complete(client, temperature=1, seed=3, logprobs=0, extra_body={"allowed_token_ids": [70, 71]})
        .choices[0]
        .logprobs.tokens
    )
    assert len(set(some)) <= 2
    assert complete(client, extra_body={"stop_token_ids": list(range(384))}).usage.completion_tokens == 1
    assert (
        complete(client, extra_body={"min_tokens": 12, "stop_token_ids": [5]}).usage.completion_tokens == 12
    )


class Pull(BaseModel):
    fast: bool
    gear: Literal[1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_json_schema(client: openai.OpenAI, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"fast": {"type": "boolean"}, "gear": {"enum": [1, 2, 3]}},
        "required": ["fast", "gear"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "pull", "schema": schema, "strict": True}}
    answer = chat(client, response_format=form, max_tokens=200, stream=stream)
    text = (
        "".join(c.choices[0].delta.content or "" for c in answer)
        if stream
        else answer.choices[0].message.content
    )
    assert set(json.loads(text)) == {"fast", "gear"}


def test_the_clients_own_parse(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 400, "temperature": 0}
    parsed = client.chat.completions.parse(**options, response_format=Pull).choices[0].message.parsed
    assert parsed is not None
    assert parsed.gear in (1, 2)


def test_json_object(client: openai.OpenAI) -> None:
    text = chat(client, response_format={"type": "json_object"}, max_tokens=20).choices[0].message.content
    assert text.startswith("{")


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("guided_regex", "[a-c]{3}", r"[a-c]{3}"),
        ("guided_choice", ["left", "right"], r"left|right"),
        ("guided_grammar", 'start: "up" | "down"', r"up|down"),
    ],
)
def test_guided_texts(client: openai.OpenAI, field: str, value: Any, pattern: str) -> None:
    import re

    text = chat(client, extra_body={field: value}).choices[0].message.content
    assert re.fullmatch(pattern, text)
    key = field.removeprefix("guided_")
    assert chat(client, extra_body={"structured_outputs": {key: value}}).choices[0].message.content == text


def test_guided_json(client: openai.OpenAI) -> None:
    assert chat(client, extra_body={"guided_json": {"enum": [True, 7]}}).choices[0].message.content in (
        "true",
        "7",
    )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pull"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_that_is_asked_for(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    answer = chat(client, tools=TOOLS, tool_choice=choice, max_tokens=200, stream=stream)
    if stream:
        chunks = list(answer)
        call, *pieces = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
        assert pieces
        for piece in pieces:
            assert (piece.index, piece.id) == (call.index, None)
            call.function.arguments += piece.function.arguments
        reason = chunks[-1].choices[0].finish_reason
        assert not any(c.choices[0].delta.content for c in chunks)
    else:
        (call,) = answer.choices[0].message.tool_calls
        reason = answer.choices[0].finish_reason
        assert answer.choices[0].message.content is None
    assert reason == "tool_calls"
    assert (call.type, call.function.name) == ("function", "pull")
    assert call.id.startswith("call_")
    arguments = json.loads(call.function.arguments)
    assert arguments["rider"] in ("Ada", "Bo")
    assert isinstance(arguments["fast"], bool)


def test_a_tool_call_in_the_models_own_words(client: openai.OpenAI) -> None:
    said = r'Well\. <tool_call>\n\{"name": "pull", "arguments": \{"rider": "Bo"\}\}\n</tool_call>'
    message = chat(client, tools=TOOLS, max_tokens=200, extra_body={"guided_regex": said}).choices[0].message
    assert message.content.strip() == "Well."
    assert [c.function.model_dump() for c in message.tool_calls] == [
        {"name": "pull", "arguments": '{"rider": "Bo"}'}
    ]
    untouched = (
        chat(client, tools=TOOLS, tool_choice="none", max_tokens=200, extra_body={"guided_regex": said})
        .choices[0]
        .message
    )
    assert untouched.tool_calls is None
    assert "<tool_call>" in untouched.content


def test_a_conversation_with_tools_goes_on(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "pull", "arguments": '{"rider": "Ada"}'}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": " now?"}]}
    ]
    assert (
        chat(client, messages=[*turns, *parts], tools=TOOLS).usage.prompt_tokens
        > chat(client).usage.prompt_tokens
    )


def test_completions_of_texts_and_tokens(client: openai.OpenAI, tiny_server: Server) -> None:
    tokens = tiny_server.post("/tokenize", prompt=PROMPT).json()["tokens"]
    one = complete(client)
    assert complete(client, prompt=tokens).choices[0].text == one.choices[0].text
    many = complete(client, prompt=[PROMPT, "The rider in front"], n=2)
    assert [c.index for c in many.choices] == [0, 1, 2, 3]
    assert many.choices[0].text == many.choices[1].text == one.choices[0].text != many.choices[2].text
    assert (
        many.usage.completion_tokens
        == sum(complete(client, prompt=p).usage.completion_tokens for p in (PROMPT, "The rider in front")) * 2
    )
    assert complete(client, prompt=[tokens, tokens]).choices[1].text == one.choices[0].text
    assert complete(client, echo=True).choices[0].text == PROMPT + one.choices[0].text
    assert (
        "".join(c.choices[0].text for c in complete(client, prompt=tokens, echo=True, stream=True))
        == PROMPT + one.choices[0].text
    )


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("tiny", "paceline")
    assert model.max_model_len == 4096  # type: ignore[attr-defined]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-99")


def test_speculation_is_off_capped_or_chosen(client: openai.OpenAI) -> None:
    options: Any = {"prompt": "abc abc abc abc abc abc abc abc abc abc", "max_tokens": 32}
    ask = lambda value: complete(client, **options, extra_body={"speculative": value, "ignore_eos": True})  # noqa: E731
    plain = ask(False)
    assert plain.usage.speculative["num_drafted"] == 0
    assert ask("off").usage.speculative["num_drafted"] == 0
    assert ask({"num_speculative_tokens": 0}).usage.speculative["num_drafted"] == 0
    for value in (True, "auto", {"method": "ngram"}, {"method": "suffix", "num_speculative_tokens": 1}):
        answer = ask(value)
        assert answer.choices[0].text == plain.choices[0].text
        used = set(answer.usage.speculative["by_source"])
        if isinstance(value, dict):
            assert used <= {value["method"]}
            assert max(map(int, answer.usage.speculative["drafts"]), default=0) <= value.get(
                "num_speculative_tokens", 128
            )
    with pytest.raises(openai.BadRequestError, match="loaded: ngram, suffix"):
        ask("eagle3")


def test_details_of_each_step(client: openai.OpenAI) -> None:
    options: Any = {"extra_body": {"speculative": {"details": True}, "ignore_eos": True}, "max_tokens": 24}
    whole = chat(client, **options)
    details = whole.choices[0].speculative
    streamed = [
        c.choices[0].speculative
        for c in chat(client, stream=True, **options)
        if getattr(c.choices[0], "speculative", None)
    ]
    tokens = [token for each in streamed for token in each["tokens"]]
    assert [t["id"] for t in tokens] == [t["id"] for t in details["tokens"]]
    assert len(tokens) == 24
    stats = whole.usage.speculative
    assert sum(t["source"] != "target" for t in details["tokens"]) == stats["num_accepted"]
    assert len(details["steps"]) == stats["num_steps"]
    assert [s["step"] for s in details["steps"]] == list(range(1, len(details["steps"]) + 1))
    assert sum(len(s["draft"]) for s in details["steps"]) == stats["num_drafted"]
    assert all(t["p"] is None or 0 <= t["p"] <= 1.000001 for t in details["tokens"])
    with_p = chat(client, logprobs=True, **options)
    for token, entry in zip(details["tokens"], with_p.choices[0].logprobs.content, strict=True):
        assert token["p"] == pytest.approx(math.exp(entry.logprob), rel=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"n": 0},
        {"n": 100_000},
        {"n": 100},
        {"max_tokens": 0},
        {"stop": [""]},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"99999999": 1}},
        {"top_logprobs": 3},
        {"stop": ["x"] * 40},
        {"stop": "x" * 2000},
        {"logit_bias": {str(i): 1 for i in range(2000)}},
        {"extra_body": {"bad_words": ["x"] * 200}},
        {"messages": []},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}
            ]
        },
        {"messages": [{"role": "user", "content": "long " * 2000}]},
        {"tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"response_format": {"type": "json_schema"}},
        {"extra_body": {"guided_regex": "("}},
        {"extra_body": {"guided_regex": "a", "guided_choice": ["b"]}},
        {"extra_body": {"no_such_option": 1}},
        {"extra_body": {"speculative": {"num_speculative_tokens": 1000}}},
        {"extra_body": {"chat_template_kwargs": {"messages": []}}},
    ],
    ids=lambda options: str(options)[:50],
)
def test_what_cannot_be_honoured_is_a_400_that_says_why(
    client: openai.OpenAI, options: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **options)
    error = caught.value.body
    assert isinstance(error, dict)
    assert error["message"]
    assert error["type"] == "invalid_request_error"


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        chat(client, model="gpt-99")
