"""The step: schedule, propose, forward, accept, commit. Plain decoding is a step whose drafts are empty.

The engine knows token ids and nothing of text. `commit` is the only place that changes a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceline.config import EngineConfig
from paceline.engine.scheduler import Scheduler, Turn
from paceline.engine.stats import SpecStats
from paceline.errors import PacelineError, RequestError
from paceline.runtime.batch import segment_of
from paceline.runtime.runner import Runner
from paceline.types import Draft, FinishReason, Needs, Output, Proposer, Request, Seen, Segment, TokenLogprobs, Verdict
from paceline.verify.accept import accept
from paceline.verify.sampling import pick_of
from paceline.verify.tree import Tree


class Emission(NamedTuple):
    """What one request said in one step."""

    request: Request
    tokens: tuple[int, ...]
    num_accepted: int  # the first so many were drafted
    source: str
    logprobs: tuple[TokenLogprobs, ...]


class Engine:
    def __init__(self, runner: Runner, proposer: Proposer | None, config: EngineConfig) -> None:
        self.runner = runner
        self.proposer = proposer
        self.config = config
        self.scheduler = Scheduler(config, runner.kv)
        self.totals = SpecStats()
        self.stats: dict[str, SpecStats] = {}
        self._num_arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def check_fits(self, request: Request) -> None:
        """Refuse what could never run, before anything is queued."""
        limit = self.config.max_model_len
        if request.num_tokens >= limit:
            raise RequestError(
                f"the prompt has {request.num_tokens:,} tokens and the context holds {limit:,}; shorten it to at most {limit - 1:,}"
            )

    def add(self, request: Request) -> None:
        self.check_fits(request)
        self._num_arrivals += 1
        request.arrival = self._num_arrivals
        self.stats[request.id] = SpecStats()
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """Stop a request at any moment; its blocks are free when this returns."""
        if not request.is_finished:
            self._finish(request, FinishReason.ABORT)

    def step(self) -> list[Emission]:
        turns = self.scheduler.schedule()
        if not turns:
            assert not self.has_work, "requests are waiting and none can run"
            return []
        drafts = self._propose(turns)
        segments = [self._segment(turn, drafts.get(turn.request.id)) for turn in turns]
        needs = self.proposer.needs if self.proposer else Needs()
        output = self.runner.forward(segments, hidden_layers=needs.hidden_layers, top_tokens=needs.top_tokens)
        verdicts: dict[str, Verdict] = {}
        emissions: list[Emission] = []
        first = 0  # row of the logits
        for turn in turns:
            request, draft = turn.request, drafts.get(turn.request.id)
            if draft is None:
                self.runner.kv.commit(request.cache, request.cache.num_cached, range(turn.num_new), request.tokens)
                continue
            logits = output.logits[first : first + len(draft.tree.tokens)]
            picked = output.picked and output.picked[first : first + len(logits)]
            first += len(logits)
            try:
                verdict = accept(request, draft, logits, picked=picked)
            except PacelineError as error:
                emissions.append(self._fail(request, error))
                continue
            verdicts[request.id] = verdict
            emissions.append(self._commit(turn, draft, verdict))
        self._observe(turns, drafts, verdicts, output)
        return emissions

    def _segment(self, turn: Turn, draft: Draft | None) -> Segment:
        return segment_of(turn.request, turn.num_new, draft, pick_of(turn.request, draft) if draft is not None else None)

    def _propose(self, turns: Sequence[Turn]) -> dict[str, Draft]:
        """A draft for every request that the target will speak for; empty where there is no budget."""
        speaking = [t for t in turns if t.is_caught_up]
        drafts = {t.request.id: Draft(Tree.chain(t.request.tokens[-1])) for t in speaking}
        drafting = [t for t in speaking if t.num_lookahead_tokens]
        if self.proposer is not None and drafting:
            proposed = self.proposer.propose([t.request for t in drafting], [t.num_lookahead_tokens for t in drafting])
            for turn, draft in zip(drafting, proposed, strict=True):
                assert draft.num_drafted <= turn.num_lookahead_tokens, f"{self.proposer.name} drafted more than its budget"
                drafts[turn.request.id] = draft
        return drafts

    def _commit(self, turn: Turn, draft: Draft, verdict: Verdict) -> Emission:
        """Text grows by what was accepted and the target's own token, up to the first that ends the request."""
        request = turn.request
        root = request.cache.num_cached + turn.num_new - 1
        reason, emitted = None, 0
        for token in verdict.tokens:
            request.tokens.append(token)
            emitted += 1
            reason = self._ending(request, token)
            if reason is not None:
                break
            try:
                if request.constraint is not None:
                    request.constraint.advance(token)
            except PacelineError as error:  # a grammar may prove too complex on the way: this request fails, the others go on
                request.error, reason = error, FinishReason.ERROR
                break
        request.num_rounds += 1
        num_accepted = min(verdict.num_accepted, emitted)
        depth = max(draft.tree.depths())
        for stats in (self.stats[request.id], self.totals):
            stats.record(verdict.num_drafted, depth, num_accepted, emitted, draft.source)
        if reason is None:
            self.runner.kv.commit(request.cache, root, verdict.path, request.tokens)
        else:
            self._finish(request, reason)
        return Emission(request, verdict.tokens[:emitted], num_accepted, draft.source, verdict.logprobs[:emitted])

    def _ending(self, request: Request, token: int) -> FinishReason | None:
        has_text_stop = request.text_stop is not None and request.text_stop.push(token)
        if token in request.stop_ids or has_text_stop:
            return FinishReason.STOP
        if request.num_output >= request.params.max_tokens or request.num_tokens >= self.config.max_model_len:
            return FinishReason.LENGTH
        return None

    def _fail(self, request: Request, error: PacelineError) -> Emission:
        request.error = error
        self._finish(request, FinishReason.ERROR)
        return Emission(request, (), 0, "", ())

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self.scheduler.finish(request, reason)
        if self.proposer is not None:
            self.proposer.release(request)

    def _observe(self, turns: Sequence[Turn], drafts: Mapping[str, Draft], verdicts: Mapping[str, Verdict], output: Output) -> None:
        """Show the drafter what the pass said about each request that goes on."""
        if self.proposer is None:
            return
        seen, first, first_row = [], 0, 0
        for turn in turns:
            request, draft = turn.request, drafts.get(turn.request.id)
            nodes = 0 if draft is None else len(draft.tree.tokens)
            end, end_row = first + nodes, first_row + turn.num_new + max(nodes - 1, 0)
            if not request.is_finished:
                top = output.top[first:end] if output.top is not None and draft is not None else None
                hidden = {layer: x[first_row:end_row] for layer, x in output.hidden.items()}
                seen.append(Seen(request, turn.num_new, draft, verdicts.get(request.id), top, hidden))
            first, first_row = end, end_row
        self.proposer.observe(seen)

    def check(self) -> None:
        """Assert that the books balance: call it at any time between steps."""
        self.runner.kv.pool.check([r.cache.blocks for r in self.scheduler.requests])
