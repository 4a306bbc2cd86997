"""Requests made up from the server's own OpenAPI schema, by the hundred: whatever they hold, none is a server
error.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from tests.server.harness import WAIT_S, Server, start_server

EXAMPLES = 60  # of each route and mode
FEW = 20  # of routes that ask the chat underneath


@pytest.fixture(scope="session")
def schema_server(wide_folder: Path) -> Iterator[Server]:
    """A short context, so that many answers fit into the time; no limit on the tokens that are asked for."""
    limits = ("--max-model-len", "96", "--max-choices", "4")
    server = start_server(str(wide_folder), *limits, "--served-model-name", "tiny")
    yield server
    server.kill()


def operations(server: Server) -> list[Any]:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    return [result.ok() for result in schema.get_all_operations()]


@pytest.mark.parametrize(
    "mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value
)
def test_no_request_is_a_server_error(schema_server: Server, mode: GenerationMode) -> None:
    """Positive ones fit the schema, negative ones do not."""
    found = operations(schema_server)
    assert {operation.path for operation in found} >= {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/responses/{name}",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
    }
    for operation in found:
        if mode is GenerationMode.NEGATIVE and operation.method.upper() in ("GET", "DELETE"):
            continue  # there is no body that could be wrong

        is_door = operation.path.startswith(("/v1/responses", "/v1/messages"))
        options: Any = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=FEW if is_door else EXAMPLES, **options)
        def ask(case: Any) -> None:
            response = case.call(timeout=WAIT_S)
            assert response.status_code < 500, (case.method, case.path, case.body, response.text)
            if response.status_code >= 400:
                is_anthropic = case.path.startswith("/v1/messages")
                names = {"message", "type"} if is_anthropic else {"message", "type", "param", "code"}
                assert set(response.json()["error"]) == names

        ask()


# Numbers that a JSON body may hold and a machine's word may not.
HUGE: list[dict[str, Any]] = [
    {"max_tokens": 10**20},
    {"max_tokens": 10**20, "min_tokens": 10**20, "ignore_eos": True},
    {"max_tokens": 10**4000},
    {"top_k": 10**20, "temperature": 1},
    {"seed": 10**20},
    {"seed": -(10**20)},
    {"n": 10**20},
    {"best_of": 10**20},
    {"logprobs": 10**20},
    {"priority": 10**20},
    {"temperature": 10**400},
    {"temperature": -(10**20)},
    {"logit_bias": {"3": -(10**400)}},
    {"logit_bias": {"3": 10**20}},
    {"logit_bias": {str(10**20): 1}},
    {"logit_bias": {"9" * 5000: 1}},
    {"stop_token_ids": [10**20]},
    {"allowed_token_ids": [-(10**20)]},
    {"prompt": [10**20]},
    {"frequency_penalty": 10**20},
    {"speculative": {"num_speculative_tokens": 10**20}},
]


@pytest.mark.parametrize("options", HUGE, ids=lambda options: str(options)[:50])
@pytest.mark.parametrize("temperature", [0, 1])
def test_huge_numbers_are_bounded_or_refused(
    schema_server: Server, options: dict[str, Any], temperature: float
) -> None:
    """To an idle server, where a compiled burst would be given them."""
    body = {"prompt": "Hi", "max_tokens": 4, "temperature": temperature, **options}
    answer = schema_server.http.post("/v1/completions", json=body)
    assert answer.status_code in (200, 400), answer.text
    assert schema_server.http.get("/health").json()["engine_restarts"] == 0


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
def test_what_is_no_number_is_refused(schema_server: Server, name: str, word: str) -> None:
    text = f'{{"prompt": "Hi", "max_tokens": 2, "{name}": {word}}}'
    headers = {"content-type": "application/json"}
    assert schema_server.http.post("/v1/completions", content=text, headers=headers).status_code == 400


def test_the_engine_has_survived_them(schema_server: Server) -> None:
    assert schema_server.http.get("/health").json()["engine_restarts"] == 0
    assert schema_server.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200
    schema_server.settled()
