"""POST /v1/messages through Anthropic's own client, against a live server that drafts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.server.conftest import KEYS
from tests.server.harness import WAIT_S, Server, as_stranger
from tests.server.test_openai_client import TOOLS
from tests.server.test_responses import QUESTION, TWO_CALLS, chat

FUNCTION = TOOLS[0]["function"]
TOOL: Any = {
    "name": "pull",
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
    "cache_control": {"type": "ephemeral"},
}
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def claude(tiny_server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=tiny_server.url, api_key=KEYS[0], max_retries=0, timeout=WAIT_S
    ) as client:
        yield client


def write(claude: anthropic.Anthropic, **options: Any) -> Any:
    asked: Any = {"model": "tiny", "max_tokens": 12, "messages": [{"role": "user", "content": QUESTION}]}
    extra = {**GREEDY, **options.pop("extra_body", {})}
    return claude.messages.create(**asked | options, extra_body=extra)


def test_a_message_has_the_chats_text_and_usage(claude: anthropic.Anthropic, tiny_server: Server) -> None:
    blocks: Any = [{"type": "text", "text": QUESTION[:20]}, {"type": "text", "text": QUESTION[20:]}]
    system: Any = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    plain = write(claude, extra_body={"ignore_eos": True, "speculative": False})
    assert plain.content[0].text == chat(
        tiny_server.client, ("user", QUESTION), extra_body={"ignore_eos": True}
    )
    assert (plain.stop_reason, plain.stop_sequence, plain.role) == ("max_tokens", None, "assistant")
    assert plain.usage.output_tokens == 12
    one, same = (
        write(claude, system=text, messages=[{"role": "user", "content": content}])
        for text, content in (("Be short.", QUESTION), (system, blocks))
    )
    assert one.content[0].text == same.content[0].text
    expected = chat(tiny_server.client, ("system", "Be short."), ("user", QUESTION))
    assert one.content[0].text == expected
    num_input = same.usage.input_tokens + same.usage.cache_read_input_tokens
    assert same.usage.cache_read_input_tokens > 0
    counted = claude.messages.count_tokens(
        model="tiny", system="Be short.", messages=[{"role": "user", "content": QUESTION}]
    )
    assert counted.input_tokens == num_input


def test_a_stream_adds_up_to_the_message(claude: anthropic.Anthropic) -> None:
    whole = write(claude)
    asked: Any = {"model": "tiny", "max_tokens": 12, "messages": [{"role": "user", "content": QUESTION}]}
    with claude.messages.stream(**asked, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    events = list(write(claude, stream=True))
    names = [event.type for event in events]
    deltas = ["content_block_delta"] * names.count("content_block_delta")
    ends = ["content_block_stop", "message_delta", "message_stop"]
    assert names == ["message_start", "content_block_start", *deltas, *ends]
    assert events[0].message.usage.input_tokens > 0


def test_a_stream_is_named_events_with_a_ping(tiny_server: Server) -> None:
    body = {"max_tokens": 2, "messages": [{"role": "user", "content": "x"}], "stream": True}
    lines = tiny_server.post("/v1/messages", **body).text.split("\n\n")
    assert lines[1] == 'event: ping\ndata: {"type":"ping"}'
    assert lines[-2:] == ['event: message_stop\ndata: {"type":"message_stop"}', ""]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_is_named(claude: anthropic.Anthropic, stream: bool) -> None:
    text = write(claude, extra_body={"ignore_eos": True}).content[0].text
    stop = text[5:8]
    options: Any = {"stop_sequences": ["nowhere to be found", stop], "extra_body": {"ignore_eos": True}}
    if stream:
        events = list(write(claude, stream=True, **options))
        said = "".join(event.delta.text for event in events if event.type == "content_block_delta")
        end = events[-2].delta
    else:
        end = write(claude, **options)
        said = end.content[0].text
    assert said == text[: text.index(stop)]
    assert (end.stop_reason, end.stop_sequence) == ("stop_sequence", stop)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "pull"}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_used_and_its_result_is_read(
    claude: anthropic.Anthropic, choice: Any, stream: bool
) -> None:
    asked: Any = {"model": "tiny", "tools": [TOOL], "max_tokens": 200}
    question: Any = {"role": "user", "content": "Who pulls?"}
    if stream:
        options = {**asked, "messages": [question], "tool_choice": choice}
        with claude.messages.stream(**options, extra_body=GREEDY) as events:
            message: Any = events.get_final_message()
    else:
        message = write(claude, **asked, messages=[question], tool_choice=choice)
    (use,) = message.content
    assert (message.stop_reason, use.type, use.name) == ("tool_use", "tool_use", "pull")
    assert use.input["rider"] in ("Ada", "Bo")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "done"}]}
    turns = [
        question,
        {"role": "assistant", "content": [use.model_dump()]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    options = {
        "messages": turns,
        "tools": [TOOL],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }
    answer = write(claude, **options)
    assert answer.content[0].type == "text"
    num_input = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    options = {"messages": turns, "tools": [TOOL]}
    assert claude.messages.count_tokens(model="tiny", **options).input_tokens == num_input
    failed = {**result, "is_error": True}
    turns[-1] = {"role": "user", "content": [failed, {"type": "text", "text": "And now?"}]}
    assert claude.messages.count_tokens(model="tiny", **options).input_tokens > num_input  # it is told


def test_calls_in_the_models_own_words_are_blocks_after_its_text(claude: anthropic.Anthropic) -> None:
    options: Any = {"tools": [TOOL], "max_tokens": 300}
    options["extra_body"] = {"structured_outputs": {"regex": TWO_CALLS}}
    whole = write(claude, **options)
    assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"]
    assert whole.content[2].input == {"rider": "Bo"}
    starts = [
        event.index for event in write(claude, stream=True, **options) if event.type == "content_block_start"
    ]
    assert starts == [0, 1, 2]
    one: Any = {"type": "auto", "disable_parallel_tool_use": True}
    assert [block.type for block in write(claude, **options, tool_choice=one).content] == ["text", "tool_use"]


def test_structured_outputs(claude: anthropic.Anthropic) -> None:
    schema: Any = {"type": "json_schema", "schema": {"enum": [True, 7]}}
    assert write(claude, output_config={"format": schema}).content[0].text in ("true", "7")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "of type 'image'"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
            "not continued",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "the call 'x'",
        ),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type is 'enabled'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type is 'bash_20250124'"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [TOOL]}, "tool_choice names 'x'"),
        ({"stop_sequences": [""]}, "stop"),
        ({"stop_sequences": ["x"] * 40}, "stop_sequences has over"),
        ({"container": "x"}, "container is not a field"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_honoured_is_a_400_that_says_why(
    claude: anthropic.Anthropic, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        write(claude, extra_body=options)
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert words in body["error"]["message"]


def test_max_tokens_are_required_and_thinking_may_be_off(tiny_server: Server) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": ""}]}
    assert "max_tokens" in tiny_server.post("/v1/messages", **body).json()["error"]["message"]
    told = {"max_tokens": 2, "thinking": {"type": "disabled"}}
    assert tiny_server.post("/v1/messages", **body, **told).status_code == 200


def test_keys_and_errors_are_anthropics(tiny_server: Server) -> None:
    ask: Any = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
    with anthropic.Anthropic(base_url=tiny_server.url, auth_token=KEYS[1], max_retries=0) as bearer:
        assert bearer.messages.create(**ask).usage.output_tokens <= 2
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            bearer.messages.create(**{**ask, "model": "claude-x"})
    with (
        anthropic.Anthropic(base_url=tiny_server.url, api_key="wrong", max_retries=0) as wrong,
        pytest.raises(anthropic.AuthenticationError),
    ):
        wrong.messages.create(**ask)
    url, key = f"{tiny_server.url}/v1/messages", {"x-api-key": KEYS[0]}
    for method, path, options, kind in (
        ("POST", "", {"content": "{"}, "invalid_request_error"),
        ("POST", "", {"content": b"x" * 2**21}, "request_too_large"),
        ("POST", "/batches", {"json": {}}, "not_found_error"),
        ("GET", "", {}, "invalid_request_error"),
    ):
        body = as_stranger(method, url + path, headers=key, **options).json()
        assert (body["type"], body["error"]["type"]) == ("error", kind)
