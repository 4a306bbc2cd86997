"""An engine without a model: known texts, drafters of known skill, and a clock that is only added up.

What a pass takes is a table; what a draft takes is said by the drafter. So what a policy promises can be
checked exactly and at once. Invariant: the policy sees the StepRecords that the engine's own step would make.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from paceline.core.params import SamplingParams
from paceline.core.tree import Tree
from paceline.core.types import Answers, Cached, Draft, Request, ScheduledRequest, Verdict
from paceline.drafters.base import Drafter
from paceline.engine.policy.auto import AutoPolicy
from paceline.engine.policy.base import Plan, Policy
from paceline.engine.policy.cost import CostTable
from paceline.runtime.record import StepRecord, longest

# Relative seconds of passes over 1, 2, ... rows as measured on two cores, a GPU where rows are free, and a
# machine where none is.
CPU = {1: 5.1, 2: 5.5, 3: 6.2, 4: 7.6, 6: 10.9, 8: 14.0, 12: 20.5, 16: 27.0}
FLAT = {1: 5.0, 64: 5.3, 128: 6.0}
STEEP = {1: 1.0, 2: 2.0}
TABLES = {"cpu": CPU, "flat": FLAT, "steep": STEEP}
IsRight = Callable[[Request, int], bool]


def sometimes(share: float) -> IsRight:
    """Right at this share of all positions, which ones being fixed."""

    def is_right(request: Request, position: int) -> bool:
        digest = hashlib.blake2b(f"{request.id}/{position}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") < share * 2**32

    return is_right


def truth(request: Request, position: int) -> int:
    """The text: any two positions of any two requests differ."""
    return int(request.id) * 1_000_000 + position


class Skilled(Drafter):
    """Drafts chains; whether the token at a position is right is up to `is_right(request, position)`."""

    def __init__(
        self, is_right: IsRight, claim: float | None = None, seconds: float = 0.0, *,
        is_free: bool = True, length: int = 8, name: str = "skilled",
    ) -> None:  # fmt: skip
        """claim: what it says of each node. seconds: of asking for one request; of a model, for each node."""
        self.is_right, self.claim, self.seconds = is_right, claim, seconds
        self.is_free, self.length, self.name = is_free, length, name
        self.num_asked, self.spent = 0, 0.0  # requests so far; seconds of the last call

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        self.num_asked += len(requests)
        counts = [min(budget, self.length) for budget in budgets]
        self.spent = self.seconds * (len(counts) if self.is_free else max(counts))
        return [self.draft(request, count) for request, count in zip(requests, counts, strict=True)]

    def draft(self, request: Request, count: int) -> Draft:
        places = range(request.num_tokens, request.num_tokens + count)
        tokens = [truth(request, p) if self.is_right(request, p) else -p - 1 for p in places]
        chances = None if self.claim is None else tuple(self.claim**i for i in range(count + 1))
        q = None
        if (
            request.params.temperature and not self.is_free
        ):  # what the tokens were drawn from is not looked at
            q = {node: torch.empty(0) for node in range(count)}
        return Draft(Tree.chain(request.tokens[-1], tokens), self.name, q, chances)


@dataclass
class World:
    """Runs requests under a policy; `seconds` and `num_tokens` say how fast."""

    policy: Policy
    table: Mapping[int, float]
    host: float = 0.0  # seconds of every step beside its pass and its drafts
    is_burst: bool = False  # drafts are made on the device, which tells the time of whole rounds only
    seconds: float = 0.0
    num_tokens: int = 0
    num_checked: int = 0
    checked: dict[str, int] = field(default_factory=dict)  # nodes by request
    # Of its own: a text, and where a drafter is right in it, follows from the number, and must not from what
    # other tests have run before.
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.costs = CostTable(self.table)

    def run(self, num_requests: int, num_steps: int, num_prompt: int = 4) -> None:
        requests = [self.new_request(num_prompt) for _ in range(num_requests)]
        for _ in range(num_steps):
            self.step(requests)
        for request in requests:
            self.policy.release(request)

    def new_request(self, num_prompt: int = 4, **params: object) -> Request:
        sampling = SamplingParams(**{"temperature": 0.0, **params})  # type: ignore[arg-type]
        cache = Cached([], num_prompt - 1)
        return Request(str(next(self.numbers)), sampling, [0] * num_prompt, num_prompt, 0, cache=cache)

    def step(self, requests: Sequence[Request]) -> StepRecord:
        scheduled = [ScheduledRequest(request, 1, draft_limit=64) for request in requests]
        plan = self.policy.plan(scheduled)
        answers, drafting, spent = self._propose(scheduled, plan)
        chosen = self.policy.choose(scheduled, answers) if answers else {}
        drafts = [chosen.get(i) or Draft(Tree.chain(r.tokens[-1])) for i, r in enumerate(requests)]
        rows = sum(len(draft.tree.tokens) for draft in drafts)
        took = self.costs.pass_seconds(rows)
        judged = [self._judge(request, draft) for request, draft in zip(requests, drafts, strict=True)]
        record = StepRecord(scheduled, drafts, judged, answers, drafting, is_plain=plan.plain_steps > 0)
        record.pass_seconds = None if self.is_burst else took
        record.seconds, record.verdicts = took + spent + self.host, dict(enumerate(judged))
        self.policy.observe(record)
        self.seconds += record.seconds
        self.num_tokens += sum(len(verdict.tokens) for verdict in judged)
        self.num_checked += rows - len(requests)
        return record

    def _propose(
        self, scheduled: Sequence[ScheduledRequest], plan: Plan
    ) -> tuple[Answers, dict[int, tuple[int, float | None]], float]:
        answers: Answers = {}
        drafting: dict[int, tuple[int, float | None]] = {}
        spent = 0.0
        for index, nodes in plan.nodes.items():
            scheduled[index].num_lookahead_tokens = nodes
        for number, asks in enumerate(plan.asks):
            asks = self.policy.replan(number, asks, scheduled, answers, False) if asks and answers else asks
            if not asks:
                continue
            drafter = self.policy.drafters[number]
            assert isinstance(drafter, Skilled)
            drafts = drafter.propose([scheduled[i].request for i, _ in asks], [count for _, count in asks])
            spent += drafter.spent
            for (index, count), draft in zip(asks, drafts, strict=True):
                assert draft.num_drafted <= count
                if draft.num_drafted:
                    answers.setdefault(index, []).append((number, draft))
            drafting[number] = (longest(answers, number), None if self.is_burst else drafter.spent)
        return answers, drafting, spent

    def _judge(self, request: Request, draft: Draft) -> Verdict:
        path, tokens, children = [0], [], draft.tree.children()
        while True:
            token = truth(request, request.num_tokens)
            request.tokens.append(token)
            tokens.append(token)
            following = [c for c in children[path[-1]] if draft.tree.tokens[c] == token]
            if not following:
                break
            path.append(following[0])
        request.cache.num_cached += len(tokens)
        self.checked[request.id] = self.checked.get(request.id, 0) + draft.num_drafted
        return Verdict(tuple(path), tuple(tokens), draft.num_drafted)

    def speed(self, num_requests: int = 1) -> float:
        """Against plain decoding of as many tokens by as many requests at a time."""
        plain = (self.costs.pass_seconds(num_requests) + self.host) / num_requests
        return self.num_tokens * plain / self.seconds


def auto(table: Mapping[int, float], *drafters: Skilled, profile: Mapping[int, float] | None = None) -> World:
    return World(AutoPolicy(drafters, CostTable(profile or table)), table)
