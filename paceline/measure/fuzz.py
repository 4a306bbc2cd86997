"""Random cases for `paceline verify --fuzz`: requests with random prompts and options that come and go at
random steps of an engine with random options. Invariant: a case is data alone: it is made from a seed and a
number without reading a clock, and what was written as JSON is read back equal.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.options import from_options

# Options of the drafters, and values that are unlike each other.
TREE: dict[str, Sequence[Any]] = {
    "tree_width": (1, 2, 3),
    "tree_depth": (1, 3, None),
    "confidence_threshold": (0.0, 0.3),
}
CHOICES: dict[str, dict[str, Sequence[Any]]] = {
    "ngram": {"prompt_lookup_max": (1, 2, 8)},
    "suffix": {
        "tree": (True, False),
        "suffix_decoding_max_tree_depth": (2, 8, 64),
        "suffix_decoding_min_token_prob": (0.0, 0.1, 0.5),
        "suffix_decoding_max_cached_requests": (0, 1, 100),
    },
    "recycle": {"tree": (True, False), "min_token_prob": (0.0, 0.1, 0.5)},
    "lookahead": {
        "max_window_size": (1, 3),
        "max_ngram_size": (2, 4),
        "max_verification_set_size": (1, 3),
        "pool_from_text": (True, False),
    },
    "quantized": {**TREE, "bits": (4, 8)},
    "early_exit": {**TREE, "num_layers": (1, None)},
    "staged": {"drafter": ({"method": "ngram"}, {"method": "suffix"}, {"method": "recycle"})},
    "hybrid": {"drafters": (["ngram", "early_exit"], ["suffix", "recycle", "lookahead"])},
    **dict.fromkeys(("draft_model", "eagle", "medusa", "draft"), TREE),
}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}}
SCHEMA["properties"] |= {
    "age": {"type": "integer"},
    "tags": {"type": "array", "items": {"enum": ["a", "bc"]}},
}
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"json": {**SCHEMA, "required": ["name", "age"], "additionalProperties": False}},
    {"json_object": True},
    {"regex": r"(the|a) [a-z]{2,6}( [a-z]{1,9}){0,4}\."},
    {"regex": r"\d{1,3}(,\d{3})*|[A-Z]+é?"},
    {"choice": ["yes", "no", "yesterday", "not at all"]},
    {"grammar": 'start: item ("," item)*\nitem: /[a-z]+/ | "(" start ")"'},
)
WORDS = ("the", "line", " a", "e", ".", "\n", "rider", "\u00e9", " and the", "1")
UNICODE = ((0x20, 0x7E), (0xA1, 0x24F), (0x400, 0x4FF), (0x4E00, 0x4EFF), (0x1F600, 0x1F64F), (0x0, 0x1F))


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: what `SamplingParams` takes, the step at which it comes, and where it is taken back."""

    prompt: list[int]
    params: dict[str, Any] = field(default_factory=dict)
    arrives: int = 0
    leaves: int | None = None
    priority: int = 0

    @property
    def is_determined(self) -> bool:
        """Whether its text is known beforehand: greedy, or with a seed."""
        return self.params.get("temperature", 1.0) == 0 or self.params.get("seed") is not None


@dataclass(frozen=True, slots=True)
class Case:
    engine: dict[str, Any]  # options of EngineOptions
    num_spare: int  # blocks of K/V beyond those of one longest text
    asks: tuple[Ask, ...]

    @property
    def method(self) -> str:
        config = self.engine.get("speculative_config")
        return str(config["method"] if isinstance(config, dict) else config or "plain")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Case:
        try:
            found = json.loads(text)
            asks = [from_options(Ask, each, "a request of the case") for each in found["asks"]]
            for ask in asks:
                if bias := ask.params.get("logit_bias"):  # JSON has no keys but texts
                    ask.params["logit_bias"] = {int(token): value for token, value in bias.items()}
            return Case(found["engine"], found["num_spare"], tuple(asks))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"the case cannot be read ({error})"
            raise ConfigError(f"{what}; give a file that --fuzz has saved") from None


@dataclass(frozen=True, slots=True)
class Maker:
    """Cases for one model. `encode` and `vocab_size` are its tokenizer's, `configs` the drafters it can have,
    `longest` the most tokens of a text."""

    texts: Sequence[str]
    encode: Callable[[str], list[int]]
    vocab_size: int
    longest: int
    configs: Sequence[dict[str, Any] | None]

    def case(self, seed: int, number: int) -> Case:
        source = random.Random(f"{seed}/{number}")
        length = source.choice((self.longest, source.randint(40, self.longest), source.randint(40, 90)))
        num_seqs = source.randint(1, 8)
        engine = {
            "speculative_config": self._drafter(source),
            "max_model_len": length,
            "max_num_seqs": num_seqs,
            "max_num_batched_tokens": source.choice((num_seqs, num_seqs + 7, 32, 64, 512)),
            "enable_prefix_caching": source.random() < 0.8,
        }
        asks = list[Ask]()
        for _ in range(source.randint(1, source.choice((1, 8, 20)))):
            asks.append(self._ask(source, length, asks))
        return Case(engine, source.choice((0, 1, 3, 8, 64)), tuple(asks))

    def _drafter(self, source: random.Random) -> dict[str, Any] | None:
        config = source.choice(self.configs)
        if config is None or config["method"] == "auto":
            return config
        known = CHOICES.get(config["method"], {})
        chosen = {name: source.choice(v) for name, v in known.items() if source.random() < 0.4}
        if source.random() < 0.7:  # else the policy says how many pay
            chosen["num_speculative_tokens"] = source.choice((1, 2, 3, 5, 8, 16))
        return {**config, **chosen}

    def _ask(self, source: random.Random, length: int, before: Sequence[Ask]) -> Ask:
        prompt = self._prompt(source, length - 1, before)
        arrives = source.choice((0, source.randint(0, 12), source.randint(0, 40)))
        leaves = arrives + source.randint(0, 12) if source.random() < 0.15 else None
        return Ask(prompt, self._params(source), arrives, leaves, source.choice((0, 0, 0, 1, -1)))

    def _prompt(self, source: random.Random, most: int, before: Sequence[Ask]) -> list[int]:
        kind, count = source.randrange(7), source.randint(1, most)
        if kind == 0 and before:  # begins as another does
            other = source.choice(before).prompt
            return [*other[: source.randint(1, len(other))], source.randrange(self.vocab_size)][:most]
        if kind == 1:
            return [source.randrange(self.vocab_size) for _ in range(min(count, 60))]
        if kind == 2:
            return [source.randrange(self.vocab_size) for _ in range(source.randint(1, 5))] * min(count, 60)
        text = self._cut(source)
        if kind == 3:
            text += self._cut(source)
        elif kind == 4:
            text *= source.randint(2, 6)
        elif kind == 5:
            text = "".join(chr(source.randint(*source.choice(UNICODE))) for _ in range(source.randint(1, 40)))
        tokens = self.encode(text)
        return tokens[: source.choice((count, most))] or [source.randrange(self.vocab_size)]

    def _cut(self, source: random.Random) -> str:
        text = source.choice(self.texts)
        start = source.choice((0, source.randrange(len(text))))
        return text[start : start + source.choice((10, 80, 2000))]

    def _params(self, source: random.Random) -> dict[str, Any]:
        def ids(most: int) -> list[int]:
            return [source.randrange(self.vocab_size) for _ in range(source.randint(1, most))]

        max_tokens = source.choice((1, 2, 8, 16, 24, 48))
        options: dict[str, Callable[[], Any]] = {
            "top_k": lambda: source.choice((1, 2, 20, 10**6)),
            "top_p": lambda: source.choice((0.01, 0.5, 0.95)),
            "min_p": lambda: source.choice((0.02, 0.5)),
            "repetition_penalty": lambda: source.choice((0.8, 1.1, 1.8)),
            "presence_penalty": lambda: source.choice((-1.0, 0.7)),
            "frequency_penalty": lambda: source.choice((-0.5, 1.5)),
            "logit_bias": lambda: {i: source.choice((-100.0, -2.0, 3.0, 100.0)) for i in ids(4)},
            "bad_words": lambda: source.sample(WORDS, 2),
            "allowed_token_ids": lambda: sorted({*ids(40)}),
            "min_tokens": lambda: source.randint(1, max_tokens),
            "stop": lambda: source.sample(WORDS, 2),
            "stop_token_ids": lambda: ids(4),
            "ignore_eos": lambda: True,
            "include_stop_str_in_output": lambda: True,
            "n": lambda: source.randint(2, 4),
            "logprobs": lambda: source.choice((0, 1, 5)),
            "num_speculative_tokens": lambda: source.choice((0, 1, 4)),
            "structured_outputs": lambda: source.choice(GRAMMARS),
        }
        rate = source.choice((0.0, 0.1, 0.3))
        params = {name: make() for name, make in options.items() if source.random() < rate}
        params |= {"max_tokens": max_tokens, "temperature": source.choice((0.0, 0.0, 0.7, 1.0, 1.5))}
        if params["temperature"] and source.random() < 0.8:
            params["seed"] = source.choice((0, -1, source.getrandbits(32), 2**64 - 1))
        return params
