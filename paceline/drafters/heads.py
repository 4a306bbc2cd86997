"""What the drafters that run a learned head share: which requests it drafts for and how, and trees grown from
its logits.

Where a request's options are no more than a temperature, the head itself guesses a chain, in one call. Where
they need whole distributions (top-p, penalties, a grammar), and for trees, the draft grows level by level as
a draft model's does. A chain that a head guesses has no q: with a temperature it guesses with the noise that
the target will add, and the target's own choice is what is emitted. Invariant: requests are only read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.core.options import require
from paceline.core.sampling import pick_of
from paceline.core.types import Cached, Draft, Needs, Pick, Request, Seen
from paceline.drafters import registry
from paceline.drafters.base import Drafter, DrafterContext, chain, empty, within
from paceline.drafters.grow import Growth, Level, TreeConfig, grow
from paceline.drafters.head_texts import HeadTexts, Text
from paceline.drafters.reading import Candidate, Reading
from paceline.heads.config import TappedConfig
from paceline.heads.rows import Guesses, Sampler, TreeShape
from paceline.loaders.head_files import Head
from paceline.loaders.heads import open_head

GREEDY = Pick(0.0, 0)
BURST_TREES = {15: TreeShape(4, 5, 15), 31: TreeShape(8, 6, 31), 63: TreeShape(8, 8, 63)}  # by nodes
BURST_DEPTH, MOST_DEVICE_NODES = 6, 64  # of trees that a device grows: all nodes of a row's mask are one word
SURER = 0.8  # times the temperature: a head that is surer than the target is right more often (decision 05)


@dataclass(frozen=True, slots=True)
class HeadDrafterConfig(TreeConfig):
    num_speculative_tokens: int = within(1, 128, 5)
    model: str = ""  # a folder or a Hugging Face name; empty: the head that ships for this target
    # which hidden states of the target the head reads, where its files say it wrongly
    hidden_layers: Sequence[int] | None = None
    # sizes of trees that a device may grow by itself instead of a chain, where that pays
    burst_nodes: Sequence[int] = ()

    def __post_init__(self) -> None:
        TreeConfig.__post_init__(self)
        layers = self.hidden_layers
        ok = layers is None or (isinstance(layers, (list, tuple)) and all(type(n) is int for n in layers))
        remedy = "give a list such as [2, 15, 27]: hidden states after that many layers"
        require(ok, "hidden_layers", layers, remedy)
        remedy = "name the folder of a head, or its Hugging Face name"
        require(isinstance(self.model, str), "model", self.model, remedy)
        remedy = f"give a list of these: {', '.join(map(str, BURST_TREES))}"
        ok = isinstance(self.burst_nodes, (list, tuple)) and all(n in BURST_TREES for n in self.burst_nodes)
        require(ok, "burst_nodes", self.burst_nodes, remedy)

    @property
    def burst_trees(self) -> tuple[TreeShape, ...]:
        """Trees that a device may grow by itself: beside chains, or those that were asked for."""
        if self.confidence_threshold:
            return ()
        if self.tree_width == 1:
            return tuple(BURST_TREES[nodes] for nodes in self.burst_nodes)
        depth = self.tree_depth or min(BURST_DEPTH, MOST_DEVICE_NODES // self.tree_width)
        tree = TreeShape(self.tree_width, depth, self.num_speculative_tokens)
        count = tree.width * tree.depth
        return (tree,) if tree.nodes <= count <= MOST_DEVICE_NODES and tree.nodes < MOST_DEVICE_NODES else ()


# logits [n, draft vocabulary] after the nodes of these growths' frontiers
Reader = Callable[[Sequence[Growth]], torch.Tensor]
Wanted = tuple[Text, int]  # a text, and the most tokens of its draft


class HeadDrafter(Drafter):
    """Base of the drafters with a head. A subclass sets `texts` and `backend`."""

    can_stop = True
    is_eager = True  # whether prompts are read as the target reads them, where requests are few
    Config = HeadDrafterConfig
    texts: HeadTexts
    backend: Any  # what runs the head: heads/rows.py

    def __init__(self, config: HeadDrafterConfig, context: DrafterContext) -> None:
        if context.vocab_size is not None:  # a stage's middle model is not the one the head was trained for
            remedy = "use it beside other drafters, not inside 'staged'"
            raise ConfigError(f"method {self.name!r} drafts for the target alone; {remedy}")
        super().__init__(config)
        # the chance below which a chain is not drafted on; a policy may raise it
        self.least = self.floor = config.confidence_threshold
        self.head = _with_layers(self._open(config, context), config.hidden_layers)
        self.needs = Needs(hidden_layers=self.head.config.hidden_layers)
        self.usual = self.head.config.first_accepted  # what a warning compares with
        self._vocab, ids = context.executor.config.vocab_size, self.head.tensors.get("draft_ids")
        self._ids = None if ids is None else ids.to(context.executor.device)
        self._offers_on_device = context.executor.backend.is_async
        self._tree: TreeConfig = config

    def _open(self, config: HeadDrafterConfig, context: DrafterContext) -> Head:
        folder = config.model or registry.head_folder(self.name, context.checkpoint)
        return open_head(folder, context.checkpoint, (self.name,))

    def _limit_depth(self, most: int) -> None:
        """The head drafts no deeper than this."""
        self._tree = replace(self._tree, tree_depth=min(self._tree.tree_depth or most, most))

    @property
    def longest_chain(self) -> int:
        """That the head itself will be asked to guess; 0 where it drafts trees."""
        return self.config.num_speculative_tokens if self.config.tree_width == 1 else 0

    def guess(self, texts: Sequence[Text], samplers: Sequence[Sampler], steps: int) -> Guesses:
        """Chains of up to `steps` tokens, in one call."""
        raise NotImplementedError

    def reader(self, texts: Sequence[Text]) -> Reader:
        """What the head says of these texts' trees, level by level."""
        raise NotImplementedError

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        chains, samplers, trees = list[Wanted](), list[Sampler](), list[Wanted]()
        for request, budget in zip(requests, budgets, strict=True):
            text, limit = self._text(request), min(budget, self.config.num_speculative_tokens)
            if text is None or not limit:
                continue
            sampler = self._sampler(request) if self.config.tree_width == 1 else None
            if sampler is None:
                trees.append((text, limit))
            else:
                chains.append((text, limit))
                samplers.append(sampler)
        drafts: dict[str, Draft] = {}
        if chains:
            texts, limits = zip(*chains, strict=True)
            tokens, chances = self.guess(texts, samplers, max(limits))
        for i, (text, limit) in enumerate(chains):
            sure = [row[i] for row in chances[:limit] if row[i] >= self.config.confidence_threshold]
            path = [row[i] for row in tokens[: len(sure)]]
            drafts[text.request.id] = chain(text.request, path, self.name, chances=sure)
        drafts |= self._grow(trees) if trees else {}
        return [drafts.get(r.id) or empty(r, self.name) for r in requests]

    def _text(self, request: Request) -> Text | None:
        """None if the head cannot draft for it now: a token but the newest is unseen, or nothing waits."""
        text = self.texts.live.get(request.id)
        return text if text and text.waiting and text.next == len(request.tokens) - 1 else None

    def _sampler(self, request: Request) -> Sampler | None:
        """How the head itself guesses; None: it cannot."""
        pick = request.pick or pick_of(request, empty(request))
        if pick is None or not self.backend.can_guess(pick.temperature):
            return None
        return Sampler(SURER * pick.temperature, pick.seed, len(request.tokens))

    def _grow(self, wanted: Sequence[Wanted]) -> dict[str, Draft]:
        requests, logits_after = [text.request for text, _ in wanted], self.reader([t for t, _ in wanted])
        readings = [Reading(t.request, Cached(), t.request.tokens[-1:], limit) for t, limit in wanted]
        growths = [Growth(reading, self._tree, number) for number, reading in enumerate(readings)]
        is_greedy = self._offers_on_device and all(pick_of(r, empty(r)) == GREEDY for r in requests)

        def read(growing: Sequence[Growth]) -> Level:
            logits = logits_after(growing)
            return self._offers(logits) if is_greedy else self._spread(logits)

        drafts = grow(growths, read, self.name)
        return {request.id: draft for request, draft in zip(requests, drafts, strict=True)}

    def _offers(self, logits: torch.Tensor) -> list[list[Candidate]]:
        """The likeliest tokens after each of many nodes: the host waits for the device once a level."""
        best = logits.float().softmax(-1).topk(min(self._tree.tree_width, logits.shape[-1]))
        tokens = best.indices if self._ids is None else self._ids[best.indices]
        chances, ids = torch.stack([best.values.double(), tokens.double()]).tolist()
        rows = [zip(*row, strict=True) for row in zip(ids, chances, strict=True)]
        return [[Candidate(int(token), chance) for token, chance in row if chance > 0] for row in rows]

    def _spread(self, logits: torch.Tensor) -> torch.Tensor:
        """[n, draft vocabulary] -> [n, vocabulary]; what cannot be drafted is impossible."""
        if self._ids is None:
            return logits
        full = torch.full((len(logits), self._vocab), -torch.inf, device=logits.device)
        full[:, self._ids] = logits.float()
        return full

    def observe(self, seen: Sequence[Seen]) -> None:
        self.texts.observe(seen, self.is_eager)

    @cached_property
    def identity(self) -> str:
        """Of the head's numbers, wherever its files are."""
        digest = hashlib.blake2b(repr(self.head.config).encode(), digest_size=8)
        for name, tensor in sorted(self.head.tensors.items()):
            digest.update(name.encode() + tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def kept(self, count: int) -> dict[str, torch.Tensor]:
        return self.texts.kept(count)

    def export(self, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
        return self.texts.export(tokens)

    def adopt(self, tokens: Sequence[int], parts: Mapping[str, torch.Tensor]) -> None:
        self.texts.adopt(tokens, parts)

    def release(self, request: Request) -> None:
        self.texts.finish(request)


def _with_layers(head: Head, layers: Sequence[int] | None) -> Head:
    if layers is None:
        return head
    config = head.config
    if not isinstance(config, TappedConfig) or len(layers) != len(config.taps):
        remedy = f"{head.where} reads layers {config.hidden_layers}, give as many or leave it out"
        raise ConfigError(f"hidden_layers is {list(layers)}; {remedy}")
    return head._replace(config=replace(config, taps=tuple(layers)))
