"""A suffix tree over a window of text, in flat arrays: the compiled part of suffix_tree.py.

A node is a row of int32: a string that occurred, how often, and its children, the likeliest first. One that
occurred once is a leaf that says where the text goes on; it grows children when it occurs again. Invariant:
for every start in [begin, end) the counts along its text, to a leaf, `depth` or the text's end, include it
once. Nothing allocates: a push takes `depth` + 1 nodes at most, `forget` frees those of the oldest start.
Kernels are given the address of a tree's header: numba takes 2 µs to unpack an array, and a tree has five.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray

from paceline.cpu.compile import kernel, piece, struct
from paceline.cpu.lanes import int_pointer, word_pointer

# columns of a node; WHERE: slot of the text, or -1
COUNT, TOTAL, TOKEN, PARENT, FIRST, NEXT, PREVIOUS, WHERE = range(8)
FREE, NUM_FREE, BEGIN, END, NUM_ACTIVE = range(5)  # of the state; BEGIN and END count all tokens ever pushed
ROOT, NOTHING = 0, 0  # the root is no child, so its number can say that there is no node
SEPARATOR = -1  # what stands in the text where there is nothing more


class Arrays(NamedTuple):
    """What a tree consists of."""

    nodes: np.ndarray  # [size, 8] int32
    slots: np.ndarray  # [2 * size] int32: nodes by hash of parent and token
    text: np.ndarray  # [size] int32: a ring
    state: np.ndarray  # [5] int64
    active: np.ndarray  # [depth] int32: nodes of the last tokens that occurred before, longest first


# what kernels read of a tree: addresses of its arrays, its size and depth, and whether it may grow
FIELDS = [(name, int) for name in (*Arrays._fields, "size", "depth", "may_grow")]
Header = NamedTuple("Header", FIELDS)  # type: ignore[misc]
header_at = struct(Header)


@piece
def tree_at(header):  # type: ignore[no-untyped-def]
    h = header_at(header)
    nodes, slots = carray(word_pointer(h.nodes), (h.size, 8)), carray(word_pointer(h.slots), 2 * h.size)
    text, state = carray(word_pointer(h.text), h.size), carray(int_pointer(h.state), 5)
    return Arrays(nodes, slots, text, state, carray(word_pointer(h.active), h.depth))


@piece
def place(slots, parent, token):  # type: ignore[no-untyped-def]
    mixed = (parent * 0x9E3779B1 + token) * 0x85EBCA6B
    return (mixed ^ (mixed >> 29)) & (len(slots) - 1)


@piece
def slot_of(nodes, slots, parent, token):  # type: ignore[no-untyped-def]
    """Where the hash table has the child of a node by token; where it would go, if there is none."""
    at = place(slots, parent, token)
    while slots[at] != NOTHING and (nodes[slots[at], PARENT] != parent or nodes[slots[at], TOKEN] != token):
        at = (at + 1) & (len(slots) - 1)
    return at


@piece
def find(nodes, slots, parent, token):  # type: ignore[no-untyped-def]
    """The child of a node by token, or NOTHING."""
    return slots[slot_of(nodes, slots, parent, token)]


@piece
def leave(nodes, slots, node):  # type: ignore[no-untyped-def]
    """Take a node out of the hash table and close the gap, so that no search ends early."""
    mask, gap = len(slots) - 1, slot_of(nodes, slots, nodes[node, PARENT], nodes[node, TOKEN])
    at = (gap + 1) & mask
    while slots[at] != NOTHING:
        home = place(slots, nodes[slots[at], PARENT], nodes[slots[at], TOKEN])
        if (at - home) & mask >= (at - gap) & mask:
            slots[gap], gap = slots[at], at
        at = (at + 1) & mask
    slots[gap] = NOTHING


@piece
def unlink(nodes, node):  # type: ignore[no-untyped-def]
    before, after = nodes[node, PREVIOUS], nodes[node, NEXT]
    if before == NOTHING:
        nodes[nodes[node, PARENT], FIRST] = after
    else:
        nodes[before, NEXT] = after
    if after != NOTHING:
        nodes[after, PREVIOUS] = before


@piece
def link(nodes, node):  # type: ignore[no-untyped-def]
    """Put a node among its siblings: first if none is more frequent than it, else second."""
    parent = nodes[node, PARENT]
    first = nodes[parent, FIRST]
    before = NOTHING if first == NOTHING or nodes[node, COUNT] >= nodes[first, COUNT] else first
    after = first if before == NOTHING else nodes[first, NEXT]
    nodes[node, PREVIOUS], nodes[node, NEXT] = before, after
    if before == NOTHING:
        nodes[parent, FIRST] = node
    else:
        nodes[before, NEXT] = node
    if after != NOTHING:
        nodes[after, PREVIOUS] = node


@piece
def create(nodes, slots, state, parent, token, where):  # type: ignore[no-untyped-def]
    node = state[FREE]
    state[FREE] = nodes[node, NEXT]
    state[NUM_FREE] -= 1
    nodes[node, COUNT], nodes[node, TOTAL], nodes[node, FIRST] = 1, 0, NOTHING
    nodes[node, TOKEN], nodes[node, PARENT], nodes[node, WHERE] = token, parent, where
    nodes[parent, TOTAL] += 1
    slots[slot_of(nodes, slots, parent, token)] = node
    link(nodes, node)


@piece
def visit(nodes, slots, text, state, parent, token, room):  # type: ignore[no-untyped-def]
    """One more occurrence of a node's child, returned if it had occurred before. `room`: levels below it."""
    node = find(nodes, slots, parent, token)
    if node == NOTHING:
        create(nodes, slots, state, parent, token, state[END] % len(text) if room else -1)
        return NOTHING
    nodes[node, COUNT] += 1
    nodes[parent, TOTAL] += 1
    if nodes[node, PREVIOUS] != NOTHING:
        unlink(nodes, node)
        link(nodes, node)
    where = nodes[node, WHERE]
    if where >= 0:  # a leaf until now: the first occurrence moves one down
        nodes[node, WHERE] = -1
        if text[where] != SEPARATOR:
            create(nodes, slots, state, node, text[where], (where + 1) % len(text) if room > 1 else -1)
    return node


@piece
def push(nodes, slots, text, state, active, token):  # type: ignore[no-untyped-def]
    """The text goes on. `active`: nodes of its last tokens that had occurred before, the longest first."""
    depth = len(active)
    text[state[END] % len(text)] = token
    state[END] += 1
    text[state[END] % len(text)] = SEPARATOR
    count, kept = state[NUM_ACTIVE], 0
    for i in range(count + 1):
        length = count - i  # of the string so far
        if length < depth:
            parent = active[i] if length else ROOT
            node = visit(nodes, slots, text, state, parent, token, depth - 1 - length)
            if node != NOTHING:
                active[kept] = node
                kept += 1
    state[NUM_ACTIVE] = kept


@piece
def forget(nodes, slots, text, state, depth):  # type: ignore[no-untyped-def]
    """Take the oldest start out of all counts; nodes that no longer occur are free again."""
    parent = ROOT
    for at in range(state[BEGIN], state[BEGIN] + depth):
        token = text[at % len(text)]
        if token == SEPARATOR:
            break
        node = find(nodes, slots, parent, token)
        was_leaf = nodes[node, WHERE] >= 0
        nodes[node, COUNT] -= 1
        nodes[parent, TOTAL] -= 1
        is_first, after = nodes[node, PREVIOUS] == NOTHING, nodes[node, NEXT]
        if nodes[node, COUNT] == 0:
            leave(nodes, slots, node)
            unlink(nodes, node)
            nodes[node, NEXT] = state[FREE]
            state[FREE] = node
            state[NUM_FREE] += 1
        elif is_first and after != NOTHING and nodes[after, COUNT] > nodes[node, COUNT]:
            unlink(nodes, after)
            link(nodes, after)
        parent = node
        if was_leaf:
            break
    state[BEGIN] += 1


@piece
def push_all(tree, tokens, can_grow):  # type: ignore[no-untyped-def]
    """Push tokens and say how many; without room stop if the arrays may grow, else forget what is oldest."""
    nodes, slots, text, state, active = tree
    for i in range(len(tokens)):
        while state[NUM_FREE] <= len(active) or state[END] - state[BEGIN] >= len(text) - 2:
            if can_grow:
                return i
            forget(nodes, slots, text, state, len(active))
        push(nodes, slots, text, state, active, tokens[i])
    return len(tokens)


@kernel
def extend(header, tokens_at, count):  # type: ignore[no-untyped-def]
    """tokens_at: address of int32."""
    return push_all(tree_at(header), carray(word_pointer(tokens_at), count), header_at(header).may_grow != 0)


@kernel
def close(header, begin):  # type: ignore[no-untyped-def]
    """End the text with a separator: what comes next is another. Forget all that began before `begin`."""
    nodes, slots, text, state, active = tree_at(header)
    state[NUM_ACTIVE] = 0
    state[END] += 1
    text[state[END] % len(text)] = SEPARATOR
    while state[BEGIN] < begin:
        forget(nodes, slots, text, state, len(active))


@kernel
def move(nodes, slots, text, state, old_nodes, old_text):  # type: ignore[no-untyped-def]
    """Fill larger arrays from smaller ones: nodes keep their numbers, the text its places."""
    begin, size, used = state[BEGIN], len(old_text), len(old_nodes)
    for at in range(begin, state[END] + 1):
        text[at % len(text)] = old_text[at % size]
    for node in range(used):
        nodes[node] = old_nodes[node]
        if nodes[node, WHERE] >= 0:
            nodes[node, WHERE] = (begin + (nodes[node, WHERE] - begin) % size) % len(text)
    for node in range(used, len(nodes)):
        nodes[node, COUNT], nodes[node, NEXT] = 0, state[FREE]
        state[FREE] = node
        state[NUM_FREE] += 1
    for node in range(1, used):
        if nodes[node, COUNT] > 0:
            slots[slot_of(nodes, slots, nodes[node, PARENT], nodes[node, TOKEN])] = node
