"""What is under way on the device between two calls of `step`: passes that the host has drafted for, or a
burst.

Both yield one StepRecord for each pass, in order, and may send further passes before the last has landed.
Invariant: whatever was sent of a request lands before anything else of it is scheduled; one that was stopped
meanwhile has no part in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from time import perf_counter
from typing import NamedTuple

from paceline.core.sampling import not_finite
from paceline.core.tree import Tree
from paceline.core.types import Answers, Burst, Cached, Draft, Output, Request, Segment
from paceline.core.watch import Watch
from paceline.drafters.base import Drafter
from paceline.engine.scheduler import Scheduler
from paceline.heads.rows import BurstBackend, TreeShape
from paceline.runtime.executor import LocalExecutor
from paceline.runtime.record import Drafting, Scheduled, StepRecord, judge, longest, scores_in

AHEAD = 2  # passes under way at a time, so that a device never waits for the host
GOING = 0.5  # of a burst's requests: with fewer left in it, another begins


@lru_cache(maxsize=4096)
def rooted(token: int) -> Draft:
    """Nothing drafted. A few tokens make up most of a text, so most of these are there already."""
    return Draft(Tree.chain(token))


class Pass(NamedTuple):
    scheduled: Scheduled
    drafts: Sequence[Draft | None] | None  # None: of roots alone, which were not known when it was sent
    output: Output
    sent: float  # when


@dataclass(slots=True)
class PendingPasses:
    """A pass and, where a device runs by itself, plain passes that read what it picks before the host has
    seen it."""

    executor: LocalExecutor
    scheduler: Scheduler
    under_way: deque[Pass]  # one, to begin with
    plain_steps: int  # that may follow each other, the first included: no draft is wanted in between
    layers: Sequence[int] = ()  # whose hidden states those keep
    answers: Answers = field(default_factory=dict)
    drafting: Drafting = field(default_factory=dict)
    _num_sent: int = 1

    @property
    def requests(self) -> list[Request]:
        return [one.request for each in self.under_way for one in each.scheduled]

    @property
    def is_under_way(self) -> bool:
        """There is more to land, and a request that wants it."""
        return any(not one.request.is_finished for each in self.under_way for one in each.scheduled)

    def extend(self) -> None:
        """Send the plain pass after the last, if that is plain too."""
        last, decoder = self.under_way[-1], self.executor.decoder
        if len(self.under_way) >= AHEAD or self._num_sent >= self.plain_steps or not _is_plain(last):
            return
        if last.output.picked is not decoder.latest:  # another model or a burst has used the device meanwhile
            return
        going = self.scheduler.follow(last.scheduled)
        if not going:
            return
        segments = []
        for i, one in going:
            cache = one.request.cache
            # Of AHEAD passes only one can have landed when this one is sent: the text is a token further.
            ahead = Cached(cache.blocks, cache.num_cached + 1)
            segments.append(Segment([-1 - i], ahead, None, 1, one.request.pick))
        sent = perf_counter()
        output = self.executor.forward(segments, hidden_layers=self.layers)
        self.under_way.append(Pass([one for _, one in going], None, output, sent))
        self._num_sent += 1

    def next(self, watch: Watch | None) -> StepRecord:
        """The first that has not landed; waits for the device."""
        one, is_first = self.under_way.popleft(), self._num_sent == 1
        drafts = one.drafts or [rooted(each.request.tokens[-1]) for each in one.scheduled]
        if one.output.picked is not None:
            len(one.output.picked)  # waits
        landed, has_more = perf_counter(), bool(self.under_way)
        judged = judge(one.scheduled, drafts, one.output, watch, has_logits=not has_more)
        record = StepRecord(
            one.scheduled, drafts, judged, self.answers, self.drafting, one.output.hidden, one.output.top
        )
        record.scores = scores_in(one.scheduled, drafts, one.output)
        record.has_more, record.is_plain = has_more, self.plain_steps > 0
        if is_first and not has_more:
            record.pass_seconds = landed - one.sent
        self.answers, self.drafting = {}, {}
        return record


def _is_plain(one: Pass) -> bool:
    """Every request has one row, and the device picks all their tokens."""
    if one.drafts is None or one.output.picked is None:
        return one.drafts is None
    pairs = zip(one.scheduled, one.drafts, strict=True)
    return all(draft is not None and len(draft.tree.tokens) == each.num_new == 1 for each, draft in pairs)


class BurstParts(NamedTuple):
    """What drafts in a burst."""

    backend: BurstBackend | None
    head: int | None  # the drafter whose head drafts in it
    matcher: int | None  # the drafter that runs no model
    length: int  # tokens of the longest path of a draft
    tree: TreeShape | None = None  # what the head drafts; None: chains

    @property
    def nodes(self) -> int:
        """That are checked of a draft, at most."""
        return self.length if self.tree is None else self.tree.nodes


@dataclass(slots=True)
class PendingBurst:
    """Rounds of draft, check and the next draft that a device runs by itself."""

    burst: Burst
    scheduled: Scheduled
    drafters: Sequence[Drafter]  # of the policy
    parts: BurstParts
    goes_on: Callable[[PendingBurst], bool]  # is another round better than whatever else could be done?
    num_landed: int = 0

    @property
    def requests(self) -> list[Request]:
        return [one.request for one in self.scheduled]

    @property
    def is_under_way(self) -> bool:
        is_wanted = not all(one.request.is_finished for one in self.scheduled)
        return is_wanted and self.num_landed < len(self.burst)

    def extend(self) -> None:
        """Send another round if most requests will probably have more to say after those under way: half of
        each draft is taken to be right."""
        num_ahead = len(self.burst) - self.num_landed
        if num_ahead >= AHEAD or not self.burst.num_left:
            return
        expected = num_ahead * (self.parts.length + 1) / 2
        going = [one.request for one in self.scheduled if not one.request.is_finished]
        wanting = len([r for r in going if r.max_tokens + r.num_prompt - len(r.tokens) > expected])
        if wanting >= GOING * len(self.scheduled) and self.goes_on(self):
            self.burst.more()

    def next(self, watch: Watch | None) -> StepRecord:
        head, matcher, requests = self.parts.head, self.parts.matcher, [one.request for one in self.scheduled]
        number, started = self.num_landed, perf_counter()
        said = self.burst.round(number, [request.tokens[-1] for request in requests])  # waits
        for drafter in (d for n, d in enumerate(self.drafters) if n in (head, matcher)):
            drafter.end_round(requests, said.num_read)
        self.num_landed += 1
        judged = [
            None if request.is_finished else verdict or not_finite(request)
            for request, verdict in zip(requests, said.verdicts, strict=True)
        ]
        numbers = {self.drafters[n].name: n for n in (head, matcher) if n is not None}
        # What a tree's likeliest path was worth says how surely the head drafts a chain, and it a tree.
        paths = [d.cut(d.tree.first_path()) if self.parts.tree else d for d in said.drafts]
        answers = {i: [(numbers[d.source], d)] for i, d in enumerate(paths) if d.num_drafted}
        if said.answers:
            answers = {0: [(numbers[source], draft) for source, draft in said.answers]}
        record = StepRecord(self.scheduled, said.drafts, judged, answers, is_in_place=True)
        record.tree = self.parts.tree
        # What the first round takes to begin says nothing about drafting.
        if head is not None and said.num_read != 0 and (number or said.seconds is not None):
            is_timed = said.seconds is not None
            length = longest(answers, head) if is_timed else self.parts.nodes
            record.drafting = {head: (length, said.head_seconds if is_timed else None)}
        record.hidden, record.is_plain = self.burst.hidden(number), head is None and matcher is None
        record.has_more = self.num_landed < len(self.burst)
        record.is_start = number == 0 and said.seconds is None
        if said.seconds is not None:
            record.seconds = said.seconds + perf_counter() - started
        return record
