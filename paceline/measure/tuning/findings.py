"""What `paceline tune` is asked to measure, and what it finds. Invariant: what cannot be measured is refused
before a model is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError
from paceline.core.options import nearest
from paceline.drafters import registry
from paceline.engine.costs import CostModel
from paceline.engine.profile import DrafterProfile
from paceline.measure.tuning.predict import Prediction

METHODS = ("ngram", "suffix", "lookahead", "early_exit", "quantized")
LENGTHS, LENGTHS_OF_MODELS = (
    (1, 2, 3, 4, 6),
    (1, 2, 3, 4),
)  # K of those that run no model, and of those that do
MOST_K = 12
LEAST_TOKENS = 16  # of an answer: two steps are not timed, and there must be something after them
REPEATS = 2


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be measured."""

    methods: Sequence[str] = METHODS
    lengths: Sequence[int] = ()  # empty: each drafter's usual ones
    draft_model: str | None = None
    max_tokens: int = 32
    seconds: float = 150.0  # no further prompt is begun when the work would take longer

    def __post_init__(self) -> None:
        known = [name for name in registry.DRAFTERS if name != "hybrid"]
        for name in self.methods:
            if name == "hybrid":
                raise ConfigError(
                    "--methods holds 'hybrid'; name its drafters one by one, each is measured alone"
                )
            if name not in known:
                raise ConfigError(f"--methods holds {name!r}; {nearest(name, known)}")
        for name in self.methods:
            if name == "draft_model" and self.draft_model is None:
                raise ConfigError(f"--methods holds {name!r}; name the smaller model with --draft-model")
        for k in self.lengths:
            if not 1 <= k <= MOST_K:
                raise ConfigError(f"-k is {k}; give a whole number from 1 to {MOST_K}")

    def options(self, name: str, k: int) -> dict[str, Any]:
        model = (
            {"model": self.draft_model}
            if self.draft_model and name in ("draft_model", *registry.HEADS)
            else {}
        )
        return {"method": name, "num_speculative_tokens": k, **model}

    def is_free(self, name: str) -> bool:
        return bool(registry.parse(self.options(name, 1))[0].is_free)

    def lengths_of(self, name: str) -> list[int]:
        ks = set(self.lengths or (LENGTHS if self.is_free(name) else LENGTHS_OF_MODELS))
        if name == "lookahead":  # its window and its n-grams have so many nodes and no more
            most = registry.parse({"method": name})[1].num_speculative_tokens
            ks = {min(k, most) for k in ks}
        return sorted(ks)

    @property
    def num_turns(self) -> int:
        """Of a prompt: each drafter is listened to, then it, the policy and plain decoding beside each of
        them are timed.
        """
        return len(self.methods) + REPEATS * (
            2 + sum(1 + len(self.lengths_of(name)) for name in self.methods)
        )


class Timing(NamedTuple):
    seconds: float
    num_tokens: int


class Row(NamedTuple):
    prediction: Prediction
    measured: (
        float | None
    )  # speedup over plain decoding; None if every answer was over before it could be timed


class Finding(NamedTuple):
    """All about one drafter."""

    name: str
    is_free: bool
    acceptance: tuple[float, ...]  # by depth
    entering: float  # seconds
    asking: float  # seconds; of one that runs a model, for each token
    rows: tuple[Row, ...]
    line: tuple[Prediction, ...]  # for every K from 0 on

    @property
    def best(self) -> Row:
        return max(self.rows, key=lambda row: row.measured or 0.0)

    @property
    def profile(self) -> DrafterProfile:
        return DrafterProfile(self.asking, self.acceptance)


class Findings(NamedTuple):
    costs: CostModel
    host: float
    plain: float  # tokens a second
    auto: float | None  # measured speedup of the policy's own choices
    drafters: tuple[Finding, ...]
    num_prompts: int
    num_tokens: int
