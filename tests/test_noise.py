"""The noise: known answers of Philox 4x32-10, independence of streams, and the shortcut in `draw`."""

from __future__ import annotations

import numpy as np

from paceline.core.noise import Noise, Purpose, child_seed, gumbel, philox, uniform


def test_philox_gives_the_published_answers() -> None:
    def words(counter: list[int], key: tuple[int, int]) -> list[int]:
        return [int(w) for w in philox(np.array([counter], np.uint64), key)[0]]

    ones = 0xFFFFFFFF
    assert words([0, 0, 0, 0], (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words([ones] * 4, (ones, ones)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert words(pi, (0xA4093822, 0x299F31D0)) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_an_id_has_the_same_noise_whoever_asks_with_it() -> None:
    every = uniform(5, 9, Purpose.TARGET, np.arange(1000))
    some = np.array([3, 77, 999])
    assert (uniform(5, 9, Purpose.TARGET, some) == every[some]).all()
    assert ((every > 0) & (every < 1)).all()
    assert abs(every.mean() - 0.5) < 0.05


def test_streams_differ_in_every_part_of_the_key() -> None:
    ids = np.arange(64)
    base = uniform(1, 2, Purpose.TARGET, ids)
    others = [
        uniform(2, 2, Purpose.TARGET, ids),
        uniform(1 + 2**32, 2, Purpose.TARGET, ids),
        uniform(1, 3, Purpose.TARGET, ids),
        uniform(1, 2, Purpose.DRAFT, ids),
        uniform(1, 2, Purpose.TARGET, ids, round=1),
    ]
    assert all((base != other).all() for other in others)


def test_target_noise_ignores_the_round_and_the_rest_does_not() -> None:
    logits = np.zeros(500)
    for purpose in Purpose:
        draws = {Noise(3, round).draw(logits, 10, purpose) for round in range(6)}
        assert (len(draws) == 1) == (purpose is Purpose.TARGET)


def test_the_shortcut_draws_what_full_noise_draws() -> None:
    rng = np.random.default_rng(0)
    for i in range(300):
        logits = rng.normal(0, rng.choice([0.1, 3, 30]), 400)
        logits[rng.integers(0, 400, 50)] = -np.inf
        full = int((logits + gumbel(7, i, Purpose.TARGET, np.arange(400))).argmax())
        assert Noise(7).draw(logits, i, Purpose.TARGET) == full


def test_completions_of_one_request_have_seeds_of_their_own() -> None:
    assert child_seed(42, 0) == 42
    assert len({child_seed(42, i) for i in range(1000)}) == 1000
    assert 0 <= child_seed(-5, 3) < 2**64
