"""What a step changes: texts grow by what was accepted, caches keep its rows, requests end.

Invariant: nothing else changes a request but the scheduler, which gives and takes its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.errors import PacelineError
from paceline.core.types import Draft, FinishReason, Request, Status, TokenLogprobs, Verdict
from paceline.engine.stats import SpecStats
from paceline.runtime.kv_cache import KvCache
from paceline.runtime.record import StepRecord


class Emission(NamedTuple):
    """What one request said in one step."""

    request: Request
    tokens: tuple[int, ...]
    num_accepted: int  # of them, from the first on, that were drafted
    sources: tuple[str, ...]  # the drafter of each of those
    logprobs: tuple[TokenLogprobs, ...]
    draft: Draft | None = None  # that was checked
    path: tuple[int, ...] = (0,)  # of its nodes: the root and those accepted


@dataclass(slots=True)
class Commits:
    kv: KvCache
    max_model_len: int
    totals: SpecStats
    stats: Mapping[str, SpecStats]  # by request
    finish: Callable[[Request, FinishReason], None]

    def land(self, record: StepRecord) -> list[Emission]:
        """What each request emitted; the verdicts that took effect are noted in the record."""
        emissions: list[Emission] = []
        num_plain = 0
        for index, scores in record.scores.items():
            record.scheduled[index].request.scores += scores
        each = zip(record.scheduled, record.drafts, record.judged, strict=True)
        for index, (one, draft, verdict) in enumerate(each):
            request = one.request
            if request.status is Status.FINISHED:  # stopped while the pass ran
                continue
            if isinstance(verdict, PacelineError):
                request.error = verdict
                self.finish(request, FinishReason.ERROR)
                emissions.append(Emission(request, (), 0, (), ()))
            elif draft is None or verdict is None:
                last = request.cache.num_cached + one.num_new - 1  # all before it were known, too
                self.kv.commit(request.cache, last, (0,), request.tokens)
            else:
                record.verdicts[index] = verdict
                num_plain += len(draft.tree.tokens) == 1
                emissions.append(self._commit(request, draft, verdict, record))
        if num_plain:
            self.totals.record_plain(num_plain)
        return emissions

    def _commit(self, request: Request, draft: Draft, verdict: Verdict, record: StepRecord) -> Emission:
        """The text grows by what was accepted and the target's own token, up to the first that ends it."""
        root, stats, tokens = len(request.tokens) - 1, self.stats[request.id], verdict.tokens
        path, logprobs, reason = verdict.path, verdict.logprobs, None
        if self._can_end(request, tokens):
            tokens, reason = self._until_end(request, tokens)
            path, logprobs = path[: 1 + len(tokens)], logprobs[: len(tokens)]
        else:  # nearly always: all at once, since this is most of the host's work where requests are many
            request.tokens += tokens
            if request.text_stop is not None:
                request.text_stop.extend(tokens)
        request.num_rounds += 1
        accepted = path[1:]
        if len(draft.tree.tokens) == 1:
            stats.record_plain()
        else:
            stats.record(draft, accepted, len(tokens), self.totals)
        rows = range(len(path)) if record.is_in_place else path
        self.kv.commit(request.cache, root, rows, request.tokens, record.has_more)  # of one that ends, too
        if reason is not None:
            self.finish(request, reason)
        return Emission(request, tokens, len(accepted), draft.sources_of(accepted), logprobs, draft, path)

    def _can_end(self, request: Request, tokens: Sequence[int]) -> bool:
        """Whether one of these tokens may be the last."""
        limit, text = min(request.num_prompt + request.max_tokens, self.max_model_len), request.text_stop
        if len(request.tokens) + len(tokens) >= limit or not request.stop_ids.isdisjoint(tokens):
            return True
        return request.constraint is not None or (text is not None and text.has_stops)

    def _until_end(
        self, request: Request, tokens: tuple[int, ...]
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """The text grows by these tokens, up to the first that ends it; which they are, and why."""
        for number, token in enumerate(tokens, 1):
            request.tokens.append(token)
            is_stop = request.text_stop is not None and request.text_stop.push(token)
            reason = FinishReason.STOP if is_stop else self._ending(request, token)
            if reason is not None:
                return tokens[:number], reason
        return tokens, None

    def _ending(self, request: Request, token: int) -> FinishReason | None:
        if token in request.stop_ids:
            return FinishReason.STOP
        num_tokens = len(request.tokens)
        if num_tokens - request.num_prompt >= request.max_tokens or num_tokens >= self.max_model_len:
            return FinishReason.LENGTH
        if request.constraint is not None:
            try:
                request.constraint.advance(token)
            except PacelineError as error:  # it may prove too complex on the way: only this request fails
                request.error = error
                return FinishReason.ERROR
        return None
