"""Shared models: a tiny one written to disk with a trained tokenizer, and the default model, fetched once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from paceline.api import build
from paceline.api.llm import LLM
from tests.make_models import tiny_hf, tiny_tokenizer

# In CI the same examples every time; at the desk new ones, so that someone finds what is left. How long one
# takes is the machine's affair.
settings.register_profile("desk", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("desk"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "desk")


@pytest.fixture(scope="session", autouse=True)
def nothing_is_said_of_waiting() -> Iterator[None]:
    """What takes more than a second says so on stderr, and on a busy machine anything may: tests read there
    what else is said.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "PATIENCE_S", 3600.0)
        yield


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama folder as users have them: config.json, model.safetensors, tokenizer.json, a chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_hf(folder, "llama")
    tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(str(tiny_folder), progress=False) as llm:
        yield llm


@pytest.fixture(scope="session")
def default_model() -> Iterator[LLM]:
    """Plain decoding."""
    with LLM(speculative_config=None, progress=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a kind: a quantized folder and the same weights plain, written when first asked for."""
    from tests.quantized_models import Pair, write_pair

    made: dict[str, Pair] = {}

    def pair(kind: str) -> Pair:
        if kind not in made:
            made[kind] = write_pair(tmp_path_factory.mktemp("pair"), kind)
        return made[kind]

    return pair
