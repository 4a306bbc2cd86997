"""How an answer went, in numbers: OpenAI's usage, vLLM's per-request speculation metrics, and Paceline's own
statistics.

Invariant: everything is worked out from counts that add up over choices, so that n > 1 and several prompts
need no other rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

Counts = dict[str, Any]


def added(parts: Iterable[Mapping[str, Any]]) -> Counts:
    """The sum of counts of the same shape: numbers add, lists add place by place, dicts key by key."""
    total: Counts = {}
    for part in parts:
        for name, value in part.items():
            total[name] = _plus(total.get(name), value)
    return total


def _plus(before: Any, value: Any) -> Any:
    if before is None:
        return (
            dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, list) else value
        )
    if isinstance(value, Mapping):
        return added((before, value))
    if isinstance(value, list):
        longest = max(len(before), len(value))
        pad = [0] * longest
        return [a + b for a, b in zip((before + pad)[:longest], (value + pad)[:longest], strict=True)]
    return before + value


def _shares(accepted: list[int], drafted: list[int]) -> list[float]:
    return [round(a / d, 4) if d else 0.0 for a, d in zip(accepted, drafted, strict=True)]


def _ratio(a: float, b: float) -> float:
    return round(a / b, 4) if b else 0.0


def speculative(stats: Counts) -> Counts:
    """Paceline's own: τ, α, acceptance by position and by drafter."""
    sources = {
        name: {
            "num_drafted": each["num_drafted"],
            "num_accepted": each["num_accepted"],
            "acceptance_per_position": _shares(each["accepted_at"], each["drafted_at"]),
        }
        for name, each in stats.get("by_source", {}).items()
    }
    return {
        "tau": _ratio(stats.get("num_tokens", 0), stats.get("num_steps", 0)),
        "alpha": _ratio(stats.get("num_accepted", 0), stats.get("num_drafted", 0)),
        "acceptance_per_position": _shares(stats.get("accepted_at", []), stats.get("drafted_at", [])),
        "num_steps": stats.get("num_steps", 0),
        "num_tokens": stats.get("num_tokens", 0),
        "num_drafted": stats.get("num_drafted", 0),
        "num_accepted": stats.get("num_accepted", 0),
        "drafts": stats.get("lengths", {}),
        "by_source": sources,
    }


def spec_decode(stats: Counts, num_spec_tokens: int) -> Counts:
    """The shape of vLLM's per-request metrics. A histogram's place j: steps with a draft that accepted j
    tokens.
    """
    lengths = stats.get("lengths", {})
    num_steps = sum(count for length, count in lengths.items() if length != "0")
    accepted_at = stats.get("accepted_at", [])
    edges = [num_steps, *accepted_at, 0]
    return {
        "mean_acceptance_length": 1 + _ratio(stats.get("num_accepted", 0), num_steps),
        "draft_acceptance_rate": _ratio(stats.get("num_accepted", 0), stats.get("num_drafted", 0)),
        "acceptance_histogram": [a - b for a, b in pairwise(edges)],
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": stats.get("num_accepted", 0),
        "num_draft_tokens": stats.get("num_drafted", 0),
        "num_spec_tokens": num_spec_tokens,
    }


def usage_json(
    prompts: list[int], cached: list[int], num_output: int, stats: Counts, timings: Counts
) -> Counts:
    """prompts, cached: of each prompt, once, however many choices it has."""
    num_accepted, num_drafted = stats.get("num_accepted", 0), stats.get("num_drafted", 0)
    return {
        "prompt_tokens": sum(prompts),
        "completion_tokens": num_output,
        "total_tokens": sum(prompts) + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(cached)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": num_drafted - num_accepted,
        },
        "speculative": speculative(stats),
        "timings": timings,
    }
