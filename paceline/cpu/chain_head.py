"""A head that drafts token by token, on the CPU: EAGLE-3, EAGLE-1 or a distilled model, as cpu/chains.py
computes it.

Invariant: the kernels read and write where they are told, so every address handed to them lies in memory that
this call keeps alive, and a sequence has room for all places that are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.cpu.chains import draft_chains
from paceline.cpu.decoder import CpuDecoder
from paceline.cpu.head_call import Capacity, HeadCall, HeadRequest, Turn
from paceline.cpu.head_memory import CHUNK, GREEDY, LayeredHead, Tensors
from paceline.cpu.recycle import address
from paceline.heads.config import LayeredConfig
from paceline.heads.rows import Feed, Guesses, Node, Row, Said, Speaker


class ChainHead(LayeredHead):
    def __init__(
        self, config: LayeredConfig, tensors: Tensors, target: CpuDecoder, norm: torch.Tensor | None = None
    ) -> None:
        """norm: the target's last, for heads that read what comes out of it."""
        super().__init__(config, tensors, target, norm)
        self._call = HeadCall(self._kernel(draft_chains), Capacity())
        # What is compiled on first use is not the first request's to wait for, nor a cost of drafting.
        row = Row(0, dict.fromkeys(self.layers, torch.zeros(1, config.hidden_size)), 0)
        self.guess([Feed(self.place(), 0, [0], [row])], [GREEDY], 1, 0.0)

    def read(self, feeds: Sequence[Feed]) -> None:
        """Take rows into the sequences; nothing is guessed."""
        for feed in feeds:
            for first in range(0, len(feed.tokens), CHUNK):
                part = slice(first, first + CHUNK)
                some = Feed(feed.place, feed.start + first, feed.tokens[part], feed.rows[part])
                self.open([some], [], 0).run()

    def guess(self, feeds: Sequence[Feed], speakers: Sequence[Speaker], steps: int, least: float) -> Guesses:
        """Chains after the last row of each feed, until no chance reaches `least`."""
        return self.open(feeds, speakers, steps, least=least).run().guesses

    def begin(self, feeds: Sequence[Feed]) -> Said:
        """The logits after the last row of each feed."""
        return _said(self.open(feeds, [GREEDY] * len(feeds), 0).run())

    def outputs(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """[feeds, hidden] after the last row of each; the next call may write there, too."""
        return torch.from_numpy(self.open(feeds, [GREEDY] * len(feeds), 0, has_logits=False).run().outputs)

    def level(self, nodes: Sequence[Node]) -> Said:
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
        return _said(call.run())

    def open(
        self, feeds: Sequence[Feed], speakers: Sequence[Speaker], steps: int, num_more: int = 0, **how: Any
    ) -> HeadCall:
        """A call of chains of up to `steps` tokens after the feeds, which are only read if there are no
        speakers. A burst runs it several times: with room for `num_more` rows. how: fields of Turn."""
        told, ahead = speakers or [GREEDY] * len(feeds), num_more + steps
        requests = [self._request(f, len(f.tokens), ahead, one) for f, one in zip(feeds, told, strict=True)]
        tokens, rows = [token for f in feeds for token in f.tokens], [row for f in feeds for row in f.rows]
        turn = Turn(len(feeds), len(tokens), len(speakers), steps, **how)
        return self._open(turn, requests, tokens, rows, ahead)


def _said(call: HeadCall) -> Said:
    """Outputs are sources of the nodes that follow, so they are copied."""
    return Said(torch.from_numpy(call.logits), list(call.outputs.copy()))
