"""Chat templates render as transformers does, and hostile ones end quickly in one line."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from paceline.core.errors import ModelFileError, PacelineError, RequestError
from paceline.loaders.chat_template import render

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """
{%- set loop_messages = messages %}
{%- if not tools_in_user_message is defined %}{% set tools_in_user_message = true %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- bos_token + "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in loop_messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one tool call at a time") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not message.content.startswith('<tool_response>') %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- set reasoning_content = '' %}
    {%- if '</think>' in content %}
        {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
        {{- '<|im_start|>' ~ message.role ~ '\\n<think>\\n' ~ reasoning_content.strip('\\n') ~ '\\n</think>\\n\\n' ~ content.lstrip('\\n') }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
GEMMA3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = (messages[0]['content'] if messages[0]['content'] is string else messages[0]['content'][0]['text']) + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
MISTRAL = """{%- macro turn(text) %}[INST] {{ text }} [/INST]{% endmacro %}
{%- set users = messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in messages | rejectattr('role', 'in', ['system']) %}
    {%- if message["role"] not in ["user", "assistant"] %}{% continue %}{% endif %}
    {%- if message["role"] == "user" %}
        {%- if tools and message == users[-1] %}[AVAILABLE_TOOLS] [
            {%- for tool in tools %}
                {%- for key, value in tool.function.items() if key != "return" %}{{ '"' + key + '": ' + value|tojson }}{{ ", " if not loop.last }}{% endfor %}
            {%- endfor %}][/AVAILABLE_TOOLS]{% endif %}
        {{- turn(message["content"] if message["content"] is string else message["content"] | map(attribute="text") | join(" / ")) }}
    {%- else %}
        {% generation %}{{- " " + (message["content"] or '')|upper|replace("A", "4") + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
{{- [3, 1, 2] | sort | join(',') }}{{ {'b': 1, 'a': 2}|dictsort }}{{ (1.5, 'x', none) }}{{ 'a"é<&' | tojson }}{{ loop is defined }}{{ users|length ** 2 }}
"""
TEMPLATES = {"smollm2": SMOLLM2, "llama3": LLAMA3, "qwen3": QWEN3, "gemma3": GEMMA3, "mistral": MISTRAL}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "a<b & 'c' é",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    }
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "  Hi there \n"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yo."},
        {"role": "user", "content": "é<&>🎉"},
    ],
    [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"},
        {"role": "user", "content": "ok"},
    ],
    [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}],
]
PARTS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": " look "}, {"type": "image"}]}
]
CALL: list[dict[str, Any]] = [
    {"role": "user", "content": "x"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": {"x": 1}}}],
    },
]


@pytest.fixture(scope="module")
def theirs() -> PreTrainedTokenizerFast:
    backend = Backend(models.BPE({"<s>": 0, "</s>": 1}, []))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def _same(
    theirs: PreTrainedTokenizerFast, template: str, messages: list[dict[str, Any]], **options: Any
) -> None:
    expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    assert render(template, messages, bos_token="<s>", eos_token="</s>", **options) == expected


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompted", [True, False])
def test_same_as_transformers(
    theirs: PreTrainedTokenizerFast, name: str, messages: list[dict[str, Any]], tools: Any, prompted: bool
) -> None:
    _same(theirs, TEMPLATES[name], messages, tools=tools, add_generation_prompt=prompted)


def test_same_with_parts_calls_and_extra_variables(theirs: PreTrainedTokenizerFast) -> None:
    _same(theirs, GEMMA3, PARTS, add_generation_prompt=True)
    _same(theirs, MISTRAL, PARTS, add_generation_prompt=True)
    _same(theirs, LLAMA3, CALL, add_generation_prompt=True)
    _same(theirs, QWEN3, CHATS[1], add_generation_prompt=True, enable_thinking=False)
    _same(theirs, "{{ strftime_now('%d %b %Y') }}", CHATS[0])


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    words=st.lists(st.text(st.characters(codec="utf-8"), max_size=20), min_size=1, max_size=5),
)
def test_same_for_any_words(theirs: PreTrainedTokenizerFast, name: str, words: list[str]) -> None:
    roles = ("user", "assistant")
    _same(
        theirs,
        TEMPLATES[name],
        [{"role": roles[i % 2], "content": w} for i, w in enumerate(words)],
        add_generation_prompt=True,
    )


def test_a_long_chat_is_within_bounds(theirs: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f"{i} " + "word " * 200} for i in range(601)
    ]
    for template in TEMPLATES.values():
        _same(theirs, template, messages, add_generation_prompt=True)


def test_a_template_that_refuses_blames_the_messages() -> None:
    with pytest.raises(RequestError, match="refuses these messages: Conversation roles must alternate"):
        render(GEMMA3, [{"role": "assistant", "content": "me first"}], bos_token="<s>")


@pytest.mark.parametrize(
    "messages", ["hi", {"role": "user"}, [1], [{"content": "x"}], [{"role": "user", "content": object()}]]
)
def test_bad_messages_are_named(messages: Any) -> None:
    with pytest.raises(RequestError, match="message"):
        render(SMOLLM2, messages)


DOUBLING = (
    "{% set ns = namespace(v=VALUE) %}{% for i in range(64) %}{% set ns.v = STEP %}{% endfor %}{{ ns.v }}"
)
HOSTILE = {
    "nested loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "huge range": "{% for i in range(99999999) %}{% endfor %}",
    "loop over text": "{% for i in range(100000) %}" + "x" * 20_000 + "{% endfor %}",
    "captured text": "{% set x %}{% for i in range(90000) %}{{ 'a' * 1000000 }}{% endfor %}{% endset %}",
    "repetition": "{{ 'a' * 1000000000 }}",
    "list repetition": "{{ ([1] * 1000000000) | length }}",
    "power": "{{ 10 ** 1000000000 }}",
    "doubling by ~": DOUBLING.replace("VALUE", "'aa'").replace("STEP", "ns.v ~ ns.v"),
    "doubling by +": DOUBLING.replace("VALUE", "'aa'").replace("STEP", "ns.v + ns.v"),
    "squaring": DOUBLING.replace("VALUE", "3").replace("STEP", "ns.v * ns.v"),
    "shared lists": DOUBLING.replace("VALUE", "[1]").replace("STEP", "[ns.v, ns.v]"),
    "shared dicts": DOUBLING.replace("VALUE", "{}").replace("STEP", "{'a': ns.v, 'b': ns.v}"),
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "replace filter": "{{ ('a' * 1000000) | replace(old='a', new='b' * 1000000) }}",
    "join": "{{ ('a' * 1000000).join(range(100000)) }}",
    "join filter": "{{ ([('a' * 1000000)] * 100000) | join }}",
    "format": "{{ '%1000000000d' % 3 }}",
    "str.format": "{{ '{:1000000000}'.format(3) }}",
    "center": "{{ 'x'.center(1000000000) }}",
    "center filter": "{{ 'x' | center(1000000000) }}",
    "indent": "{{ 'x\ny' | indent(1000000000) }}",
    "tojson": "{{ [1] | tojson(indent=1000000000) }}",
    "to_bytes": "{{ (5).to_bytes(1000000000, 'big') }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
    "macro recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "nesting": "{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}",
    "length": " " * 300_000,
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['json'] }}",
    "mutation": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "syntax": "{% if %}",
    "undefined": "{{ no.such.name }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_quickly_in_one_line(name: str) -> None:
    start = time.thread_time()
    with pytest.raises(ModelFileError) as caught:
        render(HOSTILE[name], CHATS[0])
    assert time.thread_time() - start < 6
    assert "chat template" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_stopped_template_leaves_the_next_render_whole() -> None:
    template = "{% for i in range(messages[0].content | int) %}{% for j in range(100000) %}{% endfor %}{% endfor %}done"
    with pytest.raises(PacelineError):
        render(template, [{"role": "user", "content": "100000"}])
    assert render(template, [{"role": "user", "content": "1"}]) == "done"
