"""The same seed, the same text: streamed or not, alone or among sixteen, with drafts or without, and from
LLM.generate.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.measure import prompts
from tests.server.harness import Server

TOKENS = 24
QUESTIONS = [prompt.text for prompt in prompts.chosen(None, 3)][:16]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 11},
}


def say(server: Server, question: str, is_stream: bool, **options: Any) -> str:
    asked: Any = {
        "model": "default",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": TOKENS,
        "stream": is_stream,
        **options,
    }
    answer = server.client.chat.completions.create(**asked)
    if not is_stream:
        return answer.choices[0].message.content
    return "".join(chunk.choices[0].delta.content or "" for chunk in answer)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_all_ways_of_asking_give_one_text(default_server: Server, default_model: LLM, way: str) -> None:
    options = WAYS[way]
    assert len(QUESTIONS) == 16
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    expected = [
        result.text for result in default_model.chat(chats, SamplingParams(max_tokens=TOKENS, **options))
    ]
    with ThreadPoolExecutor(16) as pool:
        streamed = list(pool.map(lambda question: say(default_server, question, True, **options), QUESTIONS))
        whole = list(pool.map(lambda question: say(default_server, question, False, **options), QUESTIONS))
        plain = list(
            pool.map(
                lambda question: say(
                    default_server, question, False, extra_body={"speculative": False}, **options
                ),
                QUESTIONS,
            )
        )
    assert streamed == expected
    assert whole == expected
    assert plain == expected
    for index in (0, 7):
        assert say(default_server, QUESTIONS[index], True, **options) == expected[index]
        assert say(default_server, QUESTIONS[index], False, **options) == expected[index]
    default_server.settled()


def test_raw_completions_too(default_server: Server, default_model: LLM) -> None:
    prompt = "The rider in front breaks the wind and the rider in front"
    expected = default_model.generate(prompt, SamplingParams(max_tokens=TOKENS, temperature=0))[0].text
    for is_stream in (False, True):
        answer = default_server.client.completions.create(
            model="default", prompt=prompt, max_tokens=TOKENS, temperature=0, stream=is_stream
        )
        text = "".join(chunk.choices[0].text for chunk in answer) if is_stream else answer.choices[0].text  # type: ignore[union-attr]
        assert text == expected


def test_watching_the_steps_changes_nothing(default_server: Server) -> None:
    texts = [
        say(
            default_server,
            QUESTIONS[3],
            True,
            temperature=0.8,
            seed=4,
            extra_body={"speculative": {"details": details}},
        )
        for details in (False, "drafts", True)
    ]
    assert texts[0] == texts[1] == texts[2]
