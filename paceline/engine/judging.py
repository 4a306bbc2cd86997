"""What a draft was worth: walks it along what was emitted, and writes down which of its claims came true.

Invariant: a node is judged once, and only if everything before it was right.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.types import Draft, Verdict
from paceline.engine.calibrate import Asked, Tally


def is_right(one: Asked, verdict: Verdict) -> bool:
    """Was the first token of a draft right?"""
    if one.draft.q is not None:
        return verdict.num_accepted > 0
    return (0, verdict.tokens[0]) in zip(one.draft.tree.parents, one.draft.tree.tokens, strict=True)


def follow(one: Asked, node: int, tokens: Sequence[int]) -> int:
    """Walk a draft along what was emitted, judging each child on the way; the node reached, 0 if it was wrong
    or has ended.

    A node that was not checked is judged too: had it been there, it would have been accepted if and only if
    its token was emitted.
    """
    observe, note, drafted, parents = (
        one.record.calibration.observe,
        one.tally.note,
        one.draft.tree.tokens,
        one.draft.tree.parents,
    )
    for token in tokens:
        reached = 0
        for child in range(node + 1, len(parents)):
            if parents[child] == node:
                is_hit = drafted[child] == token
                note(observe(one.cells[child], one.claimed[child], is_hit), is_hit)
                if is_hit:
                    reached = child
        if not reached:
            return 0
        node = reached
    return node if node in parents else 0


def judge_sampled(one: Asked, checked: Draft, verdict: Verdict) -> None:
    """Of a sampled draft only what was checked can be judged: the nodes on the accepted path, and the
    children beside it.
    """
    children, place = checked.tree.children(), 0  # where the path is in the draft before it was cut
    for depth, node in enumerate(verdict.path):
        following = verdict.path[depth + 1] if depth + 1 < len(verdict.path) else -1
        reached = 0
        for child, original in zip(children[node], one.children_of(place), strict=False):
            is_hit = child == following
            one.tally.note(
                one.record.calibration.observe(one.cells[original], one.claimed[original], is_hit), is_hit
            )
            reached = original if is_hit else reached
        place = reached


def learn(
    tallies: Sequence[Tally], asked: Sequence[Asked], checked: Draft | None, verdict: Verdict
) -> tuple[float, bool]:
    """What a verdict says about the drafts of a request, and about those before that have been right so far
    (their shadows). -> seconds of probes to give back, since they were right, and whether there is a shadow
    now."""
    refund = 0.0
    for tally in tallies:
        if tally.shadow is not None:
            tally.shadow_node = follow(tally.shadow, tally.shadow_node, verdict.tokens)
            if not tally.shadow_node:
                tally.shadow = None
    for one in asked:
        tally = one.tally
        if one.draft.q is not None:
            assert checked is not None, "the first nodes of a sampled draft are always checked"
            judge_sampled(one, checked, verdict)
        else:
            node = follow(one, 0, verdict.tokens)
            if node and tally.shadow is None:
                tally.shadow, tally.shadow_node = one, node
        if not one.record.is_free and is_right(one, verdict):
            refund += tally.probe
    return refund, any(tally.shadow is not None for tally in tallies)
