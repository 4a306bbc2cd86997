"""A drafter whose guesses are first checked by a middle model: n-gram -> early exit -> target, or deeper, one
stage inside another.

It runs the check that the engine runs (propose, forward, accept) against the middle model until it has a
chain of K tokens. Each stage is exact with respect to the one above: what it emits are the middle model's own
choices or, without a seed, samples of its distribution, which is recorded as q. Invariants: requests are only
read, stages work on copies; a stage's chances share nothing with the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from paceline.core.batch import segment_of
from paceline.core.errors import GrammarError
from paceline.core.noise import child_seed
from paceline.core.options import require
from paceline.core.sampling import probabilities, processed
from paceline.core.tree import Tree
from paceline.core.types import Draft, Request, ScheduledRequest, Verdict
from paceline.drafters import registry
from paceline.drafters.base import Drafter, DrafterConfig, DrafterContext, chain, empty, fit_vocabulary
from paceline.drafters.draft_model import ModelDrafter
from paceline.drafters.reading import GrammarWalk, Reading, likeliest
from paceline.runtime.record import StepRecord, judge

STAGES = 2**32  # seeds from here on belong to stages: a request has fewer completions


@dataclass(frozen=True, slots=True)
class StagedConfig(DrafterConfig):
    # the model that checks, and what guesses for it: staged again, if you like
    middle: Mapping[str, Any] = field(default_factory=lambda: {"method": "early_exit"})
    drafter: Mapping[str, Any] = field(default_factory=lambda: {"method": "ngram"})

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        for name in ("middle", "drafter"):
            value, remedy = getattr(self, name), "give a dict such as {'method': 'early_exit'}"
            require(isinstance(value, Mapping), name, value, remedy)
        registry.parse(self.drafter)
        kind, _ = registry.parse(self.middle)
        remedy = "choose a method that runs a model: early_exit, draft_model or quantized"
        require(issubclass(kind, ModelDrafter), "middle", dict(self.middle), remedy)


@dataclass(slots=True)
class _Stage:
    """One request as the middle model reads it."""

    request: Request
    reading: Reading
    view: Request  # a copy whose text goes on with what the middle model accepted
    grammar: GrammarWalk
    q: list[torch.Tensor] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    has_ended: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.view.tokens[self.request.num_tokens :]

    @property
    def num_left(self) -> int:
        return 0 if self.has_ended else self.reading.budget - len(self.chances)


class Staged(Drafter):
    name = "staged"
    can_rewind = True
    Config = StagedConfig

    def __init__(self, config: StagedConfig, context: DrafterContext) -> None:
        super().__init__(config)
        middle = registry.create(*registry.parse(config.middle), context)
        assert isinstance(middle, ModelDrafter)
        self.middle = middle
        below = replace(context, executor=self.middle.executor, vocab_size=self.middle.vocab_size)
        self.drafter = registry.create(*registry.parse(config.drafter), below)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        stages = [self._begin(reading) for reading in self.middle.open(requests, budgets)]
        try:
            while going := [s for s in stages if s.num_left]:
                self._step(going)
        finally:
            for stage in stages:
                stage.grammar.go([])
        for s in stages:
            self.middle.close(s.reading, s.view.tokens[: s.reading.cache.num_cached])
        drafts = {id(s.request): chain(s.request, s.tokens, self.name, s.q, s.chances) for s in stages}
        return [drafts.get(id(r)) or empty(r, self.name) for r in requests]

    def _begin(self, reading: Reading) -> _Stage:
        request = reading.request
        seed = child_seed(request.seed, STAGES + request.num_rounds) if request.is_sampled else request.seed
        view = replace(request, tokens=list(request.tokens), cache=reading.cache, seed=seed, num_rounds=0)
        return _Stage(request, reading, view, GrammarWalk(request.constraint))

    def _step(self, stages: Sequence[_Stage]) -> None:
        """The engine's own check, with the middle model for a target; what it accepts goes to the copies."""
        drafts, needs = self._drafts(stages), self.drafter.needs
        scheduled = [ScheduledRequest(stage.view, len(stage.reading.unread)) for stage in stages]
        pairs = zip(scheduled, drafts, strict=True)
        size = self.middle.executor.config.vocab_size
        segments = [segment_of(one, draft)._replace(pick=None) for one, draft in pairs]
        # A token that the middle model does not know has no chance there: what is read instead is never used.
        segments = [s._replace(tokens=[t if t < size else 0 for t in s.tokens]) for s in segments]
        wanted: dict[str, Any] = {"hidden_layers": needs.hidden_layers, "top_tokens": needs.top_tokens}
        output = self.middle.executor.forward(segments, num_layers=self.middle.num_layers, **wanted)
        output = output._replace(logits=fit_vocabulary(output.logits, self.middle.vocab_size), picked=None)
        judged = judge(scheduled, drafts, output)
        record = StepRecord(scheduled, drafts, judged, hidden=output.hidden, top=output.top)
        first = 0
        for index, (stage, draft) in enumerate(zip(stages, drafts, strict=True)):
            verdict = judged[index]
            if isinstance(verdict, Verdict) and self._take(stage, verdict, output.logits[first:]):
                record.verdicts[index] = verdict
            else:  # the middle model has nothing to say that the request allows; the target may
                stage.has_ended = True
            first += len(draft.tree.tokens)
        self.drafter.observe([seen for seen in record.seen() if seen.verdict is not None])

    def _drafts(self, stages: Sequence[_Stage]) -> list[Draft]:
        """The middle model adds a token of its own, so one place is kept for it."""
        most = self.drafter.config.num_speculative_tokens
        # one that keeps an index of the text is asked before the text goes on with guesses, and not again
        drafting = [s for s in stages if s.num_left > 1 and (self.drafter.can_rewind or not s.chances)]
        limits = [min(s.num_left - 1, most) for s in drafting]
        proposed = self.drafter.propose([s.view for s in drafting], limits) if drafting else []
        by_stage = {id(s): draft for s, draft in zip(drafting, proposed, strict=True)}
        return [by_stage.get(id(s)) or Draft(Tree.chain(s.view.tokens[-1])) for s in stages]

    def _take(self, stage: _Stage, verdict: Verdict, logits: torch.Tensor) -> bool:
        """Let the copy's text go on; false if it has ended. logits: [nodes at least, vocab]."""
        view, reading = stage.view, stage.reading
        root = reading.cache.num_cached + len(reading.unread) - 1
        self.middle.executor.kv.gather(reading.cache, root, verdict.path)
        try:
            for node, token in zip(verdict.path, verdict.tokens, strict=True):
                before = stage.chances[-1] if stage.chances else 1.0
                if view.is_sampled:
                    stage.q.append(probabilities(view.params, processed(view, (), logits[node])))
                    stage.chances.append(before * float(stage.q[-1][token]))
                else:
                    stage.chances.append(before * likeliest(view, (), logits[node], 1)[0].chance)
                view.tokens.append(token)
                stage.has_ended = token in view.stop_ids
                if stage.has_ended:
                    break
                stage.grammar.go(stage.tokens)
        except GrammarError:
            return False
        reading.unread = [view.tokens[-1]]
        view.num_rounds += 1
        return not stage.has_ended

    def release(self, request: Request) -> None:
        self.drafter.release(request)
        self.middle.release(request)
