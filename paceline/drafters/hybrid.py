"""Several drafters for one target: their branches joined in one tree, or one of them alone where its draft is
sampled.

Those that cost nothing are asked first; one that runs a model is asked only where it has lately gained more
than they expect now. Invariant: a sampled draft (q) is never joined with others, and whether it is used was
decided before it was drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.options import require
from paceline.core.tree import Tree, join
from paceline.core.types import Draft, Needs, Request, Seen
from paceline.drafters import registry
from paceline.drafters.base import Drafter, DrafterConfig, DrafterContext, empty, within

DECAY = 0.98  # a round's weight after the next one
UNSAID = 0.5  # the chance of each further token where a drafter names none


@dataclass(frozen=True, slots=True)
class HybridConfig(DrafterConfig):
    # nodes of the joined tree; 0: the most that one of the drafters has
    num_speculative_tokens: int = within(0, 128, 0)
    drafters: Sequence[str | Mapping[str, Any]] = ("ngram", "early_exit")  # names, or dicts with options

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        given, known = self.drafters, (str, Mapping)
        ok = isinstance(given, (list, tuple)) and bool(given) and all(isinstance(d, known) for d in given)
        require(ok, "drafters", given, "give a list of methods such as ['ngram', 'early_exit']")
        parsed = self.parsed()
        remedy = "a hybrid in a hybrid is one hybrid: list all drafters side by side"
        require(all(kind is not Hybrid for kind, _ in parsed), "drafters", given, remedy)
        if not self.num_speculative_tokens:
            most = max(config.num_speculative_tokens for _, config in parsed)
            object.__setattr__(self, "num_speculative_tokens", most)

    def parsed(self) -> list[tuple[type[Drafter], DrafterConfig]]:
        """Class and config of each; a length given for all holds for those that have none of their own."""
        length = self.num_speculative_tokens
        shared = {"num_speculative_tokens": length} if length else {}
        options = [{"method": d} if isinstance(d, str) else d for d in self.drafters]
        return [registry.parse({**shared, **each}) for each in options]


@dataclass(slots=True)
class _Record:
    """How a drafter has done lately. It starts with a few rounds that gained a token each."""

    rounds: float = 4.0
    claimed: float = 4.0  # the sum of its chances
    accepted: float = 4.0

    @property
    def rate(self) -> float:
        """Accepted tokens for one that was claimed."""
        return min(self.accepted / self.claimed, 1.0)

    @property
    def gain(self) -> float:
        """Tokens accepted in a round."""
        return self.accepted / self.rounds

    def add(self, claimed: float, accepted: int) -> None:
        self.rounds = DECAY * self.rounds + 1
        self.claimed = DECAY * self.claimed + claimed
        self.accepted = DECAY * self.accepted + accepted


class Hybrid(Drafter):
    name = "hybrid"
    Config = HybridConfig

    def __init__(self, config: HybridConfig, context: DrafterContext) -> None:
        super().__init__(config)
        parsed = config.parsed()
        self.drafters = tuple(registry.create(kind, each, context) for kind, each in parsed)
        self.limits = tuple(each.num_speculative_tokens for _, each in parsed)
        layers = sorted({layer for d in self.drafters for layer in d.needs.hidden_layers})
        # and verdicts, which it counts itself
        self.needs = Needs(tuple(layers), max(d.needs.top_tokens for d in self.drafters))
        self.is_free = all(d.is_free for d in self.drafters)
        self.can_rewind = all(d.can_rewind for d in self.drafters)
        self.records = {d.name: _Record() for d in self.drafters}

    @property
    def members(self) -> tuple[Drafter, ...]:
        return self.drafters

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        answers: list[list[Draft]] = [[] for _ in requests]
        pairs = list(zip(self.drafters, self.limits, strict=True))
        for drafter, limit in sorted(pairs, key=lambda p: (not p[0].is_free, -self.records[p[0].name].gain)):
            asked = [i for i, budget in enumerate(budgets) if budget and self._is_wanted(drafter, answers[i])]
            if not asked:
                continue
            limits = [min(budgets[i], limit) for i in asked]
            for i, draft in zip(asked, drafter.propose([requests[i] for i in asked], limits), strict=True):
                if draft.q:
                    answers[i] = [draft]
                elif draft.num_drafted:
                    answers[i].append(draft)
        each = zip(requests, answers, budgets, strict=True)
        return [self._joined(a, b) if a else empty(r, self.name) for r, a, b in each]

    def _is_wanted(self, drafter: Drafter, answers: Sequence[Draft]) -> bool:
        if drafter.is_free:
            return True
        if any(draft.q for draft in answers):
            return False
        expected = max((self.records[d.source].rate * sum(chances_of(d)[1:]) for d in answers), default=0.0)
        return self.records[drafter.name].gain > expected

    def _joined(self, drafts: Sequence[Draft], budget: int) -> Draft:
        """The best nodes of all drafts. A drafter's chances count as far as they have come true."""
        if len(drafts) == 1:
            return drafts[0]
        tokens, parents, places = join([draft.tree for draft in drafts])
        chances, scores, sources = [0.0] * len(tokens), [-1.0] * len(tokens), [self.name] * len(tokens)
        for draft, where in zip(drafts, places, strict=True):
            rate = self.records[draft.source].rate
            for place, claimed in zip(where, chances_of(draft), strict=True):
                if place and claimed * rate > scores[place]:
                    scores[place], sources[place] = claimed * rate, draft.source
                chances[place] = max(chances[place], claimed)
        best = sorted(range(1, len(tokens)), key=lambda n: -scores[n])[:budget]
        tree = Tree.known(tuple(tokens), tuple(parents))
        joined = Draft(tree, self.name, None, tuple(chances), tuple(sources))
        return joined.cut([0, *sorted(best)])

    def observe(self, seen: Sequence[Seen]) -> None:
        for _, _, draft, verdict, *_ in seen:
            if draft is None or verdict is None or not draft.num_drafted:
                continue
            claimed, by_source = chances_of(draft), dict[str, list[int]]()
            for node in range(1, len(claimed)):
                by_source.setdefault(draft.source_of(node), []).append(node)
            for source, nodes in by_source.items():
                num_accepted = sum(n in verdict.path for n in nodes)
                self.records[source].add(sum(claimed[n] for n in nodes), num_accepted)
        for drafter in self.drafters:
            count = drafter.needs.top_tokens
            tops = [one.top[:, :count] if one.top is not None and count else None for one in seen]
            drafter.observe([one._replace(top=top) for one, top in zip(seen, tops, strict=True)])

    def release(self, request: Request) -> None:
        for drafter in self.drafters:
            drafter.release(request)


def chances_of(draft: Draft) -> Sequence[float]:
    return draft.chances or [UNSAID**depth for depth in draft.tree.depths()]
