"""What a user may ask of sampling, checked once, on construction. Frozen: a request's options never change under it.

Checks that need the model (ids inside the vocabulary, a schema that compiles) are made when the request is added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """Exactly one of: a JSON schema, any JSON object, a regular expression, a list of choices, a Lark grammar."""

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [n for n in ("json", "regex", "choice", "grammar") if getattr(self, n) is not None] + ["json_object"] * self.json_object
        if len(given) != 1:
            raise ConfigError(f"structured_outputs takes exactly one of json, json_object, regex, choice, grammar; got {given or 'none'}")
        if self.choice is not None:
            if isinstance(self.choice, str) or not self.choice or not all(isinstance(c, str) and c for c in self.choice):
                raise ConfigError(f"structured_outputs.choice is {self.choice!r}; give a list of one or more non-empty strings")
            object.__setattr__(self, "choice", tuple(self.choice))


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
    logprobs: int | None = None  # how many of the most likely tokens to report beside the chosen one; 0: the chosen one alone
    structured_outputs: StructuredOutputs | None = None
    num_speculative_tokens: int | None = None  # caps the draft length of this request; 0: no drafts

    def __post_init__(self) -> None:
        self._check_numbers()
        self._freeze_collections()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def _check_numbers(self) -> None:
        whole = lambda v: isinstance(v, int) and not isinstance(v, bool)  # noqa: E731
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
            if not whole(value) or value < low or (high is not None and value > high):
                raise ConfigError(f"{name} is {value!r}; {remedy}")
        for name, ok, remedy in (
            ("temperature", lambda v: v >= 0, "use 0 for greedy or a positive number"),
            ("top_p", lambda v: 0 < v <= 1, "use a number in (0, 1]"),
            ("min_p", lambda v: 0 <= v <= 1, "use a number in [0, 1]"),
            ("repetition_penalty", lambda v: v > 0, "use a positive number; 1 means none"),
            ("presence_penalty", lambda v: -2 <= v <= 2, "use a number in [-2, 2]"),
            ("frequency_penalty", lambda v: -2 <= v <= 2, "use a number in [-2, 2]"),
        ):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or not ok(value):
                raise ConfigError(f"{name} is {value!r}; {remedy}")
        if self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}; lower it or raise max_tokens")

    def _freeze_collections(self) -> None:
        freeze = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(isinstance(s, str) and s for s in stop):
            raise ConfigError(f"stop is {self.stop!r}; give non-empty strings")
        freeze("stop", stop)
        if isinstance(self.bad_words, str) or not all(isinstance(w, str) and w for w in self.bad_words or ()):
            raise ConfigError(f"bad_words is {self.bad_words!r}; give a list of non-empty strings")
        freeze("bad_words", tuple(self.bad_words or ()))
        freeze("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids or ()))
        if self.allowed_token_ids is not None:
            ids = _ids("allowed_token_ids", self.allowed_token_ids)
            if not ids:
                raise ConfigError("allowed_token_ids is empty; give at least one token id, or None to allow all")
            freeze("allowed_token_ids", ids)
        if self.logit_bias is not None:
            ids = _ids("logit_bias", self.logit_bias)
            bias = {t: float(self.logit_bias[t]) for t in ids}
            bad = [b for b in bias.values() if math.isnan(b) or b == math.inf]
            if bad:
                raise ConfigError(f"logit_bias holds {bad[0]!r}; use finite numbers, or -inf to ban a token")
            freeze("logit_bias", bias)
        if isinstance(self.structured_outputs, Mapping):
            unknown = set(self.structured_outputs) - set(StructuredOutputs.__slots__)
            if unknown:
                raise ConfigError(f"structured_outputs has no key {sorted(unknown)[0]!r}; use json, json_object, regex, choice or grammar")
            freeze("structured_outputs", StructuredOutputs(**self.structured_outputs))


def _ids(name: str, values: Any) -> tuple[int, ...]:
    ids = tuple(values)
    for value in ids:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"{name} holds {value!r}; give token ids (whole numbers, 0 or more)")
    return ids
