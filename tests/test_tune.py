"""`paceline tune`: what it predicts from listening is what drafting then does, step for step; the command as
a user meets it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline import LLM
from paceline.cli.main import app
from paceline.core.params import SamplingParams
from paceline.core.tree import Tree
from paceline.core.types import Draft
from paceline.engine import costs
from paceline.engine.engine import Engine
from paceline.engine.policy.cost import CostTable
from paceline.engine.profile import DrafterProfile, load_profile, save_profile
from paceline.measure.tuning.guesses import Account, Listening, acceptance, best, followed
from paceline.measure.tuning.predict import Prices, predict
from tests.laws.harness import engine_with, prompts, request_of, run

TEXTS = ("the line the line the line the line", "who rides in front? who rides in front? who rides")
FREE = Prices(
    CostTable({1: 1.0, 2: 1.2, 4: 1.6, 8: 3.0}),
    host=0.1,
    asking=0.0,
    beside=0.0,
    catching_up=0.0,
    is_free=True,
)


def guessing(text: list[int], hits: list[int], length: int) -> Account:
    """At every token a chain of `length`, of which the first hits[i] are right."""
    guesses = {}
    for at in range(1, len(text)):
        right = text[at : at + min(hits[at], length)]
        guesses[at] = Draft(
            Tree.chain(text[at - 1], [*right, *[-1] * (length - len(right))]),
            chances=tuple(0.9**i for i in range(length + 1)),
        )
    return Account(10, text, len(text), guesses, is_everywhere=True)


def test_steps_walk_along_the_text() -> None:
    account = guessing(list(range(12)), [0, 2, 9, 9, 0, 1, 9, 9, 9, 9, 9, 9], 3)
    # (at 1: two right; at 4: none; at 5: one; at 7: three; at 11: the last token needs no draft)
    assert [(s.num_cached, s.num_drafted, s.num_right) for s in account.steps(3)] == [
        (10, 3, 2), (13, 3, 0), (14, 3, 1), (16, 3, 3), (20, 0, 0),
    ]  # fmt: skip
    assert [s.num_right for s in account.steps(1)] == [1, 1, 1, 1, 1, 0]


def test_the_best_nodes_of_a_tree_are_its_likeliest() -> None:
    draft = Draft(Tree((1, 2, 3, 4, 5), (-1, 0, 1, 0, 3)), chances=(1.0, 0.4, 0.1, 0.5, 0.3))
    assert best(draft, 3) == [3, 1, 4]
    assert best(draft, 0) == []
    assert followed(draft, best(draft, 3), [4, 5, 9]) == [3, 4]
    assert followed(draft, best(draft, 2), [4, 5, 9]) == [3]
    assert followed(draft, best(draft, 4), [2, 9]) == [1]


def test_acceptance_counts_what_was_guessed_after_what_was_right() -> None:
    account = guessing(list(range(7)), [0, 2, 1, 0, 2, 0, 0], 2)
    # Six guesses of a first token, three of them right; after those a second: two right, one wrong.
    assert acceptance([account]) == pytest.approx((3 / 6, 2 / 3))


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_prediction_is_the_formula_where_chances_are_even(k: int) -> None:
    alpha, dice = 0.6, random.Random(7)
    hits = [next((i for i in range(4) if dice.random() >= alpha), 4) for _ in range(6000)]
    found = predict([guessing(list(range(6000)), hits, 4)], k, FREE)
    assert found.tau == pytest.approx(costs.expected_tokens(alpha, k), rel=0.05)
    verify_cost = (FREE.target.pass_seconds(k + 1) + 0.1) / 1.1
    assert found.speedup == pytest.approx(costs.speedup(alpha, k, 0.0, verify_cost), rel=0.05)


def test_what_drafting_costs_is_counted() -> None:
    account = guessing(list(range(101)), [4] * 101, 4)  # twenty steps, each with four right
    free, slow = predict([account], 4, FREE), predict([account], 4, FREE._replace(asking=0.5, is_free=False))
    late = predict([account], 4, FREE._replace(asking=0.5, catching_up=0.5, is_free=False))
    assert slow.draft_cost == pytest.approx(0.5 / 1.1)
    assert free.speedup > slow.speedup > late.speedup
    assert predict([account], 0, FREE).speedup == 1.0


SAME_GUESSES = [
    {"method": "ngram", "prompt_lookup_max": 8},
    {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
    {"method": "suffix", "suffix_decoding_max_cached_requests": 0, "tree": False},
    {"method": "early_exit", "num_layers": 2},
    {"method": "quantized"},
]


@pytest.mark.parametrize("options", SAME_GUESSES, ids=lambda options: f"{options['method']}{len(options)}")
def test_listening_tells_every_step_of_drafting(options: dict[str, Any]) -> None:
    """The engine, drafting k tokens for real, takes as many steps and checks as many tokens as the walk
    says.
    """
    most, params = 4, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    listened = engine_with(options, num_speculative_tokens=most)
    assert listened.proposer is not None
    listening = Listening(listened.proposer, most)
    listened = Engine(listened.runner, listened.proposer, listened.config, listening)
    for prompt in prompts(3):
        plain, heard = request_of(prompt, params), request_of(prompt, params)
        run(engine_with(None), [plain])
        run(listened, [heard])
        assert heard.output == plain.output
        account = listening.account(len(prompt), heard.output, params.max_tokens)
        assert sorted(account.guesses) == list(range(1, params.max_tokens - 1))
        for k in (1, 2, most):
            engine, request = engine_with(options, num_speculative_tokens=k), request_of(prompt, params)
            run(engine, [request])
            steps, stats = list(account.steps(k)), engine.stats[request.id]
            assert sum(step.num_drafted for step in steps) == stats.num_drafted
            assert sum(step.num_right for step in steps) == stats.num_accepted
    assert len(listening.times.entering) == 3


def test_who_lives_on_being_checked_is_checked() -> None:
    engine = engine_with({"method": "lookahead"})
    assert engine.proposer is not None
    listening = Listening(engine.proposer, 2)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    request = request_of(prompts(1)[0], params)
    engine = Engine(engine.executor, engine.proposer, engine.config, listening)
    run(engine, [request])
    account = listening.account(request.num_prompt, request.output, 40)
    assert not account.is_everywhere
    assert sum(step.num_right for step in account.steps(2)) == engine.stats[request.id].num_accepted > 0


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
        assert llm.engine.policy._records[0].seconds.value == 7e-4  # type: ignore[attr-defined]


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
    flags = [
        "tune",
        "--model",
        str(tiny_folder),
        "--prompts",
        str(folder / "prompts.txt"),
        "--methods",
        "ngram",
        "--limit",
        "2000",
    ]
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
