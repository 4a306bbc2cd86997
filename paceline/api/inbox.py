"""What was emitted for a request so far, and the results that are made of it.

Invariant: making a result changes nothing but the text that is taken as new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.api.results import Completion, Logprob, Logprobs, Result
from paceline.core.types import FinishReason, Request, TokenLogprobs
from paceline.engine.commit import Emission
from paceline.engine.stats import SpecStats
from paceline.loaders.detokenize import Detokenizer
from paceline.loaders.tokenizer import Tokenizer


@dataclass(slots=True)
class Inbox:
    """All that was emitted for a request."""

    request: Request
    stats: SpecStats
    tokenizer: Tokenizer
    prompt: str | None = None  # as the user wrote it
    emissions: list[Emission] = field(default_factory=list)
    _scores: list[Logprobs | None] | None = None  # of the prompt: they are the same in every result

    @property
    def detokenizer(self) -> Detokenizer:
        assert isinstance(self.request.text_stop, Detokenizer)
        return self.request.text_stop

    def completion(self, index: int, since: int | None = None) -> Completion:
        """What was said so far. since: only what is new, from that emission on."""
        request, detokenizer = self.request, self.detokenizer
        if request.is_finished:
            detokenizer.finish()
        text = detokenizer.text if since is None else detokenizer.take()
        new = self.emissions[since or 0 :]
        tokens, scored = [token for each in new for token in each.tokens], None
        reason, shown, total = request.finish_reason, None, None
        if request.params.logprobs is not None:
            scored = [entry for each in new for entry in each.logprobs]
            shown = [self._by_token(entry) for entry in scored]
            total = sum(entry.logprob for each in self.emissions for entry in each.logprobs)
        more = (index, request.error, total, self._stop_reason(), scored)
        return Completion(text, tokens, reason, shown, self.stats, *more)

    def _by_token(self, entry: TokenLogprobs) -> Logprobs:
        name = self.tokenizer.token_text
        found = {entry.token: Logprob(entry.logprob, entry.rank, name(entry.token))}
        for rank, (token, logprob) in enumerate(entry.top, 1):
            found.setdefault(token, Logprob(logprob, rank, name(token)))
        return found

    def _stop_reason(self) -> int | str | None:
        request, last = self.request, self.request.tokens[-1]
        if request.finish_reason is not FinishReason.STOP:
            return None
        is_end = not request.params.ignore_eos and last in self.tokenizer.eos_ids
        is_listed = last in request.params.stop_token_ids and not is_end
        return self.detokenizer.stopped_by or (last if is_listed else None)

    def prompt_logprobs(self) -> list[Logprobs | None] | None:
        if self._scores is None and self.request.params.prompt_logprobs is not None:
            self._scores = [None, *map(self._by_token, self.request.scores)]
        return self._scores


def result_of(group: Sequence[Inbox], outputs: list[Completion], request_id: str | None = None) -> Result:
    """Of one prompt's inboxes: what was said in answer to it, all of it or what is new."""
    first, request = group[0], group[0].request
    is_over = all(inbox.request.is_finished for inbox in group)
    prompt, name = request.tokens[: request.num_prompt], request_id or request.id.partition(".")[0]
    more = first.prompt_logprobs(), request.num_prefix_hits
    return Result(first.prompt, prompt, outputs, name, is_over, *more)
