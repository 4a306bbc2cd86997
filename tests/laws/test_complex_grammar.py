"""A grammar that proves too complex after a dozen tokens ends a request where plain decoding ends it: the
same text, finish reason and error with every drafter, wherever in a draft that happens.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline.core.errors import GrammarError
from paceline.core.grammar import LIMITS, GrammarCompiler
from paceline.core.params import SamplingParams, StructuredOutputs
from paceline.core.types import Constraint, Draft, Request
from paceline.drafters.base import chain
from tests.laws.fakes import Fake
from tests.laws.grammar import NoEqualRests
from tests.laws.harness import END, VOCAB, engine_with, prompts, request_of, run
from tests.laws.test_engine_laws import make

NUM_TOKENS = 40
DRAFTERS = (
    "ngram", "suffix", "suffix_tree", "recycle_tree", "draft_model", "draft_model_twin",
    "draft_model_twin_tree", "early_exit_tree", "staged", "staged_tree", "lookahead", "hybrid",
    "SampledChain", "SampledTree",
)  # fmt: skip


class Letters:
    """A tokenizer for the tiny model: one letter each, but for its end token."""

    eos_ids = frozenset({END})
    vocab_size = VOCAB

    def json(self) -> str:
        vocab = {letter: i for i, letter in enumerate(string.ascii_letters[:VOCAB])}
        del vocab[string.ascii_letters[END]]
        tokenizer = Tokenizer(models.BPE(vocab={**vocab, "<end>": END}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<end>"])
        return str(tokenizer.to_str())


class BreaksOnAdvance(NoEqualRests):
    """Breaks while it takes a token that its mask allows."""

    def advance(self, token: int) -> None:
        if len(self.output) == 13:
            raise GrammarError("too complex here")
        super().advance(token)


@functools.cache
def compiler(limit: str, most: int) -> GrammarCompiler:
    return GrammarCompiler(Letters(), VOCAB, {**LIMITS, limit: most})


def too_many_items() -> Constraint:
    """Sums of sums without an order: the parser's items grow with every letter, whichever it is."""
    rules = "start: e\ne: e e e | e e | LETTER\nLETTER: /[a-zA-Z]/\n"
    return compiler("step_max_items", 70).compile(StructuredOutputs(grammar=rules))


def too_many_states() -> Constraint:
    """Which of the last letters were early ones: the lexer's states grow, also by what is rolled back."""
    return compiler("max_lexer_states", 45).compile(StructuredOutputs(regex="[a-zA-Z]*[a-t][a-zA-Z]{9}!"))


GRAMMARS: dict[str, Callable[[], Constraint]] = {
    "items": too_many_items,
    "states": too_many_states,
    "advance": functools.partial(BreaksOnAdvance, VOCAB),
}


def requests_of(grammar: str, temperature: float, seed: int | None = 3) -> list[Request]:
    params = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, logprobs=1
    )
    return [
        request_of(prompt, params, seed=i, constraint=GRAMMARS[grammar]())
        for i, prompt in enumerate(prompts(3, low=20, seed=5))
    ]


def endings(requests: list[Request]) -> list[tuple[list[int], str | None, str]]:
    return [(r.output, r.finish_reason, str(r.error)) for r in requests]


@functools.cache
def plain(grammar: str, temperature: float) -> list[tuple[list[int], str | None, str]]:
    requests = requests_of(grammar, temperature)
    run(make(None), requests)
    return endings(requests)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_plain_decoding_breaks_on_the_way(grammar: str, temperature: float) -> None:
    for output, reason, error in plain(grammar, temperature):
        assert 8 <= len(output) < NUM_TOKENS
        assert reason == "error"
        assert "too complex here" in error


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_ends_as_plain_decoding_does(drafter: str, grammar: str, temperature: float) -> None:
    requests = requests_of(grammar, temperature)
    run(make(drafter), requests)
    assert endings(requests) == plain(grammar, temperature)


class Foreseen(Fake):
    """Drafts plain decoding's own text, and goes on where that breaks."""

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__()
        self.texts = texts

    def draft(self, request: Request, budget: int) -> Draft:
        text = next(t for t in self.texts if t[: request.num_output] == request.output)
        tokens = [*text[request.num_output :], *range(10, 10 + budget)]
        return chain(request, tokens[:budget], self.name)


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 30])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_wherever_in_the_draft_it_breaks(grammar: str, temperature: float, budget: int) -> None:
    wanted = plain(grammar, temperature)
    for request, ending in zip(requests_of(grammar, temperature), wanted, strict=True):
        engine = engine_with(Foreseen([ending[0]]), num_speculative_tokens=budget)
        run(engine, [request])
        assert endings([request]) == [ending]
        assert engine.totals.num_accepted > 0


@pytest.mark.parametrize("grammar", ["items", "advance"])
@pytest.mark.parametrize(
    "drafter",
    ["draft_model", "draft_model_twin", "draft_model_twin_tree", "staged", "SampledChain", "SampledTree"],
)
def test_an_unseeded_request_breaks_after_as_many_tokens(drafter: str, grammar: str) -> None:
    """These two break after a number of tokens, whichever they are, so that no seed is needed to compare."""
    (length,) = {len(output) for output, _, _ in plain(grammar, 0.8)}
    requests = requests_of(grammar, 0.8, seed=None)
    run(make(drafter), requests)
    assert [(r.num_output, r.finish_reason, str(r.error)) for r in requests] == [
        (length, reason, error) for _, reason, error in plain(grammar, 0.8)
    ]
