"""What a decoder does to single rows between its products: embed, add and norm, norm and rotate and store.

Everything is computed in float32 and rounded where it is written; `add_norm` also rounds where the torch
decoder does, so the residual stream has the same bits. Invariant: a row's result depends on that row alone.
Tiles follow from the model's sizes, never from the number of rows.

Kernels start while the one before still runs (programmatic dependent launch, Hopper and later): each lets the
next one start at once and reads what no kernel of the pass writes. Invariant: every program launched with
LAUNCH waits before its first load of a computed number and its first store, so the order is as without.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.core import types
from paceline.models import layer
from paceline.models.attention import LayerCache

CLAMP, SLOPE = tl.constexpr(layer.CLAMP), tl.constexpr(layer.SLOPE)
BLOCK_SIZE, SCALE_BYTES = tl.constexpr(types.BLOCK_SIZE), tl.constexpr(types.SCALE_BYTES)
MAX_HIDDEN = 16384  # a row of the residual stream is one tile
TILE = 1024  # elements a program where a row need not be one tile
# Heads a program places, at most: a warp has enough to do, and one token still spreads over several
# multiprocessors. Of heads that are wider, one.
HEADS, WIDE = 2, 256

INTERPRETED: bool = triton.knobs.runtime.interpret
_CAN_OVERLAP = not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
OVERLAPS = tl.constexpr(_CAN_OVERLAP)
LAUNCH: dict[str, bool] = {"launch_pdl": True} if _CAN_OVERLAP else {}  # options of every launch


@triton.jit
def let_next_start() -> None:
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous() -> None:
    if OVERLAPS:
        gdc_wait()


def are_dense(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


def _are_parts(parts: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """One part is of the activations' dtype, several are float32."""
    wanted = dtype if len(parts) == 1 else torch.float32
    return parts.shape[1:] == shape and parts.dtype == wanted and parts.is_contiguous()


@triton.jit
def added_up(parts_ptr: tensor, step: tensor, mask: tensor, splits: constexpr, dtype: constexpr) -> tensor:
    """float32: a product in `splits` parts, each `step` numbers after the last, rounded as a whole one is."""
    total = tl.load(parts_ptr, mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(1, splits):
        total += tl.load(parts_ptr + i * step, mask=mask, other=0.0)
    return total.to(dtype).to(tl.float32)


@triton.jit
def normed(x: tensor, weight: tensor, eps: tensor, size: constexpr) -> tensor:
    """x [block] float32, zero beyond `size`."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * weight


@triton.jit
def _add_norm(
    x_ptr: tensor, added_ptr: tensor, after_ptr: tensor, weight_ptr: tensor, out_ptr: tensor, eps: tensor,
    scale: tensor, scalar: tensor, hidden: constexpr, splits: constexpr, block: constexpr,
) -> None:  # fmt: skip
    let_next_start()
    start = tl.program_id(0).to(tl.int64) * hidden
    at = tl.arange(0, block)
    inside = at < hidden
    dtype = x_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous()
    x = tl.load(x_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
    if added_ptr is not None:
        step = tl.num_programs(0).to(tl.int64) * hidden
        added = added_up(added_ptr + start + at, step, inside, splits, dtype)
        if after_ptr is not None:
            after = tl.load(after_ptr + at, mask=inside, other=0.0).to(tl.float32)
            added = normed(added, after, eps, hidden).to(dtype).to(tl.float32)
        total = (x + (added * scale).to(dtype).to(tl.float32)).to(dtype)
        total = (total.to(tl.float32) * scalar).to(dtype)
        tl.store(x_ptr + start + at, total, mask=inside)
        x = total.to(tl.float32)
    out = normed(x, weight, eps, hidden)
    tl.store(out_ptr + start + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def add_norm(
    x: Tensor,  # [T, hidden]: the residual stream, changed in place
    added: Tensor | None,  # [parts, T, hidden]: what a block adds to it, a product in parts
    after_weight: Tensor | None,  # [hidden]: gemma norms what is added
    weight: Tensor,  # [hidden]
    eps: float,
    out: Tensor,  # [T, hidden]
    scale: float = 1.0,
    scalar: float = 1.0,
) -> None:
    """x = scalar * (x + scale * added), then out = rms_norm(x) * weight."""
    num_rows, hidden = x.shape
    assert hidden <= MAX_HIDDEN, "a row is one tile"
    assert (out.shape, weight.shape) == (x.shape, (hidden,)), "a norm keeps its shape"
    assert added is None or _are_parts(added, x.shape, x.dtype), "what is added fits"
    assert are_dense(x, out), "rows follow each other"
    block, splits = triton.next_power_of_2(hidden), 1 if added is None else len(added)
    weights, sizes = (after_weight, weight), (hidden, splits, block)
    warps = min(max(block // 512, 1), 16)  # 16 elements a thread, until there are 16 warps
    _add_norm[(num_rows,)](x, added, *weights, out, eps, scale, scalar, *sizes, num_warps=warps, **LAUNCH)


@triton.jit
def _place(
    qkv_ptr: tensor, positions_ptr: tensor, slots_ptr: tensor, cos_ptr: tensor, sin_ptr: tensor,
    keys_ptr: tensor, values_ptr: tensor, q_norm_ptr: tensor, k_norm_ptr: tensor, q_out_ptr: tensor,
    eps: tensor, num_q: constexpr, num_kv: constexpr, dim: constexpr, splits: constexpr,
    half_block: constexpr, group: constexpr, row_block: constexpr, norms_values: constexpr,
) -> None:  # fmt: skip
    """A tile is `group` heads by half a head: both halves turn together. Heads: queries, keys, values. With a
    `row_block` there is one norm over all queries and one over all keys."""
    let_next_start()
    half: tl.constexpr = dim // 2
    row = tl.program_id(0).to(tl.int64)
    position, slot = tl.load(positions_ptr + row).to(tl.int64), tl.load(slots_ptr + row).to(tl.int64)
    head = tl.program_id(1) * group + tl.arange(0, group)[:, None]
    at = tl.arange(0, half_block)[None, :]
    is_dim = at < half
    is_query = (head < num_q) & is_dim
    is_key = (head >= num_q) & (head < num_q + num_kv) & is_dim
    is_value = (head >= num_q + num_kv) & (head < num_q + 2 * num_kv) & is_dim
    inside = is_query | is_key | is_value
    offsets = head * dim + at

    cos = tl.load(cos_ptr + position * half + at, mask=is_dim, other=0.0)
    sin = tl.load(sin_ptr + position * half + at, mask=is_dim, other=0.0)
    wait_for_previous()
    width: tl.constexpr = (num_q + 2 * num_kv) * dim
    source, step = qkv_ptr + row * width + offsets, tl.num_programs(0).to(tl.int64) * width
    left = added_up(source, step, inside, splits, q_out_ptr.dtype.element_ty)
    right = added_up(source + half, step, inside, splits, q_out_ptr.dtype.element_ty)
    normed_left, normed_right = left, right
    if q_norm_ptr is not None:
        mean = ((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / dim)[:, None]
        q_at, k_at = 0 * head + at, 0 * head + at
        if row_block:
            n, start = tl.arange(0, row_block), qkv_ptr + row * width
            q = added_up(start + n, step, n < num_q * dim, splits, q_out_ptr.dtype.element_ty)
            k = added_up(start + num_q * dim + n, step, n < num_kv * dim, splits, q_out_ptr.dtype.element_ty)
            of_q, of_k = tl.sum(q * q, 0) / (num_q * dim), tl.sum(k * k, 0) / (num_kv * dim)
            mean = tl.where(head < num_q, of_q, of_k)
            q_at, k_at = offsets, offsets - num_q * dim
        scale = tl.rsqrt(mean + eps)
        normed_left = left * scale * _head_weight(q_norm_ptr + q_at, k_norm_ptr + k_at, is_query, is_key)
        right_weight = _head_weight(q_norm_ptr + half + q_at, k_norm_ptr + half + k_at, is_query, is_key)
        normed_right = right * scale * right_weight
        if norms_values:
            left, right = left * scale, right * scale
    # Rotated, and fused by name: the compiler does not choose what is rounded.
    turned_left = tl.fma(normed_left, cos, -(normed_right * sin))
    turned_right = tl.fma(normed_right, cos, normed_left * sin)

    q_out = q_out_ptr + row * num_q * dim + offsets
    tl.store(q_out, turned_left.to(q_out_ptr.dtype.element_ty), mask=is_query)
    tl.store(q_out + half, turned_right.to(q_out_ptr.dtype.element_ty), mask=is_query)
    _keep(keys_ptr, slot * num_kv + head - num_q, at, turned_left, turned_right, is_key, dim)
    _keep(values_ptr, slot * num_kv + head - num_q - num_kv, at, left, right, is_value, dim)


@triton.jit
def _keep(
    cache_ptr: tensor, line: tensor, at: tensor, left: tensor, right: tensor, mask: tensor, dim: constexpr
) -> None:
    """Store heads [G, half] in lines [G, 1] of a cache; in one of integers, with their scale after them."""
    half: tl.constexpr = dim // 2
    if cache_ptr.dtype.element_ty == tl.int8:
        start = cache_ptr + line * (dim + SCALE_BYTES)
        highest = tl.max(tl.maximum(tl.abs(left), tl.abs(right)), 1, keep_dims=True)  # [G, 1]
        scale = tl.where(highest > 0, highest, 1.0) / 127
        is_kept = tl.max(mask.to(tl.int32), 1, keep_dims=True) > 0
        tl.store((start + dim).to(tl.pointer_type(tl.float32), bitcast=True), scale, mask=is_kept)
        left, right = tl.floor(left / scale + 0.5), tl.floor(right / scale + 0.5)
    else:
        start = cache_ptr + line * dim
    tl.store(start + at, left.to(cache_ptr.dtype.element_ty), mask=mask)
    tl.store(start + at + half, right.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _head_weight(q_norm: tensor, k_norm: tensor, is_query: tensor, is_key: tensor) -> tensor:
    of_queries = tl.load(q_norm, mask=is_query, other=0.0).to(tl.float32)
    of_keys = tl.load(k_norm, mask=is_key, other=0.0).to(tl.float32)
    return tl.where(is_query, of_queries, of_keys)


def place(
    qkv: Tensor,  # [parts, T, (heads + 2 * kv_heads) * dim]: a product in parts
    where: tuple[Tensor, Tensor],  # positions [T] and slots [T]
    rotary: tuple[Tensor, Tensor],  # cosines and sines [context, dim / 2] float32
    cache: LayerCache,  # [slots, kv_heads, dim]; int8: dim + SCALE_BYTES
    norms: tuple[Tensor | None, Tensor | None],  # of queries and keys, [dim] each, or as wide as all heads
    eps: float,
    q_out: Tensor,  # [T, heads, dim]
    norms_values: bool = False,  # each head of them, without a weight
) -> None:
    """Norm and rotate queries and keys; queries go to `q_out`, keys and values to their slots."""
    (num_rows, num_q, dim), (keys, values), num_kv = q_out.shape, cache, cache[0].shape[1]
    num_heads = num_q + 2 * num_kv
    assert _are_parts(qkv, (num_rows, num_heads * dim), q_out.dtype), "all heads of every token"
    width = dim + SCALE_BYTES.value * (keys.dtype == torch.int8)
    assert keys.shape == values.shape == (len(keys), num_kv, width), "keys and values are of the same heads"
    assert are_dense(*rotary, keys, values, q_out), "rows follow each other"
    group = HEADS if len(qkv) <= 4 and dim <= WIDE else 1  # of many parts and wide heads, less at a time
    is_over_heads = norms[0] is not None and len(norms[0]) > dim
    assert not norms_values or (norms[0] is not None and not is_over_heads), "values are normed as keys are"
    row_block = triton.next_power_of_2(num_q * dim) if is_over_heads else 0
    sizes = (num_q, num_kv, dim, len(qkv), triton.next_power_of_2(dim // 2), group, row_block, norms_values)
    _place[(num_rows, triton.cdiv(num_heads, group))](
        qkv, *where, *rotary, *cache, *norms, q_out, eps, *sizes, num_warps=1, **LAUNCH
    )


@triton.jit
def activated(gate: tensor, up: tensor, kind: constexpr) -> tensor:
    """(1 + tanh(z)) / 2 = sigmoid(2 z): all are the gate times a sigmoid; 2 sqrt(2 / pi) = 1.59577. What is
    no number is not clamped."""
    steepness = gate
    if kind == "gelu_tanh":
        steepness = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    elif kind == "clamped":
        gate, up = tl.where(gate > CLAMP, CLAMP, gate), tl.where(up > CLAMP, CLAMP, up)
        steepness, up = SLOPE * gate, tl.where(up < -CLAMP, -CLAMP, up) + 1.0
    return gate / (1.0 + tl.exp(-steepness)) * up


@triton.jit
def _embed(
    ids_ptr: tensor, table_ptr: tensor, out_ptr: tensor, picked_ptr: tensor, scale: tensor, hidden: constexpr,
    tile: constexpr,
) -> None:  # fmt: skip
    let_next_start()
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * tile + tl.arange(0, tile)
    token = tl.load(ids_ptr + row).to(tl.int64)
    if picked_ptr is not None:  # -1 where a row was broken: what comes of it is never used
        picked = tl.load(picked_ptr + tl.maximum(-1 - token, 0), mask=token < 0, other=0)
        token = tl.where(token < 0, tl.maximum(picked, 0), token)
    x = tl.load(table_ptr + token * hidden + at, mask=at < hidden, other=0.0).to(tl.float32) * scale
    tl.store(out_ptr + row * hidden + at, x.to(out_ptr.dtype.element_ty), mask=at < hidden)


def embed(ids: Tensor, table: Tensor, scale: float, picked: Tensor | None = None) -> Tensor:
    """-> [T, hidden]: rows `ids` [T] of the table [vocab, hidden], times scale; -1 - i means picked[i]."""
    assert are_dense(table), "rows follow each other"
    num_rows, hidden = len(ids), table.shape[1]
    out, grid = table.new_empty((num_rows, hidden)), (num_rows, triton.cdiv(hidden, TILE))
    _embed[grid](ids, table, out, picked, scale, hidden, TILE, num_warps=4, **LAUNCH)
    return out
