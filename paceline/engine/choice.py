"""Of the drafted nodes of all requests in a step, those the target checks: the batch is expected to emit most
tokens a second with them.

No tensors. Invariant: as in policy.py, a sampled token never decides whether it is itself checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.types import Draft
from paceline.engine.calibrate import AGREED, CONTRADICTED, Asked, Record
from paceline.engine.costs import CostModel
from paceline.engine.load import Load
from paceline.engine.nodes import Joined, Lone, admitted, best_start, first_of
from paceline.engine.scheduler import Turn

MARGIN = 1.005  # a draft must promise so much more than none


@dataclass(slots=True)
class Choice:
    """What a step would be without drafts, what drafting has taken, and what is checked."""

    load: Load
    costs: CostModel
    has_trees: bool  # false where only chains may be checked
    cost_of: Callable[[Record], float]  # seconds of asking a drafter for one request
    can_lose: bool  # there is something saved to pay for drafts that turn out wrong
    threshold: float = 1.0  # below this score a sampled node is not checked; set before anything is drawn
    spent: float = 0.0  # seconds of drafting
    prepaid: float = 0.0  # seconds that probes were taken to cost
    entering: float = 0.0  # seconds that first asks are expected to take
    entered: float = 0.0  # that those of models took: an investment, and none of this step's losses
    checked: dict[int, Draft] = field(default_factory=dict)  # by turn
    added: float = 0.0  # seconds that the checked nodes are expected to take
    seen_by_nodes: int = 0  # cached tokens that they see, summed

    def worth(self, asked: Asked, turn: Turn) -> float:
        """Seconds that a draft is expected to save by itself; how many of its nodes are worth checking is
        kept with it.
        """
        if not self.can_lose:
            asked.count, asked.added = 0, 0.0
            return 0.0
        load, scores, costs = self.load, asked.scores[1 : 1 + turn.num_lookahead_tokens], self.costs
        base, each = costs.base(load.rows + len(scores)), costs.per_row_token * turn.request.cache.num_cached
        asked.count, gained, asked.added = best_start(
            scores, load.speaking, load.seconds, base, load.rows, each, MARGIN
        )
        return gained * load.price - asked.added

    def make(self, turns: Sequence[Turn], asked: Mapping[int, list[Asked]]) -> None:
        """asked: by turn."""
        index, answers = next(iter(asked.items()))
        if len(asked) == 1 and Lone.fits(answers, self.has_trees):
            self._check_one(index, turns[index], answers[0], self.worth(answers[0], turns[index]))
        elif (
            len(asked) == 1
            and len(answers) == 2
            and self.load.has_dear_rows()
            and all(Lone.fits((one,), self.has_trees) for one in answers)
        ):
            self._check_better(index, turns[index], *answers)
        else:
            self._check_best(turns, asked)

    def _check_better(self, index: int, turn: Turn, one: Asked, two: Asked) -> None:
        """Two drafts for one request, where rows are dear: the better of them, by who else says so."""
        compare(one, two)
        first, second = self.worth(one, turn), self.worth(two, turn)
        better, other = (one, two) if first >= second else (two, one)
        self._check_one(index, turn, better, max(first, second))
        other.tally.saved(other.record, 0.0, self.cost_of(other.record))

    def _check_one(self, index: int, turn: Turn, asked: Asked, saved: float) -> None:
        """One request alone, and the first nodes of its draft are the best."""
        if asked.count:
            self.added = asked.added
            self.seen_by_nodes = asked.count * turn.request.cache.num_cached
            self.checked = {index: first_of(asked.draft, asked.count)}
        asked.tally.saved(asked.record, saved, self.cost_of(asked.record))

    def _check_best(self, turns: Sequence[Turn], asked: Mapping[int, list[Asked]]) -> None:
        trees = {
            i: Lone(answers[0]) if Lone.fits(answers, self.has_trees) else Joined(answers)
            for i, answers in asked.items()
        }
        kept: dict[int, list[int]] = {index: [] for index in trees}
        pool: list[tuple[float, int, int]] = []
        for index, tree in trees.items():
            if tree.q is None:
                pool += [
                    (-tree.scores[node], index, node)
                    for node in (range(1, len(tree.scores)) if self.has_trees else tree.chain())
                ]
            elif isinstance(
                tree, Joined
            ):  # drafted first nodes are checked whatever they are: that was decided before they were drawn
                kept[index] = [
                    n
                    for n, score in enumerate(tree.scores)
                    if n and (score >= self.threshold or tree.parents[n] == 0)
                ]
        if pool and self.can_lose:
            pool.sort()
            self._admit(turns, pool, kept)
        num_nodes = sum(len(nodes) for nodes in kept.values())
        row_seconds = self.load.row_seconds(num_nodes)
        self.added = row_seconds * num_nodes
        for index, nodes in kept.items():
            tree = trees[index]
            self.seen_by_nodes += len(nodes) * turns[index].request.cache.num_cached
            for one in asked[index]:
                saved = sum(
                    tree.scores[n] * self.load.price - row_seconds for n in nodes if tree.owner(n) is one
                )
                one.tally.saved(one.record, saved, self.cost_of(one.record))
            if nodes:
                self.checked[index] = tree.cut(nodes)

    def _admit(
        self, turns: Sequence[Turn], pool: Sequence[tuple[float, int, int]], kept: dict[int, list[int]]
    ) -> None:
        """Keep the best nodes of all requests together."""
        load = self.load
        rows = load.rows + sum(len(nodes) for nodes in kept.values())
        base = self.costs.base(rows + len(pool))
        room = [turn.num_lookahead_tokens for turn in turns]
        scores, added, chosen, cached = [], [], [], 0.0
        for negative, index, node in pool:
            if room[index]:
                room[index] -= 1
                cached += self.costs.per_row_token * turns[index].request.cache.num_cached
                chosen.append((index, node))
                scores.append(-negative)
                added.append(base[rows + len(chosen)] - base[rows] + cached)
        for index, node in chosen[
            : admitted(scores, load.speaking, load.seconds + self.spent, added, MARGIN)
        ]:
            kept[index].append(node)
        for nodes in kept.values():
            nodes.sort()


def compare(one: Asked, two: Asked) -> None:
    """Two chains after the same token: each is worth more where the other says the same."""
    standing = AGREED if one.draft.tree.tokens[1] == two.draft.tree.tokens[1] else CONTRADICTED
    one.compare(standing)
    two.compare(standing)


class Caps:
    """The most nodes that would pay for one request if all were right."""

    __slots__ = ("_costs", "_found", "_most", "_version")

    def __init__(self, costs: CostModel, most_nodes: int) -> None:
        self._costs, self._most, self._version = costs, most_nodes, 0
        self._found: dict[tuple[int, int, int], int] = {}  # by load, as of a version of the costs

    def of(self, load: Load) -> int:
        if self._version != self._costs.version:
            self._found, self._version = {}, self._costs.version
        key = (load.rows, load.speaking, load.cached // load.speaking // 64)
        cap = self._found.get(key)
        if cap is None:
            added = load.added_by(self._most, load.by_row)
            cap = self._found[key] = admitted([1.0] * self._most, load.speaking, load.seconds, added, MARGIN)
        return cap
