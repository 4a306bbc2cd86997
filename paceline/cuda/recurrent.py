"""The gated delta rule on a GPU: what a recurrent layer does between its products (models/recurrent.py has it
in plain torch, cpu/recurrent.py compiled).

A first kernel takes every row by itself: the convolution over the row and those before it on its own path,
which are rows of this pass or lie in the tail that the pass began from. A second one takes the rows of a
request one after the other, as a state must be; columns of a state are independent, so a program has some
columns of a head and keeps them in registers. Invariant: all is float32, and a row is computed from its
parent's state alone and in the same order wherever it stands, so its bits depend neither on how a text was
split into passes nor on what else is in the batch. A slot that a pass reads and one that it writes are the
same only where the writer is an ancestor of the reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from paceline.cuda.rows import LAUNCH, added_up, are_dense, let_next_start, wait_for_previous
from paceline.models import recurrent
from paceline.models.attention import LayerCache
from paceline.models.config import RecurrentConfig

EPS = tl.constexpr(recurrent.EPS)
LINEAR_FROM = tl.constexpr(20.0)  # where log(1 + exp(x)) is x, as torch has it
TILE = 16  # columns of a state that a program has: as many as a warp keeps in registers with 128 keys
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Versions(NamedTuple):
    """Where rows of a pass find states and leave them; int32. The comments of types.Columns hold."""

    parents: Tensor  # [T]
    states_in: Tensor  # [T]
    states_out: Tensor  # [T]
    starts: Tensor  # [R + 1]; the last request is padding

    @classmethod
    def of(cls, columns: Mapping[str, Tensor]) -> Self:
        return cls(*(columns[name] for name in cls._fields))


class Rule(NamedTuple):
    """What a layer has beside its products; float32."""

    sizes: RecurrentConfig
    convolution: Tensor  # [kernel, mixed]
    decay: Tensor  # [value heads]: minus exp(A_log)
    step_bias: Tensor  # [value heads]


@triton.jit
def _softplus(x: tensor) -> tensor:
    """log(1 + exp(x)), also where one is much larger than the exponential."""
    power = tl.exp(tl.minimum(x, LINEAR_FROM))
    total = 1.0 + power
    lost = tl.where(total == 1.0, 1.0, power / tl.where(total == 1.0, 1.0, total - 1.0))
    logarithm = tl.where(total == 1.0, power, tl.log(total) * lost)
    return tl.where(x > LINEAR_FROM, x, logarithm)


@triton.jit
def _convolve(
    mixed_ptr: tensor, rates_ptr: tensor, parents_ptr: tensor, sources_ptr: tensor, targets_ptr: tensor,
    tails_ptr: tensor, weight_ptr: tensor, decay_ptr: tensor, bias_ptr: tensor, out_ptr: tensor,
    steps_ptr: tensor, stride: tensor, key_heads: constexpr, value_heads: constexpr, key_dim: constexpr,
    value_dim: constexpr, kernel: constexpr, splits: constexpr, rate_splits: constexpr, dtype: constexpr,
    block: constexpr,
) -> None:  # fmt: skip
    """One head of a row's queries, keys or values; with values also the head's decay and rate."""
    let_next_start()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_rows = tl.num_programs(0).to(tl.int64)
    own, is_value = head - 2 * key_heads, head >= 2 * key_heads
    width: constexpr = 2 * key_heads * key_dim + value_heads * value_dim
    at = tl.arange(0, block)
    inside = at < tl.where(is_value, value_dim, key_dim)
    at += tl.where(is_value, 2 * key_heads * key_dim + own * value_dim, head * key_dim)
    wait_for_previous()
    target = tl.load(targets_ptr + row).to(tl.int64)
    now, slot, place = row, tl.zeros_like(row), tl.zeros_like(row)
    total = tl.zeros((block,), tl.float32)
    for back in tl.static_range(kernel):  # from the row itself to its ancestors
        is_here, held = now >= 0, tl.maximum(now, 0)
        here = added_up(mixed_ptr + held * stride + at, num_rows * stride, inside & is_here, splits, dtype)
        tail = tails_ptr + (slot * (kernel - 1) + place) * width
        x = tl.where(is_here, here, tl.load(tail + at, mask=inside & (now < 0), other=0.0))
        total += x * tl.load(weight_ptr + (kernel - 1 - back) * width + at, mask=inside, other=0.0)
        if back < kernel - 1:
            kept = tails_ptr + (target * (kernel - 1) + kernel - 2 - back) * width
            tl.store(kept + at, x, mask=inside & (target >= 0))
        parent = tl.load(parents_ptr + held, mask=is_here, other=-1)
        source = tl.load(sources_ptr + held).to(tl.int64)
        is_first = is_here & (parent < 0)  # what is before it is in a tail, the newest last
        slot = tl.where(is_first, source, slot)
        place = tl.where(is_first, kernel - 2, tl.maximum(place - 1, 0))
        now = parent.to(tl.int64)
    total = total / (1.0 + tl.exp(-total))
    unit = tl.rsqrt(tl.sum(total * total, 0) + EPS) * tl.where(head < key_heads, key_dim**-0.5, 1.0)
    tl.store(out_ptr + row * width + at, tl.where(is_value, total, total * unit), mask=inside)

    line, step = rates_ptr + row * 2 * value_heads + own, num_rows * 2 * value_heads
    rate = added_up(line, step, is_value, rate_splits, dtype)
    size = added_up(line + value_heads, step, is_value, rate_splits, dtype)
    size += tl.load(bias_ptr + own, mask=is_value, other=0.0)
    decay = tl.load(decay_ptr + own, mask=is_value, other=0.0)
    tl.store(steps_ptr + row * 2 * value_heads + own, tl.exp(decay * _softplus(size)), mask=is_value)
    rate = 1.0 / (1.0 + tl.exp(-rate))
    tl.store(steps_ptr + row * 2 * value_heads + value_heads + own, rate, mask=is_value)


@triton.jit
def _recur(
    mixed_ptr: tensor, steps_ptr: tensor, starts_ptr: tensor, sources_ptr: tensor, targets_ptr: tensor,
    states_ptr: tensor, out_ptr: tensor, key_heads: constexpr, value_heads: constexpr, key_dim: constexpr,
    value_dim: constexpr, key_block: constexpr, tile: constexpr,
) -> None:  # fmt: skip
    """Some columns of a head's state through the rows of a request. The last request has the rows that fill
    up a bucket: zeros, since turns for them would take as long as a prompt's."""
    let_next_start()
    request, head = tl.program_id(0), tl.program_id(1)
    i, j = tl.arange(0, key_block), tl.program_id(2) * tile + tl.arange(0, tile)
    is_key, is_column = i < key_dim, j < value_dim
    inside = is_key[:, None] & is_column[None, :]
    size: constexpr = value_heads * key_dim * value_dim
    width: constexpr = 2 * key_heads * key_dim + value_heads * value_dim
    in_slot = head * key_dim * value_dim + i[:, None] * value_dim + j[None, :]
    query = head // (value_heads // key_heads) * key_dim + i
    value = 2 * key_heads * key_dim + head * value_dim + j
    wait_for_previous()
    first, end = tl.load(starts_ptr + request).to(tl.int64), tl.load(starts_ptr + request + 1).to(tl.int64)
    state = tl.zeros((key_block, tile), tl.float32)
    newest = tl.full((), -1, tl.int32)  # the slot that holds what `state` is
    count = (end - first).to(tl.int32)
    num_turns = tl.where(request == tl.num_programs(0) - 1, 0, count)
    for index in range(num_turns, count):
        out = out_ptr + ((first + index) * value_heads + head) * value_dim + j
        tl.store(out, tl.zeros((tile,), tl.float32), mask=is_column)
    for index in range(0, num_turns):
        row = first + index
        source, target = tl.load(sources_ptr + row), tl.load(targets_ptr + row)
        if (source >= 0) & (source != newest):
            tl.debug_barrier()  # other threads of this program may have written it, for an ancestor
            state = tl.load(states_ptr + source.to(tl.int64) * size + in_slot, mask=inside, other=0.0)
        line, steps = mixed_ptr + row * width, steps_ptr + row * 2 * value_heads + head
        q = tl.load(line + query, mask=is_key, other=0.0)[:, None]
        k = tl.load(line + key_heads * key_dim + query, mask=is_key, other=0.0)[:, None]
        v = tl.load(line + value, mask=is_column, other=0.0)
        state = state * tl.load(steps)
        change = (v - tl.sum(state * k, 0)) * tl.load(steps + value_heads)
        state = state + k * change[None, :]
        out = out_ptr + (row * value_heads + head) * value_dim + j
        tl.store(out, tl.sum(state * q, 0), mask=is_column)
        if target >= 0:
            tl.store(states_ptr + target.to(tl.int64) * size + in_slot, state, mask=inside)
        newest = target


def recur(
    mixed: Tensor,  # [parts, T, mixed or more]: a product in parts, queries, keys and values first
    rates: Tensor,  # [parts, T, 2 * value heads]: likewise, rates and then steps
    versions: Versions,
    cache: LayerCache,  # [slots, value heads, key, value] and [slots, kernel - 1, mixed], float32
    rule: Rule,
    dtype: torch.dtype,  # of activations
) -> Tensor:
    """-> [T, value heads, value] float32: what each row reads of its state; leaves versions as asked."""
    (_, num_rows, stride), sizes, (states, tails) = mixed.shape, rule.sizes, cache
    heads = sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim
    assert rates.shape[1:] == (num_rows, 2 * sizes.value_heads), "a rate and a step of every head"
    assert states.shape[1:] == (sizes.value_heads, sizes.key_dim, sizes.value_dim), "a state of every head"
    assert tails.shape[1:] == (sizes.kernel - 1, sizes.mixed_width), "a tail of every slot"
    assert are_dense(mixed, rates, states, tails, rule.convolution), "rows follow each other"
    convolved, steps = (
        torch.empty((num_rows, width), dtype=torch.float32, device=mixed.device)
        for width in (sizes.mixed_width, 2 * sizes.value_heads)
    )
    found = convolved.new_empty((num_rows, sizes.value_heads, sizes.value_dim))
    parents, sources, targets, starts = versions
    block = triton.next_power_of_2(max(sizes.key_dim, sizes.value_dim))
    ways = sizes.kernel, len(mixed), len(rates), DTYPES[dtype], block
    _convolve[(num_rows, 2 * sizes.key_heads + sizes.value_heads)](
        mixed, rates, parents, sources, targets, tails, rule.convolution, rule.decay, rule.step_bias,
        convolved, steps, stride, *heads, *ways, num_warps=1, **LAUNCH,
    )  # fmt: skip
    tile, key_block = min(TILE, block), triton.next_power_of_2(sizes.key_dim)
    _recur[(len(starts) - 1, sizes.value_heads, triton.cdiv(sizes.value_dim, tile))](
        convolved, steps, starts, sources, targets, states, found, *heads, key_block, tile,
        num_warps=1, **LAUNCH,
    )  # fmt: skip
    return found
