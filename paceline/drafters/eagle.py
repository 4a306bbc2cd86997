"""EAGLE: a head of one layer drafts from the target's hidden states, token by token, then on from its own
output. An MLP speculator and a distilled model draft the same way.

How it reads a text: head_texts.py. With a width the draft is EAGLE-2's tree: the best paths by the product of
its probabilities. Several rounds of draft and check may follow each other without the host: what the head
read in them counts when they land.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.core.types import Request, Seen
from paceline.drafters.base import DrafterContext
from paceline.drafters.grow import Growth
from paceline.drafters.head_texts import HeadTexts, Text
from paceline.drafters.heads import HeadDrafter, HeadDrafterConfig, Reader
from paceline.heads.config import Eagle1Config, MlpSpeculatorConfig
from paceline.heads.rows import Feed, Guesses, Node, Sampler, TreeShape
from paceline.heads.torch_heads import TorchMlpHead
from paceline.loaders.head_files import Head, HeadInput
from paceline.loaders.mtp import mtp_head

CHUNK = 8  # rows: where more wait, all but the last are read before, which needs their keys and values alone


class _Nodes:
    """Where the rows of a growing tree lie, and what the head put out there."""

    def __init__(self, text: Text) -> None:
        self.text, self.places = text, dict[int, int]()
        self.outputs: dict[int, Any] = {}

    def node(self, growth: Growth, n: int) -> Node:
        start, path = self.text.count, [n]
        self.places[n] = start + len(self.places)
        while growth.parents[path[-1]] > 0:
            path.append(growth.parents[path[-1]])
        others, source = [self.places[each] for each in reversed(path)], self.outputs[growth.parents[n]]
        position, token = start - 1 + len(path), growth.tokens[n]
        return Node(self.text.place, self.places[n], position, token, source, start, others)


class Eagle(HeadDrafter):
    name = "eagle"
    reads_texts = True  # and so may draft in bursts, where the backend has them
    backend: Any  # a ChainHead

    def __init__(self, config: HeadDrafterConfig, context: DrafterContext) -> None:
        super().__init__(config, context)
        self.backend = self._load(context)
        self.texts = HeadTexts(self.backend if self.reads_texts else None, CHUNK)
        length = self.longest_chain if not config.confidence_threshold else 0
        trees = config.burst_trees
        if (length or trees) and self.head.config.hidden_layers and self.reads_texts:
            executor = context.executor
            given = executor.decoder, executor.memory.layers, self.backend, length, trees
            self.burst_backend = executor.backend.burst(*given)

    def _load(self, context: DrafterContext) -> Any:
        executor, is_normed = context.executor, isinstance(self.head.config, Eagle1Config)
        norm = context.checkpoint.tensor("norm.weight") if is_normed else None
        blocks = executor.memory.num_blocks
        given = HeadInput(self.head, executor.decoder, blocks, self.longest_chain, norm)
        return executor.backend.chain_head(given)

    def guess(self, texts: Sequence[Text], samplers: Sequence[Sampler], steps: int) -> Guesses:
        return self.backend.guess(self._feeds(texts), samplers, steps, self.least)

    def _feeds(self, texts: Sequence[Text]) -> list[Feed]:
        return self.texts.feeds(texts)

    def reader(self, texts: Sequence[Text]) -> Reader:
        feeds, trees = self._feeds(texts), [_Nodes(text) for text in texts]

        def logits_after(growing: Sequence[Growth]) -> torch.Tensor:
            rows = [(trees[growth.number], growth, n) for growth in growing for n in growth.frontier]
            if trees[0].outputs:
                output = self.backend.level([tree.node(growth, n) for tree, growth, n in rows])
            else:
                output = self.backend.begin(feeds)
            for (tree, _, n), source in zip(rows, output.outputs, strict=True):
                tree.outputs[n] = source
            return output.logits

        return logits_after

    def burst_length(self, requests: Sequence[Request], most: int) -> int:
        """Drafts that are not weighed on the device have the length that is recorded."""
        backend = self.burst_backend
        length = 0 if backend is None else min(self.longest_chain, backend.longest(len(requests)))
        if backend is None or (most < length and not backend.is_weighing):
            return 0
        return min(most, length) if all(self._text(request) for request in requests) else 0

    def burst_trees(self, requests: Sequence[Request], most: int) -> Sequence[TreeShape]:
        if self.burst_backend is None or not all(self._text(request) for request in requests):
            return ()
        return [tree for tree in self.burst_backend.trees(len(requests)) if tree.nodes <= most]

    def burst_feeds(self, requests: Sequence[Request], length: int) -> tuple[list[Feed], list[Sampler]]:
        feeds = [self.texts.unread(self.texts.live[request.id], length + 1) for request in requests]
        return feeds, [sampler for sampler in map(self._sampler, requests) if sampler is not None]

    def end_round(self, requests: Sequence[Request], num_read: int | None) -> None:
        for request in requests:
            text = self.texts.live.get(request.id)
            if text is not None and text.has_begun:
                text.skip(request.cache.num_cached) if num_read is None else text.take(num_read)


class Mtp(Eagle):
    """A module of the target's own checkpoint, trained with it to predict one token further; it drafts more
    by reading its own output."""

    name = "mtp"

    def _open(self, config: HeadDrafterConfig, context: DrafterContext) -> Head:
        if config.model:
            remedy = "mtp is in the target's own files, leave it out"
            raise ConfigError(f"model is {config.model!r:.80}; {remedy}")
        return mtp_head(context.checkpoint)


class MlpSpeculator(Eagle):
    """Smaller than EAGLE's layer: a state that starts as the target's hidden state takes in tokens."""

    name = "mlp_speculator"
    reads_texts = is_eager = False

    def _load(self, context: DrafterContext) -> TorchMlpHead:
        config, norm = self.head.config, context.checkpoint.tensor("norm.weight")
        assert isinstance(config, MlpSpeculatorConfig)
        self._limit_depth(config.num_predict)
        return TorchMlpHead(config, self.head.tensors, norm, context.executor.device)

    def _feeds(self, texts: Sequence[Text]) -> list[Feed]:
        return [Feed(None, 0, text.request.tokens[-1:], [text.waiting[-1]]) for text in texts]


class Distilled(Eagle):
    """A small model distilled from the target: it reads the target's embeddings and writes a reduced
    vocabulary. It needs nothing of the target but the text, so it reads what it missed by itself."""

    name = "draft"

    def _text(self, request: Request) -> Text:
        return self.texts.of(request)

    def _feeds(self, texts: Sequence[Text]) -> list[Feed]:
        """What it has not read of each text, the newest token last."""
        feeds = []
        for text in texts:
            tokens = text.request.tokens
            if not text.has_begun:
                text.has_begun, text.place = True, self.backend.place()
            text.count = min(text.count, len(tokens) - 1)  # as many as there are: asked again
            if len(tokens) - text.count > CHUNK:
                self.backend.read(Feed(text.place, text.count, tokens[text.count : -1], ()))
                text.count = len(tokens) - 1
            feeds.append(Feed(text.place, text.count, tokens[text.count :], ()))
            text.count = len(tokens)
        return feeds

    def observe(self, seen: Sequence[Seen]) -> None:
        """Nothing to do: it reads the text itself."""
