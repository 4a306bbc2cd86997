"""Does unseeded sampling follow the target's distribution? A chi-square test of every accept rule on the
model's own logits, read at one text and after each of its likely continuations; the draft's are the same
model's when it sees only the end of that text, so p and q differ as those of a real pair do. The engine's own
`accept` judges thousands of drafts, with noise keyed by the number of the sample, so a run can be repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch

from paceline.api.llm import LLM
from paceline.core.accept import accept
from paceline.core.params import SamplingParams
from paceline.core.sampling import choose, noise_of, probabilities, warped
from paceline.core.tree import Tree
from paceline.core.types import Draft, Request
from paceline.drafters.reading import draw

TEXT = "On the way to the market we met a"
NUM_SEEN_BY_DRAFT = 3  # tokens at least
DEPTH = 3  # tokens a sample
WIDTH = 4  # tokens the target may choose from at each place
NUM_SAMPLES = 2000
SMALLEST_P_VALUE = 0.001
SMALLEST_CELL = 5.0  # expected counts below it are pooled: the test is not to be trusted on them
RULES = ("token", "block", "siblings", "deterministic", "coupled")

Outcome = TypeVar("Outcome")
Path = tuple[int, ...]
Row = list[tuple[int, float]]  # likely tokens and their log-probabilities
# Tokens drafted after a path, and the probabilities they were sampled from, if they were.
Below = tuple[list[int], torch.Tensor | None]


class Landscape(NamedTuple):
    """Logits [tokens] after each path of likely tokens, over the few that matter, renumbered from 0."""

    target: dict[Path, torch.Tensor]
    draft: dict[Path, torch.Tensor]
    num_tokens: int


def survey(llm: LLM) -> Landscape:
    """The model's logits along every likely path: the log-probabilities that `generate` reports."""
    context = llm.tokenizer.encode(TEXT)
    # The draft sees the shortest end of the context after which a token is likely that is also likely after
    # all of it: else nothing would be kept.
    ends = [context[-count:] for count in range(min(NUM_SEEN_BY_DRAFT, len(context)), len(context) + 1)]
    likely = [{token for token, _ in row} for row in _likely(llm, ends)]
    seen = next(end for end, row in zip(ends, likely, strict=True) if row & likely[-1])
    target, draft, paths = dict[Path, Row](), dict[Path, Row](), list[Path]([()])
    for _ in range(DEPTH):
        target.update(zip(paths, _likely(llm, [[*context, *path] for path in paths]), strict=True))
        draft.update(zip(paths, _likely(llm, [[*seen, *path] for path in paths]), strict=True))
        paths = [(*path, token) for path in paths for token, _ in target[path]]
    ids = sorted({token for row in chain(target.values(), draft.values()) for token, _ in row})
    number = {token: i for i, token in enumerate(ids)}
    return Landscape(_renumbered(target, number), _renumbered(draft, number), len(ids))


def _likely(llm: LLM, contexts: list[list[int]]) -> list[Row]:
    plain: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "num_speculative_tokens": 0}
    results = llm.generate(contexts, SamplingParams(max_tokens=1, logprobs=WIDTH, **plain))
    return [list(entry.top) for result in results for entry in result.outputs[0].token_logprobs or ()]


def _renumbered(rows: dict[Path, Row], number: dict[int, int]) -> dict[Path, torch.Tensor]:
    logits = {}
    for path, row in rows.items():
        values = torch.full((len(number),), -torch.inf)
        values[[number[token] for token, _ in row]] = torch.tensor([logprob for _, logprob in row])
        logits[tuple(number[token] for token in path)] = values
    return logits


def _below(rule: str, request: Request, path: Path, logits: torch.Tensor) -> Below:
    """What leads to a rule when it is drafted."""
    if rule == "deterministic":  # the two likeliest tokens: nothing was sampled, so there is no q
        return logits.topk(2).indices.tolist(), None
    if rule == "token" and path:  # after one sampled token the likeliest: q is known at the root alone
        return [int(logits.argmax())] if len(path) == 1 else [], None
    position, noise = request.num_tokens + len(path), noise_of(request)
    if rule == "coupled":  # guessed with the request's own seed
        return [choose(request, logits, position, noise)], None
    # as a draft model samples: one token after the one before, or two without replacement
    warm = warped(request.params, logits)
    return draw(warm.numpy(), position, 2 if rule == "siblings" else 1, noise), warm.softmax(0)


def check_rule(rule: str, landscape: Landscape, num_samples: int) -> float:
    """Sample with drafts, count, and compare with the exact probabilities: the p-value."""
    first = RULES.index(rule) * num_samples  # rules share no noise: their p-values are independent
    counts = Counter(_sample(rule, landscape, seed) for seed in range(first, first + num_samples))
    return chi_square_p_value(counts, exact_probabilities(landscape))


def _sample(rule: str, landscape: Landscape, seed: int) -> Path:
    params = SamplingParams(top_k=WIDTH, seed=seed if rule == "coupled" else None)
    request = Request("check", params, tokens=[0], num_prompt=1, seed=seed)
    while request.num_output < DEPTH:
        paths, parents, q = list[Path]([()]), [-1], dict[int, torch.Tensor]()
        depth = DEPTH - request.num_output - 1
        for node, path in enumerate(paths):  # grows while it is read
            logits = landscape.draft.get((*request.output, *path))
            if len(path) < depth and logits is not None:
                tokens, probability = _below(rule, request, path, logits)
                q |= {} if probability is None else {node: probability}
                paths += [(*path, token) for token in tokens]
                parents += [node] * len(tokens)
        tree = Tree((request.tokens[-1], *(path[-1] for path in paths[1:])), tuple(parents))
        draft = Draft(tree, "check", q or None)
        unread = torch.zeros(landscape.num_tokens)  # a node off the map cannot be accepted
        rows = [landscape.target.get((*request.output, *path), unread) for path in paths]
        request.tokens += accept(request, draft, torch.stack(rows)).tokens
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


def chi_square_p_value(counts: Mapping[Outcome, int], exact: Mapping[Outcome, float]) -> float:
    """Pearson's test: how often a faithful sampler would be this far off; 0: the impossible happened."""
    total = sum(counts.values())
    if any(exact.get(outcome, 0.0) == 0.0 for outcome in counts):
        return 0.0
    cells = [(counts.get(outcome, 0), total * mass) for outcome, mass in exact.items()]
    large = [cell for cell in cells if cell[1] >= SMALLEST_CELL]
    small = [cell for cell in cells if cell[1] < SMALLEST_CELL]
    if small:
        large.append((sum(seen for seen, _ in small), sum(expected for _, expected in small)))
    if len(large) == 1:
        return 1.0  # there is but one outcome
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in large)
    freedom, half = torch.tensor([(len(large) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, half))
