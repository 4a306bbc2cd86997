"""Several drafters at once: branches joined by chance, sampled drafts alone, models asked where they gain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.tree import Tree
from paceline.core.types import Draft, Needs, Request, Seen, Verdict
from paceline.drafters import registry
from paceline.drafters.base import Drafter
from paceline.drafters.hybrid import Hybrid
from tests.laws.tables import ready, table_drafter, table_runner
from tests.laws.test_accept_exact import table
from tests.passes import ancestors

VOCAB = 5
GREEDY = SamplingParams(temperature=0.0, max_tokens=99)


class Says(Drafter):
    """A drafter that always says the same."""

    def __init__(
        self,
        name: str,
        parents: Sequence[int],
        tokens: Sequence[int],
        chances: Sequence[float] | None,
        is_free: bool = True,
    ) -> None:
        self.name, self.is_free, self.needs = name, is_free, Needs(top_tokens=len(name))
        self.parents, self.tokens, self.chances = (
            (-1, *parents),
            tuple(tokens),
            None if chances is None else (1.0, *chances),
        )
        self.asked: list[int] = []
        self.seen: list[Seen] = []
        self.released: list[Request] = []

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        self.asked += budgets
        return [
            Draft(Tree((r.tokens[-1], *self.tokens), self.parents), self.name, chances=self.chances)
            for r in requests
        ]

    def observe(self, seen: Sequence[Seen]) -> None:
        self.seen += seen

    def release(self, request: Request) -> None:
        self.released.append(request)


def hybrid_of(*drafters: Drafter) -> Hybrid:
    """The class with these drafters in place of those of its config."""
    names = iter(drafters)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "create", lambda kind, config, context: next(names))
        kind, config = registry.parse({"method": ["ngram"] * len(drafters), "num_speculative_tokens": 4})
        made = kind(config, None)
    assert isinstance(made, Hybrid)
    return made


def request_of() -> Request:
    return Request("r", GREEDY, [3, 1], 2, seed=0)


def test_the_best_nodes_of_all_are_joined_and_named() -> None:
    one = Says("one", (0, 1, 2), (10, 11, 12), (0.9, 0.5, 0.1))
    two = Says("two", (0, 1, 0), (10, 21, 30), (0.6, 0.4, 0.3))
    (draft,) = hybrid_of(one, two).propose([request_of()], [4])
    paths = {
        tuple(draft.tree.tokens[a] for a in ancestors(draft.tree.parents, n)[1:]): n for n in range(1, 5)
    }
    assert set(paths) == {(10,), (10, 11), (10, 21), (30,)}
    assert draft.sources is not None
    assert draft.chances is not None
    assert [draft.source_of(paths[p]) for p in [(10,), (10, 11), (10, 21), (30,)]] == [
        "one",
        "one",
        "two",
        "two",
    ]
    assert draft.chances[paths[10,]] == 0.9
    assert draft.chances[paths[10, 21]] == 0.4
    assert draft.q is None


def test_a_drafter_that_names_no_chances_can_be_joined() -> None:
    (draft,) = hybrid_of(Says("one", (0,), (10,), None), Says("two", (0,), (20,), (0.2,))).propose(
        [request_of()], [1]
    )
    assert draft.tree.tokens == (1, 10)


def test_chances_count_as_far_as_they_come_true() -> None:
    boaster, modest = Says("boaster", (0,), (10,), (0.9,)), Says("modest", (0,), (20,), (0.5,))
    hybrid, request = hybrid_of(boaster, modest), request_of()
    assert hybrid.propose([request], [1])[0].tree.tokens == (1, 10)
    for _ in range(60):
        (draft,) = hybrid.propose([request], [2])
        right = draft.tree.tokens.index(20)
        hybrid.observe([Seen(request, 1, draft, Verdict((0, right), (20, 9), 2), None, {})])
    assert hybrid.propose([request], [1])[0].tree.tokens == (1, 20)


def test_a_model_is_asked_where_the_others_promise_less_than_it_gains() -> None:
    sure, unsure = Says("sure", (0, 1), (10, 11), (0.9, 0.8)), Says("unsure", (0,), (10,), (0.2,))
    for free, is_asked in ((sure, False), (unsure, True)):
        model = Says("model", (0,), (20,), (0.7,), is_free=False)
        hybrid_of(model, free).propose([request_of()], [4])
        assert bool(model.asked) == is_asked


def test_a_sampled_draft_stands_alone() -> None:
    target, models = table_runner(table(1), VOCAB), {"m": table_runner(table(3), VOCAB)}
    options = {
        "method": [{"method": "ngram", "prompt_lookup_min": 1}, {"method": "draft_model", "model": "m"}],
        "num_speculative_tokens": 3,
    }
    hybrid = table_drafter(options, target, models)
    request = Request("r", SamplingParams(max_tokens=99), [3, 1, 2, 3], 2, seed=0)
    ready(target, request, 3)
    (draft,) = hybrid.propose([request], [3])
    assert draft.source == "draft_model"
    assert draft.q is not None
    assert draft.sources is None
    assert draft.tree.is_chain


def test_needs_are_those_of_all_and_everybody_sees_what_it_asked_for() -> None:
    one, two = Says("a", (0,), (1,), (0.5,)), Says("bcd", (0,), (2,), (0.5,), is_free=False)
    hybrid = hybrid_of(one, two)
    assert hybrid.needs == Needs((), 3)
    assert not hybrid.is_free
    request, top = request_of(), torch.arange(6).view(2, 3)
    hybrid.observe([Seen(request, 1, None, None, top, {})])
    assert [x.seen[0].top.shape for x in (one, two)] == [(2, 1), (2, 3)]  # type: ignore[union-attr]
    hybrid.release(request)
    assert one.released == two.released == [request]


def test_a_list_of_methods_is_a_hybrid() -> None:
    kind, config = registry.parse({"method": ["ngram", {"method": "early_exit", "num_layers": 3}]})
    assert kind is Hybrid
    assert config.num_speculative_tokens == 3
    parsed = registry.parse(
        {
            "method": ["ngram", {"method": "early_exit", "num_speculative_tokens": 2}],
            "num_speculative_tokens": 5,
        }
    )[1]
    assert [c.num_speculative_tokens for _, c in parsed.parsed()] == [5, 2]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "options",
    [
        {"method": []},
        {"method": ["ngram", "ngramm"]},
        {"method": ["ngram", ["ngram"]]},
        {"method": "hybrid", "drafters": "ngram"},
    ],
)
def test_bad_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"drafters|method"):
        registry.parse(options)
