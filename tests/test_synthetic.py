"""Synthetic drafts: right as often as was asked, and no text changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import LLM, SamplingParams
from paceline.core.errors import ConfigError

PROMPTS = [f"rider {n} follows the line" for n in range(24)]
RATES = [0.9, 0.6, 0.3]


def test_drafts_are_right_as_often_as_was_asked(tiny_folder: Path) -> None:
    """When a prompt comes again; the last rate is also that of later tokens."""
    greedy = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
    drafts = {"method": "synthetic", "num_speculative_tokens": 4, "acceptance": RATES}
    with LLM(str(tiny_folder), speculative_config=drafts, progress=False) as llm:
        first, again = llm.generate(PROMPTS, greedy), llm.generate(PROMPTS, greedy)
    assert [r.token_ids for r in again] == [r.token_ids for r in first]
    assert sum(r.stats.num_drafted for r in first) == 0
    reached = [sum(r.stats.drafted_at[0] for r in again)]
    reached += [sum(r.stats.accepted_at[depth] for r in again) for depth in range(4)]
    found = [reached[depth + 1] / reached[depth] for depth in range(4)]
    assert found == pytest.approx([*RATES, RATES[-1]], abs=0.06)


def test_sampled_texts_stay_what_they_are(tiny_folder: Path) -> None:
    """Also where what is remembered is another answer."""
    seeded = [SamplingParams(temperature=1.0, seed=seed, max_tokens=24, ignore_eos=True) for seed in (1, 2)]
    with LLM(str(tiny_folder), speculative_config=None, progress=False) as llm:
        plain = [llm.generate(PROMPTS[0], params)[0].token_ids for params in seeded]
    drafts = {"method": "synthetic", "acceptance": [1]}
    with LLM(str(tiny_folder), speculative_config=drafts, progress=False) as llm:
        said = [llm.generate(PROMPTS[0], params)[0].token_ids for params in seeded * 2]
    assert said == plain * 2


@pytest.mark.parametrize("rates", [[], 0.8, [1.1], [-0.1], ["a"], [True], [float("nan")], None])
def test_rates_are_checked(tiny_folder: Path, rates: object) -> None:
    with pytest.raises(ConfigError, match="numbers from 0 to 1"):
        LLM(str(tiny_folder), speculative_config={"method": "synthetic", "acceptance": rates})
