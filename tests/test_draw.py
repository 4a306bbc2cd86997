"""Tokens drawn by the kernels: those of core/sampling.py and core/noise.py, whatever the row, the options and
the number of threads.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import carray

from paceline.core.errors import ModelError
from paceline.core.params import SamplingParams
from paceline.core.sampling import choose, noise_of, pick_of, processed
from paceline.core.types import Pick, Request
from paceline.cpu.compile import SCALARS, entry_of, invoke, kernel, numbers, piece, size_of
from paceline.cpu.draw import BATCH, CHOICE, PIECES, draw_rows
from paceline.cpu.forward import Pass
from paceline.cpu.lanes import int_pointer
from paceline.cpu.layer import Model, Work
from paceline.cpu.recycle import address
from paceline.cpu.sync import Team, barrier, in_region, num_threads
from paceline.cpu.top import BLOCK, first_largest
from paceline.drafters.base import empty


@piece
def _part(share, given):  # type: ignore[no-untyped-def]
    """As the end of a pass: the largest of each part of a row, then the draws."""
    entry, b, m, w, logits, rows, size, largest_at = given
    largest = carray(int_pointer(largest_at), (rows, share.threads))
    for row in range(rows):
        first, last = size * share.part // share.threads, size * (share.part + 1) // share.threads
        largest[row, share.part] = first_largest(logits + row * size * 4, first, last)
    barrier(share)
    invoke(entry, (share.part, share.threads, share.sync, b, m, w, logits))


@kernel(parallel=True)
def _draw(threads, sync, given):  # type: ignore[no-untyped-def]
    in_region(_part, sync, threads, given)


TEAM = Team()


def drawn(logits: np.ndarray, picks: Sequence[Pick], positions: Sequence[int], threads: int) -> list[int]:
    """logits: [rows, vocab] float32."""
    rows, size = logits.shape
    outputs, before = np.arange(rows), np.array(positions) - 1
    picked, largest = np.zeros(rows, np.int64), np.zeros((rows, threads), np.int64)
    found, near = np.zeros((BATCH, threads, 2)), np.zeros((BATCH, size), np.int32)
    masses, choices = np.zeros((BATCH, PIECES)), array("q")
    for temperature, seed, top_k, *rest in picks:
        choices.frombytes(CHOICE.pack(temperature, seed, top_k * (top_k < size), *rest))
    at = choices.buffer_info()[0]
    spec = Pass(*[0] * len(Pass._fields))._replace(
        rows=rows, num_outputs=rows, choices=at,
        positions=address(before), outputs=address(outputs), picked=address(picked),
    )  # fmt: skip
    work = Work(*[0] * len(Work._fields))._replace(
        largest=address(largest), found=address(found), near=address(near), masses=address(masses)
    )
    model: dict[str, Any] = {
        name: 0 if kind in SCALARS else (0,) * size_of(kind) for name, kind in get_type_hints(Model).items()
    }
    model |= {"head": (0, 0, 0, size), "vocab": size}
    parts = [numbers(each) for each in (spec, model.values(), work)]
    given = (*(each.buffer_info()[0] for each in parts), address(logits), rows, size, address(largest))
    _draw(threads, TEAM.at, (entry_of(draw_rows, 7), *given))
    return picked.tolist()


def expected(row: np.ndarray, pick: Pick, position: int) -> int:
    """By core: -1 where it refuses."""
    temperature, seed, top_k, top_p, min_p = pick
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    request, logits = Request("r", params, [0], 1, seed), torch.from_numpy(row)
    assert temperature == 0 or pick_of(request, empty(request)) == pick
    try:
        return choose(request, processed(request, [], logits), position, noise_of(request))
    except ModelError:
        return -1


TEMPERATURES = (0.0, 1e-5, 0.1, 0.7, 1.0, 2.0, 100.0, 1e4)
TOP_K = (0, 0, 0, 1, 2, 5, 50, 10**6)
TOP_P = (1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999999, 1 - 1e-16)
MIN_P = (0.0, 0.0, 0.0, 1e-30, 1e-9, 0.05, 0.3, 1.0)


def some_rows(rng: np.random.Generator, rows: int, size: int) -> np.ndarray:
    """Close together or far apart, with ties, with what is not finite."""
    logits = (rng.standard_normal((rows, size)) * rng.choice([0.1, 1, 3, 10, 100])).astype(np.float32)
    if rng.random() < 0.3:
        logits = logits.round()
    for odd in (-np.inf, np.nan, np.inf):
        if rng.random() < 0.1:
            logits[rng.random(logits.shape) < rng.choice([0.5 / size, 0.3, 1.0])] = odd
    return logits


def some_picks(rng: np.random.Generator, rows: int) -> list[Pick]:
    return [
        Pick(
            float(rng.choice(TEMPERATURES)), int(rng.integers(2**64, dtype=np.uint64)),
            int(rng.choice(TOP_K)), float(rng.choice(TOP_P)), float(rng.choice(MIN_P)),
        )
        for _ in range(rows)
    ]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    st.integers(1, 2 * BATCH + 1), st.integers(1, 20 * BLOCK), st.integers(0, 2**31), st.sampled_from((1, 2))
)
def test_a_token_is_the_reference_s(rows: int, size: int, seed: int, threads: int) -> None:
    rng = np.random.default_rng(seed)
    logits, picks = some_rows(rng, rows, size), some_picks(rng, rows)
    positions = rng.integers(1, 10**5, rows).tolist()
    found = drawn(logits, picks, positions, min(threads, num_threads()))
    assert found == [expected(*each) for each in zip(logits, picks, positions, strict=True)]


def test_a_whole_vocabulary_is_drawn_from_as_by_the_reference() -> None:
    """Rows as a model writes them, a few tokens far ahead, and rows where no token is."""
    rng, tokens = np.random.default_rng(5), set()
    for ahead in (0.0, 6.0, 12.0):
        for _ in range(25):
            logits = (rng.standard_normal((3, 49_157)) * 2.5).astype(np.float32)
            logits[:, rng.integers(0, 49_157, 40)] += np.float32(ahead)
            picks, positions = some_picks(rng, 3), rng.integers(1, 10**5, 3).tolist()
            found = drawn(logits, picks, positions, num_threads())
            assert found == [expected(*each) for each in zip(logits, picks, positions, strict=True)]
            tokens |= set(found)
    assert len(tokens) > 60


@pytest.mark.parametrize("cuts", [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.95, 0.0), (0, 1.0, 0.2)])
def test_draws_have_the_probabilities_that_the_options_leave(cuts: tuple[int, float, float]) -> None:
    """Over many positions: not by core's draws, but by what a softmax says."""
    logits = np.array([[2.0, 1.0, 0.5, 0.0, -1.0, -8.0]], np.float32)
    scores = np.exp(logits[0].astype(np.float64) / 0.9)
    num_kept = {(0, 1.0, 0.0): 6, (3, 1.0, 0.0): 3, (0, 0.95, 0.0): 4, (0, 1.0, 0.2): 2}[cuts]
    law = np.where(np.arange(6) < num_kept, scores, 0) / scores[:num_kept].sum()
    counts, samples = np.zeros(6), 6000
    for first in range(0, samples, 12):
        rows = np.repeat(logits, 12, axis=0)
        found = drawn(rows, [Pick(0.9, 11, *cuts)] * 12, range(first + 1, first + 13), 1)
        counts += np.bincount(found, minlength=6)
    assert counts[num_kept:].sum() == 0
    spread = np.sqrt(samples * law * (1 - law)) + 1e-9
    assert (np.abs(counts - samples * law) < 4.5 * spread + 1).all()
