"""Clients as people use them, on the default model with drafts: a tool loop, and an editor that asks at every
key and cancels what it no longer needs. Afterwards nothing is left behind.
"""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from tests.server.harness import WAIT_S, Server

WEATHER = {"Oslo": "snow, -3 degrees", "Rome": "sun, 24 degrees"}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": list(WEATHER)}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather now.",
    "parameters": PARAMETERS,
}


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_tool_loop_comes_to_an_answer(default_server: Server, is_kept: bool) -> None:
    """Call, result, answer; the conversation kept by the server or sent each time."""
    client = default_server.client
    turns: list[Any] = [{"role": "user", "content": "How is the weather in Oslo?"}]
    common: Any = {"model": "default", "tools": [TOOL], "temperature": 0, "max_output_tokens": 60}
    answer = client.responses.create(**common, input=turns, tool_choice="required")
    num_calls = 0
    while calls := [item for item in answer.output if item.type == "function_call"]:
        num_calls += len(calls)
        assert num_calls < 5, "it goes on calling"
        results: list[Any] = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": WEATHER[json.loads(call.arguments)["city"]],
            }
            for call in calls
        ]
        turns += [*(item.model_dump() for item in answer.output), *results]
        asked: Any = {"input": results, "previous_response_id": answer.id} if is_kept else {"input": turns}
        answer = client.responses.create(**common, **asked)
    assert num_calls == 1
    assert answer.output_text.strip()
    chat: list[Any] = [{"role": "user", "content": "How is the weather in Oslo?"}]
    tools: Any = [{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}]
    options: Any = {"model": "default", "tools": tools, "temperature": 0, "max_tokens": 60}
    message = (
        client.chat.completions.create(**options, messages=chat, tool_choice="required").choices[0].message
    )
    (call,) = message.tool_calls or ()
    city = json.loads(call.function.arguments)["city"]
    chat += [
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": WEATHER[city]},
    ]
    said = client.chat.completions.create(**options, messages=chat).choices[0].message.content
    assert said == answer.output_text
    default_server.settled()


def test_an_editor_that_cancels_again_and_again(default_server: Server) -> None:
    """Each key brings a longer prompt; the answer is read until its first words, then left."""
    left = "paceline:client_disconnects_total"
    before = default_server.settled()
    text, openly = "def distance(a, b):\n    return abs(", {"ignore_eos": True, "temperature": 0}
    asked: dict[str, Any] = {"model": "default", "stream": True, "extra_body": openly}
    with anthropic.Anthropic(
        base_url=default_server.url, api_key="none", max_retries=0, timeout=WAIT_S
    ) as claude:
        for number in range(9):
            prompt = text[: len(text) - 9 + number]
            messages: Any = [{"role": "user", "content": f"Complete: {prompt}"}]
            if number % 3 == 0:
                stream: Any = default_server.client.chat.completions.create(
                    **asked, messages=messages, max_tokens=4000
                )
                first = next(chunk for chunk in stream if chunk.choices[0].delta.content)
            elif number % 3 == 1:
                stream = default_server.client.responses.create(
                    **asked, input=messages, max_output_tokens=4000
                )
                first = next(event for event in stream if event.type == "response.output_text.delta")
            else:
                stream = claude.messages.create(**asked, messages=messages, max_tokens=4000)
                first = next(event for event in stream if event.type == "content_block_delta")
            assert first is not None
            stream.close()
    after = default_server.figures_when(lambda now: now[left] == before[left] + 9, "all to be seen leaving")
    after = default_server.settled()
    assert after["paceline:kv_cache_blocks_used"] == 0
    assert after["paceline:engine_restarts_total"] == before["paceline:engine_restarts_total"]
    answer = default_server.client.responses.create(model="default", input="Hi", max_output_tokens=2)
    assert answer.usage is not None
    assert answer.usage.output_tokens == 2
