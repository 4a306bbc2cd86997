"""Two replicas of the server that the other tests use, with one thread each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.conftest import DRAFTERS, KEYS, wide_folder
from tests.server.harness import Server, launch

__all__ = ["wide_folder"]
STARTS_S = 900.0  # Ray's processes, and two engines, on a machine that does other things, too


@pytest.fixture(scope="session")
def replicas(wide_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(f"{KEYS[1]}\n")
    flags = ("--api-key", KEYS[0], "--api-key-file", str(keys), "--cors-origin", "https://page.example")
    flags = (*flags, "--served-model-name", "tiny", "--speculative-config", DRAFTERS)
    server = launch(str(wide_folder), *flags, "--replicas", "2", "--replica-cpus", "1")
    server.key = KEYS[0]
    try:
        server.connect()
        server.wait_until(r'"event": "replicas", "ready": 2', STARTS_S)
        yield server
    finally:
        server.kill()
