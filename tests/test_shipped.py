"""What "auto" asks: suffix matching, and the shipped head of the target where there is one and the user has
not left it out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.api.build import parse_speculation
from paceline.core.errors import ConfigError
from paceline.drafters import registry
from paceline.loaders.heads import target_hash
from tests.heads import random_head
from tests.laws.harness import RandomCheckpoint


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shipped are an EAGLE and a Medusa head of the tiny target."""
    for kind in ("eagle", "medusa"):
        (tmp_path / kind).symlink_to(random_head(kind, RandomCheckpoint()))
    monkeypatch.setattr(registry, "FOLDER", tmp_path)
    return tmp_path


def test_the_best_head_of_the_target_is_found(folder: Path) -> None:
    found = registry.head_for(RandomCheckpoint(), True)
    assert found is not None
    assert (found["method"], found["model"]) == ("eagle", str(folder / "eagle"))
    assert (registry.head_for(RandomCheckpoint(), "medusa") or {})["method"] == "medusa"
    assert registry.head_for(RandomCheckpoint(), False) is None


def test_another_model_gets_none_and_its_weights_are_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = json.loads((folder / "eagle" / "config.json").read_text())
    other = folder / "other" / "eagle"
    other.mkdir(parents=True)
    monkeypatch.setattr(registry, "FOLDER", other.parent)
    (other / "config.json").write_text(
        json.dumps({**values, "target_hash": target_hash(RandomCheckpoint())[::-1]})
    )
    assert registry.head_for(RandomCheckpoint(), True) is None, "the same sizes, other weights"
    (other / "config.json").write_text(json.dumps({**values, "hidden_size": 7}))
    target = RandomCheckpoint()
    monkeypatch.setattr(type(target), "tensor", None)
    assert registry.head_for(target, True) is None


def test_a_kind_that_is_not_shipped_for_the_target_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"'dflash'.*paceline train"):
        registry.head_for(RandomCheckpoint(), "dflash")


def test_a_head_that_was_trained_here_is_found_in_the_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = folder / "cache" / "heads" / "tiny" / "draft"
    kept.parent.mkdir(parents=True)
    kept.symlink_to(random_head("draft", RandomCheckpoint()))
    monkeypatch.setenv("PACELINE_CACHE", str(folder / "cache"))
    assert (registry.head_for(RandomCheckpoint(), "draft") or {})["model"] == str(kept)
    assert registry.head_folder("draft", RandomCheckpoint()) == str(kept)


def test_a_head_may_be_named_by_its_folder(folder: Path) -> None:
    asked = parse_speculation({"method": "auto", "head": str(folder / "medusa")})
    found = registry.head_for(RandomCheckpoint(), asked.head) or {}
    assert (found["method"], found["model"]) == ("medusa", str(folder / "medusa"))


@pytest.mark.parametrize(
    ("options", "head"),
    [("auto", True), ({"method": "auto"}, True), ({"method": "auto", "head": False}, False)],
)
def test_the_user_may_leave_the_head_out(options: Any, head: bool) -> None:
    asked = parse_speculation(options)
    assert asked.head is head
    assert not asked.is_pinned
    assert [kind.name for kind, _ in asked.drafters] == ["suffix"]


@pytest.mark.parametrize(
    "options",
    [{"method": "auto", "head": "eagel"}, {"method": "auto", "head": 1.5}, {"method": "off", "head": False}],
)
def test_bad_switches_are_errors(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="head"):
        parse_speculation(options)


def test_a_drafter_that_is_named_is_asked_alone() -> None:
    assert parse_speculation({"method": "suffix"}).head is False
    assert parse_speculation("off").head is False
