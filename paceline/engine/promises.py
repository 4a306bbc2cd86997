"""What a drafter that runs a model promises before it has drafted anything, and how its drafts are weighed.
No tensors, no state.

Invariant: all of it follows from what was seen of the drafter and of the request, and from what passes cost.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.types import Course
from paceline.engine.calibrate import BINS, DEPTHS, STANDINGS, SURE, Record, Tally
from paceline.engine.choice import MARGIN
from paceline.engine.costs import CostModel
from paceline.engine.load import Load
from paceline.engine.nodes import best_start
from paceline.engine.plan import rounds_within

USUAL_GAIN = (
    1.6  # a node must promise so much more than its row and drafting it cost, before a head drafts on from it
)
USUAL_ROUND = 1.5  # passes: what a round with its drafts takes, about
STEPS_OF_LEAST = 32  # a chance from which a head drafts on is one of so many


def survivals(record: Record, factor: float, count: int) -> list[float]:
    """By depth: the chance that a draft is right so far, by the rates seen, for a request that goes so much
    better.
    """
    rates, survival, found = record.calibration.rates(), 1.0, []
    for depth in range(count):
        survival *= min(rates[min(depth, DEPTHS - 1)] * factor, SURE)
        found.append(survival)
    return found


def best_count(
    load: Load, costs: CostModel, record: Record, factor: float, limit: int
) -> tuple[int, float, float]:
    """Of a draft by the rates seen at each depth, for a request that goes so much better: nodes that pay,
    their tokens, seconds.
    """
    base, row = costs.base(load.rows + limit), record.line.each + load.by_row
    return best_start(
        survivals(record, factor, limit),
        load.speaking,
        load.seconds,
        base,
        load.rows,
        row,
        MARGIN,
        record.line.fixed,
    )


def least_chance(load: Load, costs: CostModel, record: Record) -> float:
    """From which it pays to draft another token after one, and to check both."""
    base = costs.base(load.rows + 2)
    chance = (
        USUAL_GAIN * (base[load.rows + 2] - base[load.rows + 1] + load.by_row + record.line.each) / load.price
    )
    return min(round(chance * STEPS_OF_LEAST) / STEPS_OF_LEAST, SURE)


def saved_by_round(load: Load, record: Record, factors: Sequence[float], length: int) -> float:
    """Seconds, if requests that go so much better all draft and check by themselves. What was never tried is
    taken to draft for all as for one."""
    num_nodes, gained = (
        length * len(factors),
        sum(sum(survivals(record, factor, length)) for factor in factors),
    )
    measured = record.rounds.get(len(factors))
    added = load.row_seconds(num_nodes) * num_nodes + record.line.fixed + length * record.line.each
    return gained * load.price - (measured.value - load.seconds if measured else added)


def course_of(
    load: Load, record: Record, tally: Tally, beside: tuple[Record, Tally] | None, length: int
) -> Course:
    """For rounds of one request by a drafter, and maybe one that is asked beside it."""
    others, other_factor = [-1.0] * (STANDINGS * DEPTHS * BINS), 1.0
    if beside is not None:
        others, other_factor = beside[0].calibration.table(), beside[1].factor
    added = [0.0, *load.added_by(length, load.by_row)]
    num_rounds, own = rounds_within(USUAL_ROUND * load.seconds), record.calibration.table()
    return Course(
        num_rounds,
        load.seconds,
        added,
        MARGIN,
        tally.promise,
        SURE,
        BINS,
        DEPTHS,
        own,
        tally.factor,
        others,
        other_factor,
    )
