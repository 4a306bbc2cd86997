"""Drafters that sample, enumerated exactly: what they draft and the verdict on it together have the target's
own law.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.core.noise import Noise, Purpose
from paceline.core.tree import Tree
from paceline.core.types import Draft, Request
from tests.laws.tables import drafting_with, ready, table_drafter, table_runner
from tests.laws.test_accept_exact import (
    VOCAB,
    drafter,
    emitted_law,
    largest_error,
    sampled_chain,
    table,
    target,
)

FEW: dict[str, object] = {"allowed_token_ids": (0, 2, 4)}
OPTIONS: dict[str, dict[str, object]] = {
    "three tokens": FEW,
    "grammar, end": {"grammar": True, "end": True, "allowed_token_ids": (0, 1, 4)},
    "penalties, cold": {**FEW, "temperature": 0.7, "frequency_penalty": 1.5},
    "narrow": {"top_k": 2},
}
MIDDLE = {"method": "draft_model", "model": "middle"}
DRAFTERS: dict[str, dict[str, Any]] = {
    "chain": {"method": "draft_model", "model": "middle", "num_speculative_tokens": 2},
    "tree": {"method": "draft_model", "model": "middle", "num_speculative_tokens": 3, "tree_width": 2},
    "wide tree": {
        "method": "draft_model",
        "model": "middle",
        "num_speculative_tokens": 4,
        "tree_width": 2,
        "tree_depth": 2,
    },
    "early exit tree": {
        "method": "early_exit",
        "num_layers": 1,
        "num_speculative_tokens": 3,
        "tree_width": 2,
    },
    "unsure chain": {
        "method": "draft_model",
        "model": "middle",
        "num_speculative_tokens": 3,
        "confidence_threshold": 0.3,
    },
    "unsure tree": {**MIDDLE, "num_speculative_tokens": 3, "tree_width": 2, "confidence_threshold": 0.35},
    "staged": {
        "method": "staged",
        "num_speculative_tokens": 2,
        "middle": MIDDLE,
        "drafter": {"method": "ngram"},
    },
    "staged on samples": {
        "method": "staged",
        "num_speculative_tokens": 2,
        "middle": {"method": "early_exit", "num_layers": 1},
        "drafter": {"method": "draft_model", "model": "small"},
    },
    "hybrid": {"method": ["ngram", MIDDLE], "num_speculative_tokens": 2},
}


def drafted_by(options: dict[str, Any]) -> Callable[[Request, Noise], Draft]:
    """The drafter of these options, with tables for models: the target's first layer and a draft model say
    the same.
    """

    def draft_of(request: Request, noise: Noise) -> Draft:
        runner = table_runner(target, VOCAB, {1: drafter})
        models = {"middle": table_runner(drafter, VOCAB), "small": table_runner(table(5), VOCAB)}
        budget = options["num_speculative_tokens"]
        ready(runner, request, budget)
        with drafting_with(noise):
            (draft,) = table_drafter(options, runner, models).propose([request], [budget])
        assert draft.num_drafted <= budget
        return draft

    return draft_of


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("config", DRAFTERS.values(), ids=DRAFTERS)
def test_draft_and_verdict_have_the_targets_law(config: dict[str, Any], options: dict[str, object]) -> None:
    law = emitted_law(options, drafted_by(config))
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert largest_error(law, options) < 1e-9


def test_a_sampled_node_may_not_be_dropped_for_its_own_token() -> None:
    """What the threshold does to candidates, to a sampled chain: keep a token only if it is likely. The law
    moves.
    """
    kept = drafted_by(DRAFTERS["unsure chain"])

    def dropped(request: Request, noise: Noise) -> Draft:
        draft = kept(request, noise)
        assert draft.chances is not None
        length = next((n for n, chance in enumerate(draft.chances) if chance < 0.3), len(draft.chances))
        q = {n: row for n, row in (draft.q or {}).items() if n < length - 1}
        return Draft(Tree.chain(request.tokens[-1], draft.tree.tokens[1:length]), "dropped", q or None)

    assert largest_error(emitted_law(FEW, kept), FEW) < 1e-9
    assert largest_error(emitted_law(FEW, dropped), FEW) > 1e-3


def branches_late(request: Request, noise: Noise) -> Draft:
    """A sampled chain of two and, if the second token is 0, a second child of the first: a chain or a tree,
    as the draw has it.
    """
    draft = sampled_chain(request, noise)
    assert draft.q is not None
    tokens, parents = list(draft.tree.tokens), list(draft.tree.parents)
    if len(tokens) == 3 and tokens[2] == 0:
        left = draft.q[1].clone()
        left[0] = 0
        tokens.append(noise.draw(left.log().numpy(), request.num_tokens + 1, Purpose.DRAFT))
        parents.append(1)
    return Draft(Tree(tuple(tokens), tuple(parents)), "late", draft.q)


def test_whether_a_draft_is_a_chain_may_not_depend_on_what_was_drawn() -> None:
    """Chains are judged as a block, trees sibling by sibling; a mixture of the two rules, chosen by the
    tokens, is neither.
    """
    assert largest_error(emitted_law(FEW, branches_late), FEW) > 1e-3
