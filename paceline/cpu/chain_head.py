"""A head that drafts token by token, K tokens of many requests in one compiled call: EAGLE-3, EAGLE-1 and
small distilled models.

The first pass reads what the requests have not read yet; its last rows speak. Each further pass has one row a
request: the token guessed last, and the head's own output in place of features. In a tree's level each node
is a request of one row. Invariant: every address handed to the kernel lies in memory that the head keeps
alive, and a sequence has room for all places that are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numba import carray

from paceline.cpu.compile import kernel, piece
from paceline.cpu.decoder import CpuDecoder
from paceline.cpu.head_attention import ROW_SIZE
from paceline.cpu.head_call import Capacity, HeadCall, HeadRequest, Turn
from paceline.cpu.head_memory import CHUNK, GREEDY, LayeredHead, Tensors
from paceline.cpu.heads import call_at, request_of, rows_of, run_rows, write_guess, write_row
from paceline.cpu.lanes import double_pointer, int_pointer
from paceline.cpu.recycle import address
from paceline.cpu.sync import barrier, in_region
from paceline.cpu.top import guess
from paceline.heads.config import LayeredConfig
from paceline.heads.rows import Feed, Guesses, HeadOutput, Node, Row, Sampler


@piece
def _write_rows(c, step):  # type: ignore[no-untyped-def]
    """Rows of the pass before guess `step`: the new ones of all requests, then the one after them."""
    num, row = c.turn.num_requests, 0
    table = carray(int_pointer(c.memory.table), (c.turn.num_rows if step == 0 else num, ROW_SIZE))
    speaking = carray(int_pointer(c.memory.speaking), num)
    for i in range(num):
        one = request_of(c, i)
        first = one.num_rows + step - 1 if step else 0
        for ahead in range(first, one.num_rows + step):
            write_row(table, row, one, ahead, one.seen + ahead)
            row += 1
        speaking[i] = row - 1


@piece
def _move_on(c, step):  # type: ignore[no-untyped-def]
    """The guesses are the tokens of the next pass, one place further. False if nothing likely is left."""
    num, sources, most = c.turn.num_requests, c.entry.num_sources, 0.0
    guesses = carray(int_pointer(c.memory.guesses), (c.turn.steps, num))
    chances = carray(double_pointer(c.memory.chances), (c.turn.steps, num))
    tokens = carray(int_pointer(c.memory.tokens), num)
    features = carray(int_pointer(c.memory.sources), (num, sources))
    for i in range(num):
        tokens[i] = guesses[step, i]
        features[i] = c.memory.outputs + i * c.model.hidden * 4
        most = max(most, chances[step, i])
    _write_rows(c, step + 1)
    return most >= c.turn.least


@piece
def _part(share, at):  # type: ignore[no-untyped-def]
    c = call_at(at)
    t, done = c.turn, carray(int_pointer(c.memory.done), 2)
    if share.part == 0:
        _write_rows(c, 0)
    run_rows(share, c, rows_of(c, t.num_rows), 1, t.is_fused)
    for step in range(t.steps):
        for i in range(share.part, t.num_requests, share.threads):
            best, chance = guess(c.memory, i, request_of(c, i), step)
            write_guess(c, step, i, best, chance, True)
        barrier(share)
        if share.part == 0:
            done[0] = step + 1
            done[1] = 1 if step + 1 < t.steps and _move_on(c, step) else 0
        barrier(share)
        if done[1] == 0:
            return
        run_rows(share, c, rows_of(c, t.num_requests), 1, False)


@kernel(parallel=True)
def draft_chains(at, threads):  # type: ignore[no-untyped-def]
    """at: of the numbers of a Call."""
    in_region(_part, call_at(at).work.sync, threads, at)


class ChainHead(LayeredHead):
    def __init__(
        self, config: LayeredConfig, tensors: Tensors, target: CpuDecoder, norm: torch.Tensor | None = None
    ) -> None:
        super().__init__(config, tensors, target, norm)
        self._call = HeadCall(self._kernel(draft_chains), Capacity())
        # What is compiled on first use is not the first request's to wait for, nor a cost of drafting.
        row = Row(0, dict.fromkeys(self.layers, torch.zeros(1, config.hidden_size)), 0)
        self.guess([Feed(self.place(), 0, [0], [row])], [GREEDY], 1, 0.0)

    def read(self, *feeds: Feed) -> None:
        """Take rows into sequences; nothing is guessed."""
        for feed in feeds:
            for first in range(0, len(feed.tokens), CHUNK):
                part = slice(first, first + CHUNK)
                some = Feed(feed.place, feed.start + first, feed.tokens[part], feed.rows[part])
                self.open([some], [], 0).run()

    def guess(self, feeds: Sequence[Feed], samplers: Sequence[Sampler], steps: int, least: float) -> Guesses:
        """Chains after the last row of each feed, until no chance reaches `least`."""
        return self.open(feeds, samplers, steps, least=least).run().guesses

    def begin(self, feeds: Sequence[Feed]) -> HeadOutput:
        """The logits after the last row of each feed."""
        return _output(self.open(feeds, [GREEDY] * len(feeds), 0).run())

    def outputs(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """[feeds, hidden] after the last row of each; the next call may write there, too."""
        return torch.from_numpy(self.open(feeds, [GREEDY] * len(feeds), 0, has_logits=False).run().outputs)

    def level(self, nodes: Sequence[Node]) -> HeadOutput:
        """The logits after each node of a tree's level."""
        for node in nodes:
            node.place.reserve(node.at + 1)
        count, most, requests = len(nodes), max(len(node.others) for node in nodes), []
        for n in nodes:
            where = n.place.keys_at, n.place.values_at, n.place.blocks, n.at
            requests.append(HeadRequest(*where, 1, n.position, n.seen, len(n.others), *GREEDY))
        tokens, turn = [node.token for node in nodes], Turn(count, count, count, 0, is_fused=False)
        sources = [address(node.source) for node in nodes for _ in range(self._entry.num_sources)]
        self._call = call = self._call.fitting(count, count, most, 0)
        work = self._room.get(call.num_rows, max(node.seen for node in nodes) + most)
        call.open(turn, requests, tokens, sources, work)
        for row, node in enumerate(nodes):
            call.write(call.memory.others + 8 * row * call.most.others, node.others)
        return _output(call.run())

    def open(
        self, feeds: Sequence[Feed], samplers: Sequence[Sampler], steps: int, num_more: int = 0, **how: Any
    ) -> HeadCall:
        """A call of chains of up to `steps` tokens after the feeds, which are only read if there are no
        samplers. A burst runs it several times: with room for `num_more` rows. how: fields of Turn."""
        told, ahead = samplers or [GREEDY] * len(feeds), num_more + steps
        requests = [self._request(f, len(f.tokens), ahead, one) for f, one in zip(feeds, told, strict=True)]
        tokens, rows = [token for f in feeds for token in f.tokens], [row for f in feeds for row in f.rows]
        turn = Turn(len(feeds), len(tokens), len(samplers), steps, **how)
        return self._open(turn, requests, tokens, rows, ahead)


def _output(call: HeadCall) -> HeadOutput:
    """Outputs are sources of the nodes that follow, so they are copied."""
    return HeadOutput(torch.from_numpy(call.logits), list(call.outputs.copy()))
