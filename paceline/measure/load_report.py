"""From records of requests to figures: pure arithmetic, no clock and no network.

Latencies are of requests that were answered; throughput counts their tokens over the time from the first
request due to the last end. Goodput counts only requests that met every goal. Names are those of vLLM's
benchmark: ttft, tpot, itl, e2el, in milliseconds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from paceline.core.errors import ConfigError
from paceline.measure.load import Level, Record

LATENCIES = ("ttft", "tpot", "itl", "e2el")
GOALS = ("ttft", "tpot", "e2el")
Goals = dict[str, float]  # name -> milliseconds
COUNTED = "drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos"
LINE = re.compile(rf"^\w+:spec_decode_num_({COUNTED})(?:_total)?(\{{[^}}]*\}})? ([0-9.e+]+)$", re.M)
POSITION = re.compile(r'position="(\d+)"')
Counters = dict[str, float]


def goals_of(text: str) -> Goals:
    """ "ttft:500,tpot:50" as milliseconds; "none" is no goal."""
    goals: Goals = {}
    for part in text.split(",") if text != "none" else ():
        name, _, value = part.strip().partition(":")
        try:
            goals[name] = float(value)
        except ValueError:
            goals[name] = -1.0
        if name not in GOALS or not goals[name] > 0:
            form = "write ttft:500,tpot:50,e2el:5000 (milliseconds, any of them) or none"
            raise ConfigError(f"--goodput holds {part.strip()!r}; {form}")
    return goals


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two values on either side, in proportion."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def latency_of(record: Record, name: str) -> list[float]:
    """In milliseconds: one value, none where it has no meaning, several for gaps between pieces of text."""
    if name == "itl":
        return [1000 * (b - a) for a, b in pairwise(record.arrivals)]
    seconds = {"ttft": record.first_s, "e2el": record.total_s, "tpot": record.token_s}[name]
    return [] if seconds is None else [1000 * seconds]


def is_good(record: Record, goals: Goals) -> bool:
    return record.error is None and all(
        value <= goals[name] for name in goals for value in latency_of(record, name)
    )


def level_report(
    level: Level, records: Sequence[Record], num_asked: int, percents: Sequence[float], goals: Goals
) -> dict[str, Any]:
    answered = [record for record in records if record.error is None]
    failures = Counter(record.error for record in records if record.error is not None)
    began = min((record.due for record in records), default=0.0)
    seconds = max((record.end for record in records), default=0.0) - began
    num_good = sum(is_good(record, goals) for record in answered)
    prompts, outputs = (sum(getattr(r, name) for r in answered) for name in ("num_prompt", "num_tokens"))
    lag = 1000 * max((record.sent - record.due for record in records), default=0.0)
    return {
        "load": str(level),
        "request_rate": None if level.rate == float("inf") else level.rate,
        "max_concurrency": level.concurrency,
        "asked": num_asked,
        "completed": len(answered),
        "failed": len(records) - len(answered),
        "given_up": num_asked - len(records),
        "errors": dict(failures.most_common()),
        "duration_s": round(seconds, 4),
        "request_throughput": _rate(len(answered), seconds),
        "request_goodput": _rate(num_good, seconds) if goals else None,
        "good_share": round(num_good / len(records), 4) if goals and records else None,
        "output_throughput": _rate(outputs, seconds),
        "total_token_throughput": _rate(outputs + prompts, seconds),
        "output_tokens": outputs,
        "prompt_tokens": prompts,
        "cached_prompt_tokens": sum(record.num_cached for record in answered),
        "tokens_counted_by": "server" if all(record.is_counted for record in answered) else "pieces of text",
        "peak_in_flight": peak_in_flight(records),
        "client_lag_ms": round(lag, 3),
        **{f"{name}_ms": _spread(answered, name, percents) for name in LATENCIES},
    }


def record_json(record: Record) -> dict[str, Any]:
    """Without the text: it may be a user's own."""
    times = {"due_s": round(record.due, 6), "sent_s": round(record.sent, 6)}
    for name in GOALS:
        times[f"{name}_ms"] = next((round(value, 3) for value in latency_of(record, name)), None)
    counts = {"prompt_tokens": record.num_prompt, "output_tokens": record.num_tokens}
    return {"prompt": record.prompt, **times, **counts, "finish_reason": record.finish, "error": record.error}


def peak_in_flight(records: Sequence[Record]) -> int:
    """Most requests sent and not yet ended at one time."""
    changes = sorted([(record.sent, 1) for record in records] + [(record.end, -1) for record in records])
    peak = now = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 4) if seconds > 0 else 0.0


def _spread(records: Sequence[Record], name: str, percents: Sequence[float]) -> dict[str, float] | None:
    values = [value for record in records for value in latency_of(record, name)]
    if not values:
        return None
    found = {f"p{percent:g}": round(percentile(values, percent), 3) for percent in percents}
    return {"mean": round(fmean(values), 3), **found}


def counters_of(metrics: str) -> Counters:
    """Speculation as a server's own counters tell it; vLLM and Paceline write the same names. Empty where
    there are none: its speculation is then unknown, not zero.
    """
    found: Counters = {}
    for name, labels, value in LINE.findall(metrics):
        position = POSITION.search(labels)
        key = f"{name}:{position[1]}" if position else name
        found[key] = found.get(key, 0.0) + float(value)
    return found


def difference(before: Counters, after: Counters) -> dict[str, Any] | None:
    """What was drafted and accepted in between; None where the server does not count."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    if "drafts" not in grown:
        return None
    drafts, drafted, accepted = (grown.get(n, 0.0) for n in ("drafts", "draft_tokens", "accepted_tokens"))
    places = sorted(int(name.partition(":")[2]) for name in grown if ":" in name)
    by_place = [grown[f"accepted_tokens_per_pos:{i}"] for i in places]
    return {
        "num_drafts": int(drafts),
        "num_draft_tokens": int(drafted),
        "num_accepted_tokens": int(accepted),
        "acceptance_length": round(1 + accepted / drafts, 4) if drafts else None,
        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
        "per_position_acceptance_rates": [round(count / drafts, 4) for count in by_place if drafts],
    }
