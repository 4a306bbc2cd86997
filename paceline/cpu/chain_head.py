"""A head that drafts token by token, on the CPU: EAGLE-3, EAGLE-1 or a distilled model, as cpu/chains.py
computes it.

Invariant: the kernels read and write where they are told, so every address handed to them lies in memory that
this call keeps alive, and a sequence has room for all places that are written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.cpu.chain_call import MOST_ROWS, MOST_STEPS, Capacity, ChainCall
from paceline.cpu.chains import EAGLE_1, EAGLE_3, PLAIN, Entry
from paceline.cpu.decoder import CpuDecoder
from paceline.cpu.head_memory import NOTHING, Memory, Place, Room, Tensors, address, draft_ids, sources_of
from paceline.cpu.sync import num_threads
from paceline.heads.config import DraftConfig, Eagle1Config, EagleConfig, LayeredConfig
from paceline.heads.rows import Feed, Guesses, HeadOutput, Node, Row, Sampler

CHUNK = 256  # rows read in one pass
GREEDY = Sampler(0.0, 0, 0)


def _kind_of(config: LayeredConfig) -> int:
    if isinstance(config, Eagle1Config):
        return EAGLE_1
    return EAGLE_3 if isinstance(config, EagleConfig) else PLAIN


class ChainHead:
    def __init__(
        self,
        config: LayeredConfig,
        tensors: Tensors,
        target: CpuDecoder,
        feature_norm: torch.Tensor | None = None,
    ) -> None:
        """feature_norm: the target's last norm, for heads that read what comes out of it."""
        self.config, self._memory, kind = config, Memory(), _kind_of(config)
        memory, self._layers = self._memory, config.hidden_layers
        self.num_sources = len(self._layers)
        prefixes = ["midlayer."] if kind != PLAIN else []
        if isinstance(config, DraftConfig):
            prefixes = [f"layers.{i}." for i in range(config.num_layers)]
        fuse, balance = NOTHING, 0
        if kind != PLAIN:
            fuse, balance = memory.balanced(tensors["fc.weight"], tensors.get("fc.bias"))
        self.model, self.threads = memory.describe(config, prefixes, tensors, target), num_threads()
        norm = memory.vector(feature_norm) if feature_norm is not None else 0
        is_residual, is_output = (
            getattr(config, name, False) for name in ("norm_before_residual", "norm_output")
        )
        self._entry = Entry(kind, max(self.num_sources, 1), norm, fuse, balance, is_residual, is_output)
        widths = (
            fuse.k,
            2 * config.hidden_size,
            config.intermediate_size,
            config.num_heads * config.head_dim,
        )
        self._room, self._ids = Room.of(self.model, max(widths), self.threads), draft_ids(tensors)
        self._single = self._many = ChainCall(self.model, self._entry, self._ids, self.threads)
        self._warm_up()

    def _warm_up(self) -> None:
        """What is compiled on first use is not the first request's to wait for, nor a cost of drafting."""
        nothing = torch.zeros(1, self.config.hidden_size)
        row = Row(0, dict.fromkeys(self._layers, nothing), 0)
        self.guess([Feed(self.place(), 0, [0], [row])], [GREEDY], 1, 0.0)

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes

    def read(self, feed: Feed) -> None:
        """Take rows into a sequence; nothing is guessed."""
        for first in range(0, len(feed.tokens), CHUNK):
            part = slice(first, first + CHUNK)
            self._run([Feed(feed.place, feed.start + first, feed.tokens[part], feed.rows[part])], [])

    def place(self) -> Place:
        return Place(self.model.num_layers * self.config.num_kv_heads, self.config.head_dim)

    def fork(self, place: Place, length: int) -> Place:
        return place.fork(length)

    def can_guess(self, temperature: float) -> bool:
        return True

    def guess(self, feeds: Sequence[Feed], samplers: Sequence[Sampler], steps: int, least: float) -> Guesses:
        """Chains after the last row of each feed, until no chance reaches `least`."""
        return self._run(feeds, samplers, steps, least).guesses

    def open(
        self, feed: Feed, sampler: Sampler, steps: int, least: float, num_more: int
    ) -> tuple[int, int, int, int]:
        """For the burst, which calls the kernel several times: with room for `num_more` rows. Addresses, as
        ChainCall's."""
        self._open(self._single, [feed], [sampler], steps, least, num_more)
        return self._single.addresses

    def begin(self, feeds: Sequence[Feed]) -> HeadOutput:
        """The logits after the last row of each feed."""
        return self._output(self._run(feeds, [GREEDY] * len(feeds)))

    def level(self, nodes: Sequence[Node]) -> HeadOutput:
        """The logits after each node of a tree's level."""
        for node in nodes:
            node.place.reserve(node.at + 1)
        most = max(len(node.others) for node in nodes)
        sources = [address(n.source) for n in nodes for _ in range(self._entry.num_sources)]
        call = self._call_for(len(nodes), len(nodes), most, 0)
        longest = max(n.seen for n in nodes) + most
        call.open_nodes(nodes, sources, self._room.get(len(nodes), longest))
        call.run()
        return self._output(call)

    def outputs(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """[feeds, hidden] after the last row of each; the next call may write there, too."""
        return torch.from_numpy(self._run(feeds, [GREEDY] * len(feeds), has_logits=False).outputs)

    def _output(self, call: ChainCall) -> HeadOutput:
        """Outputs are sources of the nodes that follow, so they are copied."""
        logits = torch.from_numpy(call.logits[:, : self.config.draft_vocab_size])
        return HeadOutput(logits, list(call.outputs.copy()))

    def _run(
        self, feeds: Sequence[Feed], samplers: Sequence[Sampler], steps: int = 0, least: float = 0.0, *,
        has_logits: bool = True,
    ) -> ChainCall:  # fmt: skip
        """The call that was made, which knows what came of it."""
        call = self._call_for(len(feeds), sum(len(feed.tokens) for feed in feeds), 0, steps)
        self._open(call, feeds, samplers, steps, least, 0)
        call.run(has_logits=has_logits)
        return call

    def _open(
        self, call: ChainCall, feeds: Sequence[Feed], samplers: Sequence[Sampler], steps: int, least: float,
        num_more: int,
    ) -> None:  # fmt: skip
        longest = 0
        for feed in feeds:
            end = feed.start + len(feed.tokens) + num_more + steps
            feed.place.reserve(end)
            longest = max(longest, end)
        rows = feeds[0].rows if len(feeds) == 1 else [row for feed in feeds for row in feed.rows]
        sources = sources_of(rows, self._layers, self.model.hidden)
        work = self._room.get(max(call.most.rows, MOST_ROWS), longest)
        call.open(feeds, sources, samplers, steps, least, work)

    def _call_for(self, feeds: int, rows: int, others: int, steps: int) -> ChainCall:
        """The usual one, or one with more room."""
        if feeds == 1 and rows <= MOST_ROWS and steps <= MOST_STEPS and not others:
            return self._single
        most = Capacity(*map(max, (feeds, rows, others, steps), self._many.most))
        if most != self._many.most:
            self._many = ChainCall(self.model, self._entry, self._ids, self.threads, most)
        return self._many
