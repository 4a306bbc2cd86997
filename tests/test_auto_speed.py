"""`auto` on the clock: no slower than plain decoding over the shipped prompts, and faster where it copies.

Both run in one process, one prompt after the other, so that what else the machine does meets both alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from time import perf_counter

import pytest

from paceline import LLM, SamplingParams
from paceline.measure.prompts import load

PARAMS = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
LIST = "\n".join(f"{n}. The {w} is stored in room {n * 7}." for n, w in enumerate(("lamp", "desk", "map"), 1))
COPYING = f"Repeat this list exactly, three times:\n{LIST}"
SWEEPS = 3


@pytest.fixture(scope="module")
def auto_model() -> Iterator[LLM]:
    with LLM(progress=False) as llm:
        yield llm


def rate(llm: LLM, text: str) -> float:
    """Tokens a second."""
    started = perf_counter()
    said = llm.chat([{"role": "user", "content": text}], PARAMS)[0]
    return said.stats.num_tokens / (perf_counter() - started)


def ratio(auto: LLM, plain: LLM, text: str) -> float:
    """Of medians, interleaved."""
    rates = [(rate(auto, text), rate(plain, text)) for _ in range(SWEEPS)]
    return median(a for a, _ in rates) / median(p for _, p in rates)


@pytest.mark.serial
def test_auto_is_not_slower_than_plain_on_the_shipped_prompts(auto_model: LLM, default_model: LLM) -> None:
    texts = [prompt.text for prompt in load()[::6]]
    ratio(auto_model, default_model, texts[0])  # both have run before
    assert median(ratio(auto_model, default_model, text) for text in texts) >= 0.98


@pytest.mark.serial
def test_auto_is_faster_where_text_is_copied(auto_model: LLM, default_model: LLM) -> None:
    ratio(auto_model, default_model, COPYING)
    assert ratio(auto_model, default_model, COPYING) >= 1.3
