"""The most likely tokens of a row, against sorting all of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cpu.top import BLOCK, top


def sorted_top(logits: torch.Tensor, k: int) -> list[list[int]]:
    """Stable, so that of equal ones the lower id comes first; what is not a number counts as the smallest."""
    rows = np.where(np.isnan(logits.numpy()), -np.inf, logits.numpy())
    return np.argsort(-rows, axis=1, kind="stable")[:, :k].tolist()


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 5 * BLOCK),
    st.integers(1, 16),
    st.integers(0, 2**31),
    st.sampled_from([2, 30, 10**6]),
)
def test_it_is_the_head_of_the_sorted_row(rows: int, width: int, k: int, seed: int, levels: int) -> None:
    """Few levels: many ties. Rows that are minus infinity or not a number in part or whole come up too."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(-levels, levels, (rows, width)).astype(np.float32)
    for odd in (-np.inf, np.nan, np.inf):
        logits[rng.random(logits.shape) < rng.choice([0.0, 0.3, 1.0], p=[0.8, 0.15, 0.05])] = odd
    found = torch.from_numpy(logits)
    k = min(k, width)
    assert top(found, k).tolist() == sorted_top(found, k)


@pytest.mark.parametrize("width", [49_152, 49_157, 151_936])
def test_it_is_what_torch_says_for_a_whole_vocabulary(width: int) -> None:
    logits = torch.randn(3, width, generator=torch.Generator().manual_seed(width))
    assert torch.equal(top(logits, 8), logits.topk(8).indices)
    columns = torch.randn(width, 2, generator=torch.Generator().manual_seed(width))
    assert torch.equal(top(columns.T, 8), columns.T.topk(8).indices)  # not contiguous
