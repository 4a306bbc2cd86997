"""`paceline tune`: what it predicts is the formulas' on known counts; the command as a user meets it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline import LLM
from paceline.cli.main import app
from paceline.core.params import SamplingParams
from paceline.engine.policy.cost import CostTable
from paceline.engine.profile import DrafterProfile, load_profile, save_profile
from paceline.measure import roofline as costs
from paceline.measure.engines import answer, drafter_of, engine_with
from paceline.measure.tune import Prices, TimedPolicy, predict

TEXTS = ("the line the line the line the line", "who rides in front? who rides in front? who rides")
FREE = Prices(CostTable({1: 1.0, 2: 1.2, 4: 1.6, 8: 3.0}), cached=0, plain=1.1, asking=0.0, is_free=True)


def test_without_drafts_nothing_is_gained() -> None:
    assert predict(Counter({4: 9}), [5, 1], 0, FREE)["speedup"] == 1.0
    assert predict(Counter(), [], 3, FREE)["speedup"] == 1.0


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_prediction_is_the_formula_where_chances_are_even(k: int) -> None:
    alpha, dice = 0.6, random.Random(7)
    hits = [next((i for i in range(4) if dice.random() >= alpha), 4) for _ in range(6000)]
    accepted_at = [sum(hit > depth for hit in hits) for depth in range(4)]
    found = predict(Counter({4: 6000}), accepted_at, k, FREE)
    assert found["tau"] == pytest.approx(costs.expected_tokens(alpha, k), rel=0.05)
    verify_cost = (FREE.target.pass_seconds(k + 1) + 0.1) / 1.1  # a tenth of a pass for the host
    assert found["speedup"] == pytest.approx(costs.speedup(alpha, k, 0.0, verify_cost), rel=0.05)


def test_what_drafting_costs_is_counted() -> None:
    lengths, accepted_at = Counter({4: 20}), [20, 20, 20, 20]  # twenty steps, each with four right
    free, slow = (
        predict(lengths, accepted_at, 4, prices)
        for prices in (FREE, FREE._replace(asking=0.5, is_free=False))
    )
    assert slow["draft_cost"] == pytest.approx(0.5 / 1.1)  # for each token
    assert free["speedup"] > slow["speedup"]
    assert predict(lengths, accepted_at, 4, FREE._replace(asking=0.5))["draft_cost"] == pytest.approx(
        0.125 / 1.1
    )


def test_a_step_without_a_draft_costs_what_a_plain_one_does() -> None:
    found = predict(Counter({0: 10, 3: 10}), [10, 10, 10], 3, FREE)
    assert (found["num_drafted"], found["tau"]) == (1.5, 2.5)
    assert found["verify_cost"] == pytest.approx(1 + 0.5 * (FREE.target.pass_seconds(4) - 1.0) / 1.1)


@pytest.mark.parametrize("method", ["ngram", "early_exit", "lookahead"])
def test_a_clock_changes_no_text_and_no_draft(tiny: LLM, method: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    options, own = {"method": method, "num_speculative_tokens": 2}, tiny.engine
    alone, timed = (engine_with(tiny, drafter_of(tiny, options), 2) for _ in range(2))
    timed.policy = policy = TimedPolicy(timed.policy.drafters[0], 2)
    texts = [
        [answer(tiny, list(text.encode()), params, engine)["ids"] for text in TEXTS]
        for engine in (alone, timed)
    ]
    tiny.engine = own
    assert texts[0] == texts[1]
    assert all(0 < seconds < 10 for seconds in policy.asking)
    assert policy.asking or method == "ngram"  # which is asked in a burst


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: LLM) -> Path:
    """With a cache of its own; the tiny model was loaded once, so no command below compiles kernels and says
    so.
    """
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "prompts.txt").write_text("\n".join(TEXTS))
    return tmp_path


def invoke(folder: Path, model: Path, *arguments: str) -> Any:
    flags = [
        "tune",
        "--model",
        str(model),
        "--prompts",
        str(folder / "prompts.txt"),
        "--max-tokens",
        "20",
        *arguments,
    ]
    return CliRunner().invoke(app, flags)


def profiles(folder: Path) -> list[Path]:
    return sorted((folder / "cache").glob("profiles/*"))


def test_the_report_the_plot_and_the_profile(folder: Path, tiny_folder: Path) -> None:
    report, picture = folder / "tune.json", folder / "tune.png"
    done = invoke(folder, tiny_folder, "--json", str(report), "--plot", str(picture))
    assert done.exit_code == 0, done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(report.read_text())
    assert set(found["drafters"]) == {"ngram", "suffix", "lookahead", "early_exit", "quantized"}
    assert (found["prompts"], found["tokens"]) == (2, 40)
    for name, drafter in found["drafters"].items():
        ks = [row["k"] for row in drafter["lengths"]]
        assert ks == {"lookahead": [1, 2], "early_exit": [1, 2, 3, 4], "quantized": [1, 2, 3, 4]}.get(
            name, [1, 2, 3, 4, 6]
        )
        assert all(
            row["measured"] > 0 and row["speedup"] > 0 and 1 <= row["tau"] <= row["k"] + 1
            for row in drafter["lengths"]
        )
        assert drafter["best_k"] == max(drafter["lengths"], key=lambda row: row["measured"])["k"]
        assert drafter["predicted"][0] == 1
        assert name in done.stdout
    for word in ("predicted", "measured", "best", "tokens/s", "Use "):
        assert word in done.stdout
    (path,) = profiles(folder)
    saved = load_profile(path)
    assert saved is not None
    assert set(saved.drafters) == set(found["drafters"])
    assert saved.costs.to_json() == found["passes"]
    quantized = saved.drafters["quantized"]
    assert quantized.acceptance == tuple(found["drafters"]["quantized"]["acceptance_by_depth"])


def test_auto_starts_from_the_profile_and_other_drafters_stay_in_it(folder: Path, tiny_folder: Path) -> None:
    arguments = ("--methods", "early_exit", "-k", "2", "--limit", "1")
    assert invoke(folder, tiny_folder, *arguments).exit_code == 0
    (path,) = profiles(folder)
    saved = load_profile(path)
    assert saved is not None
    save_profile(path, type(saved)(saved.costs, {"suffix": DrafterProfile(7e-4, (0.25,))}))
    assert invoke(folder, tiny_folder, *arguments).exit_code == 0
    assert profiles(folder) == [path]
    both = load_profile(path)
    assert both is not None
    assert set(both.drafters) == {"suffix", "early_exit"}
    with LLM(str(tiny_folder), progress=False) as llm:
        assert llm.engine.policy._known[0].seconds(1).pass_seconds(1) == 7e-4  # type: ignore[attr-defined]


def test_the_time_given_is_kept_to(folder: Path, tiny_folder: Path) -> None:
    (folder / "prompts.txt").write_text("\n".join(f"{TEXTS[0]} {i}" for i in range(2000)))
    done = invoke(folder, tiny_folder, "--methods", "ngram", "-k", "1", "--limit", "2000", "--seconds", "1")
    assert done.exit_code == 0, done.output
    assert "prompts left out for want of time" in done.stdout


def test_answers_that_cannot_be_timed_are_reported(folder: Path, tiny: LLM, tiny_folder: Path) -> None:
    """The context holds the prompt and hardly anything more."""
    room, words = tiny.engine.config.max_model_len, ["a"]
    while len(tiny.tokenizer.encode_chat([{"role": "user", "content": " ".join(words)}])) < room - 2:
        words.append("a")
    (folder / "prompts.txt").write_text(" ".join(words))
    done = invoke(folder, tiny_folder, "--methods", "ngram", "-k", "1")
    assert done.exit_code == 2
    assert "no answer was long enough" in done.stderr
    assert profiles(folder) == []


def test_an_interrupt_saves_nothing(folder: Path, tiny_folder: Path) -> None:
    (folder / "prompts.txt").write_text("\n".join(f"{TEXTS[0]} {i}" for i in range(2000)))
    code = "from paceline.cli.entry import main; raise SystemExit(main())"
    flags = (
        f"tune --model {tiny_folder} --prompts {folder / 'prompts.txt'} --methods ngram --limit 2000"
    ).split()
    with subprocess.Popen(
        [sys.executable, "-c", code, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(b"timing ngram"):
                break
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert (output, b"Traceback" in errors) == (b"", False)
    assert profiles(folder) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--methods", "suffx"], "did you mean 'suffix'"),
        (["--methods", "hybrid"], "one by one"),
        (["--methods", "draft_model"], "--draft-model"),
        (["--methods", ""], "--methods holds ''"),
        (["-k", "0"], "-k is 0"),
        (["-k", "99"], "-k is 99"),
        (["--max-tokens", "3"], "--max-tokens"),
        (["--seconds", "0"], "--seconds"),
        (["--prompts", "absent.txt"], "absent.txt"),
        (["--json", "absent/r.json"], "absent"),
        (["--plot", "absent/p.png"], "absent"),
        (["--dtype", "int9"], "int9"),
    ],
)
def test_what_a_user_can_mend_is_one_line(
    folder: Path, tiny_folder: Path, arguments: list[str], named: str
) -> None:
    done = invoke(folder, tiny_folder, *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert named in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert profiles(folder) == []


def test_help_teaches_by_example() -> None:
    done = CliRunner().invoke(app, ["tune", "--help"])
    assert done.exit_code == 0
    assert "paceline tune --plot" in done.stdout
