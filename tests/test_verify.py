"""`paceline verify` finds nothing where there is nothing to find, and does find a fault that is put in on
purpose.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from paceline import LLM
from paceline.cli import verify
from paceline.cli import verify_distribution as distribution
from paceline.cli.main import app
from paceline.cli.verify import MODES, NEAR_TIE, Examination, _logprob, first_difference
from paceline.cli.verify_distribution import chi_square_p_value
from paceline.core.accept import accept, follow
from paceline.core.noise import Purpose, gumbel
from paceline.core.types import Draft, Request, Verdict
from paceline.drafters.registry import DRAFTERS, HEADS
from paceline.measure.prompts import Prompt
from paceline.runtime import record

TEXTS = ("the line the line the line", "who rides in front? who rides", "def ride(line): return")
KEYS = {"drafter", "mode", "temperature", "batch", "prompts", "identical", "near_ties", "tau"}


@pytest.fixture(scope="module")
def tiny(tiny: LLM, tiny_folder: Path) -> str:
    """The folder; the model was loaded once, so no command below is the one that compiles kernels and says
    so.
    """
    return str(tiny_folder)


@pytest.fixture(scope="module")
def landscape(tiny: str) -> distribution.Landscape:
    with LLM(tiny) as llm:
        found = distribution.survey(llm)
    assert (found.target[()].isfinite() & found.draft[()].isfinite()).any(), (
        "what is drafted must be on the map, or nothing is judged"
    )
    return found


def run_verify(tiny: str, folder: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    prompts, report = folder / "prompts.txt", folder / "report.json"
    prompts.write_text("\n".join(TEXTS))
    flags = [
        "verify",
        "--model",
        tiny,
        "--prompts",
        str(prompts),
        "--json",
        str(report),
        "--max-tokens",
        "12",
        *arguments,
    ]
    done = CliRunner().invoke(app, flags)
    return done.exit_code, done.stdout, json.loads(report.read_text()) if report.exists() else {}


def plain_texts(examination: Examination, llm: LLM, temperature: float) -> list[list[int]]:
    results = examination.answers(
        llm, ("plain", temperature, 8), lambda *told: None, num_speculative_tokens=0
    )
    return [list(result.token_ids) for result in results]


@pytest.mark.slow
def test_every_drafter_passes(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distribution, "NUM_SAMPLES", 400)
    status, text, report = run_verify(tiny, tmp_path)
    assert status == 0, text
    assert set(report) == {"ok", "checks", "distribution"}
    assert report["ok"] is True
    assert all(
        set(check) == KEYS and check["identical"] is True and check["prompts"] == len(TEXTS)
        for check in report["checks"]
    )
    ran = {(check["drafter"], check["temperature"], check["batch"]) for check in report["checks"]}
    drafters = ("auto", *(name for name in DRAFTERS if name not in HEADS))
    assert ran == {(name, mode, batch) for name in drafters for mode in MODES for batch in (1, 8)}
    assert [rule["rule"] for rule in report["distribution"]] == list(distribution.RULES)
    own_draft = [check["tau"] for check in report["checks"] if check["drafter"] == "draft_model"]
    assert min(own_draft) > 2  # a model that drafts for itself is always right
    assert "passed" in text


@pytest.mark.parametrize("temperature", MODES)
def test_where_arithmetic_is_not_exact_a_difference_is_weighed(tiny: str, temperature: float) -> None:
    """Texts that part at a token far less likely are different; where two tokens are as good as equal it is a
    near tie.
    """
    with LLM(tiny, kernels="torch", speculative_config=None, progress=False) as llm:
        examination = Examination([Prompt("p", "chat", TEXTS[0])], [llm.tokenizer.encode(TEXTS[0])], 6)
        (plain,) = plain_texts(examination, llm, temperature)
        other = [*plain[:3], (plain[3] + 1) % 200, *plain[4:]]
        told = examination.check(llm, ("none", temperature, 1), [other], lambda *told: None)
        logits = [_logprob(llm, [*examination.inputs[0], *other[:3]], t)
                  for t in (other[3], plain[3])]  # fmt: skip
        noise = (
            gumbel(1000, len(examination.inputs[0]) + 3, Purpose.TARGET, np.array([other[3], plain[3]]))
            * temperature
        )
        margin = abs(logits[0] - logits[1] + float(noise[0] - noise[1]))
        assert (len(told.differences), told.near_ties) == ((1, 0) if margin > NEAR_TIE else (0, 1))
        if told.differences:
            assert told.differences[0].margin == pytest.approx(margin, abs=1e-4)


def test_a_prompt_that_does_not_fit_is_named(tiny: str, tmp_path: Path) -> None:
    prompts = tmp_path / "long.jsonl"
    prompts.write_text(
        "\n".join(json.dumps({"question_id": i, "prompt": "riders " * n}) for i, n in ((501, 2), (502, 4000)))
    )
    done = CliRunner().invoke(app, ["verify", "--model", tiny, "--prompts", str(prompts)])
    assert done.exit_code == 2
    assert "error: prompt 502: the prompt has" in done.stderr


def test_another_tokenizer_is_found_before_the_work(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    words = json.loads((other / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(words))
    monkeypatch.setattr(verify, "_examine", lambda *rest: pytest.fail("the work was begun"))
    done = CliRunner().invoke(app, ["verify", "--model", tiny, "--draft-model", str(other)])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: --draft-model")
    assert "another tokenizer" in done.stderr


def test_a_broken_rule_is_reported_with_its_place(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def follow_all(draft: Draft, picked: Sequence[int], first: int = 0) -> Verdict | None:
        honest = follow(draft, picked, first)
        if honest is None or not draft.tree.is_chain:
            return honest
        tokens = (*draft.tree.tokens[1:], picked[first + draft.num_drafted])
        return honest._replace(path=tuple(range(len(tokens))), tokens=tokens)

    monkeypatch.setattr(record, "follow", follow_all)
    monkeypatch.setattr(distribution, "NUM_SAMPLES", 200)
    status, text, report = run_verify(tiny, tmp_path, "--methods", "early_exit")
    assert status == 1
    assert report["ok"] is False
    assert not all(check["identical"] for check in report["checks"])
    assert "plain decoding says" in text
    assert "prompt 1: token" in " ".join(text.split())


def test_a_changed_token_is_found_where_it_is(tiny: str) -> None:
    prompts = [Prompt(f"p{i}", "x", (text,)) for i, text in enumerate(TEXTS)]
    examination = Examination(prompts, TEXTS, 10)
    with LLM(tiny, speculative_config={"method": "ngram"}) as llm:
        plain = plain_texts(examination, llm, 0.7)
        done: list[int] = []
        assert (
            examination.check(
                llm, ("ngram", 0.7, 1), plain, lambda what, count: done.append(count)
            ).differences
            == ()
        )
        assert done == [0, 1, 1, 1]
        plain[2][4] += 1
        (found,) = examination.check(
            llm, ("ngram", 0.7, 8), plain, lambda what, count: done.append(count)
        ).differences
    assert (found.prompt_id, found.position) == ("p2", 4)
    assert found.plain.startswith(f"{plain[2][4]} ")


def test_a_text_that_ends_early_differs_at_its_end() -> None:
    found = first_difference("p", [1, 2, 3], [1, 2], chr)
    assert found is not None
    assert (found.position, found.drafted) == (2, "the end")
    assert first_difference("p", [1, 2], [1, 2], chr) is None


@pytest.mark.parametrize("rule", distribution.RULES)
def test_each_rule_follows_the_target(landscape: distribution.Landscape, rule: str) -> None:
    assert distribution.check_rule(rule, landscape, 600) > distribution.SMALLEST_P_VALUE


@pytest.mark.parametrize("rule", ["token", "block", "siblings"])
def test_a_rule_that_keeps_all_is_caught(
    landscape: distribution.Landscape, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep_first(request: Request, draft: Draft, logits: torch.Tensor) -> Verdict:
        path = (*request.output, *draft.tree.tokens[1:2])
        if draft.num_drafted == 0 or path not in landscape.target:
            return accept(request, draft, logits)
        return Verdict((0, 1), (draft.tree.tokens[1], int(logits[1].argmax())), draft.num_drafted)

    monkeypatch.setattr(distribution, "accept", keep_first)
    assert distribution.check_rule(rule, landscape, 600) <= distribution.SMALLEST_P_VALUE


def test_exact_probabilities_are_a_distribution(landscape: distribution.Landscape) -> None:
    exact = distribution.exact_probabilities(landscape)
    assert len(exact) == distribution.WIDTH**distribution.DEPTH
    assert sum(exact.values()) == pytest.approx(1.0)


def test_chi_square_is_the_known_one() -> None:
    exact = {(0,): 0.5, (1,): 0.5}
    # (60 - 50)² / 50 twice is 4 with one degree of freedom, whose p-value is 0.0455.
    assert chi_square_p_value(Counter({(0,): 60, (1,): 40}), exact) == pytest.approx(0.0455, abs=1e-4)
    assert chi_square_p_value(Counter({(2,): 1}), exact) == 0.0
