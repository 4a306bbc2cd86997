"""What the pages ask a server with curl, as printed, is answered by a live one."""

from __future__ import annotations

import subprocess

import pytest

from tests.server.harness import WAIT_S, Server
from tests.test_docs import blocks, pages_with

OWN_SERVERS = ("serve.md", "security.md")  # with settings of their own, in tests of their own


def curls(page: str) -> list[str]:
    return [line for line in "".join(blocks(page, "sh")).splitlines() if line.startswith("curl ")]


@pytest.mark.parametrize(
    "page", [page for page in pages_with("sh") if curls(page) and page not in OWN_SERVERS]
)
def test_the_pages_ask_what_is_answered(page: str, default_server: Server) -> None:
    for command in curls(page):
        own = command.replace("http://127.0.0.1:8000", default_server.url)
        done = subprocess.run(f"{own} --fail", shell=True, capture_output=True, text=True, timeout=WAIT_S)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
