"""Each accept rule, enumerated exactly on a vocabulary of 5: draft and verdict together must have the target's own law."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

import paceline.verify.accept as accept_module
from paceline.params import SamplingParams
from paceline.types import Draft, Request
from paceline.verify.accept import accept
from paceline.verify.noise import Noise, Purpose
from paceline.verify.sampling import guess, probabilities, processed
from paceline.verify.tree import Tree
from tests.laws.chances import enumerate_law
from tests.laws.reference import distribution

VOCAB, PROMPT = 5, [3, 1, 2]
LENGTH = 3  # tokens compared: two drafted and one more

OPTIONS = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "bias": {"logit_bias": {0: 1.5, 4: -2.0}},
    "allowed": {"allowed_token_ids": (0, 2, 4)},
    "all": {"temperature": 1.3, "top_k": 4, "top_p": 0.95, "min_p": 0.02, "frequency_penalty": 0.4, "logit_bias": {1: 0.5}},
}


def table(salt: int) -> Callable[[Sequence[int]], np.ndarray]:
    """A language model: random logits that depend on the whole context."""

    @functools.cache
    def logits(tokens: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng([salt, *tokens]).normal(0, 0.7, VOCAB).astype(np.float32)

    return lambda tokens: logits(tuple(tokens))


target, drafter = table(1), table(3)


def request_with(options: dict[str, object], seed: int | None = None) -> Request:
    return Request("r", SamplingParams(seed=seed, **options), list(PROMPT), len(PROMPT), seed or 0)  # type: ignore[arg-type]


def target_logits(request: Request, tree: Tree) -> torch.Tensor:
    contexts = [[*request.tokens[:-1], *(tree.tokens[n] for n in tree.ancestors(i))] for i in range(len(tree.tokens))]
    return torch.stack([torch.from_numpy(target(c)) for c in contexts])


def sampled_chain(request: Request, noise: Noise, length: int = 2) -> Draft:
    tokens: list[int] = []
    q = {}
    for i in range(length):
        token, row = guess(request, tokens, torch.from_numpy(drafter([*request.tokens, *tokens])), noise)
        assert row is not None
        q[i] = row
        tokens.append(token)
    return Draft(Tree.chain(request.tokens[-1], tokens), "chain", q)


def sampled_tree(request: Request, noise: Noise) -> Draft:
    """Two children of the root, two of the first child, each pair drawn without replacement."""
    tokens, parents, q = [request.tokens[-1]], [-1], {}
    for node, path in ((0, []), (1, [1])):
        context = [tokens[i] for i in path]
        row = torch.from_numpy(drafter([*request.tokens, *context]))
        q[node] = probabilities(request.params, processed(request, context, row))
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
    """Mixed sources: a sampled child at the root, then candidates nobody sampled."""
    chain = sampled_chain(request, noise, 1)
    assert chain.q is not None
    return Draft(Tree((*chain.tree.tokens, 0, 3), (-1, 0, 1, 1)), "mixed", chain.q)


def emitted_law(options: dict[str, object], draft_of: Callable[[Request, Noise], Draft]) -> dict[tuple[int, ...], float]:
    """Exact law of the first LENGTH tokens: one verdict, completed by the target itself."""

    def program(noise: Noise) -> tuple[int, ...]:
        request = request_with(options)
        draft = draft_of(request, noise)
        verdict = accept(request, draft, target_logits(request, draft.tree), noise)
        assert len(verdict.tokens) == len(verdict.path)
        assert [draft.tree.tokens[n] for n in verdict.path[1:]] == list(verdict.tokens[:-1])
        return verdict.tokens[:LENGTH]

    law: dict[tuple[int, ...], float] = {}
    for tokens, mass in enumerate_law(program).items():
        assert isinstance(tokens, tuple)
        for rest in itertools.product(range(VOCAB), repeat=LENGTH - len(tokens)):
            law[(*tokens, *rest)] = law.get((*tokens, *rest), 0.0) + mass * continuation(options, tokens, rest)
    return law


def continuation(options: dict[str, object], tokens: Sequence[int], rest: Sequence[int]) -> float:
    params, output, mass = request_with(options).params, list(tokens), 1.0
    for token in rest:
        mass *= float(distribution(target, PROMPT, output, params)[token])
        output.append(token)
    return mass


def largest_error(law: dict[tuple[int, ...], float], options: dict[str, object]) -> float:
    sequences = itertools.product(range(VOCAB), repeat=LENGTH)
    return max(abs(law.get(s, 0.0) - continuation(options, (), s)) for s in sequences)


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
def test_draft_and_verdict_have_the_targets_law(draft_of: Callable[[Request, Noise], Draft], options: dict[str, object]) -> None:
    law = emitted_law(options, draft_of)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert largest_error(law, options) < 1e-9


def num_accepted(request: Request, noise: Noise, one_by_one: bool) -> int:
    draft = sampled_chain(request, noise)
    logits = target_logits(request, draft.tree)
    if one_by_one:
        walk = accept_module._Walk(request, draft, logits, noise)
        walk.reject_siblings()
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
    "forget the missing mass": (lambda m: m.setattr(accept_module, "_share", lambda left, missing: float(left > 0)), "block", "plain"),
    "raw p": (lambda m: m.setattr(accept_module, "processed", lambda request, path, row: row), "token", "penalties"),
}


@pytest.mark.parametrize(("broken", "draft", "options"), BREAKS.values(), ids=BREAKS)
def test_a_broken_rule_is_seen(broken: Break, draft: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The laws can fail: each of these mistakes, all seen in the wild, moves the law by far more than the tolerance."""
    broken(monkeypatch)
    assert largest_error(emitted_law(OPTIONS[options], DRAFTS[draft]), OPTIONS[options]) > 1e-3
