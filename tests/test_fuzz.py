"""`paceline verify --fuzz`: finds nothing where there is nothing, and finds, makes small, saves and replays a
fault that is put in on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline import LLM
from paceline.cli.main import app
from paceline.core.accept import follow
from paceline.core.types import Draft, Verdict
from paceline.measure.fuzz import Ask, Case, Maker
from paceline.measure.fuzz_run import minimise
from paceline.runtime import record

MAKER = Maker(
    ["the rider in front", "naïve riders brake"],
    lambda text: [*text.encode()],
    300,
    200,
    [{"method": "ngram"}],
)


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["verify", *arguments])
    return done.exit_code, done.output


def test_cases_come_from_the_seed_and_survive_json() -> None:
    for number in range(200):
        case = MAKER.case(3, number)
        assert case == MAKER.case(3, number) == Case.from_json(case.to_json())
        assert all(0 < len(ask.prompt) <= 300 for ask in case.asks)
    assert MAKER.case(3, 0) != MAKER.case(4, 0)
    names = {name for number in range(200) for ask in MAKER.case(3, number).asks for name in ask.params}
    assert len(names) == 21  # every option comes


def test_what_is_made_small_is_what_fails() -> None:
    """Fails only with token 7 in a prompt, a bias, and two requests."""

    def fails(case: Case) -> bool:
        has_both = any(7 in ask.prompt and "logit_bias" in ask.params for ask in case.asks)
        return has_both and len(case.asks) > 1

    asks = [Ask([5, 6, 7, 8] * 9, {"logit_bias": {1: 2.0}, "top_k": 3, "max_tokens": 40}), Ask([1] * 30)]
    case = replace(MAKER.case(0, 0), asks=tuple(asks * 3))
    small = minimise(case, fails)
    assert [7] in [ask.prompt for ask in small.asks]
    assert [len(ask.prompt) for ask in small.asks] == [1, 1]
    assert {name for ask in small.asks for name in ask.params} == {"logit_bias", "max_tokens"}
    assert set(small.engine) == {"max_model_len", "speculative_config"}


def test_a_fault_is_found_made_small_saved_and_replayed(
    tiny: LLM, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def follow_all(draft: Draft, picked: Sequence[int], first: int = 0) -> Verdict | None:
        honest = follow(draft, picked, first)
        if honest is None or not draft.tree.is_chain:
            return honest
        tokens = (*draft.tree.tokens[1:], picked[first + draft.num_drafted])
        return honest._replace(path=tuple(range(len(tokens))), tokens=tokens)

    model = ("--model", str(tiny_folder), "--methods", "early_exit")
    with monkeypatch.context() as patch:
        patch.setattr(record, "follow", follow_all)
        status, said = run(*model, "--fuzz", "0.05", "--save", str(tmp_path))
        assert status == 1, said
        found = sorted(tmp_path.glob("case-*.json"))
        assert found
        assert f"paceline verify --replay {found[0]}" in said
        small = json.loads(found[0].read_text())
        assert small["failure"]["kind"] == "difference"
        # One prompt token on most processors; on some the fault shows only after two or three.
        assert len(small["asks"]) == 1
        assert len(small["asks"][0]["prompt"]) <= 3
        status, said = run("--replay", str(found[0]))
        assert status == 1
        assert "plain decoding says" in said
    status, said = run("--replay", str(found[0]))
    assert status == 0, said


def test_nothing_is_found_where_nothing_is(tiny: LLM, tiny_folder: Path, tmp_path: Path) -> None:
    status, said = run("--model", str(tiny_folder), "--fuzz", "0.3", "--seed", "1", "--save", str(tmp_path))
    assert status == 0, said
    assert not any(tmp_path.iterdir())
    assert "no difference, no crash" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ('{"asks": [{"promt": []}]}', "did you mean 'prompt'"),
        ("[]", "cannot be read"),
    ],
)
def test_a_file_that_is_no_case_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "case.json"
    path.write_text(text)
    status, said = run("--replay", str(path))
    assert status == 2
    assert words in said
