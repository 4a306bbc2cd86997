"""What a pass says about each request that speaks in it: a verdict, or why there is none. Nothing is changed by it.

Invariant: a token that the device has picked is the one `accept` would choose from the same logits.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.scheduler import Turn
from paceline.errors import PacelineError
from paceline.types import Draft, Output, Request, Round, Verdict
from paceline.verify.accept import accept, follow
from paceline.verify.sampling import not_finite
from paceline.verify.watch import Watch

Judged = Verdict | PacelineError | None  # None: a part of a prompt, or of a request that was stopped meanwhile


def judge(
    turns: Sequence[Turn], drafts: Sequence[Draft | None], output: Output, watch: Watch | None, has_logits: bool
) -> list[Judged]:  # fmt: skip
    """has_logits: they were not overwritten by a pass that followed."""
    judged: list[Judged] = []
    picked, first = output.picked if watch is None else None, 0  # row of the logits
    for turn, draft in zip(turns, drafts, strict=True):
        if draft is None or turn.request.is_finished:
            judged.append(None)
            first += 0 if draft is None else len(draft.tree.tokens)
            continue
        nodes = slice(first, first + len(draft.tree.tokens))
        verdict = None if picked is None else follow(draft, picked, first)
        if verdict is None and not has_logits:  # what the device did not pick is broken
            judged.append(not_finite(turn.request))
        else:
            judged.append(verdict or _accepted(turn.request, draft, output, nodes, watch))
        first += len(draft.tree.tokens)
    return judged


def judge_round(turns: Sequence[Turn], drafts: Sequence[Draft], said: Round) -> list[Judged]:
    return [
        None if turn.request.is_finished else follow(draft, picked) or not_finite(turn.request)
        for turn, draft, picked in zip(turns, drafts, said.picked, strict=True)
    ]


def _accepted(request: Request, draft: Draft, output: Output, nodes: slice, watch: Watch | None) -> Verdict | PacelineError:
    try:
        picked = output.picked and output.picked[nodes]
        return accept(request, draft, output.logits[nodes], picked=picked, watch=watch)
    except PacelineError as error:
        return error
