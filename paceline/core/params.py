"""What a user may ask of sampling, checked once, on construction. Frozen: a request's options never change
under it.

Checks that need the model (ids inside the vocabulary, a schema that compiles) are made when the request is
added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """Exactly one of: a JSON schema, any JSON object, a regular expression, a list of choices, a Lark
    grammar.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [n for n in ("json", "regex", "choice", "grammar") if getattr(self, n) is not None] + [
            "json_object"
        ] * self.json_object
        if len(given) != 1:
            raise ConfigError(
                f"structured_outputs takes exactly one of json, json_object, regex, choice, grammar; got {given or 'none'}"
            )
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise ConfigError(f"structured_outputs.{name} is {getattr(self, name)!r:.40}; give a string")
        if self.choice is not None:
            object.__setattr__(self, "choice", _strings("structured_outputs.choice", self.choice))
            if not self.choice:
                raise ConfigError(
                    "structured_outputs.choice is empty; give a list of one or more non-empty strings"
                )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The vLLM names, all of them exact under speculation."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    max_tokens: int = 128
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = (
        None  # how many of the most likely tokens to report beside the chosen one; 0: the chosen one alone
    )
    structured_outputs: StructuredOutputs | None = None
    num_speculative_tokens: int | None = None  # caps the draft length of this request; 0: no drafts
    speculative_method: str | None = None  # of several drafters, the one that is asked for this request

    def __post_init__(self) -> None:
        self._check_numbers()
        self._freeze_collections()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def _check_numbers(self) -> None:
        for name, low, high, remedy in (
            ("n", 1, 1024, "ask for 1 to 1024 completions"),
            ("max_tokens", 1, None, "ask for at least 1 token"),
            ("min_tokens", 0, None, "use 0 or more"),
            ("top_k", -1, None, "use 0 to keep all tokens"),
            ("logprobs", 0, 1000, "use 0 to 1000, or None"),
            ("seed", -(2**63), 2**64 - 1, "use a 64-bit whole number"),
            ("num_speculative_tokens", 0, None, "use 0 for no drafts"),
        ):
            value = getattr(self, name)
            if value is None and name in ("logprobs", "seed", "num_speculative_tokens"):
                continue
            if not _is_whole(value) or value < low or (high is not None and value > high):
                raise ConfigError(f"{name} is {value!r:.40}; {remedy}")
        for name, least, most, remedy in (
            ("temperature", 0.0, 1e4, "use 0 for greedy, or 0.00001 to 10000"),
            ("top_p", 1e-9, 1.0, "use a number above 0, at most 1"),
            ("min_p", 0.0, 1.0, "use a number from 0 to 1"),
            ("repetition_penalty", 0.01, 100.0, "use a number from 0.01 to 100; 1 means none"),
            ("presence_penalty", -2.0, 2.0, "use a number from -2 to 2"),
            ("frequency_penalty", -2.0, 2.0, "use a number from -2 to 2"),
        ):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
                raise ConfigError(f"{name} is {value!r:.40}; {remedy}")
        if 0 < self.temperature < 1e-5:
            raise ConfigError(f"temperature is {self.temperature!r}; use 0 for greedy, or 0.00001 to 10000")
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}; lower it or raise max_tokens"
            )
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r:.40}; use True or False")
        if not isinstance(self.speculative_method, str | None):
            raise ConfigError(
                f"speculative_method is {self.speculative_method!r:.40}; give the name of a drafter"
            )

    def _freeze_collections(self) -> None:
        freeze = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        freeze("stop", _strings("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        freeze("bad_words", _strings("bad_words", self.bad_words))
        freeze("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids or ()))
        if self.allowed_token_ids is not None:
            freeze("allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ConfigError(
                    "allowed_token_ids is empty; give at least one token id, or None to allow all"
                )
        if self.logit_bias is not None:
            freeze("logit_bias", _biases(self.logit_bias))
        if isinstance(self.structured_outputs, Mapping):
            unknown = set(self.structured_outputs) - set(StructuredOutputs.__slots__)
            if unknown:
                raise ConfigError(
                    f"structured_outputs has no key {min(map(str, unknown))!r}; use json, json_object, regex, choice or grammar"
                )
            freeze("structured_outputs", StructuredOutputs(**self.structured_outputs))
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise ConfigError(
                f"structured_outputs is {self.structured_outputs!r:.40}; give a StructuredOutputs or a dict of its fields"
            )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _strings(name: str, values: Any) -> tuple[str, ...]:
    many = (
        values
        if isinstance(values, Sequence) and not isinstance(values, str)
        else ()
        if values is None
        else (None,)
    )
    if not all(isinstance(s, str) and s for s in many):
        raise ConfigError(f"{name} is {values!r:.60}; give a list of non-empty strings")
    return tuple(many)


def _ids(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, (Sequence, Mapping, Set)) or isinstance(values, str):
        raise ConfigError(f"{name} is {values!r:.60}; give a list of token ids")
    for value in values:
        if not _is_whole(value) or value < 0:
            raise ConfigError(f"{name} holds {value!r:.40}; give token ids (whole numbers, 0 or more)")
    return tuple(values)


def _biases(biases: Any) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise ConfigError(f"logit_bias is {biases!r:.60}; give a dict from token ids to numbers")
    for token, bias in biases.items():
        if not isinstance(bias, (int, float)) or isinstance(bias, bool) or not (-math.inf <= bias <= 1e4):
            raise ConfigError(
                f"logit_bias holds {bias!r:.40} for {token!r:.20}; use a number up to 10000, or -inf to ban a token"
            )
    return {token: float(biases[token]) for token in _ids("logit_bias", biases)}
