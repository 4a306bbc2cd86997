"""What a user may ask of sampling, checked once, on construction. Frozen: a request's options never change
under it.

Checks that need the model (ids inside the vocabulary, a schema that compiles, more tokens than the context
holds) are made when the request is added.
"""

from __future__ import annotations

import enum
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from paceline.core.errors import ConfigError
from paceline.core.options import brief, check_names, from_options, is_whole, require, unboxed, without

T = TypeVar("T")
SURROGATE = re.compile("[\ud800-\udfff]")  # half a character: no text has it
# Changes the logits [vocab] of the token after `output`, and returns them. Either form of
# f(output, logits) and f(prompt, output, logits), with token ids as lists.
Processor = Callable[..., Any]
SAMPLES = "there is no beam search; ask for n samples"
REFUSED = {  # vLLM's, with the remedy and the value that asks for nothing
    "best_of": ("ranked answers are not made here; ask for n, and rank them by cumulative_logprob", 1),
    "use_beam_search": (SAMPLES, False),
    "length_penalty": (SAMPLES, 1.0),
    "early_stopping": (SAMPLES, False),
    "extra_args": ("no plug-in would read them; leave it out", {}),
}


class RequestOutputKind(enum.Enum):
    """What each output of AsyncLLM.generate holds, by vLLM's names."""

    CUMULATIVE = 0  # all that was said so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # there is one output, at the end


def known_names(kind: type[T]) -> type[T]:
    """A dataclass whose constructor refuses an unknown name with the nearest known one; `guided_decoding` is
    the old one of structured_outputs."""
    made: Any = kind.__init__

    @wraps(made)
    def init(self: T, *values: Any, **given: Any) -> None:
        options = without(REFUSED, given)
        if (old := options.pop("guided_decoding", None)) is not None:
            require(options.get("structured_outputs") is None, "guided_decoding", old, "it has two names")
            options["structured_outputs"] = old
        check_names(kind, options, kind.__name__)
        made(self, *values, **options)

    kind.__init__ = init  # type: ignore[method-assign, assignment]
    return kind


@known_names
@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """Exactly one of: a JSON schema, any JSON object, a regular expression, a list of choices, a Lark
    grammar."""

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [n for n in ("json", "regex", "choice", "grammar") if getattr(self, n) is not None]
        given += ["json_object"] * self.json_object
        if len(given) != 1:
            kinds = "json, json_object, regex, choice, grammar"
            raise ConfigError(f"structured_outputs takes exactly one of {kinds}; got {given or 'none'}")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            require(isinstance(value, str | None), f"structured_outputs.{name}", value, "give a string")
        if self.choice is not None:
            object.__setattr__(self, "choice", _strings("structured_outputs.choice", self.choice))
            remedy = "give a list of one or more non-empty strings"
            require(bool(self.choice), "structured_outputs.choice", self.choice, remedy)


# The least, the most, and what to do about a value outside. Where the least is an int, only whole numbers are
# allowed.
LIMITS: dict[str, tuple[float, float, str]] = {
    "n": (1, 1024, "ask for 1 to 1024 completions"),
    "max_tokens": (1, math.inf, "ask for at least 1 token"),
    "min_tokens": (0, math.inf, "use 0 or more"),
    "top_k": (-1, math.inf, "use 0 to keep all tokens"),
    "logprobs": (0, 1000, "use 0 to 1000, or None"),
    "prompt_logprobs": (0, 1000, "use 0 to 1000, or None"),
    "truncate_prompt_tokens": (-1, math.inf, "use 1 or more, -1 for what the context holds, or None"),
    "seed": (-(2**63), 2**64 - 1, "use a 64-bit whole number"),
    "num_speculative_tokens": (0, math.inf, "use 0 for no drafts"),
    "temperature": (0.0, 1e4, "use 0 for greedy, or 0.00001 to 10000"),
    "top_p": (1e-9, 1.0, "use a number above 0, at most 1"),
    "min_p": (0.0, 1.0, "use a number from 0 to 1"),
    "repetition_penalty": (0.01, 100.0, "use a number from 0.01 to 100; 1 means none"),
    "presence_penalty": (-2.0, 2.0, "use a number from -2 to 2"),
    "frequency_penalty": (-2.0, 2.0, "use a number from -2 to 2"),
}
MAY_BE_NONE = (
    "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens", "seed", "num_speculative_tokens",
)  # fmt: skip
FLAGS = (
    "ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens",
)  # fmt: skip
LEAST_BIAS = -1e30  # what is below bans the token, as -inf does: float32 holds little more


@known_names
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
    max_tokens: int | None = 128  # None: to the end of the context
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None  # likely tokens reported beside the chosen one; 0: the chosen one alone
    prompt_logprobs: int | None = None  # the same of the prompt's tokens; such a prompt is computed anew
    truncate_prompt_tokens: int | None = None  # this many last tokens of the prompt count; -1: all that fit
    detokenize: bool = True  # False: the text stays empty
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # of no influence: a text is its tokens' bytes
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # of AsyncLLM
    # Called at every node of a draft, for its own path, maybe more than once: what they return may depend on
    # nothing but their arguments. A request that has some is decoded without bursts.
    logits_processors: Sequence[Processor] = ()
    structured_outputs: StructuredOutputs | None = None
    num_speculative_tokens: int | None = None  # caps the draft length of this request; 0: no drafts
    speculative_method: str | None = None  # of several drafters, the one that is asked for this request

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def __post_init__(self) -> None:
        for name in (*LIMITS, *FLAGS):
            object.__setattr__(self, name, unboxed(getattr(self, name)))
        for name, (least, most, remedy) in LIMITS.items():
            value = getattr(self, name)
            if value is not None or name not in MAY_BE_NONE:
                is_number = is_whole(value) if isinstance(least, int) else _is_number(value)
                require(is_number and least <= value <= most, name, value, remedy)
        is_cold = 0 < self.temperature < 1e-5
        require(not is_cold, "temperature", self.temperature, LIMITS["temperature"][2])
        remedy = f"more than max_tokens {brief(self.max_tokens)}: lower it or raise max_tokens"
        is_reached = self.max_tokens is None or self.min_tokens <= self.max_tokens
        require(is_reached, "min_tokens", self.min_tokens, remedy)
        cut = self.truncate_prompt_tokens
        require(cut != 0, "truncate_prompt_tokens", cut, LIMITS["truncate_prompt_tokens"][2])
        for name in FLAGS:
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "use True or False")
        remedy = "give a RequestOutputKind"
        require(isinstance(self.output_kind, RequestOutputKind), "output_kind", self.output_kind, remedy)
        method = self.speculative_method
        require(isinstance(method, str | None), "speculative_method", method, "give the name of a drafter")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        frozen: dict[str, Any] = {
            "stop": _strings("stop", stop),
            "bad_words": _strings("bad_words", self.bad_words),
            "stop_token_ids": _ids("stop_token_ids", self.stop_token_ids),
            "logits_processors": _processors(self.logits_processors),
        }
        require(self.detokenize or not frozen["stop"], "detokenize", False, "stop strings need the text")
        if self.allowed_token_ids is not None:
            frozen["allowed_token_ids"] = _ids("allowed_token_ids", self.allowed_token_ids)
            remedy = "give at least one token id, or None to allow all"
            require(bool(frozen["allowed_token_ids"]), "allowed_token_ids", (), remedy)
        if self.logit_bias is not None:
            frozen["logit_bias"] = _biases(self.logit_bias)
        wanted: Any = self.structured_outputs
        if isinstance(wanted, Mapping):
            frozen["structured_outputs"] = from_options(StructuredOutputs, wanted, "structured_outputs")
        elif not isinstance(wanted, StructuredOutputs | None):
            require(False, "structured_outputs", wanted, "give a StructuredOutputs or a dict of its fields")
        for name, value in frozen.items():
            object.__setattr__(self, name, value)


def num_arguments(processor: Processor) -> int:
    """3: f(prompt, output, logits); 2: f(output, logits); 0: it does not say."""
    try:
        return len(inspect.signature(processor).parameters)
    except (TypeError, ValueError):
        return 0


def _processors(given: Any) -> tuple[Processor, ...]:
    many = () if given is None else given
    is_list = isinstance(many, Sequence) and all(num_arguments(each) in (2, 3) for each in many)
    remedy = "give a list of functions f(output_ids, logits) or f(prompt_ids, output_ids, logits)"
    require(is_list, "logits_processors", given, remedy)
    return tuple(many)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _strings(name: str, values: Any) -> tuple[str, ...]:
    many = () if values is None else values
    is_list = isinstance(many, Sequence) and not isinstance(many, str)
    if not is_list or not all(isinstance(s, str) and s and not SURROGATE.search(s) for s in many):
        raise ConfigError(f"{name} is {brief(values, 60)}; give a list of non-empty strings, valid Unicode")
    return tuple(many)


def _ids(name: str, values: Any) -> tuple[int, ...]:
    many = () if values is None else values.tolist() if hasattr(values, "tolist") else values
    is_collection = isinstance(many, Sequence | Mapping | Set) and not isinstance(many, str)
    require(is_collection, name, values, "give a list of token ids")
    ids = tuple(map(unboxed, many))
    for value in ids:
        if not is_whole(value) or value < 0:
            raise ConfigError(f"{name} holds {brief(value)}; give token ids (whole numbers, 0 or more)")
    return ids


def _biases(biases: Any) -> dict[int, float]:
    require(isinstance(biases, Mapping), "logit_bias", biases, "give a dict from token ids to numbers")
    biases = {unboxed(token): unboxed(bias) for token, bias in biases.items()}
    for token, bias in biases.items():
        if not _is_number(bias) or not -math.inf <= bias <= 1e4:
            what = f"{brief(bias)} for {brief(token, 20)}"
            raise ConfigError(f"logit_bias holds {what}; use a number up to 10000, or -inf to ban a token")
    tokens = _ids("logit_bias", biases)
    return {token: -math.inf if biases[token] < LEAST_BIAS else float(biases[token]) for token in tokens}
