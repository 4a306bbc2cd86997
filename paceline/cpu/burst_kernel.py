"""A burst of one request in one compiled call: a match, a head or both draft, the better draft is cut
to what pays, the target checks it, and all go on from what it picked. With neither it is plain decoding.

After a pass the host's caches are cold, and what Python does in a step takes a millisecond: so it does it
once for several. Drafts are weighed by core/weigh.py with what the policy has written down. Invariant: every
round leaves behind all that a usual step would have shown, and its pass is the decoder's own.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import carray

from paceline.core import weigh as weigher
from paceline.core.types import BLOCK_SIZE
from paceline.core.weigh import AGREED, ALONE, CONTRADICTED, NUM_CELLS
from paceline.cpu.compile import invoke, invoke_for_number, kernel, piece, struct
from paceline.cpu.forward import Pass, pass_at
from paceline.cpu.head_call import MOST_ROWS, REQUEST_SIZE, CallMemory, HeadRequest, Turn
from paceline.cpu.lanes import double_pointer, int_pointer, seconds_now, word_pointer
from paceline.heads.rows import Matcher

SPEC_ROWS, SPEC_OUTPUTS = Pass._fields.index("rows"), Pass._fields.index("num_outputs")
WRITTEN = "start", "num_rows", "position", "seen", "first_guess"  # of a head's request, in each round
START, NUM_ROWS, POSITION, SEEN, FIRST_GUESS = map(HeadRequest._fields.index, WRITTEN)
CALL_ROWS = Turn._fields.index("num_rows")  # a head's call begins with its turn
NOTHING, MATCH, HEAD = 0, 1, 2  # whose draft is checked
# What is written about a round: whole numbers, then the match's tokens, the head's and what was picked;
SOURCE, COUNT, NUM_MATCH, NUM_HEAD, NUM_READ, WIDTH = range(6)
# and floats, then the path probabilities of the match's tokens and of the head's.
HEAD_SECONDS, ROUND_SECONDS, FLOATS = range(3)
# State: tokens with K/V, the newest token, rows that wait for the head, tokens still wanted, tokens that the
# matcher has not read.
CACHED, ROOT, WAITING, WANTED, UNREAD = range(5)


class TargetPart(NamedTuple):
    """The decoder's pass. Addresses, but for threads, num_layers and width."""

    forward: int  # the kernel's entry, and what it is called with
    threads: int
    spec: int  # of a Pass
    model: int
    work: int
    logits: int
    layers: int  # [num_layers]: whose hidden states are kept
    num_layers: int
    width: int  # of a hidden state
    hidden: int  # of all rounds, one after the other: [num_layers, rows, width] float32 each


class HeadPart(NamedTuple):
    """A chain head, whose call has one request."""

    draft: int  # the kernel's entry
    call: int  # address; 0: there is no head
    memory: CallMemory  # of the call
    num_sources: int
    source_of: int  # address of [num_sources]: which of the kept layers


class WeightsPart(NamedTuple):
    """As heads/rows.py has them; arrays by address, float64."""

    seconds: float
    added: int
    promised: float
    head_rates: int
    head_factor: float
    match_rates: int
    match_factor: float
    scores: int  # [length]: scratch


class BurstCall(NamedTuple):
    target: TargetPart
    head: HeadPart
    match: Matcher  # live is 0: there is none
    pushed: int  # [length + 1] int32: tokens that the matcher has not read
    weights: WeightsPart
    length: int  # of the longest draft
    num_rounds: int  # at most
    stops: int
    num_stops: int
    state: int  # [5]
    ring: int  # [num_rounds, WIDTH + 3 * length + 1]
    floats: int  # [num_rounds, FLOATS + 2 * length]


call_at = struct(BurstCall)
cell_of, acceptance, best_count = piece(weigher.cell_of), piece(weigher.acceptance), piece(weigher.best_count)


@piece
def weigh(c, reach, num, rates_at, factor, agreement, spent):  # type: ignore[no-untyped-def]
    """Of a chain: how many of its nodes to check, and the seconds they should save. spent: on drafting in
    this round, whatever is checked."""
    w = c.weights
    rates, added = carray(double_pointer(rates_at), NUM_CELLS), carray(double_pointer(w.added), c.length + 1)
    scores, score, above = carray(double_pointer(w.scores), c.length), 1.0, 1.0
    for node in range(num):
        claim = reach[node] / above if reach[node] < above else 1.0
        above = reach[node]
        cell = cell_of(node + 1, claim, agreement if node == 0 else ALONE)
        score *= acceptance(claim, rates[cell], factor)
        scores[node] = score
    count, gained = best_count(scores, num, 1.0, w.seconds + spent, added)
    return count, gained * w.seconds - added[count]


@piece
def is_stop(c, token):  # type: ignore[no-untyped-def]
    """Whether a token ends the request."""
    found = False
    for stop in carray(int_pointer(c.stops), c.num_stops):
        found |= token == stop
    return found


@piece
def take(c, drafted_at, reach_at, num, tokens, reach):  # type: ignore[no-untyped-def]
    """A chain as its drafter wrote it, until a token that ends the request: how many tokens."""
    drafted, found = carray(int_pointer(drafted_at), num), carray(double_pointer(reach_at), num)
    for i in range(num):
        tokens[i], reach[i] = drafted[i], found[i]
        if is_stop(c, drafted[i]):
            return i + 1
    return num


@piece
def draft_by_match(c, state, tokens, reach):  # type: ignore[no-untyped-def]
    """A chain without a model: how many tokens; -1 if its tables must grow first."""
    m = c.match
    num = invoke_for_number(m.entry, (m.live, m.past, c.pushed, state[UNREAD], m.budget, m.scratch)) - 1
    if num < 0:
        return -1
    state[UNREAD] = 0
    return take(c, m.drafted + 8, m.reach + 8, num, tokens, reach)


@piece
def draft_by_head(c, state, tokens, reach):  # type: ignore[no-untyped-def]
    """The head reads the rows that wait (`show`) and drafts: how many tokens."""
    h, one = c.head, carray(int_pointer(c.head.memory.requests), REQUEST_SIZE)
    rows, start = state[WAITING], one[START]
    one[NUM_ROWS], one[POSITION], one[SEEN], one[FIRST_GUESS] = rows, start, start + 1, state[CACHED] + 1
    carray(int_pointer(h.call), CALL_ROWS + 1)[CALL_ROWS] = rows
    invoke(h.draft, (h.call, c.target.threads))
    one[START], state[WAITING] = start + rows, 0
    made = min(carray(int_pointer(h.memory.done), 1)[0], c.length)
    return take(c, h.memory.guesses, h.memory.chances, made, tokens, reach)


@piece
def show(c, state, token, rows, row, hidden):  # type: ignore[no-untyped-def]
    """A row of the last pass, with the token after it, is for the head to read."""
    h, n = c.head, state[WAITING]
    source_of = carray(int_pointer(h.source_of), h.num_sources)
    carray(int_pointer(h.memory.tokens), n + 1)[n] = token
    sources = carray(int_pointer(h.memory.sources), (n + 1, h.num_sources))
    for i in range(h.num_sources):
        sources[n, i] = hidden + (source_of[i] * rows + row) * c.target.width * 4
    state[WAITING] = n + 1


@piece
def fill(c, state, tokens, count, hidden):  # type: ignore[no-untyped-def]
    """The pass over the root and `count` drafted tokens, a chain."""
    rows, t, p, base = count + 1, c.target, pass_at(c.target.spec), state[CACHED]
    ids, positions = carray(int_pointer(p.input_ids), rows), carray(int_pointer(p.positions), rows)
    slots, spec = carray(int_pointer(p.slots), rows), carray(int_pointer(t.spec), SPEC_OUTPUTS + 1)
    blocks = carray(int_pointer(p.block_tables), (base + count) // BLOCK_SIZE + 1)
    for row in range(rows):
        at = base + row
        ids[row] = tokens[row - 1] if row else state[ROOT]
        positions[row], slots[row] = at, blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
    carray(int_pointer(p.prefix_lens), 1)[0] = base
    spec[SPEC_ROWS] = spec[SPEC_OUTPUTS] = rows
    layers = carray(int_pointer(t.layers), t.num_layers)
    for i in range(t.num_layers):
        carray(int_pointer(p.taps), layers[i] + 1)[layers[i]] = hidden + i * rows * t.width * 4


@piece
def move_on(c, state, tokens, picked, count, hidden):  # type: ignore[no-untyped-def]
    """The text goes on with what was picked. Whether another round may follow."""
    pushed, emitted = carray(word_pointer(c.pushed), c.length + 1), 0
    while True:
        token = picked[emitted]
        if token < 0:
            return False
        if c.head.call != 0:
            show(c, state, token, count + 1, emitted, hidden)
        pushed[emitted] = token
        emitted += 1
        if is_stop(c, token):
            return False
        if emitted > count or tokens[emitted - 1] != token:
            break
    state[CACHED] += emitted
    state[WANTED] -= emitted
    state[ROOT], state[UNREAD] = token, emitted
    return state[WANTED] > 0


@piece
def choose(c, state, ring, floats):  # type: ignore[no-untyped-def]
    """Which draft, and how many nodes of it are checked: the head is not asked where a match promises more,
    if it can read what comes of it later. False: the host must enlarge the matcher's tables first."""
    w, length, waiting = c.weights, c.length, state[WAITING]
    matched, drafted = ring[WIDTH : WIDTH + length], ring[WIDTH + length : WIDTH + 2 * length]
    match_reach, head_reach = floats[FLOATS : FLOATS + length], floats[FLOATS + length : FLOATS + 2 * length]
    ring[SOURCE], ring[COUNT], ring[NUM_HEAD], ring[NUM_READ], floats[HEAD_SECONDS] = NOTHING, 0, 0, 0, 0.0
    ring[NUM_MATCH] = draft_by_match(c, state, matched, match_reach) if c.match.live else 0
    if ring[NUM_MATCH] < 0:
        return False
    count, saved = weigh(c, match_reach, ring[NUM_MATCH], w.match_rates, w.match_factor, ALONE, 0.0)
    if count:
        ring[SOURCE], ring[COUNT] = MATCH, count
    if c.head.call == 0 or (count and saved > w.promised and waiting + length < MOST_ROWS):
        return True
    started = seconds_now()
    ring[NUM_READ] = waiting
    ring[NUM_HEAD] = draft_by_head(c, state, drafted, head_reach)
    floats[HEAD_SECONDS] = spent = seconds_now() - started
    agreement = ALONE
    if ring[NUM_MATCH]:
        agreement = AGREED if matched[0] == drafted[0] else CONTRADICTED
        count, saved = weigh(c, match_reach, ring[NUM_MATCH], w.match_rates, w.match_factor, agreement, spent)
    own_count, own_saved = weigh(c, head_reach, ring[NUM_HEAD], w.head_rates, w.head_factor, agreement, spent)
    if ring[NUM_MATCH] and saved >= own_saved:
        ring[SOURCE], ring[COUNT] = MATCH if count else NOTHING, count
    else:
        ring[SOURCE], ring[COUNT] = HEAD if own_count else NOTHING, own_count
    return True


@kernel
def run_burst(at):  # type: ignore[no-untyped-def]
    """Rounds made. at: of the numbers of a BurstCall."""
    c = call_at(at)
    width, breadth, hidden = WIDTH + 3 * c.length + 1, FLOATS + 2 * c.length, c.target.hidden
    ring = carray(int_pointer(c.ring), (c.num_rounds, width))
    floats = carray(double_pointer(c.floats), (c.num_rounds, breadth))
    state, t, started = carray(int_pointer(c.state), 5), c.target, seconds_now()
    for number in range(c.num_rounds):
        here, picked = ring[number], carray(int_pointer(pass_at(t.spec).picked), c.length + 1)
        if not choose(c, state, here, floats[number]):
            return number
        count, first = here[COUNT], WIDTH + (c.length if here[SOURCE] == HEAD else 0)
        fill(c, state, here[first:], count, hidden)
        invoke(t.forward, (t.threads, t.spec, t.model, t.work, t.logits))
        here[WIDTH + 2 * c.length : WIDTH + 2 * c.length + count + 1] = picked[: count + 1]
        goes_on = move_on(c, state, here[first:], picked, count, hidden)
        hidden += t.num_layers * (count + 1) * t.width * 4
        ended = seconds_now()
        floats[number, ROUND_SECONDS] = ended - started
        started = ended
        if not goes_on:
            return number + 1
    return c.num_rounds
