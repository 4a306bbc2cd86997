"""DFlash on the CPU: the target's features become keys and values of every layer, and a whole block is
drafted in one pass.

Rows of a block see all of the context and each other; the target's next features overwrite their keys and
values. With a Markov head a token's logits also depend on the token before it: each thread adds what that
token makes likely to its share of all words and looks through them while they are in its caches. Invariant:
every address handed to the kernel lies in memory that the head keeps alive, and a sequence has room for its
context and a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from numba import carray

from paceline.cpu import heads
from paceline.cpu.compile import kernel, piece
from paceline.cpu.decoder import CpuDecoder
from paceline.cpu.head_attention import ROW_SIZE, Rows
from paceline.cpu.head_call import NOTHING, Block, Capacity, HeadCall, Turn
from paceline.cpu.head_memory import CHUNK, GREEDY, LayeredHead, Tensors
from paceline.cpu.lanes import LANES, double_pointer, int_pointer
from paceline.cpu.layer import layer_of
from paceline.cpu.matmul import outputs_of, product_8
from paceline.cpu.rows import add, copy
from paceline.cpu.sync import barrier, in_region, range_of
from paceline.cpu.top import guess, look_through, settle
from paceline.heads.config import DflashConfig
from paceline.heads.rows import Feed, Guesses, Row, Sampler


@piece
def _write_rows(c):  # type: ignore[no-untyped-def]
    """Rows of features, and after them those of the blocks; rows of blocks that guess, step by step."""
    b, num, row = c.block, c.turn.num_requests, 0
    table = carray(int_pointer(c.memory.table), (c.turn.num_rows + num * b.size, ROW_SIZE))
    tokens = carray(int_pointer(c.memory.tokens), num * b.size)
    speaking = carray(int_pointer(c.memory.speaking), c.turn.num_speaking)
    for i in range(num):
        one = heads.request_of(c, i)
        end = one.start + one.num_rows
        for ahead in range(one.num_rows):
            heads.write_row(table, row, one, ahead, 0)
            row += 1
        for at in range(b.size):
            own = i * b.size + at
            tokens[own] = b.mask if at else one.root
            heads.write_row(table, c.turn.num_rows + own, one, one.num_rows + at, end + b.size)
    for i in range(c.turn.num_speaking):
        speaking[i] = i % num * b.size + b.first + i // num


@piece
def _take_in(share, c):  # type: ignore[no-untyped-def]
    """Features, fused and normed, as keys and values of every layer."""
    m, e, w, num = c.model, c.entry, c.work, c.turn.num_rows
    sources = carray(int_pointer(c.memory.sources), (num, e.num_sources))
    for row in range(share.part, num, share.threads):
        heads.put_features(e, sources[row], 0, 0, m, w, row, num)
    heads.multiply_8(share, e.fuse, w, w.narrow, num)
    for row in range(share.part, num, share.threads):
        heads.put_8_norm(w.narrow + row * e.fuse.n * 4, c.block.hidden_norm, m, w, row, num)
    for i in range(m.num_layers):
        heads.keep_rows(share, heads.rows_of(c, num), m, layer_of(m.layers, i), i, w, m.num_heads)


@piece
def _put_word(c, i, word):  # type: ignore[no-untyped-def]
    """The input of the Markov head's second matrix."""
    w, rank = c.work, c.block.rank
    ready = w.ready + i * w.widest * 4
    copy(c.block.before + word * rank * 4, ready, rank)
    heads.put_8_row(ready, rank, w, i, c.turn.num_requests)


@piece
def _found(share, c):  # type: ignore[no-untyped-def]
    """The end of the scratch: words, the largest in a thread's share of a row, and the sums of exponentials
    there. Before it lie [requests, num_outputs] floats that the Markov head adds."""
    num = c.turn.num_requests
    at, shape = c.memory.scratch + num * c.memory.num_outputs * 4, (num, share.threads)
    return carray(int_pointer(at), shape), carray(double_pointer(at + num * share.threads * 8), shape)


@piece
def _search(share, c, step):  # type: ignore[no-untyped-def]
    """A thread's share of the words of all requests."""
    num, size, (words, sums) = c.turn.num_requests, c.memory.num_outputs, _found(share, c)
    first, last = range_of(share, size // LANES)
    first, last = first * LANES, last * LANES
    mixed = c.memory.scratch + first * num * 4  # [num, last - first]
    if c.block.rank:
        product_8(0, 1, outputs_of(c.block.markov, first, last - first), c.work, mixed, num)
    for i in range(num):
        row = c.memory.logits + (step * num + i) * size * 4
        if c.block.rank:
            add(row + first * 4, mixed + i * (last - first) * 4, last - first)
        if heads.request_of(c, i).temperature == 0.0:
            words[i, share.part], sums[i, share.part] = look_through(row, first, last, c.memory.num_words)


@piece
def _settle(share, c, step):  # type: ignore[no-untyped-def]
    """The words of a step, and what the next step needs of them."""
    num, (words, sums) = c.turn.num_requests, _found(share, c)
    for i in range(share.part, num, share.threads):
        row = step * num + i
        if heads.request_of(c, i).temperature == 0.0:
            best, chance = settle(c.memory.logits + row * c.memory.num_outputs * 4, words[i], sums[i])
        else:
            best, chance = guess(c.memory, row, heads.request_of(c, i), step)
        heads.write_guess(c, step, i, best, chance, True)
        if c.block.rank:
            _put_word(c, i, best)


@piece
def _part(share, at):  # type: ignore[no-untyped-def]
    c = heads.call_at(at)
    b, t = c.block, c.turn
    if share.part == 0:
        _write_rows(c)
    _take_in(share, c)
    if t.num_speaking:
        table = c.memory.table + t.num_rows * ROW_SIZE * 8
        heads.run_rows(share, c, Rows(t.num_requests * b.size, c.memory.tokens, table, 0, 0), b.size, False)
    for i in range(share.part, t.num_requests if b.rank and t.steps else 0, share.threads):
        _put_word(c, i, heads.request_of(c, i).word)
    for step in range(t.steps):
        barrier(share)
        _search(share, c, step)
        barrier(share)
        _settle(share, c, step)


@kernel(parallel=True)
def draft_blocks(at, threads):  # type: ignore[no-untyped-def]
    """at: of the numbers of a Call."""
    in_region(_part, heads.call_at(at).work.sync, threads, at)


class BlockHead(LayeredHead):
    def __init__(self, config: DflashConfig, tensors: Tensors, target: CpuDecoder) -> None:
        super().__init__(config, tensors, target)
        self.config, memory, size, rank = config, self._memory, config.block_size, config.markov_rank
        self._words = {int(token): i for i, token in enumerate(self._ids)}
        markov, before = NOTHING, 0
        if rank:
            markov = memory.output(tensors["markov_w2.weight"], fill=0.0)
            before = memory.vector(tensors["markov_w1.weight"])
        norm, first = memory.vector(tensors["hidden_norm.weight"]), 0 if config.sample_from_anchor else 1
        block = Block(size, config.mask_token_id, first, norm, rank, before, markov)
        scratch, steps = 4 * self.model.head.n + 16 * self.threads, config.num_drafts
        sizes = {"num_speaking": steps, "block": size, "scratch": scratch}
        self._call = HeadCall(self._kernel(draft_blocks, block, **sizes), Capacity(steps=steps))
        # What is compiled on first use is not the first request's to wait for, nor a cost of drafting.
        row = Row(0, dict.fromkeys(self.layers, torch.zeros(1, config.hidden_size)), 0)
        self.guess([Feed(self.place(), 0, [0], [row])], [GREEDY], 1)

    def read(self, *feeds: Feed) -> None:
        """Take features into sequences; nothing is guessed."""
        for feed in feeds:
            for first in range(0, len(feed.rows), CHUNK):
                part = feed._replace(start=feed.start + first, rows=feed.rows[first : first + CHUNK])
                self._run([part], [GREEDY], 0, 0)

    def guess(self, feeds: Sequence[Feed], samplers: Sequence[Sampler], steps: int) -> Guesses:
        return self._run(feeds, samplers, steps, steps).guesses

    def logits(self, feeds: Sequence[Feed], steps: int) -> torch.Tensor:
        """[steps, requests, draft vocabulary], without the Markov head."""
        found = self._run(feeds, [GREEDY] * len(feeds), steps, 0).logits.copy()
        return torch.from_numpy(found.reshape(steps, len(feeds), -1))

    def word(self, token: int) -> int:
        """A token of the target as a draft id; the last one is for all others."""
        return self._words.get(token, self.config.draft_vocab_size) if len(self._ids) else token

    def _run(self, feeds: Sequence[Feed], samplers: Sequence[Sampler], speaking: int, steps: int) -> HeadCall:
        """speaking: rows of a block whose logits are wanted; of the first `steps` tokens are guessed."""
        ahead, requests = self.config.block_size if speaking else 0, []
        for feed, sampler in zip(feeds, samplers, strict=True):
            root = feed.tokens[-1], self.word(feed.tokens[-1])
            requests.append(self._request(feed, len(feed.rows), ahead, sampler, *root))
        rows, count = [row for feed in feeds for row in feed.rows], len(feeds)
        return self._open(Turn(count, len(rows), count * speaking, steps), requests, [], rows, ahead).run()
