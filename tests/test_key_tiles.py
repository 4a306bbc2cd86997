"""Attention scores from integers: rounded as they should be, exact from there on, and the same bits whatever
the shape of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numba
import numpy as np
import pytest
import torch

from paceline.cpu.lanes import address
from paceline.cpu.tiles import AHEAD, PLACE, SCORED, SPAN, TAIL, round_head, score_rounded
from paceline.models.attention import round_halves

DIMS = (16, 32, 48, 64, 80, 128, 256)
HEADS, SLOTS = 2, 120  # of a cache; the list of places goes on behind the positions that are used
POSITIONS = SLOTS - AHEAD


@numba.njit
def round_all(x, out):  # type: ignore[no-untyped-def]
    for i in range(len(x)):
        round_head(1, address(x) + i * x.shape[1] * 4, x.shape[1], address(out) + i * out.shape[1])


def rounded(x: np.ndarray) -> np.ndarray:
    """[n, dim] -> [n, dim + TAIL] bytes."""
    out = np.full((len(x), x.shape[1] + TAIL), 99, np.int8)
    round_all(x, out)
    return out


def first_half(dim: int) -> int:
    return -(-dim // 32) * 16


def parts(heads: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integers, scales and sums of heads in memory."""
    dim = heads.shape[-1] - TAIL
    tail = heads[..., dim:].copy()
    return heads[..., :dim].astype(np.int64), tail[..., :8].view(np.float32), tail[..., 8:].view(np.int32)


@cache
def scorer(queries: int, span: int, dim: int) -> Callable[..., None]:
    @numba.njit
    def score(q, keys, places, out):  # type: ignore[no-untyped-def]
        for p in range(0, POSITIONS, span):
            at, to = address(places) + p * PLACE, address(out) + p * 4
            score_rounded(queries, address(q), address(keys), at, span, dim, to, POSITIONS * 4)

    return score


@pytest.mark.parametrize("dim", DIMS)
def test_a_head_is_rounded_half_by_half_as_the_reference_does(dim: int) -> None:
    x = (
        np.random.default_rng(dim).standard_normal((40, dim)).astype(np.float32)
        * np.logspace(-8, 8, 40, dtype=np.float32)[:, None]
    )
    x[:, first_half(dim) :] *= 1000
    x[3], x[4, : first_half(dim)] = 0, 0
    whole, scales, sums = parts(rounded(x))
    halves = [slice(0, first_half(dim)), slice(first_half(dim), dim)]
    for i, half in enumerate(halves):
        top = np.abs(x[:, half]).max(1, initial=0)
        np.testing.assert_array_equal(scales[:, i], top / np.float32(127))
        np.testing.assert_array_equal(sums[:, i], whole[:, half].sum(1))
        assert (np.abs(whole[:, half]).max(1, initial=0) == np.where(top > 0, 127, 0)).all()
        assert (
            np.abs(whole[:, half] * scales[:, i : i + 1].astype(float) - x[:, half])
            <= 0.501 * scales[:, i : i + 1]
        ).all()
    seen = np.concatenate([whole[:, half] * scales[:, i : i + 1] for i, half in enumerate(halves)], 1)
    steps = np.repeat(scales, [first_half(dim), dim - first_half(dim)], 1)
    difference = np.abs(
        round_halves(torch.from_numpy(x)).numpy() - seen
    )  # on a border between integers either may do
    assert (difference <= 1.001 * steps).all()
    assert (difference > 0.5 * steps).mean() < 1e-3


def test_what_is_not_a_number_does_not_vanish() -> None:
    x = np.ones((2, 64), np.float32)
    x[0, 40], x[1, 3] = np.nan, np.inf
    scales = parts(rounded(x))[1]
    assert np.isnan(scales[0, 1])
    assert np.isinf(scales[1, 0])
    assert np.isfinite([scales[0, 0], scales[1, 1]]).all()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("size", ["random", "largest", "opposite"])
def test_scores_are_exact_and_no_shape_of_a_tile_changes_a_bit(dim: int, size: str) -> None:
    generator = np.random.default_rng(dim)
    if size == "random":
        keys, q = generator.standard_normal((SLOTS * HEADS, dim)), generator.standard_normal((SCORED, dim))
    else:
        keys, q = np.ones((SLOTS * HEADS, dim)), np.full((SCORED, dim), 1.0 if size == "largest" else -1.0)
    heads, queries = rounded(keys.astype(np.float32)), rounded(q.astype(np.float32))
    offsets = generator.permutation(SLOTS) * HEADS * (dim + TAIL)
    places = np.stack([offsets, np.full_like(offsets, -1)], 1)
    (k, k_scales, _), (n, n_scales, _) = parts(heads[offsets[:POSITIONS] // (dim + TAIL)]), parts(queries)
    middle = first_half(dim)
    exact = sum(
        n_scales[:, i : i + 1].astype(float) * (n[:, half] @ k[:, half].T) * k_scales[:, i].astype(float)
        for i, half in enumerate([slice(0, middle), slice(middle, dim)])
    )
    alone = np.zeros((SCORED, POSITIONS), np.float32)
    for i in range(SCORED):
        scorer(1, 1, dim)(queries[i : i + 1], heads, places, alone[i : i + 1])
    np.testing.assert_allclose(alone, exact, rtol=0, atol=1e-6 * np.abs(exact).max())
    for count in range(1, SCORED + 1):
        found = np.zeros((count, POSITIONS), np.float32)
        scorer(count, SPAN, dim)(queries[:count].copy(), heads, places, found)
        assert found.tobytes() == alone[:count].tobytes()
