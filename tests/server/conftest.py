"""Servers that tests share: the tiny model behind keys, and the default model, which is slow enough to be
interrupted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers

from paceline.loaders import hub
from tests.make_models import VOCAB, tiny_hf, tiny_tokenizer
from tests.server.harness import Server, server_at, start_server

KEYS = ("first-secret-key-71", "second-secret-key-72")
DRAFTERS = '{"method": ["ngram", "suffix"]}'
MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>")
THINKING_TEMPLATE = """{%- if tools %}<|im_start|>tools
{{ tools | tojson }} <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if reasoning_effort %}Effort: {{ reasoning_effort }}
{% endif %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% if enable_thinking is false %}</think>
{% endif %}{% endif %}"""


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a context that holds tools and long answers."""
    folder = tmp_path_factory.mktemp("wide")
    tiny_hf(folder, "llama", max_position_embeddings=4096)
    tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_server(wide_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two keys, one of them in a file; drafters that may be chosen for a request. Another that was started with
    the same settings can be given by its address.
    """
    if url := os.environ.get("PACELINE_TEST_SERVER"):
        server = server_at(url, KEYS[0])
        yield server
        server.close()
        return
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(f"{KEYS[1]}\n")
    flags = (
        "--api-key",
        KEYS[0],
        "--api-key-file",
        str(keys),
        "--cors-origin",
        "https://page.example",
        "--served-model-name",
        "tiny",
    )
    server = start_server(str(wide_folder), *flags, "--speculative-config", DRAFTERS, key=KEYS[0])
    yield server
    server.kill()


@pytest.fixture(scope="session")
def default_server() -> Iterator[Server]:
    hub.resolve("default", progress=False)
    server = start_server("default")
    yield server
    server.kill()


@pytest.fixture(scope="session")
def limited_server() -> Iterator[Server]:
    """One at a time, one may wait, and little patience: less than its longest answer takes, more than a few
    questions to a busy machine.
    """
    hub.resolve("default", progress=False)
    limits = {
        "max-num-seqs": 1,
        "max-queue": 1,
        "request-timeout": 20,
        "body-timeout": 3,
        "max-prompt-tokens": 60,
        "max-completion-tokens": 4000,
    }
    sizes = {"max-request-bytes": 20_000, "max-choices": 4, "max-grammar-bytes": 1000}
    server = start_server("default", *(f"--{name}={value}" for name, value in {**limits, **sizes}.items()))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def thinking_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with the marks of families that think and call: a template that opens the reasoning, and
    special tokens of other formats.
    """
    folder = tmp_path_factory.mktemp("thinking")
    tiny_hf(folder, "llama", max_position_embeddings=4096)
    tiny_tokenizer(folder, VOCAB - len(MARKS))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": THINKING_TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def thinking_server(thinking_folder: Path) -> Iterator[Server]:
    server = start_server(str(thinking_folder), "--served-model-name", "tiny")
    yield server
    server.kill()


@pytest.fixture(scope="session")
def harmony_server(thinking_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same model, read as gpt-oss is, with defaults of sampling: a file's, and one put over them."""
    folder = tmp_path_factory.mktemp("defaults")
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 1, "max_length": 9}')
    defaults = ("--generation-config", str(folder), "--override-generation-config", '{"top_p": 0.25}')
    flags = ("--tool-call-parser", "openai", *defaults)
    server = start_server(str(thinking_folder), "--served-model-name", "tiny", *flags)
    yield server
    server.kill()
