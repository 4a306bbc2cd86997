"""How calls of a drafting head's kernel are described, and the memory that they read and write.

After a pass of the target the host's caches are cold, and every object that has to be made costs
microseconds: so a call's memory is made once. Invariant: all addresses in a call lie in arrays that its
HeadCall owns and that never move, but for what it is given with each call.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from paceline.cpu.compile import numbers, size_of
from paceline.cpu.head_attention import ROW_SIZE, TOGETHER
from paceline.cpu.lanes import LANES
from paceline.cpu.layer import COLUMNS, Work
from paceline.cpu.matmul import Matrix
from paceline.cpu.recycle import Workspace, address
from paceline.cpu.sync import Team
from paceline.cpu.tables import room_of_experts
from paceline.heads.rows import Guesses
from paceline.models.config import ExpertsConfig
from paceline.models.quantize import padded

EAGLE_3, EAGLE_1, PLAIN = 3, 1, 0  # what enters the first layer


class HeadRequest(NamedTuple):
    """What the host says of a request, or of a node of a tree's level."""

    keys: int  # where its sequence lies
    values: int
    room: int
    start: int  # place of its first new row
    num_rows: int  # new ones
    position: int  # of the first new row
    seen: int  # places that it sees; each row after it sees one more
    num_others: int  # beside them
    temperature: float  # 0: the likeliest token is guessed
    seed: int
    first_guess: int  # position of the first guess
    root: int = 0  # the token that a block begins with
    word: int = 0  # the same as a draft id: the number of words where it is none


class Turn(NamedTuple):
    """What differs between calls, beside the requests."""

    num_requests: int
    num_rows: int  # new ones of all requests
    num_speaking: int  # rows whose outputs are wanted; 0: rows are only read
    steps: int  # tokens guessed; 0: none
    has_logits: bool = True  # else outputs alone are wanted
    is_fused: bool = True  # features are the target's; else each row's first is an output of the head
    least: float = 0.0  # a chain ends where the chance of every request's path is below


class CallMemory(NamedTuple):
    """Where a call's arrays lie, of int64 unless said otherwise, and their sizes."""

    requests: int  # [num_requests] HeadRequest
    tokens: int  # [rows]
    sources: int  # [rows, num_sources] addresses of features
    others: int  # [rows, most_others]
    table: int  # [rows] PlacedRow
    speaking: int  # [num_speaking] rows whose outputs are wanted
    done: int  # [2]: steps made, and whether to go on
    guesses: int  # [steps, num_requests]: ids of the target
    chances: int  # [steps, num_requests] float64
    logits: int  # [num_speaking, num_outputs] float32
    outputs: int  # [num_speaking, hidden] float32
    scratch: int
    most_others: int
    num_outputs: int
    num_words: int  # outputs but for what fills up the last tile
    ids: int  # of the draft's vocabulary in the target's
    num_ids: int  # 0: they are the same
    call: int  # where the call itself lies


class Entry(NamedTuple):
    """How rows enter and leave the layers."""

    kind: int
    num_sources: int  # features of a position
    feature_norm: int  # address; 0: features are taken as they are
    fuse: Matrix  # the first product, and
    balance: int  # address of a factor for each column of its input
    is_normed_residual: bool
    is_normed_output: bool
    embed_norm: int = 0  # addresses of what tokens' embeddings, and features after `feature_norm`, are
    source_norm: int = 0  # normed with before that product; 0: neither is


class Block(NamedTuple):
    """What is guessed in the blocks of DFlash. Rows of a request follow each other."""

    size: int  # rows of a block
    mask: int  # the token of all rows but the first
    first: int  # row of a block that guesses the first token
    hidden_norm: int  # of fused features
    rank: int  # of the Markov head; 0: none
    before: int  # its first matrix: [vocabulary + 1, rank] floats
    markov: Matrix  # its second


NOTHING = Matrix(0, 0, 0, 0)
NO_BLOCK = Block(0, 0, 0, 0, 0, 0, NOTHING)
REQUEST, TURN = Struct("8qdQ3q"), Struct("6qd")  # as HeadRequest and Turn are written
REQUEST_SIZE, WORK = size_of(HeadRequest), size_of(Turn)  # in numbers; where a call's Work begins
MOST_ROWS = 16  # of the usual call: one request, whose rows are the tokens of a few passes
WORK_AT, MODEL_AT = 8 * WORK, 8 * (WORK + size_of(Work) + size_of(CallMemory))  # and in bytes, of two parts
NO_WORK = Work(*[0] * len(Work._fields))


class Room:
    """The workspace of a head, and the widths in floats that its sizes follow from."""

    def __init__(
        self, widest: int, hidden: int, wide: int = 0, narrow: int = 0, threads: int = 0,
        experts: ExpertsConfig | None = None,
    ) -> None:  # fmt: skip
        """widest: of a product's input, wide and narrow: of outputs; threads: that attend."""
        self._experts = experts
        self._widest, self._queries, self._team = padded(widest, COLUMNS), threads * TOGETHER, Team()
        wide, narrow = padded(wide, 8), padded(narrow, 8)
        self._floats = {"h": hidden, "ready": self._widest, "wide": wide, "narrow": narrow}
        self._workspace, self._longest = Workspace(self._sizes, self._work), 0

    def get(self, rows: int, longest: int = 0) -> Work:
        """longest: positions that a row may see."""
        if longest > self._longest:
            self._longest = padded(2 * longest, LANES)
        return self._workspace.get(rows, self._longest)

    def _sizes(self, rows: int, longest: int) -> dict[str, int]:
        sizes = {name: 4 * rows * floats for name, floats in self._floats.items()}
        sizes |= dict.fromkeys(("scales", "sums"), 4 * rows * self._widest // COLUMNS)
        sizes |= {"values": rows * self._widest, "scores": 4 * self._queries * (longest + 4 * LANES)}
        more = room_of_experts(self._experts, self._floats["h"], rows)
        if more:
            more |= {"gated": self._queries * COLUMNS * 4, "woken": 8}
        return sizes | {name: max(size, sizes.get(name, 0)) for name, size in more.items()}

    def _work(self, places: dict[str, int]) -> Work:
        return Work(sync=self._team.at, longest=self._longest + 4 * LANES, widest=self._widest, **places)


class Capacity(NamedTuple):
    """What a call has memory for."""

    requests: int = 1
    rows: int = MOST_ROWS
    others: int = 0  # places of a tree that a row sees beside its text
    steps: int = 16


class HeadKernel(NamedTuple):
    """What is the same in all calls of a head."""

    run: Callable[[int, int], None]  # with the address of a call and the number of threads
    constants: tuple[Any, ...]  # what follows turn, work and memory in a call
    threads: int
    hidden: int
    num_outputs: int
    num_words: int
    ids: np.ndarray  # of the draft's vocabulary in the target's; empty where they are the same
    num_sources: int = 1
    num_speaking: int = 1  # rows of a request, at most
    block: int = 0  # rows of a request beside those that it is fed
    scratch: int = 0  # bytes of a request


class HeadCall:
    def __init__(self, kernel: HeadKernel, most: Capacity) -> None:
        self.most, self._kernel, self._work, self._turn = most, kernel, NO_WORK, Turn(0, 0, 0, 0)
        num, speaking = most.requests, most.requests * kernel.num_speaking
        self.num_rows = max(most.rows, num * kernel.block)  # of a pass, at most
        rows, steps = most.rows + num * kernel.block, most.steps * num
        sizes = num * REQUEST_SIZE, rows, rows * kernel.num_sources, rows * most.others, rows * ROW_SIZE
        starts = [*accumulate((*sizes, speaking, 2, steps, steps), initial=0)]
        whole = array("q", bytes(8 * starts[-1]))
        self._numbers = memoryview(whole)
        self._floats: Any = self._numbers.cast("B").cast("d")  # the same memory
        self._logits = np.empty((speaking, kernel.num_outputs), np.float32)
        self._outputs = np.empty((speaking, kernel.hidden), np.float32)
        self._scratch = np.empty(num * kernel.scratch, np.uint8)
        places = [whole.buffer_info()[0] + 8 * start for start in starts[:-1]]
        places += [address(each) for each in (self._logits, self._outputs, self._scratch)]
        words = most.others, kernel.num_outputs, kernel.num_words, address(kernel.ids), len(kernel.ids)
        self._call = numbers((self._turn, NO_WORK, *places, *words, 0, *kernel.constants))
        self.at = self._call.buffer_info()[0]
        self.memory = CallMemory._make((*places, *words, self.at))
        self._call[MODEL_AT // 8 - 1] = self.at

    def fitting(self, *needed: int) -> HeadCall:
        """This, or one with more room. needed: as Capacity."""
        most = Capacity(*map(max, needed, self.most))
        return self if most == self.most else HeadCall(self._kernel, most)

    def _span(self, at: int, count: int) -> slice:
        """Of the numbers, from an address of `memory` on."""
        first = (at - self.memory.requests) // 8
        return slice(first, first + count)

    def write(self, at: int, given: Sequence[int]) -> None:
        self._numbers[self._span(at, len(given))] = array("q", given)

    def open(
        self, turn: Turn, requests: list[HeadRequest], tokens: list[int], sources: list[int], work: Work
    ) -> None:
        """Write down what the kernel must know. tokens and sources: of all new rows."""
        for i, request in enumerate(requests):
            REQUEST.pack_into(self._numbers, i * REQUEST.size, *request)
        TURN.pack_into(self._call, 0, *turn)
        self._turn = turn
        self.write(self.memory.tokens, tokens)
        self.write(self.memory.sources, sources)
        self.write(self.memory.done, [turn.steps])
        if work is not self._work:
            self._work = work
            self._call[WORK : WORK + len(work)] = array("q", work)

    def run(self) -> HeadCall:
        """Itself, which knows what came of it."""
        self._kernel.run(self.at, self._kernel.threads)
        return self

    @property
    def guesses(self) -> Guesses:
        (made,), num = self._numbers[self._span(self.memory.done, 1)], self._turn.num_requests
        tokens = self._numbers[self._span(self.memory.guesses, made * num)].tolist()
        chances = self._floats[self._span(self.memory.chances, made * num)].tolist()
        starts = range(0, made * num, num)
        return Guesses([tokens[i : i + num] for i in starts], [chances[i : i + num] for i in starts])

    @property
    def logits(self) -> np.ndarray:
        """[rows that spoke, words]; the next call writes there, too."""
        return self._logits[: self._turn.num_speaking, : self._kernel.num_words]

    @property
    def outputs(self) -> np.ndarray:
        """[rows that spoke, hidden]."""
        return self._outputs[: self._turn.num_speaking]
