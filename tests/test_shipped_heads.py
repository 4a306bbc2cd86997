"""The heads that ship with the package: they belong to the default model, draft well on it, change nothing,
and a wrong one shows.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import LLM, SamplingParams
from paceline.loaders.checkpoint import open_checkpoint
from paceline.loaders.heads import open_head
from paceline.measure.prompts import load

HEADS = Path(paceline.__file__).parent / "data" / "heads"
# at least, on the first prompts we ship: measured 2.15, 2.01, 1.92 and 1.87
TAU = {"eagle": 2.1, "dflash": 1.96, "draft": 1.87, "medusa": 1.83}
PARAMS = SamplingParams(temperature=0, max_tokens=48)


def asked(llm: LLM, count: int = 12) -> list[Any]:
    return [llm.chat([{"role": "user", "content": prompt.text}], PARAMS)[0] for prompt in load()[:count]]


@pytest.fixture(scope="module")
def plain(default_model: LLM) -> list[str]:
    llm = LLM(speculative_config=None, progress=False)
    return [said.text for said in asked(llm)]


def test_sizes_of_the_package() -> None:
    sizes = {path.parent.name: path.stat().st_size for path in HEADS.glob("*/model.safetensors")}
    assert sorted(sizes) == sorted(TAU)
    assert max(sizes.values()) <= 16e6
    assert sum(sizes.values()) <= 48e6


@pytest.mark.parametrize(
    "kind", ["eagle", *(pytest.param(kind, marks=pytest.mark.slow) for kind in TAU if kind != "eagle")]
)
def test_a_shipped_head_drafts_well_and_changes_nothing(kind: str, plain: list[str]) -> None:
    head = open_head(str(HEADS / kind), open_checkpoint("default", progress=False), (kind,))
    assert head.config.first_accepted > 0.4
    llm = LLM(speculative_config={"method": kind, "num_speculative_tokens": 5}, progress=False)
    said = asked(llm)
    assert [answer.text for answer in said] == plain
    tau = sum(answer.stats.num_tokens for answer in said) / sum(answer.stats.num_steps for answer in said)
    assert tau >= TAU[kind]


def test_wrong_layers_are_warned_of(tmp_path: Path) -> None:
    """Nothing else tells of them: the text stays what it is, only slower."""
    wrong = tmp_path / "eagle"
    shutil.copytree(HEADS / "eagle", wrong)
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps({**config, "taps": [27, 15, 2]}))
    llm = LLM(
        speculative_config={"method": "eagle", "model": str(wrong), "num_speculative_tokens": 2},
        progress=False,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asked(llm, 8)
    messages = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    assert len(messages) == 1
    assert "the drafter eagle was right" in messages[0]
    assert "the right layers" in messages[0]


def test_the_right_layers_are_not_warned_of() -> None:
    llm = LLM(speculative_config={"method": "eagle", "num_speculative_tokens": 1}, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        asked(llm, 8)
