"""What the drafters that run a learned head share: who is asked how, and trees grown from a head's logits.

Where a request's options are no more than a temperature, the head itself guesses a chain, in one call. Where
they need whole distributions (top-p, penalties, a grammar), and for trees, the draft grows level by level as
a draft model's does. A chain that a head guesses has no q: with a temperature it guesses with the noise that
the target will add, and the target's own choice is what is emitted. Invariant: requests are only read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch

from paceline.core.errors import ConfigError
from paceline.core.options import require
from paceline.core.sampling import pick_of
from paceline.core.types import Cached, Draft, Needs, Pick, Request, Seen
from paceline.drafters import shipped
from paceline.drafters.base import Drafter, DrafterContext, chain, empty
from paceline.drafters.candidates import Candidate
from paceline.drafters.features import Text
from paceline.drafters.grow import Growth, TreeConfig
from paceline.drafters.reading import Reading
from paceline.heads.config import DflashConfig, EagleConfig
from paceline.heads.rows import Guesses, Speaker
from paceline.loaders.head_files import Head
from paceline.loaders.heads import open_head


@dataclass(frozen=True, slots=True)
class HeadDrafterConfig(TreeConfig):
    num_speculative_tokens: int = 5
    model: str = ""  # a folder or a Hugging Face name; empty: the head that ships for this target
    hidden_layers: Sequence[int] | None = (
        None  # which hidden states of the target the head reads, where its files say it wrongly
    )

    def __post_init__(self) -> None:
        TreeConfig.__post_init__(self)
        layers = self.hidden_layers
        ok = layers is None or (
            isinstance(layers, (list, tuple)) and all(type(layer) is int for layer in layers)
        )
        require(
            ok, "hidden_layers", layers, "give a list such as [2, 15, 27]: hidden states after so many layers"
        )
        require(
            isinstance(self.model, str),
            "model",
            self.model,
            "name the folder of a head, or its Hugging Face name",
        )


class Asked(NamedTuple):
    text: Text
    limit: int
    speaker: Speaker | None  # how the head itself guesses; None: it cannot


GREEDY = Pick(0.0, 0)
Numbered = list[tuple[int, int]]  # (number of a tree, node)


class HeadDrafter(Drafter):
    """Base of the drafters with a head."""

    name = ""
    kinds: tuple[str, ...] = ()
    can_stop = True
    most_waiting: int | None = None  # hidden states kept of a text, if not as many as usual
    Config: type[HeadDrafterConfig] = HeadDrafterConfig

    def __init__(self, config: HeadDrafterConfig, context: DrafterContext) -> None:
        if context.vocab_size is not None:  # a stage's middle model is not the one the head was trained for
            raise ConfigError(
                f"method {self.name!r} drafts for the target alone; use it beside other drafters, "
                f"not inside 'staged'"
            )
        self.config = config
        self.least = self.floor = config.confidence_threshold
        # the chance below which a chain is not drafted on; a policy may raise it
        folder = config.model or shipped.folder_of(self.kinds[0], context.checkpoint)
        self.head = _with_layers(open_head(folder, context.checkpoint, self.kinds), config.hidden_layers)
        self.needs = Needs(hidden_layers=self.head.config.hidden_layers)
        self.usual = self.head.config.first_accepted  # what a warning compares with
        self._vocab = context.executor.config.vocab_size
        self._ids = self.head.tensors.get("draft_ids")
        self._ids_there = None if self._ids is None else self._ids.to(context.executor.device)
        self._offers_on_device = context.executor.backend.is_async
        self._texts: dict[str, Text] = {}

    @property
    def longest_chain(self) -> int:
        """That the head itself will be asked to guess; 0 where it drafts trees."""
        return self.config.num_speculative_tokens if self.config.tree_width == 1 else 0

    def can_guess(self, temperature: float) -> bool:
        raise NotImplementedError

    def guess(self, asked: Sequence[Asked]) -> Guesses:
        """Chains of all that have a speaker, in one call."""
        raise NotImplementedError

    def grow(self, asked: Sequence[Asked]) -> list[Draft]:
        raise NotImplementedError

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        asked = list(self._asked(requests, budgets))
        chains, trees = [a for a in asked if a.speaker is not None], [a for a in asked if a.speaker is None]
        drafts = self._chains(chains) if chains else {}
        if trees:
            drafts.update(
                (a.text.request.id, draft) for a, draft in zip(trees, self.grow(trees), strict=True)
            )
        return [drafts.get(r.id) or empty(r, self.name) for r in requests]

    def _asked(self, requests: Sequence[Request], budgets: Sequence[int]) -> Iterator[Asked]:
        for request, budget in zip(requests, budgets, strict=True):
            text, limit = self._texts.get(request.id), min(budget, self.config.num_speculative_tokens)
            if text is not None and limit and text.is_ready:
                yield Asked(text, limit, self._speaker(request))

    def _speaker(self, request: Request) -> Speaker | None:
        pick = (request.pick or pick_of(request, empty(request))) if self.config.tree_width == 1 else None
        if pick is None or not self.can_guess(pick.temperature):
            return None
        return Speaker(pick.temperature, pick.seed, len(request.tokens))

    def _chains(self, asked: Sequence[Asked]) -> dict[str, Draft]:
        tokens, chances = self.guess(asked)
        least, drafts = self.config.confidence_threshold, {}
        if len(asked) == 1 and not least:
            text, limit, _ = asked[0]
            paths = [row[0] for row in chances[:limit]]
            return {
                text.request.id: chain(
                    text.request, [row[0] for row in tokens[:limit]], self.name, chances=paths
                )
            }
        for i, (text, limit, _) in enumerate(asked):
            sure = [c for c in (row[i] for row in chances[:limit]) if c >= least]
            drafts[text.request.id] = chain(
                text.request, [row[i] for row in tokens[: len(sure)]], self.name, chances=sure
            )
        return drafts

    def grow_all(
        self,
        asked: Sequence[Asked],
        speak: Callable[[list[Growth], Numbered], torch.Tensor],
        config: TreeConfig,
    ) -> list[Draft]:
        """speak: the logits [n, draft vocabulary] after these nodes."""
        growths = [
            Growth(Reading(a.text.request, Cached(), a.text.request.tokens[-1:], a.limit), config)
            for a in asked
        ]
        is_greedy = self._offers_on_device and all(
            pick_of(a.text.request, empty(a.text.request)) == GREEDY for a in asked
        )
        try:
            while pairs := [(i, node) for i, growth in enumerate(growths) for node in growth.frontier]:
                said, first = speak(growths, pairs), 0
                offers = self._offers(said, config.tree_width) if is_greedy else None
                logits = said if is_greedy else self._spread(said)
                for i, group in groupby(pairs, key=lambda pair: pair[0]):
                    end = first + len(list(group))
                    growths[i].extend(logits[first:end], None if offers is None else offers[first:end])
                    first = end
        finally:
            for growth in growths:
                growth.grammar.restore()
        return [growth.draft(self.name) for growth in growths]

    def _offers(self, logits: torch.Tensor, width: int) -> list[list[Candidate]]:
        """The likeliest tokens after each of many nodes at once: the host waits for the device once a
        level.
        """
        best = logits.float().softmax(-1).topk(min(width, logits.shape[-1]))
        tokens = best.indices if self._ids_there is None else self._ids_there[best.indices]
        chances, ids = torch.stack([best.values.double(), tokens.double()]).tolist()
        return [
            [Candidate(int(t), c) for t, c in zip(*row, strict=True) if c > 0]
            for row in zip(ids, chances, strict=True)
        ]

    def _spread(self, logits: torch.Tensor) -> torch.Tensor:
        """[n, draft vocabulary] -> [n, vocabulary]; what cannot be drafted is impossible."""
        if self._ids_there is None:
            return logits
        full = torch.full((len(logits), self._vocab), -torch.inf, device=logits.device)
        full[:, self._ids_there] = logits.float()
        return full

    def observe(self, seen: Sequence[Seen]) -> None:
        for one in seen:
            text = self._texts.get(one.request.id)
            if text is None:
                text = self._texts[one.request.id] = Text.of(one.request, self.most_waiting)
            text.show(one)

    def release(self, request: Request) -> None:
        self._texts.pop(request.id, None)


def _with_layers(head: Head, layers: Sequence[int] | None) -> Head:
    if layers is None:
        return head
    config = head.config
    if not isinstance(config, EagleConfig | DflashConfig) or len(layers) != len(config.taps):
        raise ConfigError(
            f"hidden_layers is {list(layers)}; {head.where} reads layers {config.hidden_layers}, "
            f"give as many or leave it out"
        )
    return replace(head, config=replace(config, taps=tuple(layers)))
