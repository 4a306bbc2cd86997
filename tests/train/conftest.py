"""A tiny target, as a teacher, and what it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.api.llm import LLM
from paceline.loaders.checkpoint import Checkpoint, open_checkpoint
from paceline.train.data import Writer
from paceline.train.lessons import Target
from paceline.train.talk import conversations
from paceline.train.texts import Texts, from_written
from tests.make_models import VOCAB


@pytest.fixture(scope="package")
def checkpoint(tiny_folder: Path) -> Checkpoint:
    return open_checkpoint(str(tiny_folder), progress=False)


@pytest.fixture(scope="package")
def target(checkpoint: Checkpoint) -> Target:
    return Target.load(checkpoint, context=512)


@pytest.fixture(scope="package")
def texts(tiny_folder: Path) -> Texts:
    """What the tiny model writes to prompts of its own."""
    with LLM(str(tiny_folder), speculative_config=None, device="cpu", progress=False) as llm:
        talks = conversations(llm.tokenizer, [], seed=0)
        written = Writer(llm, batch=16).write(talks, lambda: llm.engine.totals.num_tokens > 16_000)
        return from_written(list(written), VOCAB)
