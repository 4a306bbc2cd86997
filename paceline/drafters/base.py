"""What every drafter shares: its interface, how its options are checked, and how a Draft is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.options import is_whole, require
from paceline.core.tree import Tree
from paceline.core.types import Draft, Needs, Request, Seen
from paceline.heads.rows import BurstBackend, Feed, Matcher, Sampler, TreeShape

if TYPE_CHECKING:
    from paceline.loaders.checkpoint import Checkpoint
    from paceline.loaders.tokenizer import Tokenizer
    from paceline.runtime.executor import LocalExecutor

Ids = Sequence[int]
Rows = Sequence[torch.Tensor | None]  # [vocab] each


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter may use of the target. It never sees the engine."""

    executor: LocalExecutor
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    # (model, dtype of the target if left out, skipped: layers): another model, with a KV cache as long as the
    # target's
    load_model: Callable[..., tuple[Checkpoint, Tokenizer, LocalExecutor]]
    vocab_size: int | None = None  # of the texts that are drafted, where the executor's is another


def within(low: float, high: float, default: float | None) -> Any:
    """A numeric option with its least and its most; floats allow any number between them, ints whole ones."""
    return field(default=default, metadata={"within": (low, high)})


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """A drafter's options, checked on construction: flags, and numbers within their limits."""

    num_speculative_tokens: int = within(1, 128, 4)  # K: how many tokens to draft

    def __post_init__(self) -> None:
        for option in fields(self):
            name, value = option.name, getattr(self, option.name)
            if isinstance(option.default, bool):
                require(isinstance(value, bool), name, value, "use true or false")
            if "within" in option.metadata and (value is not None or option.default is not None):
                low, high = option.metadata["within"]
                ok, remedy = is_whole(value), f"use a whole number from {low:,} to {high:,}"
                if isinstance(high, float):
                    ok, remedy = ok or isinstance(value, float), f"use a number from {low:g} to {high:g}"
                require(ok and low <= value <= high, name, value, remedy)


class Drafter:
    """Proposes a token tree for each request and learns from what was accepted. It never changes a request.

    A draft with q is sampled: how long it is may depend on what was drawn before a node, never on the node's
    own token."""

    name = ""
    Config: type[DrafterConfig] = DrafterConfig
    needs = Needs()
    is_free = False  # drafts without running a model
    can_rewind = False  # may be shown guesses as text, and see them taken back
    can_stop = False  # ends a draft by itself where a path's probability falls below `least`
    least = 0.0
    floor = 0.0  # what `least` is at least, as its options say
    usual = 0.0  # how often its first token was right where it was trained; 0: not known
    burst_backend: BurstBackend | None = None  # what runs its head and the target without the host

    def __init__(self, config: Any, context: DrafterContext | None = None) -> None:
        self.config = config

    @property
    def members(self) -> tuple[Drafter, ...]:
        """The drafters that a policy may ask one by one."""
        return (self,)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """One draft each, of at most that many nodes; maybe empty."""
        pairs = zip(requests, budgets, strict=True)
        return [self.draft(request, n) if n else empty(request, self.name) for request, n in pairs]

    def draft(self, request: Request, budget: int) -> Draft:
        """The same for one request: enough for a drafter to which requests have nothing in common."""
        raise NotImplementedError

    def observe(self, seen: Sequence[Seen]) -> None:
        """What came of a pass, after the commit."""

    def release(self, request: Request) -> None:
        """The request has ended."""

    @property
    def identity(self) -> str:
        """Of the model it drafts with, where it has something to hand over to another engine."""
        return ""

    def kept(self, count: int) -> dict[str, torch.Tensor]:
        """What `export` gives of so many tokens, without memory; nothing where the tokens say it all."""
        return {}

    def export(self, tokens: Ids) -> dict[str, torch.Tensor]:
        """What it has of a prompt's whole blocks; maybe nothing."""
        return {}

    def adopt(self, tokens: Ids, parts: Mapping[str, torch.Tensor]) -> None:
        """The same, come from another engine's."""

    def burst_length(self, requests: Sequence[Request], most: int) -> int:
        """Tokens of each draft in a burst of these requests, at most `most`; 0: it can have none."""
        return 0

    def burst_trees(self, requests: Sequence[Request], most: int) -> Sequence[TreeShape]:
        """Trees of at most that many nodes that it can draft in such a burst instead."""
        return ()

    def burst_feeds(self, requests: Sequence[Request], length: int) -> tuple[list[Feed], list[Sampler]]:
        """What its head has not read yet, and how it chooses tokens."""
        return [], []

    def matcher(self, request: Request) -> Matcher | None:
        """Where the tables lie with which a kernel drafts by itself, without a model."""
        return None

    def end_round(self, requests: Sequence[Request], num_read: int | None) -> None:
        """A round of a burst is about to be committed; its head has read this many rows (None: all)."""


def empty(request: Request, source: str = "") -> Draft:
    return Draft(Tree.chain(request.tokens[-1]), source, chances=(1.0,))


def chain(
    request: Request, tokens: Ids, source: str, q: Rows = (), chances: Sequence[float] | None = None
) -> Draft:
    """A chain draft, ended after the first token that would end the request. q: the distribution each token
    was sampled from."""
    if not request.stop_ids.isdisjoint(tokens):
        length = next(i + 1 for i, t in enumerate(tokens) if t in request.stop_ids)
        tokens, q, chances = tokens[:length], q[:length], chances and chances[:length]
    known = {i: row for i, row in enumerate(q) if row is not None} or None
    reached = None if chances is None else (1.0, *chances)
    return Draft(Tree.chain(request.tokens[-1], tokens), source, known, reached)


def tree_draft(request: Request, tokens: Ids, parents: Ids, chances: Sequence[float], source: str) -> Draft:
    """A draft from its nodes, the root first, which are a tree. What would follow a token that ends the
    request is left out."""
    draft = Draft(Tree.known(tuple(tokens), tuple(parents)), source, chances=tuple(chances))
    ends = request.stop_ids
    if ends.isdisjoint(tokens[1:]):
        return draft
    kept = [0]
    for node, parent in enumerate(parents[1:], start=1):
        if parent in kept and not (parent and tokens[parent] in ends):
            kept.append(node)
    return draft.cut(kept)


def num_same(a: Ids, b: Ids) -> int:
    """How many of their first tokens are the same."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(a), len(b)))


def fit_vocabulary(logits: torch.Tensor, size: int) -> torch.Tensor:
    """Cut or pad the last dimension to the target's vocabulary: families pad theirs differently, and padding
    is never drafted."""
    width = logits.shape[-1]
    if width >= size:
        return logits[..., :size]
    return torch.nn.functional.pad(logits, (0, size - width), value=-torch.inf)
