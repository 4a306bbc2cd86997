"""Each accept rule, enumerated exactly on a vocabulary of 5: draft and verdict together must have the
target's own law.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import paceline.core.accept as accept_module
from paceline.core.accept import accept
from paceline.core.noise import Noise, Purpose
from paceline.core.params import SamplingParams
from paceline.core.sampling import probabilities, processed
from paceline.core.tree import Tree
from paceline.core.types import Draft, Request
from paceline.drafters.base import chain
from tests.laws.chances import enumerate_law
from tests.laws.fakes import guess
from tests.laws.grammar import NoEqualRests, allowed_after
from tests.laws.reference import distribution
from tests.passes import ancestors

VOCAB, PROMPT = 5, [3, 1, 2]
END = 4  # ends a text where an option says so
LENGTH = 3  # tokens compared: two drafted and one more


def by_last(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """The user's own: what was said last becomes less likely, and one token cannot follow it."""
    if output:
        logits[output[-1]] -= 1.0
        logits[(output[-1] + 1) % len(logits)] = -torch.inf
    return logits


OPTIONS = {
    "plain": {},
    "processor": {"logits_processors": (by_last,)},
    "cold": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "bias": {"logit_bias": {0: 1.5, 4: -2.0}},
    "allowed": {"allowed_token_ids": (0, 2, 4)},
    "grammar": {"grammar": True},
    "end": {"end": True},
    "grammar, end, penalty": {"grammar": True, "end": True, "frequency_penalty": 1.0, "temperature": 0.8},
    "all": {
        "temperature": 1.3,
        "top_k": 4,
        "top_p": 0.95,
        "min_p": 0.02,
        "frequency_penalty": 0.4,
        "logit_bias": {1: 0.5},
    },
}


def table(salt: int) -> Callable[[Sequence[int]], np.ndarray]:
    """A language model: random logits that depend on the whole context."""

    @functools.cache
    def logits(tokens: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng([salt, *tokens]).normal(0, 0.7, VOCAB).astype(np.float32)

    return lambda tokens: logits(tuple(tokens))


target, drafter = table(1), table(3)


def request_with(options: dict[str, object]) -> Request:
    sampling = {k: v for k, v in options.items() if k not in ("grammar", "end")}
    request = Request("r", SamplingParams(**sampling), list(PROMPT), len(PROMPT), seed=0)  # type: ignore[arg-type]
    request.constraint = NoEqualRests(VOCAB) if "grammar" in options else None
    request.stop_ids = frozenset({END}) if "end" in options else frozenset()
    return request


def target_logits(request: Request, tree: Tree) -> torch.Tensor:
    contexts = [
        [*request.tokens[:-1], *(tree.tokens[n] for n in ancestors(tree.parents, i))]
        for i in range(len(tree.tokens))
    ]
    return torch.stack([torch.from_numpy(target(c)) for c in contexts])


def drafter_logits(request: Request, path: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(drafter([*request.tokens, *path]))


@contextmanager
def grammar_along(request: Request, path: Sequence[int]) -> Iterator[None]:
    """Within, the request's grammar has read `path`."""
    steps = [t for t in path if t not in request.stop_ids] if request.constraint else []
    for token in steps:
        request.constraint.advance(token)  # type: ignore[union-attr]
    yield
    if steps:
        request.constraint.rollback(len(steps))  # type: ignore[union-attr]


def sampled_chain(request: Request, noise: Noise, length: int = 2) -> Draft:
    tokens: list[int] = []
    q: list[torch.Tensor | None] = []
    while len(tokens) < length and not set(tokens) & request.stop_ids:
        with grammar_along(request, tokens):
            token, row = guess(request, tokens, drafter_logits(request, tokens), noise)
        q.append(row)
        tokens.append(token)
    return chain(request, tokens, "chain", q)


def sampled_tree(request: Request, noise: Noise) -> Draft:
    """Two children of the root, two of the first child, each pair drawn without replacement."""
    tokens, parents, q = [request.tokens[-1]], [-1], {}
    for node in (0, 1):
        path = tokens[1 : node + 1]
        if set(path) & request.stop_ids:
            break
        with grammar_along(request, path):
            q[node] = probabilities(request.params, processed(request, path, drafter_logits(request, path)))
        left = q[node].clone()
        for _ in range(min(2, int((left > 0).sum()))):
            token = noise.draw(left.log().numpy(), request.num_tokens + len(path), Purpose.DRAFT)
            tokens.append(token)
            parents.append(node)
            left[token] = 0
    return Draft(Tree(tuple(tokens), tuple(parents)), "tree", q)


def fixed_tree(request: Request, noise: Noise) -> Draft:
    return Draft(Tree((request.tokens[-1], 0, 2, 4, 1, 0), (-1, 0, 0, 1, 1, 3)), "fixed")


def fixed_branch_on_sampled_chain(request: Request, noise: Noise) -> Draft:
    """Mixed sources: a sampled child at the root, then candidates that were not sampled."""
    sampled = sampled_chain(request, noise, 1)
    return Draft(Tree((*sampled.tree.tokens, 0, 3), (-1, 0, 1, 1)), "mixed", sampled.q)


Law = dict[tuple[int, ...], float]  # of texts: LENGTH tokens, or fewer up to an end


def is_whole(text: Sequence[int], options: dict[str, object]) -> bool:
    return len(text) == LENGTH or ("end" in options and bool(text) and text[-1] == END)


def targets_law(options: dict[str, object], start: tuple[int, ...] = ()) -> Law:
    """What the reference says the target writes after `start`."""
    if is_whole(start, options):
        return {start: 1.0}
    allowed = functools.partial(allowed_after, vocab=VOCAB) if "grammar" in options else None
    p = distribution(target, PROMPT, start, request_with(options).params, allowed)
    return {
        text: share * mass
        for token, share in enumerate(p.tolist())
        if share > 0
        for text, mass in targets_law(options, (*start, token)).items()
    }


def emitted_law(options: dict[str, object], draft_of: Callable[[Request, Noise], Draft]) -> Law:
    """Exact law of the text: one draft and its verdict, completed by the target itself."""

    def program(noise: Noise) -> tuple[int, ...]:
        request = request_with(options)
        draft = draft_of(request, noise)
        verdict = accept(request, draft, target_logits(request, draft.tree), noise)
        assert len(verdict.tokens) == len(verdict.path)
        assert [draft.tree.tokens[n] for n in verdict.path[1:]] == list(verdict.tokens[:-1])
        assert request.constraint is None or not request.constraint.output, "the grammar was not rolled back"  # type: ignore[attr-defined]
        return next(
            verdict.tokens[:n]
            for n in range(1, 9)
            if n == len(verdict.tokens) or is_whole(verdict.tokens[:n], options)
        )

    law: Law = {}
    for emitted, mass in enumerate_law(program).items():
        assert isinstance(emitted, tuple)
        for text, share in targets_law(options, emitted).items():
            law[text] = law.get(text, 0.0) + mass * share
    return law


def largest_error(law: Law, options: dict[str, object]) -> float:
    exact = targets_law(options)
    return max(abs(law.get(text, 0.0) - exact.get(text, 0.0)) for text in law.keys() | exact.keys())


DRAFTS = {
    "block": sampled_chain,
    "siblings": sampled_tree,
    "token": lambda r, n: sampled_chain(r, n, 1),
    "deterministic": fixed_tree,
    "mixed": fixed_branch_on_sampled_chain,
    "empty": lambda r, n: Draft(Tree.chain(r.tokens[-1])),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("draft_of", DRAFTS.values(), ids=DRAFTS)
def test_draft_and_verdict_have_the_targets_law(
    draft_of: Callable[[Request, Noise], Draft], options: dict[str, object]
) -> None:
    law = emitted_law(options, draft_of)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert largest_error(law, options) < 1e-9


def num_accepted(request: Request, noise: Noise, one_by_one: bool) -> int:
    draft = sampled_chain(request, noise)
    logits = target_logits(request, draft.tree)
    if one_by_one:
        walk = accept_module._Walk(request, draft, logits, noise)
        walk.go_down(has_coins=True)
        return len(walk.path) - 1
    return accept(request, draft, logits, noise).num_accepted


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_block_verification_accepts_at_least_as_much_as_token_by_token(options: dict[str, object]) -> None:
    def mean(one_by_one: bool) -> float:
        law = enumerate_law(lambda noise: num_accepted(request_with(options), noise, one_by_one))
        return sum(k * mass for k, mass in law.items())  # type: ignore[operator]

    assert mean(one_by_one=False) >= mean(one_by_one=True) - 1e-12


def test_acceptance_of_one_token_is_one_minus_the_total_variation() -> None:
    request = request_with({})
    p = distribution(target, PROMPT, [], request.params)
    q = distribution(drafter, PROMPT, [], request.params)

    def accepted(noise: Noise) -> int:
        draft = sampled_chain(request_with({}), noise, 1)
        return accept(request, draft, target_logits(request, draft.tree), noise).num_accepted

    assert enumerate_law(accepted)[1] == pytest.approx(np.minimum(p, q).sum(), abs=1e-12)


Break = Callable[[pytest.MonkeyPatch], None]
BREAKS: dict[str, tuple[Break, str, str]] = {  # the mistake, and the draft and options it shows with
    "resample from p": (lambda m: m.setattr(accept_module, "_excess", lambda p, q: p), "token", "plain"),
    "always accept": (lambda m: m.setattr(accept_module, "_ratio", lambda p, q: 1.0), "block", "plain"),
    "forget the missing mass": (
        lambda m: m.setattr(accept_module, "_share", lambda left, missing: float(left > 0)),
        "block",
        "plain",
    ),
    "raw p": (
        lambda m: m.setattr(accept_module, "processed", lambda request, path, row: row),
        "token",
        "penalties",
    ),
}


@pytest.mark.parametrize(("broken", "draft", "options"), BREAKS.values(), ids=BREAKS)
def test_a_broken_rule_is_seen(
    broken: Break, draft: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The laws can fail: each of these mistakes, all seen in the wild, moves the law by far more than the
    tolerance.
    """
    broken(monkeypatch)
    assert largest_error(emitted_law(OPTIONS[options], DRAFTS[draft]), OPTIONS[options]) > 1e-3
