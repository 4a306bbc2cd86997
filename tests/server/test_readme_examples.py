"""The README's server examples, as printed, against a live server: curl and the official client."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.server.harness import WAIT_S, Server

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def block(language: str, server: Server) -> str:
    """The one block of a language, with the address of the server that runs."""
    (body,) = re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return str(body).replace("http://127.0.0.1:8000", server.url)


def test_curl_gets_an_answer(default_server: Server) -> None:
    (command,) = [line for line in block("sh", default_server).splitlines() if line.startswith("curl")]
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=WAIT_S, check=True)
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["content"].strip()
    assert answer["usage"]["completion_tokens"] <= 24


def test_the_official_client_streams_an_answer(default_server: Server) -> None:
    code = [sys.executable, "-c", block("py", default_server)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout.strip()
