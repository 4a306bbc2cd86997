"""Does unseeded sampling follow the target's distribution? A chi-square test of every accept rule on the
model's own logits.

The target's next-token logits are read at one text and after each of its likely continuations; the draft's
logits are the same model's when it sees only the end of that text, so p and q differ as those of a real pair
do. Then the engine's own `accept` judges thousands of drafts, and the texts are counted against their exact
probabilities. The noise is keyed by the number of the sample, so a run can be repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paceline.core.accept import accept
from paceline.core.chi_square import chi_square_p_value
from paceline.core.noise import Purpose
from paceline.core.params import SamplingParams
from paceline.core.sampling import guess, noise_of, probabilities, warped
from paceline.core.tree import Tree
from paceline.core.types import Draft, Request

if TYPE_CHECKING:
    from paceline.api.llm import LLM

TEXT = "On the way to the market we met a"
NUM_SEEN_BY_DRAFT = 3  # tokens at least
DEPTH = 3  # tokens a sample
WIDTH = 4  # tokens the target may choose from at each place
NUM_SAMPLES = 2000
SMALLEST_P_VALUE = 0.001

Path = tuple[int, ...]
Row = list[tuple[int, float]]  # likely tokens and their log-probabilities


class RuleResult(NamedTuple):
    rule: str
    p_value: float

    @property
    def is_ok(self) -> bool:
        return self.p_value > SMALLEST_P_VALUE


@dataclass(frozen=True, slots=True)
class Landscape:
    """Logits [tokens] after each path of likely tokens, over the few tokens that matter, renumbered from
    0."""

    target: dict[Path, torch.Tensor]
    draft: dict[Path, torch.Tensor]
    num_tokens: int

    def target_rows(self, emitted: Sequence[int], tree: Tree) -> torch.Tensor:
        """[nodes, tokens]. A node off the map cannot be accepted, so its row is never read."""
        unread = torch.zeros(self.num_tokens)
        below = [[tree.tokens[n] for n in tree.ancestors(i)[1:]] for i in range(len(tree.tokens))]
        return torch.stack([self.target.get((*emitted, *path), unread) for path in below])


def survey(llm: LLM) -> Landscape:
    """Ask the model for its logits along every likely path, as the log-probabilities that `generate`
    reports."""
    context = llm.tokenizer.encode(TEXT)
    seen = _seen_by_draft(llm, context)
    target: dict[Path, Row] = {}
    draft: dict[Path, Row] = {}
    paths: list[Path] = [()]
    for _ in range(DEPTH):
        target.update(zip(paths, _likely(llm, [[*context, *path] for path in paths]), strict=True))
        draft.update(zip(paths, _likely(llm, [[*seen, *path] for path in paths]), strict=True))
        paths = [(*path, token) for path in paths for token, _ in target[path]]
    ids = sorted({token for row in chain(target.values(), draft.values()) for token, _ in row})
    number = {token: i for i, token in enumerate(ids)}
    return Landscape(_renumbered(target, number), _renumbered(draft, number), len(ids))


def _seen_by_draft(llm: LLM, context: list[int]) -> list[int]:
    """The shortest end of the context after which a token is likely that is also likely after all of it: else
    nothing would be kept."""
    ends = [context[-count:] for count in range(min(NUM_SEEN_BY_DRAFT, len(context)), len(context) + 1)]
    rows = [{token for token, _ in row} for row in _likely(llm, ends)]
    return next(end for end, row in zip(ends, rows, strict=True) if row & rows[-1])


def _likely(llm: LLM, contexts: list[list[int]]) -> list[Row]:
    plain: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "num_speculative_tokens": 0}
    results = llm.generate(contexts, SamplingParams(max_tokens=1, logprobs=WIDTH, **plain))
    return [list(entry.top) for result in results for entry in result.outputs[0].logprobs or ()]


def _renumbered(rows: dict[Path, Row], number: dict[int, int]) -> dict[Path, torch.Tensor]:
    logits = {}
    for path, row in rows.items():
        values = torch.full((len(number),), -torch.inf)
        values[[number[token] for token, _ in row]] = torch.tensor([logprob for _, logprob in row])
        logits[tuple(number[token] for token in path)] = values
    return logits


def _sampled_chain(request: Request, landscape: Landscape, depth: int) -> Draft:
    """What a draft model offers: each token sampled after the one before (or guessed with the request's own
    seed)."""
    path: list[int] = []
    q: dict[int, torch.Tensor] = {}
    while len(path) < depth and (*request.output, *path) in landscape.draft:
        token, probability = guess(request, path, landscape.draft[(*request.output, *path)])
        if probability is not None:
            q[len(path)] = probability
        path.append(token)
    return Draft(Tree.chain(request.tokens[-1], path), "check", q or None)


def _one_sampled_token(request: Request, landscape: Landscape, depth: int) -> Draft:
    """One sampled token, then the likeliest: q is known at the root alone, which leads to the token rule."""
    draft = _sampled_chain(request, landscape, min(depth, 1))
    after = landscape.draft.get((*request.output, *draft.tree.tokens[1:]))
    if depth < 2 or after is None:
        return draft
    tree = Tree.chain(request.tokens[-1], [*draft.tree.tokens[1:], int(after.argmax())])
    return Draft(tree, "check", draft.q)


# After a path: two tokens, and what they were sampled from, if they were.
Pair = Callable[[Path], tuple[list[int], torch.Tensor | None]]


def _sampled_siblings(request: Request, landscape: Landscape, depth: int) -> Draft:
    """Two tokens sampled without replacement at each node."""

    def pair(path: Path) -> tuple[list[int], torch.Tensor]:
        logits = warped(request.params, landscape.draft[(*request.output, *path)])
        weights, noise, position = logits.numpy().copy(), noise_of(request), request.num_tokens + len(path)
        first = noise.draw(weights, position, Purpose.DRAFT)
        weights[first] = -torch.inf
        return [first, noise.draw(weights, position, Purpose.DRAFT)], logits.softmax(0)

    return _grow(request, landscape, depth, pair)


def _best_siblings(request: Request, landscape: Landscape, depth: int) -> Draft:
    """The two likeliest tokens at each node: nothing was sampled, so there is no q."""
    draft = landscape.draft
    best = lambda path: (draft[(*request.output, *path)].topk(2).indices.tolist(), None)  # noqa: E731
    return _grow(request, landscape, depth, best)


def _grow(request: Request, landscape: Landscape, depth: int, pair: Pair) -> Draft:
    paths: list[Path] = [()]
    parents, q = [-1], {}
    for node, _ in enumerate(paths):  # grows while it is read
        if len(paths[node]) < depth and (*request.output, *paths[node]) in landscape.draft:
            pair_tokens, probability = pair(paths[node])
            if probability is not None:
                q[node] = probability
            paths += [(*paths[node], token) for token in pair_tokens]
            parents += [node] * len(pair_tokens)
    tokens = (request.tokens[-1], *(path[-1] for path in paths[1:]))
    return Draft(Tree(tokens, tuple(parents)), "check", q or None)


RULES: dict[str, Callable[[Request, Landscape, int], Draft]] = {
    "token": _one_sampled_token,
    "block": _sampled_chain,
    "siblings": _sampled_siblings,
    "deterministic": _best_siblings,
    "coupled": _sampled_chain,
}


def check_rule(rule: str, landscape: Landscape, num_samples: int) -> RuleResult:
    """Sample with drafts, count, and compare with the exact probabilities."""
    first = list(RULES).index(rule) * num_samples  # rules share no noise: their p-values are independent
    counts = Counter(_sample(rule, landscape, seed) for seed in range(first, first + num_samples))
    return RuleResult(rule, chi_square_p_value(counts, exact_probabilities(landscape)))


def _sample(rule: str, landscape: Landscape, seed: int) -> Path:
    params = SamplingParams(top_k=WIDTH, seed=seed if rule == "coupled" else None)
    request = Request("check", params, tokens=[0], num_prompt=1, seed=seed)
    while request.num_output < DEPTH:
        draft = RULES[rule](request, landscape, DEPTH - request.num_output - 1)
        verdict = accept(request, draft, landscape.target_rows(request.output, draft.tree))
        request.tokens += verdict.tokens
        request.num_rounds += 1
    return tuple(request.output)


def exact_probabilities(landscape: Landscape) -> dict[Path, float]:
    """Of every text of DEPTH tokens that the target can write."""
    params = SamplingParams(top_k=WIDTH)
    found: dict[Path, float] = {(): 1.0}
    for _ in range(DEPTH):
        rows = {path: probabilities(params, landscape.target[path]) for path in found}
        steps = [(path, int(t)) for path, row in rows.items() for t in row.nonzero()[:, 0]]
        found = {(*path, t): found[path] * float(rows[path][t]) for path, t in steps}
    return found
