"""Sums of rounded values: weights are right to 14 bits, sums are exact integers, and what is not a number
does not vanish.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numba
import numpy as np
import pytest

from paceline.cpu.lanes import LANES, address
from paceline.cpu.tiles import PLACE
from paceline.cpu.value_tiles import (
    ADDED,
    CHUNK,
    LARGEST,
    LONGEST,
    TURNED,
    add_turned,
    combine,
    round_value,
    turn,
    weigh_rounded,
)

DIM, SLOTS = 32, 3 * CHUNK


@numba.njit
def weighed(scores, scales, total):  # type: ignore[no-untyped-def]
    weigh_rounded(
        address(scores),
        address(scales),
        len(scores) // LANES,
        np.float32(0.5),
        address(scores),
        address(total),
    )


@numba.njit
def rounded(x, out, scales):  # type: ignore[no-untyped-def]
    for i in range(len(x)):
        round_value(
            address(x) + i * x.shape[1] * 4,
            x.shape[1],
            address(out) + i * x.shape[1],
            address(scales) + i * 4,
        )


@cache
def adder(queries: int) -> Callable[..., None]:
    @numba.njit
    def add(weights, values, places, first, last, turned, out):  # type: ignore[no-untyped-def]
        turns = turn(address(values), address(places) + first * PLACE, first, last, address(turned), 0)
        at = address(weights) + first // 8 * 16
        add_turned(queries, at, weights.shape[1], address(turned), turns, address(out), 2 * LANES * 4)

    return add


@numba.njit
def combined(sums, factor, out):  # type: ignore[no-untyped-def]
    combine(address(sums), LANES * 4, np.float32(factor), address(out))


def split(whole: np.ndarray) -> np.ndarray:
    """[queries, positions] weights -> bytes, four high, four low, ..."""
    fours = whole.reshape(len(whole), -1, 1, 4)
    return np.concatenate([fours >> 7, fours & 127], 2).reshape(len(whole), -1).astype(np.int8)


def joined(data: np.ndarray) -> np.ndarray:
    parts = data.reshape(-1, 2, 4).astype(int)
    return (parts[:, 0] * 128 + parts[:, 1]).ravel()


@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
def test_weights_times_scales_are_right_to_14_bits_of_the_largest(spread: float) -> None:
    generator = np.random.default_rng(0)
    scores = (spread * generator.standard_normal(160)).astype(np.float32)
    scales = generator.lognormal(0, 2, 160).astype(np.float32)
    data, total = scores.copy(), np.zeros(1, np.float32)
    weighed(data, scales, total)
    exact = np.exp2(0.5 * (scores - scores.max()).astype(float))
    unit = (exact * scales).max() / LARGEST
    found = joined(data.view(np.int8)[:320])
    assert (np.abs(found - exact * scales / unit) < 0.5 + 1e-5 * LARGEST).all()
    assert found.max() == LARGEST
    np.testing.assert_allclose(total * unit, exact.sum(), rtol=1e-5)


def test_values_of_zero_weigh_nothing_and_what_is_not_a_number_does_not_vanish() -> None:
    for scale in (0.0, np.nan, np.inf):
        data, total = np.zeros(16, np.float32), np.zeros(1, np.float32)
        scales = np.ones(16, np.float32) if scale else np.zeros(16, np.float32)
        scales[3] = scale
        weighed(data, scales, total)
        out = np.zeros(LANES, np.float32)
        with np.errstate(divide="ignore"):
            combined(np.ones((2, LANES), np.int32) * (scale != 0), np.float32(1) / total[0], out)
        assert np.isfinite(out).all() == (scale == 0)


def test_a_value_is_rounded_by_its_largest_number() -> None:
    x = (
        np.random.default_rng(1).standard_normal((40, 80)).astype(np.float32)
        * np.logspace(-8, 8, 40, dtype=np.float32)[:, None]
    )
    x[7] = 0
    out, scales = np.full(x.shape, 99, np.int8), np.full(40, 9, np.float32)
    rounded(x, out, scales)
    np.testing.assert_array_equal(scales, np.abs(x).max(1) / np.float32(127))
    assert (np.abs(out * scales[:, None].astype(float) - x) <= 0.501 * scales[:, None]).all()


@pytest.mark.parametrize("queries", range(1, ADDED + 1))
def test_sums_are_exact_wherever_a_stretch_begins_and_ends(queries: int) -> None:
    """What lies before and after it has weights and values too, which must not count."""
    generator = np.random.default_rng(queries)
    values = generator.integers(-127, 128, (SLOTS, DIM)).astype(np.int8)
    whole = generator.integers(0, int(LARGEST) + 1, (queries, SLOTS))
    order = generator.permutation(SLOTS)
    places = np.zeros((SLOTS + 2 * CHUNK, 2), np.int64)
    places[:SLOTS, 0] = order * DIM
    turned, weights = np.full(TURNED, 77, np.int8), split(whole)
    for first, last in (
        (0, 1),
        (0, CHUNK),
        (3, 4),
        (5, 7),
        (6, 9),
        (7, 8),
        (2, 2 + CHUNK),
        (13, 100),
        (8, 24),
        (1, 20),
    ):
        sums = generator.integers(-99, 99, (queries, 2, LANES)).astype(np.int32)
        before, parts = sums.astype(int), np.stack([whole >> 7, whole & 127], 1)[:, :, first:last]
        adder(queries)(weights, values, places, first, last, turned, sums)
        np.testing.assert_array_equal(sums - before, parts @ values[order[first:last], :LANES].astype(int))


def test_the_longest_sums_fit_and_halves_are_put_together() -> None:
    assert 127 * 127 * LONGEST < 2**31
    out, sums = (
        np.zeros(LANES, np.float32),
        np.stack([np.arange(LANES) - 5, np.arange(LANES) * 7]).astype(np.int32),
    )
    combined(sums, 0.25, out)
    np.testing.assert_array_equal(out, (sums[0] * 128 + sums[1]) * 0.25)
