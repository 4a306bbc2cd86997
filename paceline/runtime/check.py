"""What a pass says about each draft it has checked. Used by the engine's step and by staged drafting.

Invariant: a token that the device has picked is the one that `accept` would choose from the same logits.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.accept import accept, follow
from paceline.core.errors import PacelineError
from paceline.core.sampling import not_finite
from paceline.core.types import Draft, Output, Request, ScheduledRequest, Verdict
from paceline.core.watch import Watch
from paceline.runtime.record import Judged


def judge(
    scheduled: Sequence[ScheduledRequest], drafts: Sequence[Draft | None], output: Output,
    watch: Watch | None = None, has_logits: bool = True,
) -> list[Judged]:  # fmt: skip
    """has_logits: they were not overwritten by a pass that followed."""
    judged: list[Judged] = []
    picked, first = output.picked if watch is None else None, 0  # row of the logits
    for one, draft in zip(scheduled, drafts, strict=True):
        nodes = slice(first, first + (0 if draft is None else len(draft.tree.tokens)))
        if draft is None or one.request.is_finished:
            judged.append(None)
        else:
            verdict = None if picked is None else follow(draft, picked, first)
            if verdict is None and not has_logits:  # what the device did not pick is not finite
                judged.append(not_finite(one.request))
            else:
                judged.append(verdict or _accepted(one.request, draft, output, nodes, watch))
        first = nodes.stop
    return judged


def _accepted(
    request: Request, draft: Draft, output: Output, nodes: slice, watch: Watch | None
) -> Verdict | PacelineError:
    try:
        picked = output.picked and output.picked[nodes]
        return accept(request, draft, output.logits[nodes], picked=picked, watch=watch)
    except PacelineError as error:
        return error
