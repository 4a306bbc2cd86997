"""A model that thinks, through the doors of Responses and Messages: its reasoning is an item or a block of its
own, and goes back to the model as the chat's does.
"""

from __future__ import annotations

from typing import Any

import anthropic

from tests.server.harness import WAIT_S, Server
from tests.server.test_anthropic_client import TOOL as CLAUDES_TOOL
from tests.server.test_responses import TOOL

SAID = (
    'Hm.</think>\n\nWell. <tool_call>{"name": "pull", "arguments": {"rider": "Bo", "fast": true}}</tool_call>'
)
EXTRA: Any = {"structured_outputs": {"choice": [SAID]}}
GREEDY: Any = {"temperature": 0}


def test_reasoning_is_an_item_and_is_sent_back(thinking_server: Server) -> None:
    client = thinking_server.client
    common: Any = {"model": "tiny", "tools": [TOOL], "max_output_tokens": 200, "temperature": 0}
    first = client.responses.create(**common, input="Who pulls?", extra_body=EXTRA)
    *_, last = client.responses.create(**common, input="Who pulls?", extra_body=EXTRA, stream=True)
    for response in (first, last.response):  # type: ignore[union-attr]
        thought, message, call = response.output
        assert (thought.type, message.type, call.type) == ("reasoning", "message", "function_call")
        assert [part.text for part in thought.content] == ["Hm."]  # type: ignore[union-attr]
        assert response.output_text.strip() == "Well."
        assert call.arguments == '{"rider": "Bo", "fast": true}'  # type: ignore[union-attr]
        assert 0 < response.usage.output_tokens_details.reasoning_tokens <= len("Hm.")
    events = [
        e.type for e in client.responses.create(**common, input="Who pulls?", extra_body=EXTRA, stream=True)
    ]
    assert "response.reasoning_text.delta" in events
    assert events.index("response.reasoning_text.done") < events.index("response.output_text.delta")
    result: Any = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "done"}  # type: ignore[union-attr]
    kept = client.responses.create(**common, input=[result], previous_response_id=first.id)
    items: list[Any] = [item.model_dump() for item in first.output]
    sent = client.responses.create(
        **common, input=[{"role": "user", "content": "Who pulls?"}, *items, result]
    )
    assert kept.usage is not None
    assert sent.usage is not None
    assert kept.usage.input_tokens == sent.usage.input_tokens
    said = [[item.model_dump(exclude={"id", "call_id"}) for item in each.output] for each in (kept, sent)]
    assert said[0] == said[1]
    without = [{"role": "user", "content": "Who pulls?"}, *items[1:], result]
    shorter = client.responses.create(**common, input=without)  # type: ignore[arg-type]
    assert shorter.usage is not None
    assert shorter.usage.input_tokens < sent.usage.input_tokens
    quiet = client.responses.create(**common, input="Who pulls?", reasoning={"effort": "none"})
    assert "reasoning" not in [item.type for item in quiet.output]


def test_thinking_is_a_block_and_is_sent_back(thinking_server: Server) -> None:
    common: Any = {"model": "tiny", "tools": [CLAUDES_TOOL], "max_tokens": 200}
    question: Any = {"role": "user", "content": "Who pulls?"}
    with anthropic.Anthropic(
        base_url=thinking_server.url, api_key="none", max_retries=0, timeout=WAIT_S
    ) as claude:
        whole = claude.messages.create(**common, messages=[question], extra_body=EXTRA | GREEDY)
        with claude.messages.stream(**common, messages=[question], extra_body=EXTRA | GREEDY) as stream:
            streamed = stream.get_final_message()
        for message in (whole, streamed):
            thought, text, use = message.content
            assert (thought.type, text.type, use.type) == ("thinking", "text", "tool_use")
            assert (thought.thinking, text.text.strip()) == ("Hm.", "Well.")  # type: ignore[union-attr]
            assert use.input == {"rider": "Bo", "fast": True}  # type: ignore[union-attr]
            assert message.stop_reason == "tool_use"
        result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "done"}  # type: ignore[union-attr]
        own: Any = [block.model_dump() for block in streamed.content]
        counts = [
            claude.messages.count_tokens(
                model="tiny",
                messages=[
                    question,
                    {"role": "assistant", "content": content},
                    {"role": "user", "content": [result]},
                ],
            ).input_tokens
            for content in (own, own[1:])
        ]
        assert counts[0] > counts[1]
        off: Any = {"type": "disabled"}
        quiet = claude.messages.create(**common, messages=[question], thinking=off, extra_body=GREEDY)
        assert [block.type for block in quiet.content] == ["text"]


def test_a_call_that_is_cut_is_told_as_far_as_it_came(thinking_server: Server) -> None:
    client, spoken = thinking_server.client, SAID.partition("</think>")[2]
    tokens = thinking_server.post("/tokenize", prompt=spoken.partition('"fast"')[0]).json()["count"]
    options: Any = {"structured_outputs": {"choice": [SAID]}, "temperature": 0}
    thought = thinking_server.post("/tokenize", prompt="Hm.</think>").json()["count"]
    most = tokens + thought
    common: Any = {"model": "tiny", "tools": [TOOL], "input": "Who pulls?"}
    response = client.responses.create(**common, max_output_tokens=most, extra_body=options)
    assert response.status == "incomplete"
    last = response.output[-1]
    assert last.type == "function_call"
    assert (last.status, last.name) == ("incomplete", "pull")
    assert '{"rider": "Bo", "fast": true}'.startswith(last.arguments)
