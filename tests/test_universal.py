"""Drafts of a model with another vocabulary: the same text as plain decoding, and many of them are right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.core.errors import ConfigError
from paceline.core.types import Request
from paceline.drafters.universal import Universal
from paceline.measure.prompts import load
from tests.make_models import tiny_hf, tiny_tokenizer

DRAFT = {"method": "universal", "model": "default", "num_speculative_tokens": 4}
OPTIONS: dict[str, Any] = {"progress": False, "max_model_len": 512}
TEXT = "Blåbær and čaj are naïve 😀 words.\n\nThe 12 riders  ride, one behind the other; " * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of 320 tokens."""
    made = tmp_path_factory.mktemp("universal")
    tiny_hf(made, "llama", head_dim=16)
    return tiny_tokenizer(made)


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), speculative_config=DRAFT, **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=90, ignore_eos=True),
        SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=40),
    ],
    ids=["greedy", "seeded"],
)
def test_texts_are_those_of_plain_decoding(folder: Path, tiny: LLM, params: SamplingParams) -> None:
    prompts = ["the wind the wind the", TEXT, "a", "12 riders"]
    with LLM(str(folder), speculative_config=None, **OPTIONS) as plain:
        wanted = [answer.token_ids for answer in plain.generate(prompts, params)]
    assert [answer.token_ids for answer in tiny.generate(prompts, params)] == wanted
    assert tiny.engine.totals.num_drafted > 0


def test_a_shadow_has_the_same_text(tiny: LLM) -> None:
    """However it grows; and a draft is what the draft model wrote, without q."""
    drafter, own = tiny.engine.drafter, tiny.tokenizer
    assert isinstance(drafter, Universal)
    tokens = own.encode(TEXT)
    request = Request("shadow", SamplingParams(), tokens[:70], 70, 0)
    for token in tokens[70:]:
        request.tokens.append(token)
        (draft,) = drafter.propose([request], [4])
        shadow = drafter._shadows["shadow"].request.tokens
        assert drafter._reader.tokenizer.decode(shadow, skip_special=False) == own.decode(request.tokens)
        assert draft.q is None
        assert draft.num_drafted <= 4
    drafter.release(request)
    assert not drafter._shadows
    assert drafter._reader.executor.kv.num_used == 0


@pytest.mark.parametrize(
    ("before", "guessed", "after"), [("The wi", "nd and", "nd"), ("The", " wind and", " wind")]
)
def test_a_word_may_be_begun(tiny: LLM, before: str, guessed: str, after: str) -> None:
    drafter, own = tiny.engine.drafter, tiny.tokenizer
    assert isinstance(drafter, Universal)
    request = Request("word", SamplingParams(), own.encode(before), 1, 0)
    found = drafter._translated(request, drafter._reader.tokenizer.encode(guessed))
    assert own.decode(found).startswith(after)


def test_the_default_model_drafts_for_itself(default_model: LLM) -> None:
    params, prompts = SamplingParams(temperature=0, max_tokens=48), [prompt.text for prompt in load()[:4]]
    chats = [[{"role": "user", "content": text}] for text in prompts]
    with LLM(speculative_config=DRAFT, progress=False) as llm:
        said = llm.chat(chats, params)
    assert [answer.text for answer in said] == [answer.text for answer in default_model.chat(chats, params)]
    steps = sum(answer.stats.num_steps for answer in said)
    assert sum(answer.stats.num_tokens for answer in said) / steps > 3, "of four tokens the last is left out"


def test_what_it_cannot_do_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="tree_width is 2"):
        LLM(str(folder), speculative_config={**DRAFT, "tree_width": 2}, **OPTIONS)
    with pytest.raises(ConfigError, match="use method 'universal'"):
        LLM(str(folder), speculative_config={**DRAFT, "method": "draft_model"}, **OPTIONS)
