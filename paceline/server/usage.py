"""How an answer went, in numbers: OpenAI's usage, vLLM's per-request speculation metrics, and Paceline's own
statistics. Invariant: everything is worked out from counts that add up over choices, so that n > 1 and
several prompts need no other rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise, zip_longest
from typing import Any

from pydantic import TypeAdapter

from paceline.engine.stats import SpecStats

_STATS = TypeAdapter(SpecStats)


def added(parts: Iterable[Mapping[str, Any]]) -> SpecStats:
    """The sum of statistics that were sent as JSON."""
    total: dict[str, Any] = {}
    for part in parts:
        total = _plus(total, part)
    return _STATS.validate_python(total)


def _plus(one: Any, other: Any) -> Any:
    """Numbers add, lists place by place, dicts key by key."""
    if isinstance(other, Mapping):
        return {**one, **{name: _plus(one.get(name, type(value)()), value) for name, value in other.items()}}
    if isinstance(other, list):
        return [a + b for a, b in zip_longest(one, other, fillvalue=0)]
    return one + other


def rounded(value: Any) -> Any:
    """With all fractions inside to four digits."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, Mapping):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def num_drafts(stats: SpecStats) -> int:
    """Steps that checked a draft."""
    return stats.num_steps - stats.lengths.get(0, 0)


def spec_decode(stats: SpecStats, num_spec_tokens: int) -> dict[str, Any]:
    """The shape of vLLM's per-request metrics. A histogram's place j: steps with a draft that accepted j
    tokens."""
    num_steps = num_drafts(stats)
    figures = {
        "mean_acceptance_length": 1 + (stats.num_accepted / num_steps if num_steps else 0.0),
        "draft_acceptance_rate": stats.alpha,
        "acceptance_histogram": [a - b for a, b in pairwise([num_steps, *stats.accepted_at, 0])],
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": stats.num_accepted,
        "num_draft_tokens": stats.num_drafted,
        "num_spec_tokens": num_spec_tokens,
    }
    return dict(rounded(figures))
