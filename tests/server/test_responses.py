"""POST /v1/responses through the official client, against a live server that drafts: the chat's text in other
words, and conversations that the server keeps.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from paceline.server.doors import ResponseStore
from paceline.server.responses import ApiError
from tests.server.conftest import KEYS
from tests.server.harness import Server
from tests.server.test_openai_client import TOOLS

QUESTION = "In a paceline, cyclists ride one behind the other. In a paceline,"
TOOL: Any = {"type": "function", **TOOLS[0]["function"]}
ORDER = ["created", "in_progress", "output_item.added"]


@pytest.fixture(scope="module")
def client(tiny_server: Server) -> openai.OpenAI:
    return tiny_server.client


def respond(client: openai.OpenAI, **options: Any) -> Any:
    asked = {"model": "tiny", "input": QUESTION, "max_output_tokens": 12, "temperature": 0, **options}
    return client.responses.create(**asked)


def chat(client: openai.OpenAI, *messages: tuple[str, str], **options: Any) -> str:
    asked: Any = [{"role": role, "content": content} for role, content in messages]
    options = {"max_tokens": 12, "temperature": 0, **options}
    answer = client.chat.completions.create(model="tiny", messages=asked, **options)
    return answer.choices[0].message.content or ""


def test_a_response_has_the_chats_text_and_usage(client: openai.OpenAI) -> None:
    answer = respond(client, max_output_tokens=48, extra_body={"ignore_eos": True})
    more: Any = {"max_tokens": 48, "extra_body": {"ignore_eos": True, "speculative": False}}
    assert answer.output_text == chat(client, ("user", QUESTION), **more)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.output[0].status, answer.output[0].role) == ("incomplete", "assistant")
    assert answer.usage.output_tokens == 48
    assert answer.usage.total_tokens == answer.usage.input_tokens + 48
    again = respond(client, max_output_tokens=48, extra_body={"ignore_eos": True})
    assert again.usage.input_tokens_details.cached_tokens > 0
    assert again.output_text == answer.output_text


def test_a_stream_has_every_event_in_order_and_ends_with_the_response(client: openai.OpenAI) -> None:
    whole = respond(client, instructions="Be short.", metadata={"trace": "7"})
    assert whole.output_text == chat(client, ("system", "Be short."), ("user", QUESTION))
    events = list(respond(client, instructions="Be short.", metadata={"trace": "7"}, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    num_deltas = names.count("output_text.delta")
    closing = ["output_text.done", "content_part.done", "output_item.done", whole.status]
    deltas = ["output_text.delta"] * num_deltas
    assert names == [*ORDER, "content_part.added", *deltas, *closing]
    assert num_deltas > 0
    assert "".join(event.delta for event in events if event.type.endswith("delta")) == whole.output_text
    last = events[-1].response
    assert last.output_text == whole.output_text
    assert last.metadata == {"trace": "7"}
    ours = {"id", "created_at", "usage", "output"}
    assert last.model_dump(exclude=ours) == whole.model_dump(exclude=ours)
    assert last.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "pull"}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_function_call(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    answer = respond(client, tools=[TOOL], tool_choice=choice, max_output_tokens=200, stream=stream)
    if stream:
        events = list(answer)
        names = [event.type.removeprefix("response.") for event in events]
        closing = ["function_call_arguments.done", "output_item.done", "completed"]
        num_deltas = len(names) - len(ORDER) - len(closing)
        assert names == [*ORDER, *["function_call_arguments.delta"] * num_deltas, *closing]
        answer = events[-1].response
        pieces = [event.delta for event in events if event.type.endswith("delta")]
        assert "".join(pieces) == answer.output[0].arguments
    (call,) = answer.output
    assert call.type == "function_call"
    assert call.name == "pull"
    assert call.status == "completed"
    assert answer.status == "completed"
    assert json.loads(call.arguments)["rider"] in ("Ada", "Bo")
    assert answer.tools[0].name == "pull"


TWO_CALLS = r'Well\. (<tool_call>\n\{"name": "pull", "arguments": \{"rider": "Bo"\}\}\n</tool_call>\n){2}'


def test_calls_in_the_models_own_words_are_items_after_its_text(client: openai.OpenAI) -> None:
    options: Any = {"tools": [TOOL], "max_output_tokens": 300}
    options["extra_body"] = {"structured_outputs": {"regex": TWO_CALLS}}
    answer = respond(client, **options)
    assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
    assert [json.loads(item.arguments) for item in answer.output[1:]] == [{"rider": "Bo"}] * 2
    assert answer.output_text.strip() == "Well."
    events = list(respond(client, stream=True, **options))
    kinds = [item.type for item in events[-1].response.output]
    assert kinds == [item.type for item in answer.output]
    added = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert added == [0, 1, 2]
    single = respond(client, **options, parallel_tool_calls=False)
    assert [item.type for item in single.output] == ["message", "function_call"]


def test_a_conversation_goes_on_by_its_id_or_in_full(client: openai.OpenAI) -> None:
    """With calls and their results, as input or kept here: the same prompt, so the same text."""
    asked: Any = {"role": "user", "content": [{"type": "input_text", "text": "Who pulls?"}]}
    first = respond(client, input=[asked], tools=[TOOL], tool_choice="required", max_output_tokens=200)
    call = first.output[0]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    kept = respond(client, input=[result], previous_response_id=first.id, tools=[TOOL])
    sent = respond(client, input=[asked, call.model_dump(), result], tools=[TOOL], store=False)
    assert kept.output_text == sent.output_text
    assert kept.usage.input_tokens == sent.usage.input_tokens
    assert kept.previous_response_id == first.id
    function = {"name": call.name, "arguments": call.arguments}
    messages: Any = [
        {"role": "user", "content": "Who pulls?"},
        {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "done"},
    ]
    options: Any = {"model": "tiny", "tools": TOOLS, "max_tokens": 12, "temperature": 0}
    answer = client.chat.completions.create(messages=messages, **options)
    assert answer.choices[0].message.content == sent.output_text
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(sent.id)  # store=False


class Pull(BaseModel):
    fast: bool
    gear: Literal[1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_structured_outputs(client: openai.OpenAI, stream: bool) -> None:
    form: Any = {"type": "json_schema", "name": "pull", "strict": True, "schema": Pull.model_json_schema()}
    answer = respond(client, text={"format": form}, max_output_tokens=300, stream=stream)
    response = list(answer)[-1].response if stream else answer
    assert Pull.model_validate_json(response.output_text).gear in (1, 2)
    assert response.status == "completed"


def test_the_clients_own_parse(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "input": QUESTION, "max_output_tokens": 400, "temperature": 0}
    assert client.responses.parse(**options, text_format=Pull).output_parsed.gear in (1, 2)  # type: ignore[union-attr]
    with client.responses.stream(**options, text_format=Pull) as stream:
        assert stream.get_final_response().output_parsed.gear in (1, 2)  # type: ignore[union-attr]
    assert respond(client, text={"format": {"type": "json_object"}}).output_text.startswith("{")


def test_kept_responses_are_read_and_deleted_with_the_own_key_only(client: openai.OpenAI) -> None:
    other = client.with_options(api_key=KEYS[1])
    answer = respond(client)
    assert client.responses.retrieve(answer.id).model_dump() == answer.model_dump()
    for act in (
        lambda: other.responses.retrieve(answer.id),
        lambda: other.responses.delete(answer.id),
        lambda: respond(other, previous_response_id=answer.id),
    ):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            act()
    client.responses.delete(answer.id)
    for act in (lambda: client.responses.retrieve(answer.id), lambda: client.responses.delete(answer.id)):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            act()
    with pytest.raises(openai.NotFoundError) as caught:
        respond(client, previous_response_id=answer.id)
    error: Any = caught.value.body
    assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")


def test_the_store_is_bounded_in_number_and_bytes() -> None:
    store = ResponseStore(most=3, most_bytes=1000)
    names = [f"resp_{number}" for number in range(5)]
    for name in names:
        store.put(b"me", {"id": name}, [])
    store.get(b"me", "resp_2")  # now the last used
    store.put(b"me", {"id": "large"}, [{"content": "x" * 850}])
    assert store.get(b"me", "resp_2")["response"] == {"id": "resp_2"}
    for gone in ("resp_0", "resp_1", "resp_3"):
        with pytest.raises(ApiError, match="there is no response"):
            store.get(b"me", gone)
    store.put(b"me", {"id": "too large"}, [{"content": "x" * 2000}])
    with pytest.raises(ApiError):
        store.get(b"me", "too large")
    store.delete(b"me", "large")
    store.put(b"me", {"id": "other"}, [{"content": "x" * 850}])
    assert store.get(b"me", "resp_2")  # what was deleted no longer counts
    with pytest.raises(ApiError):
        store.get(b"you", "resp_2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type is 'web_search'"),
        ({"input": [{"type": "computer_call"}]}, "input.0 is of type 'computer_call'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image'"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "the call 'x'"),
        ({"input": []}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
        ({"temperature": -1}, "temperature"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"conversation": "x"}, "conversation is not a field"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "has no schema"),
        ({"input": "long " * 5000}, "the prompt has"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"no_such_option": 1}, "no_such_option is not a field"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_honoured_is_a_400_that_says_why(
    client: openai.OpenAI, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, extra_body=options)
    error: Any = caught.value.body
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_a_schema_that_is_no_json_is_refused(tiny_server: Server) -> None:
    body = '{"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"default": NaN}}]}'
    headers = {"content-type": "application/json"}
    assert tiny_server.http.post("/v1/responses", content=body, headers=headers).status_code == 400


def test_closing_a_stream_ends_the_answer(default_server: Server) -> None:
    left = "paceline:client_disconnects_total"
    before = default_server.settled()[left]
    options: Any = {"ignore_eos": True}
    stream = default_server.client.responses.create(
        model="default", input="Tell a long story.", max_output_tokens=4000, stream=True, extra_body=options
    )
    names = []
    for event in stream:
        names.append(event.type)
        if event.type == "response.output_text.delta":
            break
    stream.close()
    default_server.figures_when(lambda now: now[left] == before + 1, "it to be seen leaving")
    default_server.settled()
    assert names[0] == "response.created"


def test_an_answer_that_fails_ends_with_an_event_that_says_so(limited_server: Server) -> None:
    """They take longer than that server has patience: one runs, the other waits."""
    limited_server.settled()
    options: Any = {"ignore_eos": True, "speculative": "off", "stream": True}
    messages = [{"role": "user", "content": "Once upon a time"}]
    with ThreadPoolExecutor(1) as pool:
        asked: dict[str, Any] = {"messages": messages, "max_tokens": 4000, **options}
        other = pool.submit(limited_server.post, "/v1/messages", **asked)
        create = limited_server.client.responses.create
        *_, last = create(
            model="default", input="Once", max_output_tokens=4000, stream=True, extra_body=options
        )
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert last.response.error.code == "request_timeout"
    end = other.result().text.strip().split("\n\n")[-1]
    assert end.startswith('event: error\ndata: {"type":"error","error":{"type":"timeout_error"')
    limited_server.settled()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/embeddings",
        "/v1/audio/speech",
        "/v1/audio/transcriptions",
        "/v1/images/generations",
        "/v1/moderations",
        "/v1/rerank",
        "/v1/assistants",
        "/v1/threads/x/runs",
        "/v1/batches",
        "/v1/files",
        "/v1/fine_tuning/jobs",
        "/v1/responses/x/cancel",
    ],
)
def test_other_routes_are_refused_with_what_there_is(tiny_server: Server, path: str) -> None:
    answer: httpx.Response = tiny_server.post(path, input="x", model="tiny")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert path in error["message"]
    for route in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert f"POST {route}" in error["message"]
