"""`paceline explain`: a watched verdict is the same verdict, the numbers shown are the rule's own, the
command as a user meets it.
"""

from __future__ import annotations

import json
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from paceline import LLM
from paceline.cli.explain import page, print_step, shown
from paceline.cli.explain_steps import EXPLAINED, Recorder, Step
from paceline.cli.main import app
from paceline.core.accept import accept, rule_of
from paceline.core.noise import Noise
from paceline.core.sampling import probabilities, processed
from paceline.core.tree import Tree
from paceline.core.types import Draft, Request, Verdict
from tests.laws.test_accept_exact import (
    OPTIONS,
    VOCAB,
    request_with,
    sampled_chain,
    sampled_tree,
    target_logits,
)

SEEDS = range(60)


@pytest.fixture(scope="module")
def tiny_model(tiny: LLM, tiny_folder: Path) -> str:
    return str(tiny_folder)


class Words:
    """Stands where a tokenizer stands."""

    def token_text(self, token: int) -> str:
        return f"<{token}>"


def judged(
    request: Request, draft: Draft, noise: Noise, logits: torch.Tensor | None = None
) -> tuple[Step, Verdict]:
    """A recorded step, after checking that it is the one an unwatched engine takes."""
    logits = target_logits(request, draft.tree) if logits is None else logits
    recorder = Recorder(Words())  # type: ignore[arg-type]
    verdict = accept(request, draft, logits, noise, watch=recorder)
    assert verdict == accept(request, draft, logits, noise)
    recorder.settle(list(verdict.tokens))
    return recorder.steps[-1], verdict


def deterministic_tree(request: Request) -> Draft:
    """Two children of the root, two of the first."""
    return Draft(Tree((request.tokens[-1], 0, 1, 2, 3), (-1, 0, 0, 1, 1)), "tree")


@pytest.mark.parametrize("options", ["plain", "cold", "penalties", "grammar", "end"])
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_coins_are_the_rules_own(kind: str, options: str) -> None:
    fates = set()
    for seed in SEEDS:
        request, noise = request_with(OPTIONS[options]), Noise(seed)
        draft = sampled_chain(request, noise, 3) if kind == "chain" else sampled_tree(request, noise)
        step, verdict = judged(request, draft, noise)
        assert step.rule == rule_of(request, draft) == ("block" if kind == "chain" else "siblings")
        assert step.path == list(verdict.path)
        first = step.nodes[0]
        p = probabilities(request.params, processed(request, [], target_logits(request, draft.tree)[0]))
        assert first.p == pytest.approx(float(p[first.token]))
        assert draft.q is not None
        assert first.q == pytest.approx(float(draft.q[0][first.token]))
        for node in step.nodes:
            assert (node.fate == "accepted") == (node.index in verdict.path)
            fates.add(node.fate)
            if (
                kind == "tree"
                and node.coin is not None
                and node.chance is not None
                and node.p is not None
                and node.q is not None
            ):
                assert node.chance == pytest.approx(min(1.0, node.p / node.q))
                assert (node.fate == "accepted") == (node.coin < node.chance)
    assert fates >= {"accepted", "rejected"}


def test_of_a_block_the_longest_prefix_under_its_chance_stays() -> None:
    lengths = set()
    for seed in SEEDS:
        request, noise = request_with({}), Noise(seed)
        step, verdict = judged(request, sampled_chain(request, noise, 3), noise)
        under = [
            node.index
            for node in step.nodes
            if node.coin is not None and node.chance is not None and node.coin < node.chance
        ]
        assert verdict.num_accepted == max(under, default=0)
        assert step.nodes[-1].weight == pytest.approx(step.nodes[-1].chance)
        lengths.add(verdict.num_accepted)
    assert lengths == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"temperature": 0.0}, "greedy"),
        ({"seed": 3}, "coupled"),
        ({}, "deterministic"),
        ({"top_k": 3, "temperature": 0.7}, "deterministic"),
    ],
)
def test_choices_are_the_targets_own(options: dict[str, Any], rule: str) -> None:
    kinds = set()
    for seed in SEEDS:
        request = request_with(options)
        step, verdict = judged(
            request, deterministic_tree(request), Noise(seed), torch.randn(5, VOCAB, generator=_dice(seed))
        )
        assert step.rule == rule
        assert step.own is not None
        assert (step.own.token, step.own.text) == (verdict.tokens[-1], f"<{verdict.tokens[-1]}>")
        assert not step.own.is_from_rest
        kinds.add(step.own.kind)
        for node in step.nodes:
            if node.fate == "accepted":
                assert node.draw == node.text
            elif node.fate == "rejected":
                assert node.draw != node.text
                assert node.q is None
            else:
                assert node.parent not in verdict.path
    assert kinds == {"bonus", "replacement"}


def _dice(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_choices_made_on_a_device_are_shown_too() -> None:
    request = request_with({"temperature": 0.0})
    draft, recorder = deterministic_tree(request), Recorder(Words())  # type: ignore[arg-type]
    logits = torch.randn(5, VOCAB, generator=_dice(1))
    picked = logits.argmax(1).tolist()
    verdict = accept(request, draft, logits, picked=picked, watch=recorder)
    assert verdict == accept(request, draft, logits)
    own = recorder.steps[-1].own
    assert own is not None
    assert own.p == pytest.approx(float(logits.double().softmax(1)[verdict.path[-1], own.token]))


def test_slots_of_a_tree_are_kept_moved_and_dropped() -> None:
    request = request_with({"temperature": 0.0})
    request.cache.num_cached = 2
    logits = torch.zeros(5, VOCAB)
    logits[0, 0] = logits[1, 3] = logits[4, 2] = 9.0  # the root's first child, then its second
    step, _ = judged(request, deterministic_tree(request), Noise(0), logits)
    assert step.path == [0, 1, 4]
    assert (step.kept, step.dropped, step.moves) == ([2, 3, 6], [4, 5], [(6, 4)])
    assert [(node.position, node.slot) for node in step.nodes] == [(3, 3), (3, 4), (4, 5), (4, 6)]
    text = _printed(step)
    assert "├─ ✓" in text
    assert "│  └─ ✓" in text
    assert "moved 6→4" in text
    assert "kept 2-3, 6, dropped 4-5" in text


def _printed(step: Step) -> str:
    console = Console(record=True, width=60, file=open("/dev/null", "w"))  # noqa: SIM115
    print_step(console, [step])
    console.file.close()
    return console.export_text()


def explained(model: str, *arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["explain", *arguments, "--model", model, "--json"])
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


PROMPT = "the rider in front, the rider in front, the rider in"
DRAFTING = ("--method", "early_exit", "-k", "3")  # always three: what pays here and now is another matter


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--method", "ngram"], "greedy"),
        (["--method", "ngram", "--temperature", "0.9", "--seed", "5"], "coupled"),
        (["--method", "ngram", "--temperature", "0.9"], "deterministic"),
        (["--method", "early_exit", "-k", "2", "--temperature", "0.9"], "block"),
    ],
)
def test_the_steps_of_a_real_engine_fit_together(tiny_model: str, arguments: list[str], rule: str) -> None:
    found = explained(tiny_model, PROMPT, "--raw", "--steps", "8", "--max-tokens", "24", *arguments)
    steps = found["steps"]
    assert 1 <= len(steps) <= 8
    assert rule in {step["rule"] for step in steps}
    assert [token for step in steps for token in step["emitted_ids"]] == found["token_ids"]
    for step, following in pairwise(steps):
        assert step["num_cached_after"] == following["num_cached"] == following["root_slot"]
        assert step["num_cached_after"] == step["root_slot"] + len(step["path"])
        assert following["root"] == step["emitted"][-1]
    for step in steps:
        assert step["num_rows"] == step["root_slot"] + 1 - step["num_cached"] + len(step["nodes"])
        assert sorted([*step["kv"]["kept"], *step["kv"]["dropped"]]) == [
            step["root_slot"] + i for i in range(len(step["nodes"]) + 1)
        ]
        assert step["explanation"] == EXPLAINED[step["rule"]]


@pytest.mark.parametrize(
    "arguments", [["--temperature", "0"], ["--temperature", "0.9", "--top-p", "0.9", "--seed", "5"]]
)
def test_being_watched_changes_nothing(tiny_model: str, arguments: list[str]) -> None:
    shared = [PROMPT, "--raw", "--max-tokens", "16", *DRAFTING, "--model", tiny_model, "--json", *arguments]
    if "--top-p" not in arguments:
        shared += ["--top-p", "1"]
    plain = json.loads(CliRunner().invoke(app, ["generate", *shared]).stdout)
    watched = json.loads(CliRunner().invoke(app, ["explain", *shared, "--steps", "99"]).stdout)
    assert watched["token_ids"] == plain["token_ids"]
    assert watched["finish_reason"] == plain["finish_reason"]
    assert watched["steps"][-1]["num_cached_after"] is None


def test_the_terminal_shows_rule_numbers_and_slots(tiny_model: str) -> None:
    done = CliRunner().invoke(
        app, ["explain", PROMPT, "--raw", "--model", tiny_model, "--steps", "6", *DRAFTING]
    )
    assert done.exit_code == 0, done.output
    assert done.stdout.count(EXPLAINED["greedy"]) == 1
    assert done.stdout.count("step ") == 6
    for word in ("p 0.", "q one-hot", "chance", "own: ", "K/V: slots kept", "said: ", "by early_exit"):
        assert word in done.stdout


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert {name for name, _ in attrs} <= {"class", "charset", "lang"}
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_html_is_whole_escaped_and_alone(tiny_model: str, tmp_path: Path) -> None:
    evil = "<script>alert('the rider')</script> & the rider in front, the rider in"
    file = tmp_path / "steps.html"
    arguments = [
        "explain",
        evil,
        "--raw",
        "--model",
        tiny_model,
        "--html",
        str(file),
        "--steps",
        "4",
        *DRAFTING,
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    text = file.read_text(encoding="utf-8")
    assert "://" not in text
    assert "url(" not in text
    assert "@import" not in text
    found = Page(text)
    assert found.open == []
    assert "script" not in found.tags
    assert [found.text.count(f"step {number}: ") for number in range(1, 6)] == [1, 1, 1, 1, 0]
    assert "<script>alert(" in found.text
    assert EXPLAINED["greedy"] in found.text


def test_the_html_draws_trees() -> None:
    request = request_with({"temperature": 0.0})
    step, _ = judged(
        request, deterministic_tree(request), Noise(0), torch.randn(5, VOCAB, generator=_dice(2))
    )
    text = page("a prompt", "a model", [step])
    assert Page(text).open == []
    tree = Page(text).text
    assert sum(tree.count(guide) for guide in ("├─", "└─")) == 4
    # a node, its children, its sibling
    places = [tree.index(f'{mark} "<{token}>"') for mark, token in (("✗", 0), ("·", 2), ("·", 3), ("✓", 1))]
    assert places == sorted(places)


def test_nothing_shown_can_move_a_cursor() -> None:
    assert shown("a\x1b[2J\n\r\t ") == '"a\\x1b[2J⏎\\r\\t "'


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([""], "prompt is empty"),
        (["hi", "--method", "ngrm"], "ngram"),
        (["hi", "--steps", "0"], "--steps"),
        (["hi", "--temperature", "-1"], "temperature is -1"),
        (["hi", "--html", "absent/steps.html"], "absent"),
        (["hi", "--method", "none", "-k", "3"], "nothing is drafted"),
        (["hi", "--speculative-config", "{"], "not JSON"),
    ],
)
def test_what_a_user_can_mend_is_one_line(tiny_model: str, arguments: list[str], named: str) -> None:
    done = CliRunner().invoke(app, ["explain", *arguments, "--model", tiny_model])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert named in done.stderr


def test_plain_decoding_can_be_explained(tiny_model: str) -> None:
    found = explained(tiny_model, PROMPT, "--raw", "--method", "none", "--steps", "2")
    assert found["method"] is None
    assert [step["own"]["kind"] for step in found["steps"]] == ["plain", "plain"]


def test_help_teaches_by_example() -> None:
    done = CliRunner().invoke(app, ["explain", "--help"])
    assert done.exit_code == 0
    assert "paceline explain" in done.stdout
