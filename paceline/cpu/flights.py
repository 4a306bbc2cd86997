"""Several rounds of one greedy request in one compiled call: suffix matching, a head or both draft, the
better draft is cut to what pays, the target checks it, and all go on from what it picked.

After a pass the host's caches are cold, and what Python does in a step takes a millisecond: so it does it
once for several. What a draft is weighed by, the policy has written down before (types.py, `Course`).
Invariant: every round leaves behind all that a usual step would have shown, and its pass is the decoder's
own; how drafts are weighed changes nothing but the time.
"""

from __future__ import annotations

from time import CLOCK_MONOTONIC
from typing import Any, NamedTuple

from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from paceline.cpu.chain_call import KEYS, MOST_ROWS, PLACES, POSITIONS, ROOMS, SEEN, TOKENS, VALUES
from paceline.cpu.chains import ROWS
from paceline.cpu.compile import invoke, invoke_for_number, kernel, piece
from paceline.cpu.forward import Pass
from paceline.cpu.lanes import INT32, INT64, Emitter, double_pointer, int_pointer, word_pointer

SPEC_ROWS, SPEC_OUTPUTS = Pass._fields.index("rows"), Pass._fields.index("num_outputs")
NOBODY, OTHER, HEAD = 0, 1, 2  # whose draft is checked
ALONE, AGREED, CONTRADICTED = (
    0,
    1,
    2,
)  # as the policy tells drafts apart by what the other says (engine/calibrate.py)
# What is written about a round: whole numbers, then the other's tokens, the head's and what was picked;
WHO, COUNT, NUM_OTHER, NUM_HEAD, NUM_READ = range(5)
WIDTH = 5
# and floats, then the chances of the other's paths and of the head's.
HEAD_SECONDS, ROUND_SECONDS = range(2)
FLOATS = 2


class Craft(NamedTuple):
    """Where everything lies: addresses, but for what is said to be a number."""

    forward: int  # the kernel of a pass, and
    draft: int  # of the head's drafts, and
    votes: int  # of suffix matching: entries
    spec: int  # of a Pass
    model: int
    work: int
    logits: int
    threads: int  # a number
    ids: int
    positions: int
    slots: int
    blocks: int
    block_size: int  # a number
    prefix: int
    picked: int
    taps: int
    layers: int  # [num_layers]: whose hidden states are kept
    num_layers: int  # a number
    width: int  # of a hidden state
    hidden: int  # of all rounds, one after the other: [num_layers, rows, width] float32 each
    call: int  # of the head's draft_chains; 0: there is no head
    numbers: int  # of its SingleFeed
    guessed: int  # tokens
    chances: int  # float64
    num_sources: int  # a number
    source_of: int  # [num_sources]: which of the layers
    live: int  # of the request's suffix tree; 0: nobody is asked beside the head
    past: int
    scratch: int  # the header of one for chains,
    voted: int  # its tokens
    reach: int  # and their chances, float64
    budget: int  # a number: of its longest draft, no more than `length`
    pushed: int  # [length + 1] int32: tokens that the tree has not read
    length: int  # a number: of the longest draft
    num_rounds: int  # a number, at most
    stops: int
    num_stops: int  # a number
    bins: int  # a number, and
    depths: int  # a number: how claims are told apart
    added: int  # [length + 1] float64: seconds that so many nodes add
    own: int  # float64: what the head's claims are worth, cell by cell; less than 0: what they say
    others: int  # the same of the other's
    settings: int  # float64, see below
    state: int  # [5]: as below
    ring: int  # [num_rounds, WIDTH + 3 * length + 1]
    floats: int  # [num_rounds, FLOATS + 2 * length]


SECONDS, MARGIN, PROMISE, SURE, OWN_FACTOR, OTHER_FACTOR = range(6)  # settings
CACHED, ROOT, WAITING, WANTED, UNREAD = range(
    5
)  # state: tokens with K/V, the newest token, rows for the head, tokens to be said, to push


@intrinsic
def seconds_now(_context: Any) -> Any:
    """Of a clock that only goes on."""

    def generate(_target: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        emit = Emitter(builder)
        room = emit.variable(ir.Constant(ir.ArrayType(INT64, 2), [0, 0]))
        emit.call("clock_gettime", INT32, [ir.Constant(INT32, CLOCK_MONOTONIC), room])
        whole = builder.load(room)
        parts = [builder.sitofp(builder.extract_value(whole, i), ir.DoubleType()) for i in range(2)]
        return builder.fadd(parts[0], builder.fmul(parts[1], ir.Constant(ir.DoubleType(), 1e-9)))

    return types.float64(), generate


@piece
def craft_at(at):  # type: ignore[no-untyped-def]
    f = carray(int_pointer(at), 46)
    return Craft(
        f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10], f[11], f[12], f[13], f[14], f[15], f[16], f[17], f[18], f[19],
        f[20], f[21], f[22], f[23], f[24], f[25], f[26], f[27], f[28], f[29], f[30], f[31], f[32], f[33], f[34], f[35], f[36], f[37], f[38],
        f[39], f[40], f[41], f[42], f[43], f[44], f[45],
    )  # fmt: skip


@piece
def weigh(c, chances, num, table_at, factor, standing, spent):  # type: ignore[no-untyped-def]
    """Of a chain: how many of its nodes are worth checking, and the seconds that they are expected to save.
    As nodes.py's best_start. spent: seconds that drafting took in this round, whatever is checked."""
    settings, added = carray(double_pointer(c.settings), 6), carray(double_pointer(c.added), c.length + 1)
    table = carray(double_pointer(table_at), 3 * c.depths * c.bins)
    seconds = settings[SECONDS] + spent
    count, rate, saved = 0, settings[MARGIN] / seconds, 0.0
    gained, score, above = 0.0, 1.0, 1.0
    for node in range(num):
        claim = chances[node] / above if chances[node] < above else 1.0
        above = chances[node]
        cell = c.bins * (min(node, c.depths - 1) + (0 if node else c.depths * standing)) + int(
            claim * (c.bins - 0.001)
        )
        chance = table[cell] if table[cell] >= 0.0 else claim
        better = chance * factor
        if factor > 1.0:
            better /= 1.0 - chance + better
        score *= min(better, settings[SURE])
        gained += score
        here = (1.0 + gained) / (seconds + added[node + 1])
        if here > rate:
            count, rate, saved = node + 1, here, gained * settings[SECONDS] - added[node + 1]
    return count, saved


@piece
def until_stop(c, tokens, num):  # type: ignore[no-untyped-def]
    """Nothing is drafted after a token that ends the request."""
    stops = carray(int_pointer(c.stops), c.num_stops)
    for i in range(num):
        for stop in stops:
            if tokens[i] == stop:
                return i + 1
    return num


@piece
def match(c, tokens, chances):  # type: ignore[no-untyped-def]
    """What suffix matching drafts, a chain: how many tokens; -1 if its tree must grow first."""
    state = carray(int_pointer(c.state), 5)
    num = invoke_for_number(c.votes, (c.live, c.past, c.pushed, state[UNREAD], c.budget, c.scratch)) - 1
    if num < 0:
        return -1
    state[UNREAD] = 0
    drafted, reach = carray(int_pointer(c.voted), num + 1), carray(double_pointer(c.reach), num + 1)
    for i in range(num):
        tokens[i], chances[i] = drafted[i + 1], reach[i + 1]
    return until_stop(c, tokens, num)


@piece
def guess(c, tokens, chances):  # type: ignore[no-untyped-def]
    """The head reads the rows that wait and drafts: how many tokens. Rows lie in its own numbers already
    (`wait`).
    """
    state, call = carray(int_pointer(c.state), 5), carray(int_pointer(c.call), ROWS + 1)
    own = 8 * MOST_ROWS + MOST_ROWS * c.num_sources
    then, rest = own + c.num_sources, own + c.num_sources + 7
    numbers = carray(int_pointer(c.numbers), rest + 5)
    rows = state[WAITING]
    at = numbers[PLACES] + rows
    for i in range(7):
        numbers[then + i] = 0
    numbers[then + 1], numbers[then + 5], numbers[then + 6] = at, at, at + 1
    numbers[then + 2], numbers[then + 3], numbers[then + 4] = numbers[KEYS], numbers[VALUES], numbers[ROOMS]
    numbers[rest], numbers[rest + 2], numbers[rest + 3], numbers[rest + 4] = rows - 1, 0, 0, state[CACHED] + 1
    call[ROWS] = rows
    invoke(c.draft, (c.call, c.threads))
    made = min(numbers[rest + 2], c.length)
    guessed, paths = carray(int_pointer(c.guessed), made), carray(double_pointer(c.chances), made)
    for i in range(made):
        tokens[i], chances[i] = guessed[i], paths[i]
    numbers[PLACES] = at
    state[WAITING] = 0
    return until_stop(c, tokens, made)


@piece
def wait(c, token, rows, row, hidden):  # type: ignore[no-untyped-def]
    """A row of the last pass, with the token after it, is for the head to read."""
    state, numbers = (
        carray(int_pointer(c.state), 5),
        carray(int_pointer(c.numbers), (8 + c.num_sources) * MOST_ROWS),
    )
    n, source_of = state[WAITING], carray(int_pointer(c.source_of), c.num_sources)
    at = numbers[PLACES] + n
    numbers[TOKENS + n], numbers[POSITIONS + n], numbers[PLACES + n], numbers[SEEN + n] = (
        token,
        at,
        at,
        at + 1,
    )
    numbers[KEYS + n], numbers[VALUES + n], numbers[ROOMS + n] = (
        numbers[KEYS],
        numbers[VALUES],
        numbers[ROOMS],
    )
    for i in range(c.num_sources):
        numbers[8 * MOST_ROWS + n * c.num_sources + i] = hidden + (source_of[i] * rows + row) * c.width * 4
    state[WAITING] = n + 1


@piece
def fill(c, tokens, count, hidden):  # type: ignore[no-untyped-def]
    """The pass over the root and so many drafted tokens, a chain."""
    state, rows = carray(int_pointer(c.state), 5), count + 1
    ids, positions, slots = (
        carray(int_pointer(c.ids), rows),
        carray(int_pointer(c.positions), rows),
        carray(int_pointer(c.slots), rows),
    )
    spec, base = carray(int_pointer(c.spec), SPEC_OUTPUTS + 1), state[CACHED]
    blocks = carray(int_pointer(c.blocks), (base + count) // c.block_size + 1)
    for row in range(rows):
        at = base + row
        ids[row] = tokens[row - 1] if row else state[ROOT]
        positions[row], slots[row] = at, blocks[at // c.block_size] * c.block_size + at % c.block_size
    carray(int_pointer(c.prefix), 1)[0] = base
    spec[SPEC_ROWS] = spec[SPEC_OUTPUTS] = rows
    layers = carray(int_pointer(c.layers), c.num_layers)
    for i in range(c.num_layers):
        carray(int_pointer(c.taps), layers[i] + 1)[layers[i]] = hidden + i * rows * c.width * 4


@piece
def move_on(c, tokens, count, hidden):  # type: ignore[no-untyped-def]
    """The text goes on with what was picked. Whether another round may follow."""
    state, picked = carray(int_pointer(c.state), 5), carray(int_pointer(c.picked), count + 1)
    pushed, stops = carray(word_pointer(c.pushed), c.length + 1), carray(int_pointer(c.stops), c.num_stops)
    said = 0
    while True:
        token = picked[said]
        if token < 0:
            return False
        if c.call != 0:
            wait(c, token, count + 1, said, hidden)
        pushed[said] = token
        said += 1
        for stop in stops:
            if token == stop:
                return False
        if said > count or tokens[said - 1] != token:
            break
    state[CACHED] += said
    state[ROOT] = token
    state[WANTED] -= said
    state[UNREAD] = said
    return state[WANTED] > 0


@piece
def choose(c, ring, floats):  # type: ignore[no-untyped-def]
    """Who drafts, and how many nodes of it are checked: the head is not asked where the other's draft
    promises more, if it can read what comes of it later. False: the host must look after the suffix tree
    first."""
    settings, length, waiting = (
        carray(double_pointer(c.settings), 6),
        c.length,
        carray(int_pointer(c.state), 5)[WAITING],
    )
    others, guesses = ring[WIDTH : WIDTH + length], ring[WIDTH + length : WIDTH + 2 * length]
    their_chances, chances = floats[FLOATS : FLOATS + length], floats[FLOATS + length : FLOATS + 2 * length]
    ring[WHO], ring[COUNT], ring[NUM_HEAD], ring[NUM_READ], floats[HEAD_SECONDS] = NOBODY, 0, 0, 0, 0.0
    ring[NUM_OTHER] = match(c, others, their_chances) if c.live else 0
    if ring[NUM_OTHER] < 0:
        return False
    count, saved = weigh(c, their_chances, ring[NUM_OTHER], c.others, settings[OTHER_FACTOR], ALONE, 0.0)
    if count:
        ring[WHO], ring[COUNT] = OTHER, count
    if c.call == 0 or (count and saved > settings[PROMISE] and waiting + length < MOST_ROWS):
        return True
    started = seconds_now()
    ring[NUM_READ] = waiting
    ring[NUM_HEAD] = guess(c, guesses, chances)
    floats[HEAD_SECONDS] = spent = seconds_now() - started
    standing = ALONE
    if ring[NUM_OTHER]:
        standing = AGREED if others[0] == guesses[0] else CONTRADICTED
        count, saved = weigh(
            c, their_chances, ring[NUM_OTHER], c.others, settings[OTHER_FACTOR], standing, spent
        )
    own_count, own_saved = weigh(c, chances, ring[NUM_HEAD], c.own, settings[OWN_FACTOR], standing, spent)
    if ring[NUM_OTHER] and saved >= own_saved:
        ring[WHO], ring[COUNT] = OTHER if count else NOBODY, count
    else:
        ring[WHO], ring[COUNT] = HEAD if own_count else NOBODY, own_count
    return True


@kernel
def fly(at):  # type: ignore[no-untyped-def]
    """Rounds made. at: of the numbers of a Craft."""
    c = craft_at(at)
    width, breadth, hidden = WIDTH + 3 * c.length + 1, FLOATS + 2 * c.length, c.hidden
    ring, floats = (
        carray(int_pointer(c.ring), (c.num_rounds, width)),
        carray(double_pointer(c.floats), (c.num_rounds, breadth)),
    )
    picked = carray(int_pointer(c.picked), c.length + 1)
    started = seconds_now()
    for number in range(c.num_rounds):
        here = ring[number]
        if not choose(c, here, floats[number]):
            return number
        count, first = here[COUNT], WIDTH + (c.length if here[WHO] == HEAD else 0)
        fill(c, here[first:], count, hidden)
        invoke(c.forward, (c.threads, c.spec, c.model, c.work, c.logits))
        here[WIDTH + 2 * c.length : WIDTH + 2 * c.length + count + 1] = picked[: count + 1]
        goes_on = move_on(c, here[first:], count, hidden)
        hidden += c.num_layers * (count + 1) * c.width * 4
        ended = seconds_now()
        floats[number, ROUND_SECONDS] = ended - started
        started = ended
        if not goes_on:
            return number + 1
    return c.num_rounds
