"""Records of how a draft is verified, for `paceline explain`; no decision depends on them.

A watcher is called with each in order: `Begun`, then choices, coins and redraws, then the `Verdict`.
Invariant: a watcher gets the very numbers that the rules used and can change no result; without a watcher
nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple, Union

if TYPE_CHECKING:
    import torch

    from paceline.core.types import Draft, Request, Verdict

Rule = Literal["greedy", "coupled", "deterministic", "block", "siblings"]


class Begun(NamedTuple):
    rule: Rule
    request: Request  # as it is before the verdict: to be read during the call only
    draft: Draft


class Choice(NamedTuple):
    """The target chose a token of its own after a node."""

    node: int
    position: int  # of the token
    logits: torch.Tensor  # [vocab], all options but the temperature's family applied
    token: int
    child: int | None  # the drafted node that holds it


class Coin(NamedTuple):
    """A sampled node was tested: accepted if the coin is below the chance."""

    node: int
    position: int
    p: float  # of its token, less what rejected siblings have taken
    q: float
    weight: float  # min(1, p/q) of the whole chain up to the node in block verification, else 1
    chance: float
    coin: float | None = None  # None: p is 0, and no coin was needed
    is_under: bool = False


class Redraw(NamedTuple):
    """The target's own token after drafted tokens were tested by coins."""

    node: int
    position: int
    weights: torch.Tensor  # [vocab]: what p has left there, not normalized
    token: int


Event = Union[Begun, Choice, Coin, Redraw, "Verdict"]
Watch = Callable[[Event], None]
