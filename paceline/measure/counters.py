"""Speculation as a server's own counters tell it: /metrics before and after a load. vLLM and Paceline write
the same names.

Invariant: a server without such counters is measured all the same; its speculation is then unknown, not zero.
"""

from __future__ import annotations

import re
from typing import Any

from paceline.measure.endpoint import Endpoint, Refused

LINE = re.compile(
    r"^\w+:spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?(\{[^}]*\})? ([0-9.e+]+)$",
    re.M,
)
POSITION = re.compile(r'position="(\d+)"')
Counters = dict[str, float]


async def read(server: Endpoint) -> Counters:
    """Empty where there are none."""
    try:
        text = (await server.get("/metrics")).decode("utf-8", "replace")
    except Refused:
        return {}
    found: Counters = {}
    for name, labels, value in LINE.findall(text):
        position = POSITION.search(labels)
        key = f"{name}:{position[1]}" if position else name
        found[key] = found.get(key, 0.0) + float(value)
    return found


def difference(before: Counters, after: Counters) -> dict[str, Any] | None:
    """What was drafted and accepted in between; None where the server does not count."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    if "drafts" not in grown:
        return None
    drafts, drafted, accepted = (
        grown.get(name, 0.0) for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    places = sorted(
        int(name.partition(":")[2]) for name in grown if name.startswith("accepted_tokens_per_pos:")
    )
    return {
        "num_drafts": int(drafts),
        "num_draft_tokens": int(drafted),
        "num_accepted_tokens": int(accepted),
        "acceptance_length": round(1 + accepted / drafts, 4) if drafts else None,
        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
        "per_position_acceptance_rates": [
            round(grown[f"accepted_tokens_per_pos:{i}"] / drafts, 4) for i in places
        ]
        if drafts
        else [],
    }
