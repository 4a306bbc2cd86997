"""Profiles: measured on a real decoder, kept, used again while they hold, and measured anew when they are
spoilt or do not.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.engine.policy.cost import CostTable
from paceline.engine.profile import DrafterProfile, Profile, load_profile, profile_of, save_profile
from paceline.runtime.timing import measure
from tests.laws.harness import executor

COSTS = CostTable({1: 1.0, 4: 1.5}, 0.25, 0.125)


def test_a_profile_survives_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "p.json"
    save_profile(path, Profile(COSTS, {"suffix": DrafterProfile(1e-4, (0.5, 0.25))}))
    found = load_profile(path)
    assert found is not None
    assert found.costs.to_json() == COSTS.to_json()
    assert found.drafters == {"suffix": DrafterProfile(1e-4, (0.5, 0.25))}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 1, "costs": {}, "drafters": {}}', "\xff", "[" * 100_000]
)
def test_a_spoilt_file_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text, encoding="latin-1")
    assert load_profile(path) is None


def test_a_profile_of_another_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="version 7"):
        Profile.from_json({**Profile(COSTS).to_json(), "version": 7})


def test_measuring_leaves_nothing_behind_and_never_falls_with_rows() -> None:
    target = executor()
    timings = measure(target, 60)  # it stops by itself, long before
    assert target.kv.num_used == 0
    assert {1, 2, 4, 8} <= set(timings.seconds)
    assert list(timings.seconds.values()) == sorted(timings.seconds.values())


def test_a_small_cache_is_measured_as_far_as_it_goes() -> None:
    target = executor(num_blocks=1)
    assert max(measure(target, 0.1).seconds) <= 16
    assert target.kv.num_used == 0


def test_a_saved_profile_that_cannot_be_true_is_measured_anew(tmp_path: Path) -> None:
    """It says that four rows cost a thousand times one."""
    path, target = tmp_path / "p.json", executor()
    save_profile(
        path, Profile(CostTable({1: 1e-4, 2: 1e-4, 4: 0.1, 8: 0.2}), {"suffix": DrafterProfile(1e-4)})
    )
    found = profile_of(target, path)
    assert found.costs.pass_seconds(4) < 100 * found.costs.pass_seconds(1)
    assert found.drafters == {"suffix": DrafterProfile(1e-4)}, "what is known of drafters is kept"
    assert json.loads(path.read_text())["costs"] == found.costs.to_json()
