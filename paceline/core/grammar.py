"""Structured output: JSON schemas, regexes, choices and grammars as masks over the vocabulary (llguidance).

Invariant: a constraint's mask depends only on the tokens advanced and not rolled back, so a draft can be
tested and undone any number of times. So does where a grammar proves too complex: a constraint that raises
stays where it was, and can still be rolled back. End tokens are allowed exactly where the grammar may end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from paceline.core.errors import GrammarError
from paceline.core.params import StructuredOutputs

if TYPE_CHECKING:
    import llguidance
    import torch

MAX_GRAMMAR_CHARS = 500_000
MAX_CHOICES = 20_000
MAX_REASON_CHARS = 200
# Room for any usual indentation; without a bound a model may write blanks until its tokens run out.
JSON_WHITESPACE = {"whitespace_pattern": r"[ \n\r\t]{1,32}"}
# By llguidance's own figures: at most about 20 ms to build a lexer, 15 ms a mask, 2 kB a lexer state.
Limits = Mapping[str, int]  # of llguidance's parser
LIMITS: Limits = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 100_000,
    "max_grammar_size": 250_000,
}


class GrammarTokenizer(Protocol):
    """The part of a tokenizer that is read here."""

    eos_ids: frozenset[int]

    @property
    def vocab_size(self) -> int: ...
    def json(self) -> str: ...


class GrammarCompiler:
    """Makes constraints for one model. `vocab_size` is the model's; ids without a token are never allowed."""

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int, limits: Limits = LIMITS) -> None:
        import llguidance

        if not tokenizer.eos_ids:
            remedy = "use a model with an eos_token_id"
            raise GrammarError(f"the model has no end token, so structured output could never end; {remedy}")
        self.ends, self.vocab_size = sorted(i for i in tokenizer.eos_ids if i < vocab_size), vocab_size
        self.num_known = min(vocab_size, tokenizer.vocab_size)  # ids from here on have no token
        num_ids = max(vocab_size, tokenizer.vocab_size)
        self._tokenizer = llguidance.LLTokenizer(tokenizer.json(), n_vocab=num_ids, eos_token=self.ends)
        self._limits = llguidance.LLParserLimits(**limits, verbose_errors=False)

    def matcher(self, spec: StructuredOutputs) -> tuple[str, llguidance.LLMatcher]:
        """The kind of the grammar, and its parser with the first mask computed: all that may take long."""
        import llguidance

        kind, grammar = _to_grammar(spec)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            reason = _shorten(matcher.get_error())
            raise GrammarError(f"structured_outputs.{kind} does not compile: {reason}; {_REMEDY[kind]}")
        matcher.compute_bitmask()  # only the first mask shows that no token can begin the text
        return kind, matcher

    def compile(self, spec: StructuredOutputs) -> GrammarConstraint:
        kind, matcher = self.matcher(spec)
        constraint = GrammarConstraint(self, spec, kind, matcher)
        if (matcher.is_stopped() and not matcher.is_accepting()) or not constraint.allowed().any():
            raise GrammarError(f"structured_outputs.{kind} allows no text at all; loosen it")
        return constraint


class GrammarConstraint:
    """One request's state in its grammar."""

    def __init__(self, compiler: GrammarCompiler, spec: StructuredOutputs, kind: str, matcher: Any) -> None:
        self._compiler, self._spec, self._kind = compiler, spec, kind
        self._matcher: llguidance.LLMatcher = matcher
        self._tokens: list[int] = []  # advanced and not rolled back, without end tokens
        self._num_ends = 0  # end tokens advanced: the matcher never sees them
        self._mask: torch.Tensor | None = None  # of the present state
        self._has_undone = False  # the matcher has seen more than `_tokens`, or is broken
        # Why the grammar is too complex, by where: the tokens before, and the next one or None for the mask.
        self._too_complex: dict[tuple[int | None, ...], str] = {}

    def allowed(self) -> torch.Tensor:
        """bool [vocab], read only: the tokens that may come next; after an end token only end tokens."""
        if self._mask is None:
            import numpy as np
            import torch

            known, is_over = self._compiler.num_known, self._num_ends > 0
            mask = torch.zeros(self._compiler.vocab_size, dtype=torch.bool)
            if not is_over:
                packed = np.frombuffer(self._step(None), dtype=np.uint8)
                bits = np.unpackbits(packed, count=known, bitorder="little")
                mask[:known] = torch.from_numpy(bits.view(np.bool_))
            mask[self._compiler.ends] = is_over or self._matcher.is_accepting()
            self._mask = mask
        return self._mask

    def advance(self, token: int) -> None:
        assert bool(self.allowed()[token]), f"token {token} is not allowed by the grammar here"
        if token in self._compiler.ends:
            self._num_ends += 1
        else:
            self._step(token)
            self._tokens.append(token)
        self._mask = None

    def rollback(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        ends, self._mask = min(num_tokens, self._num_ends), None
        self._num_ends -= ends
        if num_tokens > ends:
            del self._tokens[len(self._tokens) - (num_tokens - ends) :]
            self._has_undone = True
            self._matcher.rollback(num_tokens - ends)  # a broken one refuses: the next step replaces it

    @property
    def is_finished(self) -> bool:
        """The text is complete: an end token came, or nothing else may come."""
        return self._num_ends > 0 or (self._matcher.is_stopped() and not self._matcher.is_error())

    def _step(self, token: int | None) -> bytes:
        """Let the matcher consume a token, or with None compute the present state's mask, packed.

        A matcher that reaches a limit is broken for good, and some limits also count what rolled back tokens
        made it build. So where any were, the step is tried again with a matcher that has seen only the text,
        as in plain decoding; what breaks that one too is remembered, since drafts come here repeatedly."""
        place = (*self._tokens, token) if self._too_complex else ()
        if place in self._too_complex:
            raise GrammarError(self._too_complex[place])
        result = _apply(self._matcher, token)
        if self._matcher.is_error() and self._has_undone:
            self._matcher, self._has_undone = self._compiler.matcher(self._spec)[1], False
            for earlier in self._tokens:
                _apply(self._matcher, None)  # masks count against the limits too
                _apply(self._matcher, earlier)
            result = _apply(self._matcher, token)
        if self._matcher.is_error():
            self._has_undone = True
            reason = f"{_shorten(self._matcher.get_error())}; {_REMEDY[self._kind]}"
            message = f"structured_outputs.{self._kind} is too complex here: {reason}"
            self._too_complex[*self._tokens, token] = message
            raise GrammarError(message)
        return result


def _apply(matcher: llguidance.LLMatcher, token: int | None) -> bytes:
    if token is None:
        return bytes(matcher.compute_bitmask())
    matcher.consume_token(token)
    return b""


_REMEDY: Mapping[str, str] = {
    "json": "correct or simplify the schema",
    "json_object": "shorten the answer",
    "regex": "correct or simplify it (no look-around or back-references)",
    "choice": "shorten the list",
    "grammar": "correct or simplify it (Lark or GBNF)",
}


def _to_grammar(spec: StructuredOutputs) -> tuple[str, str]:
    """Which field was given, and llguidance's own grammar text for it."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if spec.json is not None or spec.json_object:
        kind = "json_object" if spec.json is None else "json"
        schema = '{"type": "object"}' if spec.json is None else _checked_size("json", _schema_text(spec.json))
        return kind, LLMatcher.grammar_from_json_schema(schema, defaults=JSON_WHITESPACE)
    if spec.regex is not None:
        return "regex", LLMatcher.grammar_from_regex(_checked_size("regex", spec.regex))
    if spec.choice is not None:
        if len(spec.choice) > MAX_CHOICES:
            count = len(spec.choice)
            raise GrammarError(f"structured_outputs.choice has {count} entries; give at most {MAX_CHOICES}")
        # One terminal: a rule with thousands of branches would overflow the parser's row.
        choices = " | ".join(json.dumps(c) for c in spec.choice)
        text = _checked_size("choice", f"start: CHOICE\nCHOICE: {choices}")
        return "choice", LLMatcher.grammar_from_lark(text)
    assert spec.grammar is not None, "StructuredOutputs holds exactly one field"
    text = _checked_size("grammar", spec.grammar)
    try:
        return "grammar", LLMatcher.grammar_from_lark(str(any_to_lark(text)))
    except Exception as error:  # the converter raises bare Exception for what it cannot read
        reason = f"{_shorten(str(error))}; {_REMEDY['grammar']}"
        raise GrammarError(f"structured_outputs.grammar does not compile: {reason}") from error


def _schema_text(schema: str | Mapping[str, Any]) -> str:
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = "{}" if value is True else json.dumps(value)
    except (ValueError, TypeError, RecursionError) as error:
        remedy = "give a JSON schema as text or as a dict"
        raise GrammarError(f"structured_outputs.json is no JSON ({error!s:.80}); {remedy}") from error
    if value is False:
        remedy = "give a JSON schema that some text fits"
        raise GrammarError(f"structured_outputs.json is false, which allows no text at all; {remedy}")
    if not isinstance(value, (Mapping, bool)):
        remedy = "give a JSON schema: an object such as {'type': 'object'}"
        raise GrammarError(f"structured_outputs.json is {value!r:.60}; {remedy}")
    return text


def _checked_size(kind: str, text: str) -> str:
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise GrammarError(f"structured_outputs.{kind} holds half a surrogate pair: no text; remove it")
    if len(text) > MAX_GRAMMAR_CHARS:
        remedy = f"keep it under {MAX_GRAMMAR_CHARS}"
        raise GrammarError(f"structured_outputs.{kind} is {len(text)} characters long; {remedy}")
    return text


def _shorten(reason: str) -> str:
    line = " ".join(reason.split("<state>")[0].split())
    return line if len(line) <= MAX_REASON_CHARS else line[: MAX_REASON_CHARS - 1] + "…"
