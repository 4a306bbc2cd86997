"""Finds the longest match of a text's last tokens in the text itself: the compiled part of drafters/ngram.py.

The text is read backwards, a nanosecond a token, so there is no index to keep, and a text may lose its last
tokens at any time. Invariant: of equally long matches the most recent is found.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import carray

from paceline.cpu.compile import kernel, piece, struct
from paceline.cpu.lanes import double_pointer, int_pointer, word_pointer

# What followed a match of n tokens follows it again with the chance n / (n + DOUBT): measured for suffix.py.
DOUBT = 2.0


class Lookup(NamedTuple):
    """What a kernel reads of a request; arrays by address."""

    num: int  # tokens of the text
    text: int  # [size] int32
    size: int
    shortest: int  # match that counts
    longest: int  # match that is looked for
    is_trusted: bool  # wholly; else half as far as it is long
    drafted: int  # [budget + 1] int64: where a draft is written, the root first
    reach: int  # [budget + 1] float64: path probabilities


lookup_at = struct(Lookup)


@piece
def match(text, num, longest):  # type: ignore[no-untyped-def]
    """Where the longest match goes on, and how many tokens it has."""
    start, best = 0, 0
    for last in range(num - 2, -1, -1):
        size = 0
        while size < longest and size <= last and text[last - size] == text[num - 1 - size]:
            size += 1
        if size > best:
            start, best = last + 1, size
            if best == longest:
                break
    return start, best


@kernel
def draft(live, _past, tokens_at, count, budget, _scratch):  # type: ignore[no-untyped-def]
    """Push `count` new tokens and draft what follows: the number of nodes with the root. If the text has no
    room for them, -1. live: address of a Lookup."""
    h = lookup_at(live)
    num, text = h.num + count, carray(word_pointer(h.text), h.size)
    if num > h.size:
        return -1
    text[h.num : num] = carray(word_pointer(tokens_at), count)
    carray(int_pointer(live), 1)[0] = num
    drafted, reach = carray(int_pointer(h.drafted), budget + 1), carray(double_pointer(h.reach), budget + 1)
    start, size = match(text, num, h.longest)
    drafted[0], reach[0] = text[num - 1], 1.0
    if size < h.shortest:
        return 1
    length = budget if h.is_trusted else min(budget, (size + 1) // 2)
    for i in range(length):
        # a match that overlaps the end repeats: what is drafted is read on from
        drafted[i + 1] = text[start + i % (num - start)]
        reach[i + 1] = reach[i] * ((size + i) / (size + i + DOUBT))
    return length + 1
