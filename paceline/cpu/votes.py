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
# rows of a Scratch: what is known of the drafted nodes; votes for what follows a node; continuations that are
# not drafted yet
DRAFTED, PARENTS, COUNTS, DEPTHS, TOKENS, POOL_TOKENS, POOL_PARENTS, NUM_WHOLE = range(8)
SETTINGS, REACH, CHANCES, POOL_CHANCES, NUM_FLOATS = range(5)  # REACH: chances of the nodes' paths


class Scratch(NamedTuple):
    """What a draft is grown in; used again for the next. nodes: one more than are ever drafted."""

    whole: np.ndarray  # [NUM_WHOLE, size] int64
    floats: np.ndarray  # [NUM_FLOATS, size] float64
    matches: np.ndarray  # [nodes, 2 * depth, 4] int32: of each drafted node, of which COUNTS has the number


# what kernels read of a Scratch: addresses of its arrays, and sizes
FIELDS = [(name, int) for name in (*Scratch._fields, "size", "depth", "nodes", "width")]
Header = NamedTuple("Header", FIELDS)  # type: ignore[misc]
scratch_header_at = struct(Header)


def scratch(depth: int, nodes: int) -> Scratch:
    size = max(nodes * WIDTH, 2 * depth * VOTES)
    matches = np.zeros((nodes, 2 * depth, 4), np.int32)
    return Scratch(np.zeros((NUM_WHOLE, size), np.int64), np.zeros((NUM_FLOATS, size)), matches)


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
    whole, floats, matches = scratch
    drafted, parents, counts, depths = whole[DRAFTED], whole[PARENTS], whole[COUNTS], whole[DEPTHS]
    tokens, pool_tokens, pool_parents = whole[TOKENS], whole[POOL_TOKENS], whole[POOL_PARENTS]
    settings, reach, chances, pool = floats[SETTINGS], floats[REACH], floats[CHANCES], floats[POOL_CHANCES]
    counts[0], depths[0], reach[0], pool_size, size = locate(matches[0], live, past), 0, 1.0, 0, 1
    drafted[0], parents[0] = live.text[(live.state[suffixes.END] - 1) % len(live.text)], -1
    longest, node = 0, 0
    for i in range(counts[0]):
        longest = max(longest, matches[0, i, LENGTH])
    furthest = max(1, int(settings[FACTOR] * longest))
    while True:
        if depths[node] < furthest:
            found = vote(matches[node], counts[node], live, past, settings, tokens, chances)
            left = reach[node]  # siblings count where earlier ones fail
            for _ in range(min(width, found)):
                best = chances[:found].argmax()
                pool_tokens[pool_size], pool_parents[pool_size] = tokens[best], node
                pool[pool_size] = left * chances[best]
                left *= 1.0 - chances[best]
                chances[best] = -1.0
                pool_size += 1
        if pool_size == 0 or size > budget:
            return size
        best = pool[:pool_size].argmax()
        chance, token, parent = pool[best], pool_tokens[best], pool_parents[best]
        if chance < settings[FLOOR]:
            return size
        pool[best] = -1.0
        node = size
        drafted[node], parents[node] = token, parent
        reach[node], depths[node] = chance, depths[parent] + 1
        counts[node] = follow(matches[parent], counts[parent], matches[node], live, past, token)
        size += 1


@kernel
def draft(live, past, tokens_at, count, budget, header):  # type: ignore[no-untyped-def]
    """Push a request's `count` new tokens and draft what follows: the number of nodes with the root. If its
    tree must grow first, minus one and minus the tokens that were pushed. live, past, header: addresses of
    the trees' headers and of the scratch's."""
    own, h = tree_at(live), scratch_header_at(header)
    pushed = push_all(own, carray(word_pointer(tokens_at), count), header_at(live).may_grow != 0)
    if pushed < count:
        return -1 - pushed
    whole = carray(int_pointer(h.whole), (NUM_WHOLE, h.size))
    floats = carray(double_pointer(h.floats), (NUM_FLOATS, h.size))
    matches = carray(word_pointer(h.matches), (h.nodes, 2 * h.depth, 4))
    return grow(own, tree_at(past), budget, h.width, Scratch(whole, floats, matches))
