"""The arithmetic of attention: right, and the same bits whatever the shape of a tile."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cpu.lanes import LANES, address
from paceline.cpu.tiles import AHEAD, LEAST, MIXED, PLACE, SCORED, SPAN, mix_floats, score_floats, weigh_lanes

DIM, HEADS, SLOTS = 48, 2, 120  # of a cache; the list of places goes on behind the positions that are used
POSITIONS = SLOTS - AHEAD


def scorer(queries: int, span: int) -> Callable[..., None]:
    @numba.njit
    def score(q, keys, places, out):  # type: ignore[no-untyped-def]
        for p in range(0, POSITIONS, span):
            at, to = address(places) + p * PLACE, address(out) + p * 4
            score_floats(queries, address(q), address(keys), at, span, DIM, to, POSITIONS * 4)

    return score


def mixer(queries: int) -> Callable[..., None]:
    @numba.njit
    def mix(weights, values, places, first, last, out):  # type: ignore[no-untyped-def]
        here, at = address(weights) + first * 4, address(places) + first * PLACE
        mix_floats(queries, here, POSITIONS * 4, address(values), at, last - first, address(out), LANES * 4)

    return mix


@numba.njit
def weighed(scores, scale, total):  # type: ignore[no-untyped-def]
    weigh_lanes(address(scores), len(scores) // LANES, np.float32(scale), address(total))


def cached(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a cache and where they lie in it, in bytes, in no order."""
    generator = np.random.default_rng(seed)
    rows, offsets = (
        generator.standard_normal((SLOTS, HEADS, DIM)).astype(np.float32),
        generator.permutation(SLOTS) * HEADS * DIM * 4,
    )
    return rows, np.stack([offsets, offsets], 1)


@pytest.mark.parametrize("queries", range(1, SCORED + 1))
def test_scores_are_right_and_no_shape_of_a_tile_changes_a_bit(queries: int) -> None:
    keys, places = cached(0)
    q = np.random.default_rng(1).standard_normal((queries, DIM)).astype(np.float32)
    found = np.zeros((queries, POSITIONS), np.float32)
    scorer(queries, SPAN)(q, keys, places, found)
    rows = keys[places[:POSITIONS, 0] // (HEADS * DIM * 4), 0]
    np.testing.assert_allclose(found, q.astype(float) @ rows.T.astype(float), atol=2e-5)
    alone, one = np.zeros((1, POSITIONS), np.float32), scorer(1, 1)
    for i in range(queries):
        one(q[i : i + 1], keys, places, alone)
        assert alone.tobytes() == found[i].tobytes()


@pytest.mark.parametrize("queries", range(1, MIXED + 1))
def test_sums_are_right_and_may_be_taken_up_anywhere(queries: int) -> None:
    values, places = cached(2)
    weights = np.random.default_rng(3).random((queries, POSITIONS), np.float32)
    whole, mix, one = np.zeros((queries, LANES), np.float32), mixer(queries), mixer(1)
    mix(weights, values, places, 0, POSITIONS, whole)
    rows = values[places[:POSITIONS, 0] // (HEADS * DIM * 4), 0, :LANES]
    np.testing.assert_allclose(whole, weights.astype(float) @ rows.astype(float), atol=2e-5)
    for cuts in ([1], [3, 4, 9, 41], [SPAN, 2 * SPAN], list(range(POSITIONS))):
        parts, edges = np.zeros_like(whole), [0, *cuts, POSITIONS]
        for first, last in pairwise(edges):
            mix(weights, values, places, first, last, parts)
        assert parts.tobytes() == whole.tobytes()
    for i in range(queries):
        alone = np.zeros((1, LANES), np.float32)
        one(weights[i : i + 1], values, places, 0, POSITIONS, alone)
        assert alone.tobytes() == whole[i].tobytes()


@settings(deadline=None, max_examples=60)
@given(
    turns=st.integers(1, 9),
    seed=st.integers(0, 99),
    size=st.sampled_from([0.0, 1e-6, 1.0, 30.0, 1e4]),
    shift=st.sampled_from([0.0, -900.0, 900.0]),
)
def test_weights_are_powers_of_two_over_the_whole_range(
    turns: int, seed: int, size: float, shift: float
) -> None:
    scores = (size * np.random.default_rng(seed).standard_normal(turns * LANES) + shift).astype(np.float32)
    weights, total, scale = scores.copy(), np.zeros(1, np.float32), np.float32(0.18)
    weighed(weights, scale, total)
    exponents = float(scale) * (scores.astype(float) - float(scores.max()))
    rounding = 2.0**-22 * float(scale) * np.abs(scores).max()  # of the product that a power is taken of
    np.testing.assert_allclose(weights, np.exp2(np.maximum(exponents, LEAST)), rtol=3e-7 + rounding)
    np.testing.assert_allclose(total[0], weights.astype(float).sum(), rtol=1e-6)
