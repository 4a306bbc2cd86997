"""The server examples of the README and of docs/serve.md, as printed, against a live server: curl and the
official clients.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.harness import WAIT_S, Server

ROOT = Path(__file__).parents[2]
BLOCKS = [
    block
    for document in ("README.md", "docs/serve.md")
    for block in re.findall(
        r"^```(sh|py)\n(.*?)^```", (ROOT / document).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
]
COMMANDS = [
    line for kind, body in BLOCKS if kind == "sh" for line in body.splitlines() if line.startswith("curl")
]


def test_there_is_an_example_of_each_protocol() -> None:
    code = "\n".join(body for kind, body in BLOCKS if kind == "py")
    for call in ("client.chat.completions.create", "client.responses.create", "client.messages.stream"):
        assert call in code
    assert len(COMMANDS) == 4


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[2])
def test_curl_gets_an_answer(default_server: Server, command: str) -> None:
    command = command.replace("http://127.0.0.1:8000", default_server.url)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=WAIT_S, check=True)
    answer = json.loads(done.stdout)
    usage = answer["usage"]
    assert 0 < usage.get("completion_tokens", usage.get("output_tokens")) <= 24


@pytest.mark.parametrize("code", [body for kind, body in BLOCKS if kind == "py"])
def test_the_official_clients_stream_an_answer(default_server: Server, code: str) -> None:
    code = code.replace("http://127.0.0.1:8000", default_server.url)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert done.stdout.strip()
