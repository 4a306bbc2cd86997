"""Walks through grammars with the default model's tokenizer: what comes out is valid, and rolling back undoes
exactly.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import GrammarError
from paceline.core.grammar import LIMITS, GrammarCompiler, GrammarConstraint
from paceline.core.params import StructuredOutputs
from paceline.loaders.checkpoint import open_checkpoint
from paceline.loaders.tokenizer import Tokenizer

VOCAB = 49_280  # the model's, padded beyond the tokenizer's 49,152
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"[A-Z][a-z]{1,6} (\d{2}|none)(é|☃)?"
CHOICES = ("yes", "no", "not sure", '日本 "x"\n')
LARK = 'start: sum\nsum: NUMBER ("+" NUMBER)~1..3\nNUMBER: /[0-9]{1,3}/\n'
GBNF = 'root ::= item item\nitem ::= "ab" | "cd"\n'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(open_checkpoint("default", progress=False).tokenizer_source())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB)


def _walk(
    constraint: GrammarConstraint, rng: random.Random, eos_ids: frozenset[int], limit: int = 2_000
) -> list[int]:
    """Random allowed tokens until an end token."""
    tokens: list[int] = []
    while len(tokens) < limit:
        allowed = torch.nonzero(constraint.allowed()).flatten().tolist()
        ends = [t for t in allowed if t in eos_ids]
        token = rng.choice(ends) if ends and rng.random() < 0.5 else rng.choice(allowed)
        constraint.advance(token)
        if token in eos_ids:
            return tokens
        tokens.append(token)
    raise AssertionError("the grammar did not end")


def _is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"name", "age", "tags"}
        and len(value["name"]) <= 8
        and isinstance(value["age"], int)
        and 0 <= value["age"] <= 120
        and len(value["tags"]) <= 2
        and set(value["tags"]) <= {"red", "green"}
    )


CASES = [
    (StructuredOutputs(json=SCHEMA), _is_person),
    (StructuredOutputs(json=json.dumps(SCHEMA)), _is_person),
    (StructuredOutputs(regex=REGEX), lambda text: re.fullmatch(REGEX, text) is not None),
    (StructuredOutputs(choice=CHOICES), lambda text: text in CHOICES),
    (
        StructuredOutputs(grammar=LARK),
        lambda text: re.fullmatch(r"\d{1,3}(\+\d{1,3}){1,3}", text) is not None,
    ),
    (StructuredOutputs(grammar=GBNF), lambda text: re.fullmatch("(ab|cd)(ab|cd)", text) is not None),
]


@pytest.mark.parametrize(("spec", "is_valid"), CASES)
@pytest.mark.parametrize("seed", range(8))
def test_random_walks_give_valid_text(
    tokenizer: Tokenizer,
    compiler: GrammarCompiler,
    spec: StructuredOutputs,
    is_valid: Callable[[str], bool],
    seed: int,
) -> None:
    constraint = compiler.compile(spec)
    text = tokenizer.decode(_walk(constraint, random.Random(seed), tokenizer.eos_ids))
    assert is_valid(text), text
    assert constraint.is_finished


def test_blanks_between_json_values_are_bounded(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(StructuredOutputs(json=SCHEMA))
    blank = tokenizer.encode("\n", add_special=False)[0]
    constraint.advance(tokenizer.encode("{", add_special=False)[0])
    for _ in range(32):
        constraint.advance(blank)
    assert not constraint.allowed()[blank]


@pytest.mark.parametrize("schema", ["true", "{}"])
def test_a_schema_that_allows_all_allows_any_value(
    tokenizer: Tokenizer, compiler: GrammarCompiler, schema: str
) -> None:
    constraint = compiler.compile(StructuredOutputs(json=schema))
    for token in tokenizer.encode("[1, null]", add_special=False):
        constraint.advance(token)
    assert constraint.is_finished


def test_json_object_is_an_object(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(StructuredOutputs(json_object=True))
    for token in tokenizer.encode('{"a": [1, null]}', add_special=False):
        constraint.advance(token)
    assert constraint.is_finished
    fresh = compiler.compile(StructuredOutputs(json_object=True))
    assert not fresh.allowed()[tokenizer.encode("[", add_special=False)[0]]


def test_end_tokens_exactly_where_the_grammar_may_end(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    constraint = compiler.compile(StructuredOutputs(regex="ab?"))
    (eos,) = tokenizer.eos_ids
    a, b = (tokenizer.encode(c, add_special=False)[0] for c in "ab")
    assert not constraint.allowed()[eos]
    assert not constraint.is_finished
    constraint.advance(a)
    assert constraint.allowed()[[eos, b]].all()
    assert not constraint.is_finished
    constraint.advance(b)
    assert torch.nonzero(constraint.allowed()).flatten().tolist() == [eos]
    assert constraint.is_finished


def test_padding_and_special_tokens_are_never_allowed(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    allowed = compiler.compile(StructuredOutputs(regex="(?s:.*)")).allowed()
    assert allowed.shape == (VOCAB,)
    assert allowed.dtype == torch.bool
    assert not allowed[tokenizer.vocab_size :].any()
    assert torch.nonzero(allowed[:17]).flatten().tolist() == sorted(tokenizer.eos_ids)
    assert allowed[17 : tokenizer.vocab_size].sum() > 40_000


def _replayed(compiler: GrammarCompiler, spec: StructuredOutputs, tokens: Sequence[int]) -> GrammarConstraint:
    constraint = compiler.compile(spec)
    for token in tokens:
        constraint.advance(token)
    return constraint


@settings(max_examples=60, deadline=None)
@given(case=st.integers(0, len(CASES) - 1), seed=st.integers(0, 2**32), data=st.data())
def test_rollback_equals_a_fresh_replay(
    tokenizer: Tokenizer, compiler: GrammarCompiler, case: int, seed: int, data: st.DataObject
) -> None:
    """Steps forward (also past the end) and back, in any order."""
    spec, rng, held = CASES[case][0], random.Random(seed), []
    constraint = compiler.compile(spec)
    for forward, back in data.draw(
        st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=4)
    ):
        for _ in range(forward):
            held.append(rng.choice(torch.nonzero(constraint.allowed()).flatten().tolist()))
            constraint.advance(held[-1])
        back = min(back, len(held))
        constraint.rollback(back)
        del held[len(held) - back :]
        fresh = _replayed(compiler, spec, held)
        assert torch.equal(constraint.allowed(), fresh.allowed())
        assert constraint.is_finished == fresh.is_finished


def test_rollback_past_end_tokens(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    (eos,) = tokenizer.eos_ids
    constraint = _replayed(compiler, StructuredOutputs(choice=["a"]), [*tokenizer.encode("a"), eos, eos, eos])
    constraint.rollback(4)
    assert torch.equal(constraint.allowed(), compiler.compile(StructuredOutputs(choice=["a"])).allowed())
    assert not constraint.is_finished


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (StructuredOutputs(regex="("), "structured_outputs.regex does not compile.*unclosed group"),
        (StructuredOutputs(regex="a(?=b)"), "look-around"),
        (StructuredOutputs(regex=r"[^\x00-\U0010ffff]"), "allows no text at all"),
        (
            StructuredOutputs(json={"type": "nope"}),
            "structured_outputs.json does not compile: Invalid type: nope",
        ),
        (StructuredOutputs(json={"const": 1, "enum": [2]}), "Unsatisfiable"),
        (StructuredOutputs(json=False), "allows no text at all"),  # type: ignore[arg-type]
        (StructuredOutputs(json="false"), "allows no text at all"),
        (StructuredOutputs(json="{x"), "is no JSON"),
        (StructuredOutputs(json="[1]"), "give a JSON schema"),
        (StructuredOutputs(json={"default": object()}), "is no JSON"),
        (StructuredOutputs(grammar="start: foo"), "unknown name"),
        (StructuredOutputs(grammar='root ::= "a" | ["b"'), "structured_outputs.grammar does not compile"),
        (StructuredOutputs(regex="a" * 600_000), "600000 characters long"),
        (StructuredOutputs(choice=["a"] * 30_000), "30000 entries"),
    ],
)
def test_bad_grammars_end_in_one_line(compiler: GrammarCompiler, spec: StructuredOutputs, words: str) -> None:
    with pytest.raises(GrammarError, match=words) as caught:
        compiler.compile(spec)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_disallowed_token_is_our_own_mistake(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    with pytest.raises(AssertionError, match="not allowed"):
        compiler.compile(StructuredOutputs(choice=["a"])).advance(tokenizer.encode("z")[0])


@pytest.mark.parametrize(("limit", "most"), [("step_max_items", 400), ("max_lexer_states", 400)])
def test_a_grammar_that_breaks_stays_where_it_was(tokenizer: Tokenizer, limit: str, most: int) -> None:
    """It breaks at the same place again and again, and goes on from anywhere before it."""
    compiler = GrammarCompiler(tokenizer, VOCAB, {**LIMITS, limit: most})
    rules = {
        "step_max_items": StructuredOutputs(grammar='start: e\ne: e e e | e e | "a" | "b"\n'),
        "max_lexer_states": StructuredOutputs(regex="(.*a.{12}b.*|.*b.{9}a.*)"),
    }
    constraint, held = compiler.compile(rules[limit]), list[int]()
    letters = [tokenizer.encode(letter, add_special=False)[0] for letter in "ab"]

    def advance_all() -> None:
        while len(held) < 200:
            constraint.advance(letters[len(held) % 2])
            held.append(letters[len(held) % 2])

    with pytest.raises(GrammarError, match="too complex here") as first:
        advance_all()
    for back in (0, 1, 2, len(held)):
        constraint.rollback(back)
        kept = held[: len(held) - back]
        if back:
            assert torch.equal(constraint.allowed(), _replayed(compiler, rules[limit], kept).allowed())
            assert not constraint.is_finished
        for token in held[len(kept) :]:
            constraint.advance(token)
        with pytest.raises(GrammarError) as again:
            constraint.advance(letters[len(held) % 2])
        assert str(again.value) == str(first.value)
