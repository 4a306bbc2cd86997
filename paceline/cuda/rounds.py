"""What the host reads of a round: the numbers that advance.py and walk.py have written down, as drafts and
verdicts. Invariant: a verdict is the one that the device has gone on from.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from paceline.core.accept import follow
from paceline.core.tree import Tree
from paceline.core.types import Draft, Round, Verdict


@cache
def _path(count: int) -> tuple[int, ...]:
    """Of a chain, by its accepted nodes."""
    return tuple(range(count))


def chains_of(said: np.ndarray, roots: Sequence[int], name: str) -> Round:
    """said [requests, 3 * steps + 1]"""
    steps = said.shape[1] // 3
    drafted, chances, picked = np.split(said, (steps, 2 * steps), 1)
    reach = np.ascontiguousarray(chances).view(np.float32).cumprod(1).tolist()
    # What follows a token that is not finite is an error only if the text comes so far.
    is_kept = (drafted == picked[:, :-1]) & (picked[:, 1:] >= 0)
    counts = (1 + is_kept.cumprod(1).sum(1)).tolist()
    drafts = [
        Draft(Tree.chain(root, tokens), name, None, (1.0, *paths))
        for root, tokens, paths in zip(roots, drafted.tolist(), reach, strict=True)
    ]
    verdicts = [
        Verdict(_path(count), tuple(tokens[:count]), steps) if tokens[0] >= 0 else None
        for count, tokens in zip(counts, picked.tolist(), strict=True)
    ]
    return Round(drafts, verdicts)


def trees_of(said: np.ndarray, roots: Sequence[int], name: str) -> Round:
    """said [requests, 4 * nodes + 1]"""
    nodes = said.shape[1] // 4
    tokens, parents, reach, picked = np.split(said, (nodes, 2 * nodes, 3 * nodes), 1)
    chances = np.exp(np.ascontiguousarray(reach).view(np.float32)).tolist()
    drafts = [
        Draft(Tree.known((root, *tokens), (-1, *parents)), name, None, (1.0, *paths))
        for root, tokens, parents, paths in zip(
            roots, tokens.tolist(), parents.tolist(), chances, strict=True
        )
    ]
    return Round(drafts, [follow(*each) for each in zip(drafts, picked.tolist(), strict=True)])
