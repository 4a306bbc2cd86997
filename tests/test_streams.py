"""A text that is streamed flows: the bursts of its request are short. It is the same text all the same."""

from __future__ import annotations

import pytest

from paceline import LLM, SamplingParams
from paceline.engine.stats import Median
from tests.calm import bursts_of

ROUND_S = 0.01
PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


@pytest.fixture
def steady(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Every round of a burst is taken to last 10 ms, as on a model of a hundred times the size."""
    monkeypatch.setattr(Median, "add", lambda *_: None)
    monkeypatch.setattr(tiny.engine, "_round_seconds", Median(ROUND_S))
    monkeypatch.setattr(tiny.engine.executor, "burst", tiny.engine.executor.burst)  # is put back at the end
    return tiny


def test_bursts_are_short_where_the_text_is_streamed_and_the_text_is_the_same(steady: LLM) -> None:
    launched, prompt = bursts_of(steady.engine), "the line the line the line"
    whole = steady.generate(prompt, PARAMS)[0].outputs[0]
    unstreamed = [each.given.num_rounds for each in launched]
    launched.clear()
    chunks = list(steady.stream(prompt, PARAMS))
    streamed = [each.given.num_rounds for each in launched]
    assert 0.04 < max(unstreamed) * ROUND_S <= 0.12
    assert 0 < max(streamed) * ROUND_S <= 0.04
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token.id for chunk in chunks for token in chunk.tokens] == list(whole.token_ids)
    assert whole.stats.num_tokens == PARAMS.max_tokens
