"""Drafters that run a model: a smaller one with the same tokenizer, the target's own weights in fewer bits,
or the target's first layers.

They sample under the request's own settings and record q, so the rejection rules apply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from paceline.core.errors import ConfigError
from paceline.core.options import is_whole, require
from paceline.core.types import Cached, Draft, PassSizes, Request, Segment
from paceline.drafters.base import Drafter, DrafterContext, Ids, empty, fit_vocabulary, num_same, within
from paceline.drafters.grow import Edge, Growth, TreeConfig, grow
from paceline.drafters.reading import Reading
from paceline.runtime.executor import LocalExecutor
from paceline.runtime.kv_cache import whole_blocks

if TYPE_CHECKING:
    from paceline.loaders.checkpoint import Checkpoint
    from paceline.loaders.tokenizer import Tokenizer

CHUNK, MOST_RECORDED = 512, 16  # prompt tokens read in one pass; requests whose early exits are recorded


@dataclass(frozen=True, slots=True)
class DraftModelConfig(TreeConfig):
    model: str = ""
    dtype: str = "auto"  # of its weights; auto: the target's
    skip_layers: Sequence[int] = ()  # that it does without: quicker, and right less often

    def __post_init__(self) -> None:
        TreeConfig.__post_init__(self)
        remedy = "name the draft model: a path, 'default' or a Hugging Face name"
        require(bool(self.model) and isinstance(self.model, str), "model", self.model, remedy)
        require(isinstance(self.dtype, str), "dtype", self.dtype, "give a text such as 'int4'")
        layers, remedy = self.skip_layers, "give a list of layers, counted from 0, such as [7, 8]"
        is_list = isinstance(layers, (list, tuple)) and all(is_whole(n) for n in layers)
        require(is_list, "skip_layers", layers, remedy)


@dataclass(frozen=True, slots=True)
class QuantizedConfig(TreeConfig):
    bits: int = 4

    def __post_init__(self) -> None:
        TreeConfig.__post_init__(self)
        require(self.bits in (4, 8), "bits", self.bits, "use 4 or 8")


@dataclass(frozen=True, slots=True)
class EarlyExitConfig(TreeConfig):
    num_speculative_tokens: int = within(1, 128, 2)
    num_layers: int | None = within(1, 1024, None)  # None: two thirds of the target's


def without_recurrence(executor: LocalExecutor) -> LocalExecutor:
    """Guesses of a model are taken back token by token, which a recurrent state cannot be."""
    if executor.config.recurrent is not None:
        raise ConfigError("a model with recurrent layers cannot draft; use auto, ngram, suffix or a head")
    return executor


@dataclass(slots=True)
class _State:
    cache: Cached = field(default_factory=Cached)
    fed: list[int] = field(default_factory=list)  # tokens whose K/V the cache holds: text, then guesses
    rows: Sequence[Edge] = ()  # guesses read after them


class ModelDrafter(Drafter):
    """Reads requests with a model and guesses on: a draft model, or the target's first layers."""

    can_rewind = True
    executor: LocalExecutor
    num_layers: int | None = None  # None: all
    vocab_size: int  # the target's

    def open(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Reading]:
        """Without those that have no budget or that it cannot read."""
        raise NotImplementedError

    def close(self, reading: Reading, fed: list[int], rows: Sequence[Edge] = ()) -> None:
        """fed: the tokens that the cache holds now; rows: guesses whose K/V lie in the slots after them, the
        parent -1 for the last of `fed`."""

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        growths = [Growth(reading, self.config) for reading in self.open(requests, budgets)]

        def logits_after(growing: Sequence[Growth]) -> torch.Tensor:
            segments = [growth.segment() for growth in growing]
            output = self.executor.forward(segments, num_layers=self.num_layers)
            return fit_vocabulary(output.logits, self.vocab_size)

        drafts = {}
        for growth, draft in zip(growths, grow(growths, logits_after, self.name), strict=True):
            fed = [*growth.request.tokens, *growth.path(growth.trunk)]
            self.close(growth.reading, fed, growth.edges())
            drafts[id(growth.request)] = draft
        return [drafts.get(id(r)) or empty(r, self.name) for r in requests]


def load_asked(
    config: DraftModelConfig, context: DrafterContext
) -> tuple[Checkpoint, Tokenizer, LocalExecutor]:
    dtype = () if config.dtype == "auto" else (config.dtype,)
    less = {"skipped": config.skip_layers} if config.skip_layers else {}
    return context.load_model(config.model, *dtype, **less)


class DraftModel(ModelDrafter):
    """A smaller model, whose own KV cache is rolled back to what the target kept: after a round it holds a
    trunk of text and guesses, and behind it the rows of the last pass. What became text of both stays."""

    name = "draft_model"
    Config: type[TreeConfig] = DraftModelConfig

    def __init__(self, config: TreeConfig, context: DrafterContext) -> None:
        super().__init__(config)
        self.vocab_size = context.vocab_size or context.executor.config.vocab_size
        self._identity = ""
        self.executor = without_recurrence(self._load(context))
        self._states: dict[str, _State] = {}

    def _load(self, context: DrafterContext) -> LocalExecutor:
        checkpoint, tokenizer, executor = load_asked(self.config, context)
        self._identity = f"{checkpoint.fingerprint} {self.config.dtype} {sorted(self.config.skip_layers)}"
        difference = context.tokenizer.same_as(tokenizer) if context.tokenizer else None
        if difference:
            what = f"draft model {self.config.model!r} has another tokenizer than the target"
            raise ConfigError(f"{what} ({difference}); use method 'universal', or a draft of its family")
        return executor

    def open(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Reading]:
        pairs = [(request, budget) for request, budget in zip(requests, budgets, strict=True) if budget]
        readings = [r for request, b in pairs if (r := self._start(request, b, requests)) is not None]
        for reading in readings:
            while len(reading.unread) > CHUNK:
                self.executor.forward([Segment(reading.unread[:CHUNK], reading.cache, num_logits=0)])
                reading.cache.num_cached += CHUNK
                reading.unread = reading.unread[CHUNK:]
        return readings

    def _start(self, request: Request, budget: int, batch: Sequence[Request]) -> Reading | None:
        state = self._states.get(request.id)
        if state is None:
            state = self._states[request.id] = _State()
            self.executor.kv.adopt_prefix(state.cache, request.tokens)
            state.fed = request.tokens[: state.cache.num_cached]
        self._catch_up(state, request)
        model, unread = self.executor.config, request.tokens[state.cache.num_cached :]
        if max(unread) >= model.vocab_size or request.num_tokens + budget > model.max_context:
            return None  # the text holds a token that the draft model cannot read, or is too long for it
        while not self.executor.kv.reserve(state.cache, request.num_tokens + budget):
            # Forget the oldest sequence that is not drafted for now; if it comes back it is read again.
            busy = {r.id for r in batch}
            oldest = next((k for k, s in self._states.items() if k not in busy and s.cache.blocks), None)
            if oldest is None:
                return None  # no memory for this one: the target decodes it plainly
            self.executor.kv.free(self._states.pop(oldest).cache)
        return Reading(request, state.cache, unread, budget)

    def _catch_up(self, state: _State, request: Request) -> None:
        """Keep what is still a prefix of the text, leaving at least the newest token to be read."""
        fed, limit = state.fed, request.num_tokens - 1
        if len(fed) > limit or fed != request.tokens[: len(fed)]:
            self.executor.kv.rewind(state.cache, num_same(fed, request.tokens[:limit]))
        else:
            path: list[int] = []
            places = {edge: i for i, edge in enumerate(state.rows)}
            for token in request.tokens[len(fed) : limit]:
                row = places.get((path[-1] if path else -1, token))
                if row is None:
                    break
                path.append(row)
            self.executor.kv.commit(state.cache, len(fed), path, request.tokens)
        state.fed, state.rows = request.tokens[: state.cache.num_cached], ()

    def close(self, reading: Reading, fed: list[int], rows: Sequence[Edge] = ()) -> None:
        state = self._states[reading.request.id]
        state.fed, state.rows = fed, rows
        self.executor.kv.register(state.cache, fed)

    @property
    def identity(self) -> str:
        return self._identity

    def kept(self, count: int) -> dict[str, torch.Tensor]:
        return self.executor.kept(count)

    def export(self, tokens: Ids) -> dict[str, torch.Tensor]:
        """It reads a prompt when it is first asked for a draft, or here."""
        model, kv, cached, count = self.executor.config, self.executor.kv, Cached(), whole_blocks(tokens)
        if max(tokens) >= model.vocab_size or len(tokens) > model.max_context:
            return {}
        kv.adopt_prefix(cached, tokens)
        if kv.reserve(cached, count):
            while cached.num_cached < count:
                chunk = tokens[cached.num_cached : min(cached.num_cached + CHUNK, count)]
                self.executor.forward([Segment(chunk, cached, num_logits=0)])
                cached.num_cached += len(chunk)
            kv.register(cached, tokens[:count])
        kv.free(cached)
        return self.executor.export(tokens)

    def adopt(self, tokens: Ids, parts: Mapping[str, torch.Tensor]) -> None:
        self.executor.adopt(tokens, parts)

    def release(self, request: Request) -> None:
        state = self._states.pop(request.id, None)
        if state is not None:
            self.executor.kv.free(state.cache)


class Quantized(DraftModel):
    """The target's own weights in fewer bits: a draft model that needs no second download."""

    name = "quantized"
    Config = QuantizedConfig

    def _load(self, context: DrafterContext) -> LocalExecutor:
        self._identity = f"int{self.config.bits}"
        return context.load_model(context.checkpoint, f"int{self.config.bits}")[2]


class EarlyExit(ModelDrafter):
    """The target drafts for itself: its first n layers, then its own norm and head.

    It shares the target's KV cache: the prefix is already there, and what drafting writes for the first n
    layers the verify pass writes again, the same values, in the same slots. So there is nothing to roll back.
    """

    name = "early_exit"
    Config = EarlyExitConfig

    def __init__(self, config: EarlyExitConfig, context: DrafterContext) -> None:
        super().__init__(config)
        self.executor, total = without_recurrence(context.executor), context.executor.config.num_layers
        self.num_layers = config.num_layers or max(1, 2 * total // 3)
        require(self.num_layers < total, "num_layers", self.num_layers, f"the target has {total}; use fewer")
        self.executor.record(PassSizes(MOST_RECORDED, config.num_speculative_tokens), depth=self.num_layers)
        self.vocab_size = context.vocab_size or self.executor.config.vocab_size

    def open(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Reading]:
        """The request's own blocks, read on from its newest token."""
        asked = [(request, budget) for request, budget in zip(requests, budgets, strict=True) if budget]
        views = [(r, Cached(r.cache.blocks, r.cache.num_cached), budget) for r, budget in asked]
        return [Reading(r, view, r.tokens[view.num_cached :], budget) for r, view, budget in views]
