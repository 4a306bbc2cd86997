"""Choices on the device against paceline.core: the same noise bit for bit, the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.noise import Noise, Purpose, philox
from paceline.cuda import pick as device_pick
from paceline.cuda.pick import BLOCK, noise_words

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS = st.integers(0, 2**64 - 1)
POSITIONS = st.integers(0, 2**33)


def signed(seed: int) -> int:
    """The same 64 bits as int64."""
    return seed - 2**64 if seed >= 2**63 else seed


def longs(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=DEVICE)


def pick(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    places: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    how = {"temperatures": temperatures, "seeds": seeds, "places": places}
    return device_pick.pick(logits, how, out)


@triton.jit
def _export_words(position_ptr, seed_ptr, out_ptr, first, count: tl.constexpr):  # type: ignore[no-untyped-def]
    words = noise_words(first, tl.load(position_ptr), tl.load(seed_ptr), count)
    tl.store(out_ptr + tl.arange(0, count), words.to(tl.int64))


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, position=POSITIONS, block=st.integers(0, 60))
def test_the_words_are_those_of_the_host(seed: int, position: int, block: int) -> None:
    count, first = 16, 16 * block
    out = torch.empty(count, dtype=torch.int64, device=DEVICE)
    _export_words[(1,)](longs(position), longs(signed(seed)), out, first, count)
    counter = np.zeros((count // 4, 4), np.uint64)
    counter[:, 0] = first // 4 + np.arange(count // 4)
    counter[:, 1:3] = (position & 0xFFFFFFFF, int(Purpose.TARGET))
    assert out.tolist() == philox(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1).tolist()


def random_logits(num_rows: int, vocab: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (
        (4 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed))).to(dtype).to(DEVICE)
    )


@settings(max_examples=25, deadline=None)
@given(
    vocab=st.sampled_from([1, 2, 7, 1000, BLOCK, BLOCK + 1, 3 * BLOCK - 5]),
    temperatures=st.lists(st.sampled_from([0.0, 0.01, 0.7, 1.0, 5.0]), min_size=1, max_size=3),
    seed=SEEDS,
    position=POSITIONS,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_choices_are_those_of_the_host(
    vocab: int, temperatures: list[float], seed: int, position: int, dtype: torch.dtype
) -> None:
    num_rows = len(temperatures)
    logits = random_logits(num_rows, vocab, seed % 1000, dtype)
    ids = torch.full((num_rows,), -7, device=DEVICE)
    warmth = torch.tensor(temperatures, dtype=torch.float64, device=DEVICE)
    seeds, positions = longs(*[signed(seed)] * num_rows), longs(*range(position, position + num_rows))
    assert pick(logits, warmth, seeds, positions, ids) is ids
    for row, temperature in enumerate(temperatures):
        values = logits[row].double().cpu().numpy()
        wanted = (
            Noise(seed).draw(values / temperature, position + row, Purpose.TARGET)
            if temperature
            else int(values.argmax())
        )
        assert int(ids[row]) == wanted
    assert torch.equal(pick(logits, warmth, seeds, positions), ids)  # in memory of its own


def test_a_temperature_may_be_float32(device: torch.device) -> None:
    """One half has no rounding, so the draw is the host's."""
    logits = random_logits(4, 50, 3)
    picked = pick(logits, torch.full((4,), 0.5, device=device), longs(1, 2, 3, 4), longs(9, 9, 9, 9))
    wanted = [
        Noise(row + 1).draw(logits[row].double().cpu().numpy() / 0.5, 9, Purpose.TARGET) for row in range(4)
    ]
    assert picked.tolist() == wanted


@pytest.mark.parametrize("ties", [(3, 5), (5, BLOCK + 2), (BLOCK + 1, BLOCK + 2), (0, 2 * BLOCK)])
def test_the_lowest_id_wins_a_tie(device: torch.device, ties: tuple[int, int]) -> None:
    logits = torch.zeros(1, 2 * BLOCK + 1, device=device)
    logits[0, list(ties)] = 2.5
    assert pick(logits, torch.zeros(1, device=device), longs(0), longs(0)).tolist() == [ties[0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [4, BLOCK + 1])
def test_a_broken_row_shows_and_breaks_no_other(
    device: torch.device, temperature: float, value: float, at: int
) -> None:
    logits = random_logits(2, BLOCK + 3, 1)
    alone = pick(logits[1:].clone(), torch.full((1,), temperature, device=device), longs(5), longs(6))
    logits[0, at] = value
    picked = pick(logits, torch.full((2,), temperature, device=device), longs(5, 5), longs(6, 6))
    assert picked.tolist() == [-1, int(alone)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nothing_to_choose_shows(device: torch.device, temperature: float) -> None:
    nothing = torch.full((1, 9), -float("inf"), device=device)
    assert pick(nothing, torch.full((1,), temperature, device=device), longs(0), longs(0)).tolist() == [-1]
