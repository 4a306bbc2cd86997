"""The suffix drafter: its trees count exactly, within their bytes and in time that does not grow, and it
drafts what they say.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import SamplingParams
from paceline.core.errors import ConfigError
from paceline.core.types import Draft, Request
from paceline.cpu.suffix_tree import SLOT_BYTES, SuffixTree
from paceline.cpu.suffixes import COUNT, FIRST, NEXT, ROOT, SEPARATOR, TOKEN, TOTAL, WHERE
from paceline.drafters.registry import parse
from paceline.drafters.suffix import DOUBTS, Suffix, SuffixConfig

Counts = dict[tuple[int, ...], int]


def request_of(
    tokens: Sequence[int], name: str = "r", num_prompt: int | None = None, **fields: Any
) -> Request:
    return Request(
        name,
        SamplingParams(),
        list(tokens),
        len(tokens) if num_prompt is None else num_prompt,
        seed=0,
        **fields,
    )


def drafter(**options: Any) -> Suffix:
    return Suffix(
        SuffixConfig(
            **{"num_speculative_tokens": 8, "suffix_decoding_min_token_prob": 0.0, "tree": False, **options}
        )
    )


def draft_of(suffix: Suffix, request: Request, budget: int = 8) -> Draft:
    (draft,) = suffix.propose([request], [budget])
    assert draft.chances is not None
    assert len(draft.chances) == len(draft.tree.tokens)
    assert all(0 < draft.chances[n] <= draft.chances[p] for n, p in enumerate(draft.tree.parents) if n)
    return draft


def drafted(suffix: Suffix, request: Request, budget: int = 8) -> list[int]:
    return list(draft_of(suffix, request, budget).tree.tokens[1:])


def answered(suffix: Suffix, name: str, answer: Sequence[int]) -> None:
    """A request comes, is answered and goes."""
    request = request_of([999, *answer], name, num_prompt=1)
    suffix.propose([request], [1])
    suffix.release(request)


def counts_of(tree: SuffixTree) -> Counts:
    """All strings in a tree, read from its arrays, leaves followed into the text."""
    nodes, _, text, _, active = tree.arrays
    found: Counts = {}

    def read(node: int, path: tuple[int, ...]) -> None:
        children = []
        child = int(nodes[node, FIRST])
        while child:
            children.append(child)
            child = int(nodes[child, NEXT])
        assert nodes[node, TOTAL] == sum(nodes[c, COUNT] for c in children)
        for child in children:
            string = (*path, int(nodes[child, TOKEN]))
            found[string] = int(nodes[child, COUNT])
            where = int(nodes[child, WHERE])
            if where < 0:
                read(child, string)
            while where >= 0 and len(string) < len(active) and text[where] != SEPARATOR:
                string = (*string, int(text[where]))
                found[string] = 1
                where = (where + 1) % len(text)

    read(ROOT, ())
    return found


def counted(texts: Sequence[Sequence[int]], depth: int, begin: int = 0) -> Counts:
    """All strings that begin at `begin` or later, counted one by one. A text and the separator after it take
    their places in turn.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    place = 0
    for text in texts:
        for start in range(max(begin - place, 0), len(text)):
            counts.update(tuple(text[start : start + n]) for n in range(1, min(depth, len(text) - start) + 1))
        place += len(text) + 1
    return dict(counts)


pieces = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 4), st.booleans()),
    min_size=1,
    max_size=8,
)


@settings(max_examples=80, deadline=None)
@given(pieces, st.integers(2, 6), st.sampled_from([128, 2048]), st.data())
def test_a_tree_counts_every_string_it_holds(
    shown: list[Any], depth: int, size: int, data: st.DataObject
) -> None:
    """Texts in pieces, repetitive ones too, some of them ended, some forgotten, in a tree so small that it
    also forgets by itself.
    """
    tree = SuffixTree(depth, size * SLOT_BYTES)
    texts: list[list[int]] = [[]]
    for tokens, repeats, is_end in shown:
        tree.extend(tokens * repeats)
        texts[-1] += tokens * repeats
        assert counts_of(tree) == counted(texts, depth, tree.num_pushed - tree.num_held)
        if is_end:
            tree.close(data.draw(st.integers(0, tree.num_pushed)))
            texts.append([])
            assert counts_of(tree) == counted(texts, depth, tree.num_pushed - tree.num_held)


@pytest.mark.parametrize("kind", ["random", "repeated", "constant"])
def test_a_tree_keeps_to_its_bytes_and_holds_the_newest(kind: str) -> None:
    rng, bound = np.random.default_rng(1), 2**20
    tokens = {
        "random": rng.integers(0, 50_000, 60_000),
        "repeated": np.repeat(rng.integers(0, 50_000, (30, 1_000)), 2, axis=0).reshape(
            -1
        ),  # all of it twice, at full depth
        "constant": np.full(60_000, 7),
    }[kind]
    tree = SuffixTree(24, bound)
    for part in np.array_split(tokens, 60):
        tree.extend(part)
        assert tree.num_bytes == sum(array.nbytes for array in tree.arrays[:3]) <= bound
    assert 0 < tree.num_held < len(tokens)
    newest = tokens[-tree.num_held :].tolist()
    assert counts_of(tree) == counted([newest], 24)


def best_chance(own: list[int], past: list[list[int]], depth: int) -> float:
    """Of the next token, from the definition: the best vote of any match, of any length, in either text."""
    best = 0.0
    for texts, doubt in (([own], DOUBTS[0]), (past, DOUBTS[1])):
        counts = counted(texts, depth)
        for n in range(1, min(depth, len(own) + 1)):
            match = tuple(own[-n:])
            followers = [counts.get((*match, token), 0) for token in range(4)]
            if sum(followers):
                best = max(best, max(followers) / (sum(followers) + doubt / n))
    return best


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(2, 6),
    st.booleans(),
)
def test_the_best_vote_wins(past: list[list[int]], own: list[int], depth: int, tree: bool) -> None:
    suffix = drafter(suffix_decoding_max_tree_depth=depth, tree=tree)
    for i, answer in enumerate(past):
        answered(suffix, f"past {i}", answer)
    chances = draft_of(suffix, request_of(own)).chances
    assert chances is not None
    assert max(chances[1:], default=0.0) == pytest.approx(best_chance(own, past, depth))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([5, 6, 7, 8, 9, 1, 5, 6], [7, 8, 9, 1, 5, 6]),  # what followed, to the end of the text
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 3, 9, 8, 1, 2], [3, 9]),  # the more frequent; after 3 9 came 1 and 8
        ([4, 5, 9, 4, 5, 8, 4, 5], [8, 4, 5]),  # of equally frequent ones the most recent
        ([1, 2, 3], []),
    ],
)
def test_it_drafts_what_followed(tokens: list[int], expected: list[int]) -> None:
    assert drafted(drafter(), request_of(tokens))[: len(expected)] == expected
    assert expected or not drafted(drafter(), request_of(tokens))


def test_options_cut_a_draft() -> None:
    request = request_of([5, 6, 7, 8, 9, 1, 5, 6])
    assert drafted(drafter(), request, budget=2) == [7, 8]
    assert drafted(drafter(num_speculative_tokens=3), request) == [7, 8, 9]
    assert drafted(drafter(suffix_decoding_max_spec_factor=1.0), request) == [7, 8]  # two tokens match
    assert drafted(drafter(suffix_decoding_max_spec_factor=0.0), request) == [7]
    assert drafted(drafter(suffix_decoding_min_token_prob=0.9), request) == []
    assert drafted(drafter(), request_of(request.tokens, stop_ids=frozenset({8}))) == [7, 8]


def test_a_tree_drafts_both_where_both_occurred() -> None:
    request = request_of([1, 2, 3, 9, 1, 2, 4, 8, 1, 2])
    tree = draft_of(drafter(tree=True), request).tree
    assert {tree.tokens[n] for n, parent in enumerate(tree.parents) if parent == 0} >= {3, 4}
    assert draft_of(drafter(), request).tree.is_chain


def test_past_answers_are_drafted_from_and_the_oldest_forgotten() -> None:
    suffix = drafter(suffix_decoding_max_cached_requests=2)
    for i in range(3):
        answered(suffix, f"past {i}", [10 * i + 100 + j for j in range(6)])
    found = [
        drafted(suffix, request_of([1, 10 * i + 100, 10 * i + 101], f"new {i}"), budget=2) for i in range(3)
    ]
    assert found == [[], [112, 113], [122, 123]]
    nothing = drafter(suffix_decoding_max_cached_requests=0)
    answered(nothing, "past", [100, 101, 102])
    assert drafted(nothing, request_of([1, 100, 101])) == []


def test_an_answer_nobody_asked_about_is_not_remembered() -> None:
    suffix = drafter()
    suffix.release(request_of([999, 100, 101, 102], "unasked", num_prompt=1))
    assert not drafted(suffix, request_of([1, 100, 101], "other"))
    assert suffix.past.num_held == 0
    answered(suffix, "asked", [100, 101, 102])
    assert drafted(suffix, request_of([1, 100, 101])) == [102]


def test_what_is_forgotten_is_not_drafted() -> None:
    """Who measures a prompt twice must not be given its answer."""
    one = drafter()
    one.propose([request_of([1, 2, 3, 4, 5, 6], "first", num_prompt=2)], [4])
    one.release(request_of([1, 2, 3, 4, 5, 6], "first", num_prompt=2))
    assert one.propose([request_of([9, 3, 4], "second")], [4])[0].num_drafted
    one.forget()
    assert not one.propose([request_of([9, 3, 4], "third")], [4])[0].num_drafted


def test_a_request_leaves_nothing_but_its_answer() -> None:
    suffix = drafter()
    empty = suffix.num_bytes
    request = request_of([1, 2, 3] * 2000, num_prompt=5990)
    assert drafted(suffix, request)
    assert drafted(suffix, request) == drafted(suffix, request), "asking again changes nothing"
    assert suffix.num_bytes > 2 * empty
    suffix.release(request)
    assert suffix.num_bytes == empty
    drafted(suffix, request_of([7], "other"))
    assert suffix.past.num_held == 11  # ten tokens, and the end


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("suffix_decoding_max_tree_depth", 1),
        ("suffix_decoding_max_tree_depth", 2.5),
        ("suffix_decoding_min_token_prob", 1.5),
        ("suffix_decoding_max_spec_factor", -1),
        ("suffix_decoding_max_cached_requests", -1),
        ("suffix_decoding_max_bytes", 1000),
        ("tree", 3),
    ],
)
def test_a_wrong_option_is_named(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{option} is {value}"):
        parse({"method": "suffix", option: value})


@pytest.mark.serial
def test_a_step_costs_the_same_after_a_hundred_thousand_tokens() -> None:
    rng = np.random.default_rng(0)
    words = [rng.integers(0, 50_000, rng.integers(1, 8)).tolist() for _ in range(5_000)]
    text = [t for w in rng.zipf(1.3, 60_000) % len(words) for t in words[w]]
    costs = []
    for length in (1_000, 100_000):
        suffix, request = drafter(), request_of(text[:length])
        suffix.propose([request], [4])
        suffix.past.extend(text[-length:])
        suffix.past.close()
        times = []
        for token in text[length : length + 2_000]:
            request.tokens.append(token)
            start = time.perf_counter()
            suffix.propose([request], [4])
            times.append(time.perf_counter() - start)
        costs.append(float(np.median(times)))
        assert suffix.past.num_held == length + 1
    print(f"\nsuffix: {costs[0] * 1e6:.1f} µs a step after 1,000 tokens, {costs[1] * 1e6:.1f} after 100,000")
    assert costs[1] < 2.5 * costs[0]
    assert costs[1] < 0.5e-3
