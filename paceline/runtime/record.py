"""What a pass says about each draft it has checked, and what a step drafted, accepted and took: the same from
every driver to policy and drafters.

Invariant: a token that the device has picked is the one that `accept` would choose from the same logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.accept import accept, follow
from paceline.core.errors import PacelineError
from paceline.core.sampling import logprobs_of, not_finite
from paceline.core.types import Answers, Draft, Output, ScheduledRequest, Seen, TokenLogprobs, Verdict
from paceline.core.watch import Watch

if TYPE_CHECKING:
    import torch

    from paceline.heads.rows import TreeShape

Scheduled = Sequence[ScheduledRequest]
# By drafter: nodes of its longest draft, seconds (None: within the pass's).
Drafting = dict[int, tuple[int, float | None]]
# None: a part of a prompt, or of a request that was stopped meanwhile
Judged = Verdict | PacelineError | None


def longest(answers: Answers, number: int) -> int:
    """Nodes of a drafter's longest draft."""
    return max((d.num_drafted for drafts in answers.values() for n, d in drafts if n == number), default=0)


@dataclass(slots=True)
class StepRecord:
    """Of one pass, or one round of a burst. Requests are named by their index among the scheduled ones."""

    scheduled: Scheduled
    drafts: Sequence[Draft | None]  # what was checked, maybe only a root; None: a part of a prompt
    judged: Sequence[Judged]
    answers: Answers = field(default_factory=dict)  # all that was drafted, also what was not checked
    drafting: Drafting = field(default_factory=dict)
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)  # layer -> [rows, hidden]
    top: torch.Tensor | None = None  # [L, k]: the most likely tokens at each node
    has_more: bool = False  # a pass that goes on from this one is under way, and writes to reserved slots
    is_start: bool = False  # the first of a burst that goes on: getting it ready took longer than a round
    is_in_place: bool = False  # the device has moved the accepted rows' K/V to where the text continues
    tree: TreeShape | None = None  # that a head has drafted in a burst; None: a chain
    is_plain: bool = False  # nothing was asked for, by choice: plain decoding's own time
    pass_seconds: float | None = None  # of the pass alone; None where it cannot be told
    seconds: float | None = None  # from the commit before to this one; None where that is not known
    verdicts: dict[int, Verdict] = field(default_factory=dict)  # what was committed
    scores: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # of tokens of prompts

    def seen(self) -> list[Seen]:
        """What drafters may learn, of each request that goes on. Call after the commit."""
        found, first, first_row = [], 0, 0
        for index, (one, draft) in enumerate(zip(self.scheduled, self.drafts, strict=True)):
            nodes = 0 if draft is None else len(draft.tree.tokens)
            first += one.num_scored
            end, end_row = first + nodes, first_row + one.num_new + max(nodes - 1, 0)
            if not one.request.is_finished:
                top = self.top[first:end] if self.top is not None and draft is not None else None
                hidden = self.hidden
                if len(self.scheduled) > 1 and hidden:
                    hidden = {layer: rows[first_row:end_row] for layer, rows in hidden.items()}
                found.append(Seen(one.request, one.num_new, draft, self.verdicts.get(index), top, hidden))
            first, first_row = end, end_row
        return found


def judge(
    scheduled: Scheduled, drafts: Sequence[Draft | None], output: Output,
    watch: Watch | None = None, has_logits: bool = True,
) -> list[Judged]:  # fmt: skip
    """has_logits: they were not overwritten by a pass that followed. A stage does not send them either where
    picks are enough."""
    judged: list[Judged] = []
    has_logits = has_logits and len(output.logits) > 0
    picked, first = output.picked if watch is None or not has_logits else None, 0  # row of the logits
    for one, draft in zip(scheduled, drafts, strict=True):
        first += one.num_scored
        nodes = slice(first, first + (0 if draft is None else len(draft.tree.tokens)))
        found: Judged = None
        if draft is not None and not one.request.is_finished:
            found = None if picked is None else follow(draft, picked, first)
            if found is None and not has_logits:  # what the device did not pick is not finite
                found = not_finite(one.request)
            elif found is None:
                chosen = output.picked and output.picked[nodes]
                try:
                    found = accept(one.request, draft, output.logits[nodes], picked=chosen, watch=watch)
                except PacelineError as error:
                    found = error
        judged.append(found)
        first = nodes.stop
    return judged


def scores_in(
    scheduled: Scheduled, drafts: Sequence[Draft | None], output: Output
) -> dict[int, list[TokenLogprobs]]:
    """Log-probabilities of the prompts' tokens that a pass has scored, by request."""
    found: dict[int, list[TokenLogprobs]] = {}
    if not any(one.num_scored for one in scheduled):
        return found
    first = 0  # row of the logits
    for index, (one, draft) in enumerate(zip(scheduled, drafts, strict=True)):
        request, count = one.request, one.num_scored
        if count and not request.is_finished:
            place, num_top = len(request.scores) + 1, request.params.prompt_logprobs or 0
            tokens, rows = request.tokens[place : place + count], output.logits[first : first + count]
            # On the host, as those of an answer: a device would round their logarithms otherwise.
            pairs = zip(rows, tokens, strict=True)
            found[index] = [logprobs_of(row.cpu(), token, num_top) for row, token in pairs]
        first += count + (0 if draft is None else len(draft.tree.tokens))
    return found
