"""What a pass says about each request that speaks in it: a verdict, or why there is none; and what it shows
to drafters. Changes nothing.

Invariant: a token that the device has picked is the one `accept` would choose from the same logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from paceline.core.accept import accept, follow
from paceline.core.errors import PacelineError
from paceline.core.sampling import not_finite
from paceline.core.types import Draft, Output, Request, Round, Seen, Verdict
from paceline.core.watch import Watch
from paceline.engine.scheduler import Turn

if TYPE_CHECKING:
    import torch

Judged = (
    Verdict | PacelineError | None
)  # None: a part of a prompt, or of a request that was stopped meanwhile


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


def _accepted(
    request: Request, draft: Draft, output: Output, nodes: slice, watch: Watch | None
) -> Verdict | PacelineError:
    try:
        picked = output.picked and output.picked[nodes]
        return accept(request, draft, output.logits[nodes], picked=picked, watch=watch)
    except PacelineError as error:
        return error


def shown(
    turns: Sequence[Turn], drafts: Sequence[Draft | None], verdicts: Mapping[int, Verdict], hidden: Mapping[int, torch.Tensor],
    likely: torch.Tensor | None,
) -> list[Seen]:  # fmt: skip
    """Of each request that goes on, after the commit. likely: tokens, as an Output's `top`."""
    seen, first, first_row = [], 0, 0
    for index, (turn, draft) in enumerate(zip(turns, drafts, strict=True)):
        nodes = 0 if draft is None else len(draft.tree.tokens)
        end, end_row = first + nodes, first_row + turn.num_new + max(nodes - 1, 0)
        if not turn.request.is_finished:
            top = likely[first:end] if likely is not None and draft is not None else None
            rows = (
                {layer: x[first_row:end_row] for layer, x in hidden.items()}
                if len(turns) > 1 and hidden
                else hidden
            )
            seen.append(Seen(turn.request, turn.num_new, draft, verdicts.get(index), top, rows))
        first, first_row = end, end_row
    return seen
