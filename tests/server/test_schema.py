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

from tests.server.harness import Server, start_server

EXAMPLES = 60  # of each route and mode


@pytest.fixture(scope="session")
def schema_server(wide_folder: Path) -> Iterator[Server]:
    """Short answers, so that many fit into the time."""
    server = start_server(
        str(wide_folder), "--max-completion-tokens", "8", "--max-choices", "4", "--served-model-name", "tiny"
    )
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
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"} <= {
        operation.path for operation in found
    }
    for operation in found:
        if mode is GenerationMode.NEGATIVE and operation.method.upper() == "GET":
            continue  # there is no body that could be wrong

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        def ask(case: Any) -> None:
            response = case.call()
            assert response.status_code < 500, (case.method, case.path, case.body, response.text)
            if response.status_code >= 400:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}

        ask()


def test_the_engine_has_survived_them(schema_server: Server) -> None:
    assert schema_server.http.get("/health").json()["engine_restarts"] == 0
    assert schema_server.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200
    schema_server.settled()
