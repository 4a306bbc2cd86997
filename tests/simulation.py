"""An engine without a model: texts that are known, drafters of known skill, and a clock that is only added
up.

What a pass takes is a table; what a drafter takes is said by the drafter. So the policy's promises can be
checked exactly and at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.params import SamplingParams
from paceline.core.tree import Tree
from paceline.core.types import Cached, Draft, Needs, Request, ScheduledRequest, Seen, Verdict
from paceline.engine.policy.auto import AutoPolicy
from paceline.engine.policy.base import Policy
from paceline.engine.policy.cost import CostTable

# Relative seconds of passes over 1, 2, ... rows as measured on two cores, a GPU where rows are free, and one
# where none is.
CPU = {1: 5.1, 2: 5.5, 3: 6.2, 4: 7.6, 6: 10.9, 8: 14.0, 12: 20.5, 16: 27.0}
FLAT = {1: 5.0, 64: 5.3, 128: 6.0}
STEEP = {1: 1.0, 2: 2.0}


def truth(request: Request, position: int) -> int:
    """The text: any two positions of any two requests differ."""
    return int(request.id) * 1_000_000 + position


@dataclass
class Skilled:
    """Drafts `length` tokens; whether the one at a position is right is up to `is_right(request,
    position)`.
    """

    is_right: Callable[[Request, int], bool]
    claim: float | None = None
    seconds: float = 0.0  # of asking for one request; for a model, of each token
    is_free: bool = True
    length: int = 8
    name: str = "skilled"
    needs: Needs = field(default_factory=Needs)
    num_asked: int = 0
    spent: float = 0.0

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        self.num_asked += len(requests)
        self.spent = 0.0
        return [self._draft(r, min(b, self.length)) for r, b in zip(requests, budgets, strict=True)]

    def _draft(self, request: Request, count: int) -> Draft:
        self.spent += self.seconds * (1 if self.is_free else count)
        places = range(request.num_tokens, request.num_tokens + count)
        tokens = [truth(request, p) if self.is_right(request, p) else -p - 1 for p in places]
        chances = None if self.claim is None else tuple(self.claim**i for i in range(count + 1))
        return Draft(Tree.chain(request.tokens[-1], tokens), self.name, chances=chances)

    def observe(self, seen: Sequence[Seen]) -> None: ...
    def release(self, request: Request) -> None: ...


@dataclass
class World:
    """Runs requests under a policy; `seconds` and `num_tokens` say how fast."""

    policy: Policy
    table: Mapping[int, float]
    seconds: float = 0.0
    num_tokens: int = 0
    num_checked: int = 0
    checked: dict[str, int] = field(default_factory=dict)  # nodes by request
    num_rounds: int = 0  # of a drafter that runs a model, where it may run them by itself
    share: float = 0.5  # of its time, that it takes then
    num_flights: int = 0
    # Of its own: a text, and where a drafter is right in it, follows from the number, and must not from what
    # other tests have run before.
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def run(self, num_requests: int, num_steps: int, num_prompt: int = 4) -> None:
        requests = [self.new_request(num_prompt) for _ in range(num_requests)]
        for _ in range(num_steps):
            self.step(requests)
        for request in requests:
            self.policy.release(request)

    def new_request(self, num_prompt: int = 4) -> Request:
        name = str(next(self.numbers))
        request = Request(
            name,
            SamplingParams(temperature=0.0),
            [0] * num_prompt,
            num_prompt,
            0,
            cache=Cached([], num_prompt - 1),
        )
        return request

    def step(self, requests: Sequence[Request]) -> None:
        turns = [ScheduledRequest(request, 1, draft_limit=64) for request in requests]
        plan = self.policy.plan(turns)
        for turn, nodes in zip(turns, plan.nodes, strict=False):
            turn.num_lookahead_tokens = nodes
        proposed: dict[int, list[tuple[int, Draft]]] = {}
        for number in self.policy.order if plan.asks else ():
            asks = self.policy.reconsider(number, plan.asks[number], turns) if proposed else plan.asks[number]
            if (
                asks
                and self.num_rounds
                and not self.policy.drafters[number].is_free
                and self.policy.may_fly(number, asks)
            ):
                return self._fly(number, turns)
            if asks:
                drafter = self.policy.drafters[number]
                drafts = drafter.propose([requests[i] for i, _ in asks], [count for _, count in asks])
                self.policy.heard(number, asks, drafts, drafter.spent)  # type: ignore[attr-defined]
                self.seconds += drafter.spent  # type: ignore[attr-defined]
                for (index, _), draft in zip(asks, drafts, strict=True):
                    proposed.setdefault(index, []).append((number, draft))
        checked = self.policy.trim(turns, proposed) if proposed else {}
        rows = len(requests) + sum(draft.num_drafted for draft in checked.values())
        took = CostTable(self.table).pass_seconds(rows)
        verdicts = {i: self._judge(request, checked.get(i)) for i, request in enumerate(requests)}
        self.policy.observe(turns, verdicts, took)
        self.seconds += took
        self.num_tokens += sum(len(v.tokens) for v in verdicts.values())
        self.num_checked += rows - len(requests)

    def _fly(self, number: int, turns: Sequence[ScheduledRequest]) -> None:
        """Rounds without anybody in between: drafting takes its share of what it takes otherwise. Whoever
        promises more meanwhile ends them, after the one that is under way."""
        requests, drafter, num_left = (
            [turn.request for turn in turns],
            self.policy.drafters[number],
            self.num_rounds,
        )
        while num_left:
            num_left -= 1
            drafts = dict(enumerate(drafter.propose(requests, [8] * len(requests))))
            rows = len(requests) + sum(draft.num_drafted for draft in drafts.values())
            took = CostTable(self.table).pass_seconds(rows) + self.share * drafter.spent  # type: ignore[attr-defined]
            verdicts = {i: self._judge(requests[i], draft) for i, draft in drafts.items()}
            self.policy.flown(number, turns, drafts, verdicts, took)
            self.seconds += took
            self.num_tokens += sum(len(v.tokens) for v in verdicts.values())
            self.num_checked += rows - len(requests)
            for other, asks in self.policy.lookouts(number, turns) if num_left > 1 else ():
                drafts = dict(
                    enumerate(
                        self.policy.drafters[other].propose(
                            [requests[i] for i, _ in asks], [count for _, count in asks]
                        )
                    )
                )
                self.policy.heard(other, asks, list(drafts.values()), self.policy.drafters[other].spent)  # type: ignore[attr-defined]
            rounds = [(i, 8) for i in range(len(turns))]
            if num_left > 1 and len(self.policy.reconsider(number, rounds, turns, is_flying=True)) < len(
                rounds
            ):
                num_left = 1
        self.num_flights += 1

    def _judge(self, request: Request, draft: Draft | None) -> Verdict:
        path, tokens = [0], []
        tree = Tree.chain(0) if draft is None else draft.tree
        children = tree.children()
        while True:
            token = truth(request, request.num_tokens)
            request.tokens.append(token)
            tokens.append(token)
            following = [c for c in children[path[-1]] if tree.tokens[c] == token]
            if not following:
                break
            path.append(following[0])
        request.cache.num_cached += len(tokens)
        self.checked[request.id] = self.checked.get(request.id, 0) + len(tree.tokens) - 1
        return Verdict(tuple(path), tuple(tokens), len(tree.tokens) - 1)


def speed(world: World) -> float:
    """Against plain decoding of as many tokens, one request at a time."""
    return world.num_tokens * CostTable(world.table).pass_seconds(1) / world.seconds


def auto(table: Mapping[int, float], *drafters: Skilled, profile: Mapping[int, float] | None = None) -> World:
    return World(AutoPolicy(drafters, CostTable(profile or table)), table)
