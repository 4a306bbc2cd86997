"""Drafters that no one would ship, to corner the verifier: always right, always wrong, random, ragged, empty,
trees with and without q.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paceline.core.errors import GrammarError
from paceline.core.noise import Noise, Purpose
from paceline.core.sampling import choose, noise_of, probabilities, processed, warped
from paceline.core.tree import Tree
from paceline.core.types import Draft, Request
from paceline.drafters.base import Drafter, chain, empty
from tests.laws.harness import DEVICE, VOCAB, model
from tests.passes import ancestors


def guess(
    request: Request, path: Sequence[int], logits: torch.Tensor, noise: Noise | None = None
) -> tuple[int, torch.Tensor | None]:
    """A drafter's token after `request.tokens + path`, from its raw logits under the request's settings.
    Greedy and seeded requests guess the target's choice with the same noise; unseeded ones sample from q
    [vocab] float64, which comes with the token."""
    noise = noise or noise_of(request)
    logits = processed(request, path, logits)
    position = request.num_tokens + len(path)
    if request.params.is_greedy or request.is_seeded:
        return choose(request, logits, position, noise), None
    warm = warped(request.params, logits)
    return noise.draw(warm.cpu().numpy(), position, Purpose.DRAFT), warm.softmax(0)


class Fake(Drafter):
    is_free = True

    def __init__(self) -> None:
        self.name = type(self).__name__
        self.rng = np.random.default_rng(5)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return [self.draft(r, b) for r, b in zip(requests, budgets, strict=True)]

    def draft(self, request: Request, budget: int) -> Draft:
        raise NotImplementedError

    def truth(self, request: Request, budget: int) -> list[int]:
        """What the target would say, were it asked."""
        path: list[int] = []
        for _ in range(budget):
            logits = processed(request, path, torch.from_numpy(model([*request.tokens, *path])))
            path.append(choose(request, logits, request.num_tokens + len(path), noise_of(request)))
            if request.constraint is not None:
                break  # a grammar would have to be advanced
        return path


class Empty(Fake):
    def draft(self, request: Request, budget: int) -> Draft:
        return empty(request)


class AlwaysRight(Fake):
    def draft(self, request: Request, budget: int) -> Draft:
        return chain(request, self.truth(request, budget), self.name)


class AlwaysWrong(Fake):
    def draft(self, request: Request, budget: int) -> Draft:
        return chain(request, [(t + 1) % VOCAB for t in self.truth(request, budget)], self.name)


class Random(Fake):
    def draft(self, request: Request, budget: int) -> Draft:
        return chain(request, self.rng.integers(0, VOCAB, budget).tolist(), self.name)


class Ragged(Fake):
    """Of any length, right at first and then not."""

    def draft(self, request: Request, budget: int) -> Draft:
        length = int(self.rng.integers(0, budget + 1))
        right = int(self.rng.integers(0, length + 1))
        truth = self.truth(request, length)
        return chain(request, [t if i < right else (t + 1) % VOCAB for i, t in enumerate(truth)], self.name)


class Fives(Fake):
    def draft(self, request: Request, budget: int) -> Draft:
        return chain(request, [5] * budget, self.name)


class RandomTree(Fake):
    """Random shape, random tokens, with the target's next few hidden in some branch."""

    def draft(self, request: Request, budget: int) -> Draft:
        tokens, parents = [request.tokens[-1]], [-1]
        truth = self.truth(request, 3)
        right = 0
        while len(tokens) <= budget:
            parent = int(self.rng.integers(0, len(tokens)))
            depth = len(ancestors(parents, right)) - 1
            is_right = parent == right and depth < len(truth) and self.rng.random() < 0.7
            token = truth[depth] if is_right else int(self.rng.integers(0, VOCAB))
            if (parent, token) in zip(parents, tokens, strict=True):
                continue
            right = len(tokens) if is_right else right
            tokens.append(token)
            parents.append(parent)
        return Draft(Tree(tuple(tokens), tuple(parents)), self.name)


class SampledChain(Fake):
    """q from another model: the rejection rules."""

    def draft(self, request: Request, budget: int) -> Draft:
        path: list[int] = []
        rows: list[torch.Tensor | None] = []
        for _ in range(budget if request.constraint is None else 1):
            try:
                token, q = guess(
                    request, path, torch.from_numpy(model([*request.tokens, *path], seed=1)).to(DEVICE)
                )
            except GrammarError:
                break
            path.append(token)
            rows.append(q)
        return chain(request, path, self.name, rows)


class SampledTree(Fake):
    """Two siblings at each of the first nodes, drawn without replacement from q."""

    def draft(self, request: Request, budget: int) -> Draft:
        tokens, parents, q = [request.tokens[-1]], [-1], {}
        noise = noise_of(request)
        for node in range(budget):
            if (
                node >= len(tokens)
                or len(tokens) + 2 > budget + 1
                or (node and request.constraint is not None)
            ):
                break
            path = [tokens[n] for n in ancestors(parents, node)[1:]]
            try:
                logits = processed(
                    request, path, torch.from_numpy(model([*request.tokens, *path], seed=1)).to(DEVICE)
                )
            except GrammarError:
                break
            if request.params.is_greedy:
                picks = logits.topk(2).indices.tolist()
            else:
                q[node] = left = probabilities(request.params, logits)
                picks = []
                for _ in range(
                    min(2, int((left > 0).sum()))
                ):  # the best two of one noisy row: a sample without replacement
                    picks.append(
                        noise.draw(left.log().cpu().numpy(), request.num_tokens + len(path), Purpose.DRAFT)
                    )
                    left = left.clone()
                    left[picks[-1]] = 0
            tokens.extend(picks)
            parents.extend([node] * len(picks))
        return Draft(Tree(tuple(tokens), tuple(parents)), self.name, q or None)


FAKES: dict[str, type[Fake]] = {
    kind.__name__: kind
    for kind in (Empty, AlwaysRight, AlwaysWrong, Random, Ragged, RandomTree, SampledChain, SampledTree)
}
