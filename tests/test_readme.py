"""Every command in the README's bash blocks runs as printed, and its Python example too.

`make` and `git` lines are left out: they create the environment this test already runs in, and CI runs them
itself.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SKIPPED = ("make", "git ", "cd ", "#")


def blocks(language: str) -> list[str]:
    return [
        body
        for kind, body in BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
        if kind == language
    ]


COMMANDS = [
    line
    for block in blocks("bash")
    for line in block.splitlines()
    if line.strip() and not line.startswith(SKIPPED)
]


def run(command: list[str] | str, folder: Path) -> subprocess.CompletedProcess[str]:
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": tools, "NO_COLOR": "1"}
    return subprocess.run(
        command,
        shell=isinstance(command, str),
        cwd=folder,
        env=environment,
        input="",
        capture_output=True,
        text=True,
        timeout=1200,
    )


def test_readme_shows_commands_and_an_example() -> None:
    assert len(COMMANDS) >= 4
    assert len(blocks("python")) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs_as_printed(command: str, tmp_path: Path) -> None:
    done = run(command.split("   #")[0], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("example", blocks("python"))
def test_example_runs_as_printed(example: str, tmp_path: Path) -> None:
    done = run([sys.executable, "-W", "error", "-c", example], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
