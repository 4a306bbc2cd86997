"""Incremental text equals decoding at once, and stop strings are found wherever token borders fall."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.loaders.checkpoint import open_checkpoint
from paceline.loaders.detokenize import Detokenizer
from paceline.loaders.tokenizer import Tokenizer

BYTES = range(17, 273)  # of the default model: one token a byte, so that broken UTF-8 is common
ids = st.lists(
    st.one_of(
        st.integers(0, 49_151),
        st.integers(BYTES.start, BYTES.stop - 1),
        st.sampled_from([0, 1, 2, 49_152, 10**6]),
    ),
    max_size=40,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(open_checkpoint("default", progress=False).tokenizer_source())


class SpacedTokens:
    """Tokens as SentencePiece has them: a space in front of a word, bytes, and one special token."""

    special_ids = frozenset({0})
    strips_leading_space = True
    spellings = (b"<s>", b" Hello", b" world", b"\xe2", b"\x82", b"\xac", b" ", b"")

    def token_bytes(self, token: int) -> bytes:
        return self.spellings[token]


def _taken(detokenizer: Detokenizer, tokens: list[int]) -> str:
    pieces = []
    for token in tokens:
        detokenizer.push(token)
        pieces.append(detokenizer.take())
    detokenizer.finish()
    return "".join([*pieces, detokenizer.take()])


@settings(max_examples=300, deadline=None)
@given(tokens=ids)
def test_equals_decoding_at_once(tokenizer: Tokenizer, tokens: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer)
    text = _taken(detokenizer, tokens)
    assert text == detokenizer.text == tokenizer.decode(tokens)


@settings(max_examples=200, deadline=None)
@given(tokens=ids, stop=st.lists(st.text("ab e\n�", min_size=1, max_size=3), min_size=1, max_size=3))
def test_stop_cuts_like_a_search_of_the_whole_text(
    tokenizer: Tokenizer, tokens: list[int], stop: list[str]
) -> None:
    """One byte a token, so that the first complete stop string is the one whose end comes first in the
    text.
    """
    spelled = [
        i for token in tokens for i in tokenizer.encode(tokenizer.token_text(token), add_special=False)[:1]
    ]
    whole = tokenizer.decode(spelled)
    found = min(((whole.find(s) + len(s), whole.find(s)) for s in stop if s in whole), default=None)
    detokenizer = Detokenizer(tokenizer, stop)
    text = _taken(detokenizer, spelled)
    if "�" in whole:
        # broken characters are settled by the token after them, so a stop of them may be seen one token late
        return
    assert text == (whole if found is None else whole[: found[1]])
    assert detokenizer.is_stopped == (found is not None)


@pytest.mark.parametrize(("include", "expected"), [(False, "one "), (True, "one STOP")])
def test_stop_across_tokens(tokenizer: Tokenizer, include: bool, expected: str) -> None:
    tokens = [i for c in "one STOP two" for i in tokenizer.encode(c, add_special=False)]
    detokenizer = Detokenizer(tokenizer, ["STOP", "STOPPED"], include_stop=include)
    hits = [detokenizer.push(token) for token in tokens]
    assert hits == [i == 7 for i in range(12)]
    assert detokenizer.text == expected
    assert detokenizer.finish() == expected


def test_holds_back_what_may_become_a_stop_string(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ["<end>"])
    shown = []
    for c in "a<en<end":
        detokenizer.push(tokenizer.encode(c, add_special=False)[0])
        shown.append(detokenizer.take())
    assert shown == ["a", "", "", "", "<en", "", "", ""]
    assert detokenizer.finish() == "<end"
    assert detokenizer.text == "a<en<end"


def test_no_stop_within_min_tokens(tokenizer: Tokenizer) -> None:
    tokens = [tokenizer.encode(c, add_special=False)[0] for c in "xxaxx"]
    detokenizer = Detokenizer(tokenizer, ["x"], min_tokens=2)
    assert [detokenizer.push(t) for t in tokens] == [False, False, False, True, False]
    assert detokenizer.text == "xxa"


def test_stop_seen_before_min_tokens_is_not_found_late(tokenizer: Tokenizer) -> None:
    tokens = [tokenizer.encode(c, add_special=False)[0] for c in "ab!"]
    detokenizer = Detokenizer(tokenizer, ["ab", "abab"], min_tokens=2)
    assert not any(detokenizer.push(t) for t in tokens)
    assert detokenizer.finish() == "ab!"


def test_sentence_piece_text() -> None:
    detokenizer = Detokenizer(SpacedTokens())
    assert _taken(detokenizer, [0, 1, 2, 6, 3, 4, 5]) == "Hello world €"
    broken = Detokenizer(SpacedTokens())
    assert _taken(broken, [7, 6, 1, 3, 4, 2]) == " Hello� world"


def test_cost_does_not_grow_with_the_text(tokenizer: Tokenizer) -> None:
    chosen = random.Random(0).choices(range(17, 49_152), k=40_000)

    def seconds(tokens: list[int]) -> float:
        detokenizer, start = Detokenizer(tokenizer, ["never to be seen"]), time.thread_time()
        for token in tokens:
            detokenizer.push(token)
            detokenizer.take()
        return time.thread_time() - start

    seconds(chosen[:2_000])
    assert seconds(chosen) < 40 * max(
        seconds(chosen[:2_000]), 1e-3
    )  # 20 times the tokens; quadratic would be 400 times


@pytest.mark.parametrize("stop", ["", [""], [1]])
def test_bad_stop_is_named(stop: object) -> None:
    with pytest.raises(ConfigError, match="stop is"):
        SamplingParams(stop=stop)  # type: ignore[arg-type]
