"""What is known before the first step: what passes cost on this machine and how drafters did, kept as JSON in
the cache folder.

Invariant: a profile is used only for the model, weights' type, device and threads it was measured with, and
only while a quick look agrees with it; else it is measured anew. It changes how fast the first steps are, and
nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError
from paceline.engine.policy.cost import CostTable
from paceline.loaders.fetch import whole
from paceline.loaders.hub import cache_dir
from paceline.runtime.executor import LocalExecutor
from paceline.runtime.timing import Timed, measure

VERSION = 2
MOST_BYTES = 2**20  # a larger file is not one of ours
LOOK = (1, 2, 4, 8)  # rows of the passes that are timed to see whether a profile holds
TOLERANCE = 1.25  # between the profile's cost of a few rows, relative to one, and a quick look's


class DrafterProfile(NamedTuple):
    seconds: float  # of asking it for one request; of one that runs a model, for each node
    # by depth from 1 on: how often a node was accepted once its parent was
    acceptance: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Profile:
    costs: CostTable
    drafters: Mapping[str, DrafterProfile] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        drafters = {name: drafter._asdict() for name, drafter in self.drafters.items()}
        return {"version": VERSION, "costs": self.costs.to_json(), "drafters": drafters}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Profile:
        try:
            if data["version"] != VERSION:
                raise ValueError(f"version {data['version']}")
            drafters = {
                str(name): DrafterProfile(float(d["seconds"]), tuple(float(a) for a in d["acceptance"]))
                for name, d in data["drafters"].items()
            }
            costs = CostTable(**data["costs"])
            if 1 not in costs.seconds:
                raise ValueError("no pass over one row")
            return cls(costs, drafters)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            remedy = "measure it again with `paceline tune`"
            raise ConfigError(f"a profile cannot be read ({error!r:.60}); {remedy}") from None


def profile_path(fingerprint: str, dtype: str, executor: LocalExecutor) -> Path:
    """One file for each model, type of weights, machine and number of threads."""
    device = executor.device
    threads = [os.cpu_count(), os.environ.get("OMP_NUM_THREADS"), os.environ.get("NUMBA_NUM_THREADS")]
    place = [platform.machine(), platform.processor(), *threads]
    kind, sizes = type(executor.backend).__name__, (executor.num_stages, executor.num_ranks)
    kind += "".join(f" x {size}" for size in sizes if size > 1)
    name = hashlib.sha256(repr((VERSION, kind, device.type, device.index, place)).encode()).hexdigest()[:12]
    return cache_dir() / "profiles" / f"{fingerprint[:32]}-{dtype}-{name}.json"


def load_profile(path: Path) -> Profile | None:
    """What was saved, or None if there is nothing usable."""
    try:
        if path.stat().st_size > MOST_BYTES:
            return None
        return Profile.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return None


def save_profile(path: Path, profile: Profile) -> bool:
    """Whether it could be written."""
    with contextlib.suppress(OSError):  # a full disk costs the next start a third of a second, no more
        with whole(path) as part:
            part.write_text(json.dumps(profile.to_json(), indent=1) + "\n", encoding="utf-8")
        return True
    return False


def profile_of(executor: LocalExecutor, path: Path) -> Profile:
    """The saved profile while it holds, else a new one, which is saved."""
    saved = load_profile(path)
    if saved is not None and _holds(saved.costs, executor):
        return saved
    measured = Profile(CostTable(*measure(executor)), saved.drafters if saved is not None else {})
    save_profile(path, measured)
    return measured


def _holds(costs: CostTable, executor: LocalExecutor) -> bool:
    """Whether a few rows still cost as much, relative to one, as the profile says."""
    sizes = [rows for rows in LOOK if rows in costs.seconds]
    passes = Timed(executor, max(sizes))
    try:
        sizes = [rows for rows in sizes if rows <= passes.room]
        passes.seconds(1)
        seen = {rows: min(passes.seconds(rows) for _ in range(2)) for rows in sizes}
    finally:
        passes.free()
    ratios = [seen[rows] / seen[1] * costs.seconds[1] / costs.pass_seconds(rows) for rows in sizes]
    return all(1 / TOLERANCE < ratio < TOLERANCE for ratio in ratios)
