"""What every drafter shares: how it is made, and the small steps between logits and a Draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.core.options import require
from paceline.core.tree import Tree
from paceline.core.types import Draft, Request

if TYPE_CHECKING:
    from paceline.loaders.checkpoint import Checkpoint
    from paceline.loaders.tokenizer import Tokenizer
    from paceline.runtime.runner import Runner


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a drafter may use of the target. It never sees the engine."""

    runner: Runner
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    load_model: Callable[
        ..., tuple[Checkpoint, Tokenizer, Runner]
    ]  # (model, dtype of the target if left out): another model with a KV cache as long as the target's
    vocab_size: int | None = None  # of the texts that are drafted, where the runner's is another


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """The one option all drafters have. K: how many tokens to draft."""

    num_speculative_tokens: int = 4

    def __post_init__(self) -> None:
        k = self.num_speculative_tokens
        require(
            isinstance(k, int) and not isinstance(k, bool) and 1 <= k <= 128,
            "num_speculative_tokens",
            k,
            "use a whole number from 1 to 128",
        )


def empty(request: Request, source: str = "") -> Draft:
    return Draft(Tree.chain(request.tokens[-1]), source, chances=(1.0,))


def chain(
    request: Request,
    tokens: Sequence[int],
    source: str,
    q: Sequence[torch.Tensor | None] = (),
    chances: Sequence[float] | None = None,
) -> Draft:
    """A chain draft, ended after the first token that would end the request. q: the distribution each token
    was sampled from.
    """
    if not request.stop_ids.isdisjoint(tokens):
        length = next(i + 1 for i, t in enumerate(tokens) if t in request.stop_ids)
        tokens, q, chances = tokens[:length], q[:length], chances and chances[:length]
    known = {i: row for i, row in enumerate(q) if row is not None} if q else None
    return Draft(
        Tree.chain(request.tokens[-1], tokens),
        source,
        known or None,
        None if chances is None else (1.0, *chances),
    )


def planted(
    request: Request, tokens: Sequence[int], parents: Sequence[int], chances: Sequence[float], source: str
) -> Draft:
    """A draft from its nodes, the root first, which are a tree. What would follow a token that ends the
    request is left out.
    """
    if not request.stop_ids.isdisjoint(tokens[1:]):
        kept, places = [0], {0: 0}
        for node in range(1, len(tokens)):
            parent = parents[node]
            if parent in places and not (parent and tokens[parent] in request.stop_ids):
                places[node] = len(kept)
                kept.append(node)
        tokens, chances = [tokens[node] for node in kept], [chances[node] for node in kept]
        parents = [-1, *(places[parents[node]] for node in kept[1:])]
    return Draft(Tree.known(tuple(tokens), tuple(parents)), source, chances=tuple(chances))


def fit_vocabulary(logits: torch.Tensor, size: int) -> torch.Tensor:
    """Cut or pad the last dimension to the target's vocabulary: families pad theirs differently, and padding
    is never drafted.
    """
    width = logits.shape[-1]
    if width >= size:
        return logits[..., :size]
    return torch.nn.functional.pad(logits, (0, size - width), value=-torch.inf)
