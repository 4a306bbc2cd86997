"""What the user gets back: text, ids, why it ended, and how speculation went, by vLLM's names and ours.

Invariant: an inbox holds all that was emitted for a request; results are made from it and change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.errors import PacelineError
from paceline.core.types import FinishReason, Request, TokenLogprobs
from paceline.engine.commit import Emission
from paceline.engine.stats import SpecStats
from paceline.loaders.detokenize import Detokenizer
from paceline.loaders.tokenizer import Tokenizer


class Token(NamedTuple):
    id: int
    text: str  # for display: a token may be a part of a character
    source: str | None  # the drafter that guessed it, None if it is the target's own


class Logprob(NamedTuple):
    logprob: float  # of the target's raw logits, before any sampling option
    rank: int  # 1 for the most likely token
    decoded_token: str


Logprobs = dict[int, Logprob]  # by token: the chosen one first, then the likeliest


@dataclass(frozen=True, slots=True)
class Completion:
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None  # None: it goes on
    logprobs: list[Logprobs] | None
    stats: SpecStats
    index: int = 0
    error: PacelineError | None = None  # set with finish_reason "error"
    cumulative_logprob: float | None = None  # where logprobs were asked for
    stop_reason: int | str | None = None  # the stop string or the one of stop_token_ids that ended it
    token_logprobs: list[TokenLogprobs] | None = None  # the same as logprobs, a tuple a token


@dataclass(frozen=True, slots=True)
class Result:
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion] = field(default_factory=list)  # n of them
    request_id: str = ""
    finished: bool = True
    prompt_logprobs: list[Logprobs | None] | None = None  # None for the first token: nothing comes before it
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

    @property
    def stats(self) -> SpecStats:
        return self.outputs[0].stats


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream. `text` is settled: it will not be taken back by a stop string or an unfinished
    character."""

    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason | None = None
    result: Result | None = None  # on the last chunk


@dataclass(slots=True)
class Inbox:
    """All that was emitted for a request."""

    request: Request
    stats: SpecStats
    tokenizer: Tokenizer
    prompt: str | None = None  # as the user wrote it
    emissions: list[Emission] = field(default_factory=list)

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
        if self.request.params.prompt_logprobs is None:
            return None
        return [None, *map(self._by_token, self.request.scores)]


def result_of(group: Sequence[Inbox], outputs: list[Completion], request_id: str | None = None) -> Result:
    """Of one prompt's inboxes: what was said in answer to it, all of it or what is new."""
    first, request = group[0], group[0].request
    is_over = all(inbox.request.is_finished for inbox in group)
    prompt, name = request.tokens[: request.num_prompt], request_id or request.id.partition(".")[0]
    more = first.prompt_logprobs(), request.num_prefix_hits
    return Result(first.prompt, prompt, outputs, name, is_over, *more)
