"""How an answer went, in numbers: OpenAI's usage, vLLM's per-request speculation metrics, and Paceline's own
statistics.

Invariant: everything is worked out from counts that add up over choices, so that n > 1 and several prompts
need no other rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise, zip_longest
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
    if isinstance(value, Mapping):
        return added((before or {}, value))
    if isinstance(value, list):
        return [a + b for a, b in zip_longest(before or [], value, fillvalue=0)]
    return (before or 0) + value


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
    counts = {name: stats.get(name, 0) for name in ("num_steps", "num_tokens", "num_drafted", "num_accepted")}
    return {
        "tau": _ratio(counts["num_tokens"], counts["num_steps"]),
        "alpha": _ratio(counts["num_accepted"], counts["num_drafted"]),
        "acceptance_per_position": _shares(stats.get("accepted_at", []), stats.get("drafted_at", [])),
        **counts,
        "drafts": stats.get("lengths", {}),
        "by_source": sources,
    }


def spec_decode(stats: Counts, num_spec_tokens: int) -> Counts:
    """The shape of vLLM's per-request metrics. A histogram's place j: steps with a draft that accepted j
    tokens."""
    num_accepted, num_drafted = stats.get("num_accepted", 0), stats.get("num_drafted", 0)
    num_steps = sum(count for length, count in stats.get("lengths", {}).items() if length != "0")
    edges = [num_steps, *stats.get("accepted_at", []), 0]
    return {
        "mean_acceptance_length": 1 + _ratio(num_accepted, num_steps),
        "draft_acceptance_rate": _ratio(num_accepted, num_drafted),
        "acceptance_histogram": [a - b for a, b in pairwise(edges)],
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": num_spec_tokens,
    }


def usage_json(num_prompt: int, num_cached: int, num_output: int, stats: Counts, timings: Counts) -> Counts:
    """num_prompt, num_cached: tokens of each prompt once, however many choices it has."""
    num_accepted, num_drafted = stats.get("num_accepted", 0), stats.get("num_drafted", 0)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": num_drafted - num_accepted,
        },
        "speculative": speculative(stats),
        "timings": timings,
    }
