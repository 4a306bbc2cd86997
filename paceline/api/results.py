"""What the user gets back: text, ids, why it ended, and how speculation went, by vLLM's names and ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.errors import PacelineError
from paceline.core.types import FinishReason, TokenLogprobs
from paceline.engine.stats import SpecStats


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
    """One answer: its text and ids, why it ended, and how speculation went."""

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
    """A prompt and its n answers; text, token_ids, finish_reason and stats are the first one's."""

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
