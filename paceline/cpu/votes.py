"""Grows a draft from suffix trees: the compiled part of drafters/suffix.py.

Every match of the last tokens, of any length, in the request's own tree or in that of the past, votes for
what followed it most often: with the chance count / (total + doubt / length), the highest vote for a token
counts, and the draft grows where its chance is highest. A match is a node, or inside a leaf a place in the
text. Invariant: the work is bounded by nodes drafted x tree depth, however long the text is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray

from paceline.cpu import suffixes
from paceline.cpu.compile import kernel, piece, struct
from paceline.cpu.lanes import double_pointer, int_pointer, word_pointer
from paceline.cpu.suffixes import NOTHING, find, header_at, push_all, tree_at

# columns of a match: which tree; its node, or NOTHING and a slot of the text; tokens matched
PAST, NODE, SLOT, LENGTH = range(4)
VOTES = 2  # children of a node that get a vote
WIDTH = 3  # most children of a drafted node
OWN_DOUBT, PAST_DOUBT, FLOOR, FACTOR = range(4)  # settings


class Scratch(NamedTuple):
    """What a draft is grown in; used again for the next. nodes: one more than are ever drafted."""

    settings: np.ndarray  # [4] float64
    drafted: np.ndarray  # [nodes] int64: tokens
    parents: np.ndarray  # [nodes] int64
    reach: np.ndarray  # [nodes] float64: chances of their paths
    matches: np.ndarray  # [nodes, 2 * depth, 4] int32: of each drafted node
    counts: np.ndarray  # [nodes] int64: how many there are
    depths: np.ndarray  # [nodes] int64
    tokens: np.ndarray  # [votes] int64
    chances: np.ndarray  # [votes] float64
    pool_tokens: np.ndarray  # [nodes * width] int64: continuations not drafted yet
    pool_parents: np.ndarray
    pool_chances: np.ndarray  # float64


# what kernels read of a Scratch: addresses of its arrays, and sizes
Header = NamedTuple("Header", [(name, int) for name in (*Scratch._fields, "depth", "nodes", "width")])  # type: ignore[misc]


def scratch(depth: int, nodes: int, width: int) -> Scratch:
    num_votes, pool, whole = 2 * depth * VOTES, nodes * width, np.int64
    return Scratch(
        np.zeros(4), np.zeros(nodes, whole), np.zeros(nodes, whole), np.zeros(nodes),
        np.zeros((nodes, 2 * depth, 4), np.int32), np.zeros(nodes, whole), np.zeros(nodes, whole),
        np.zeros(num_votes, whole), np.zeros(num_votes), np.zeros(pool, whole), np.zeros(pool, whole),
        np.zeros(pool),
    )  # fmt: skip


scratch_header_at = struct(Header)


@piece
def scratch_at(header):  # type: ignore[no-untyped-def]
    h = scratch_header_at(header)
    nodes, votes, pool = h.nodes, 2 * h.depth * VOTES, h.nodes * h.width
    return Scratch(
        carray(double_pointer(h.settings), 4),
        carray(int_pointer(h.drafted), nodes),
        carray(int_pointer(h.parents), nodes),
        carray(double_pointer(h.reach), nodes),
        carray(word_pointer(h.matches), (nodes, 2 * h.depth, 4)),
        carray(int_pointer(h.counts), nodes),
        carray(int_pointer(h.depths), nodes),
        carray(int_pointer(h.tokens), votes),
        carray(double_pointer(h.chances), votes),
        carray(int_pointer(h.pool_tokens), pool),
        carray(int_pointer(h.pool_parents), pool),
        carray(double_pointer(h.pool_chances), pool),
    )


@piece
def record(matches, count, is_past, tree, node, length):  # type: ignore[no-untyped-def]
    """Write down a match that ends at a node."""
    where = tree.nodes[node, suffixes.WHERE]
    matches[count, PAST], matches[count, LENGTH] = is_past, length
    matches[count, NODE] = NOTHING if where >= 0 else node
    matches[count, SLOT] = where
    return count + 1


@piece
def locate(matches, live, past):  # type: ignore[no-untyped-def]
    """All matches of the last tokens, longest first in each tree. What the past lacks ends nothing longer."""
    count, num_active = 0, live.state[suffixes.NUM_ACTIVE]
    for i in range(num_active):
        count = record(matches, count, 0, live, live.active[i], num_active - i)
    end, size = live.state[suffixes.END], len(live.text)
    longest = min(end - live.state[suffixes.BEGIN], len(past.active) - 1)
    first = count
    for length in range(1, longest + 1):
        node, at = suffixes.ROOT, end - length
        while at < end:
            node = find(past.nodes, past.slots, node, live.text[at % size])
            at += 1
            if node == NOTHING or past.nodes[node, suffixes.WHERE] >= 0:
                break
        if node == NOTHING:
            break
        here = record(matches, count, 1, past, node, length)
        slot = matches[count, SLOT]
        while at < end and slot >= 0 and past.text[slot] == live.text[at % size]:
            slot = (slot + 1) % len(past.text)
            at += 1
        matches[count, SLOT] = slot
        if at < end:
            break
        count = here
    for i in range((count - first) // 2):  # longest first
        for column in range(4):
            low, high = matches[first + i, column], matches[count - 1 - i, column]
            matches[first + i, column], matches[count - 1 - i, column] = high, low
    return count


@piece
def follow(matches, count, followed, live, past, token):  # type: ignore[no-untyped-def]
    """The matches that go on with a token, into `followed`; how many there are."""
    kept = 0
    for i in range(count):
        tree = past if matches[i, PAST] else live
        node, slot = matches[i, NODE], matches[i, SLOT]
        if node == NOTHING:
            if tree.text[slot] == token:
                followed[kept] = matches[i]
                followed[kept, SLOT] = (slot + 1) % len(tree.text)
                followed[kept, LENGTH] += 1
                kept += 1
        else:
            child = find(tree.nodes, tree.slots, node, token)
            if child != NOTHING:
                kept = record(followed, kept, matches[i, PAST], tree, child, matches[i, LENGTH] + 1)
    return kept


@piece
def raise_vote(tokens, chances, count, token, chance):  # type: ignore[no-untyped-def]
    for i in range(count):
        if tokens[i] == token:
            chances[i] = max(chances[i], chance)
            return count
    tokens[count], chances[count] = token, chance
    return count + 1


@piece
def vote(matches, count, live, past, settings, tokens, chances):  # type: ignore[no-untyped-def]
    """The tokens the matches vote for, and the chance of each; how many there are."""
    found = 0
    for i in range(count):
        tree, node = past if matches[i, PAST] else live, matches[i, NODE]
        doubt = settings[OWN_DOUBT + matches[i, PAST]] / matches[i, LENGTH]
        if node == NOTHING:
            token = tree.text[matches[i, SLOT]]
            if token != suffixes.SEPARATOR:
                found = raise_vote(tokens, chances, found, token, 1.0 / (1.0 + doubt))
            continue
        child, total = tree.nodes[node, suffixes.FIRST], tree.nodes[node, suffixes.TOTAL] + doubt
        for _ in range(VOTES):
            if child != NOTHING:
                chance = tree.nodes[child, suffixes.COUNT] / total
                found = raise_vote(tokens, chances, found, tree.nodes[child, suffixes.TOKEN], chance)
                child = tree.nodes[child, suffixes.NEXT]
    return found


@piece
def grow(live, past, budget, width, scratch):  # type: ignore[no-untyped-def]
    """Draft up to `budget` nodes, best first, none below the floor; how many there are with the root."""
    matches, counts, depths, reach = scratch.matches, scratch.counts, scratch.depths, scratch.reach
    counts[0], depths[0], reach[0], pool_size, size = locate(matches[0], live, past), 0, 1.0, 0, 1
    scratch.drafted[0], scratch.parents[0] = live.text[(live.state[suffixes.END] - 1) % len(live.text)], -1
    longest = 0
    for i in range(counts[0]):
        longest = max(longest, matches[0, i, LENGTH])
    furthest = max(1, int(scratch.settings[FACTOR] * longest))
    node = 0
    while True:
        if depths[node] < furthest:
            votes = scratch.settings, scratch.tokens, scratch.chances
            found = vote(matches[node], counts[node], live, past, *votes)
            left = reach[node]  # siblings count where earlier ones fail
            for _ in range(min(width, found)):
                best = scratch.chances[:found].argmax()
                chance = scratch.chances[best]
                scratch.pool_tokens[pool_size], scratch.pool_parents[pool_size] = scratch.tokens[best], node
                scratch.pool_chances[pool_size] = left * chance
                scratch.chances[best] = -1.0
                left *= 1.0 - chance
                pool_size += 1
        if pool_size == 0 or size > budget:
            return size
        best = scratch.pool_chances[:pool_size].argmax()
        chance, token = scratch.pool_chances[best], scratch.pool_tokens[best]
        parent = scratch.pool_parents[best]
        if chance < scratch.settings[FLOOR]:
            return size
        scratch.pool_chances[best] = -1.0
        node = size
        scratch.drafted[node], scratch.parents[node] = token, parent
        reach[node], depths[node] = chance, depths[parent] + 1
        counts[node] = follow(matches[parent], counts[parent], matches[node], live, past, token)
        size += 1


@kernel
def draft(live, past, tokens_at, count, budget, header):  # type: ignore[no-untyped-def]
    """Push a request's `count` new tokens and draft what follows: the number of nodes with the root. If its
    tree must grow first, minus one and minus the tokens that were pushed. live, past, header: addresses of
    the trees' headers and of the scratch's."""
    own, width = tree_at(live), scratch_header_at(header).width
    pushed = push_all(own, carray(word_pointer(tokens_at), count), header_at(live).may_grow != 0)
    return grow(own, tree_at(past), budget, width, scratch_at(header)) if pushed == count else -1 - pushed
