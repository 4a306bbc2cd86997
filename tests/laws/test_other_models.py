"""The laws of this folder for other architectures: experts, gpt-oss, recurrent layers. Each in a process of its
own, since a law's target is chosen when the harness is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.laws.harness import MODELS

ROOT = Path(__file__).parents[2]
FILES = ("test_engine_laws.py", "test_distribution.py")
SELECTION = "not every_option and not logprobs and not cap_or_refuse"  # what a model hardly matters for


@pytest.mark.slow
@pytest.mark.parametrize("model", [name for name in MODELS if name != "llama"])
def test_the_laws_hold(model: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-x"]
    command += ["-k", SELECTION]
    files = [str(Path(__file__).with_name(name)) for name in FILES]
    done = subprocess.run(
        [*command, *files], cwd=ROOT, env={**os.environ, "PACELINE_LAWS_MODEL": model}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
