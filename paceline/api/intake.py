"""Turns a prompt and its options into engine requests, checking against the model what SamplingParams could
not.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.core.errors import ConfigError, RequestError
from paceline.core.grammar import GrammarCompiler
from paceline.core.noise import child_seed
from paceline.core.params import SamplingParams
from paceline.core.types import Request
from paceline.loaders.detokenize import Detokenizer
from paceline.loaders.tokenizer import Tokenizer


@dataclass(slots=True)
class Intake:
    tokenizer: Tokenizer
    vocab_size: int
    _grammars: GrammarCompiler | None = None
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    def requests(self, tokens: list[int], params: SamplingParams, priority: int = 0) -> list[Request]:
        """One request for each of the n completions; the later ones share the first one's prompt blocks."""
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token")
        self._check_ids("prompt", tokens)
        self._check_ids("logit_bias", params.logit_bias or ())
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("stop_token_ids", params.stop_token_ids)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        name = f"r{next(self._ids)}"
        requests: list[Request] = []
        for index in range(params.n):
            request = self._request(f"{name}.{index}", tokens, params, child_seed(seed, index), priority)
            request.leader = requests[0] if requests else None
            requests.append(request)
        return requests

    def _request(
        self, name: str, tokens: list[int], params: SamplingParams, seed: int, priority: int
    ) -> Request:
        constraint = None
        if params.structured_outputs is not None:
            self._grammars = self._grammars or GrammarCompiler(self.tokenizer, self.vocab_size)
            constraint = self._grammars.compile(params.structured_outputs)
        ends = self.tokenizer.eos_ids
        # A grammar that has ended can only be followed by an end token, so it is not ignored there.
        obeyed = frozenset() if params.ignore_eos and constraint is None else ends
        return Request(
            id=name,
            params=params,
            tokens=list(tokens),
            num_prompt=len(tokens),
            seed=seed,
            priority=priority,
            stop_ids=obeyed | frozenset(params.stop_token_ids),
            banned_until_min=ends | frozenset(params.stop_token_ids) if params.min_tokens else frozenset(),
            bad_sequences=self._bad_sequences(params),
            constraint=constraint,
            text_stop=Detokenizer(
                self.tokenizer, params.stop, params.include_stop_str_in_output, min_tokens=params.min_tokens
            ),
        )

    def _bad_sequences(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each bad word as it is spelled at the start of a text and after a space."""
        spellings = (text for word in params.bad_words for text in (word, " " + word.lstrip()))
        return tuple(
            dict.fromkeys(tuple(self.tokenizer.encode(text, add_special=False)) for text in spellings)
        )

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        bad = next((i for i in ids if not isinstance(i, int) or not 0 <= i < self.vocab_size), None)
        if bad is not None:
            raise ConfigError(
                f"{name} holds token id {bad}; the model's ids go from 0 to {self.vocab_size - 1}"
            )
