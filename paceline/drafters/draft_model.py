"""A smaller model with the same tokenizer drafts; its own KV cache is rolled back to what the target kept.

Sampled under the request's own settings with q recorded, so the rejection rules apply. After a round the
cache holds a trunk of text and guesses, and behind it the rows of the last pass; `_catch_up` keeps the part
of both that became text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.errors import ConfigError
from paceline.core.options import require
from paceline.core.types import Cached, Draft, Request, Segment
from paceline.drafters.base import DrafterContext
from paceline.drafters.grow import TreeConfig, grow
from paceline.drafters.reading import ModelDrafter, Reading, Rows
from paceline.runtime.executor import LocalExecutor

CHUNK = 512  # prompt tokens the draft model reads in one pass


@dataclass(frozen=True, slots=True)
class DraftModelConfig(TreeConfig):
    model: str = ""

    def __post_init__(self) -> None:
        TreeConfig.__post_init__(self)
        require(
            bool(self.model) and isinstance(self.model, str),
            "model",
            self.model,
            "name the draft model: a path, 'default' or a Hugging Face name",
        )


@dataclass(slots=True)
class _State:
    cache: Cached = field(default_factory=Cached)
    fed: list[int] = field(default_factory=list)  # tokens whose K/V the cache holds: text, then guesses
    rows: Rows = field(default_factory=Rows)  # guesses read after them


class DraftModel(ModelDrafter):
    name = "draft_model"
    Config: type[TreeConfig] = DraftModelConfig

    def __init__(self, config: TreeConfig, context: DrafterContext) -> None:
        self.config = config
        self.vocab_size = context.vocab_size or context.executor.config.vocab_size
        self.executor = self._load(context)
        self._states: dict[str, _State] = {}

    def _load(self, context: DrafterContext) -> LocalExecutor:
        assert isinstance(self.config, DraftModelConfig)
        _, tokenizer, executor = context.load_model(self.config.model)
        difference = context.tokenizer.same_as(tokenizer) if context.tokenizer else None
        if difference:
            raise ConfigError(
                f"draft model {self.config.model!r} has another tokenizer than the target ({difference}); "
                "use a draft of the same family"
            )
        return executor

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return grow(self, requests, budgets, self.config, self.name)

    def open(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Reading]:
        readings = [
            r
            for request, b in zip(requests, budgets, strict=True)
            if b and (r := self._start(request, b, requests))
        ]
        self._read_long_prompts(readings)
        return readings

    def _start(self, request: Request, budget: int, batch: Sequence[Request]) -> Reading | None:
        state = self._states.get(request.id) or self._states.setdefault(request.id, self._new_state(request))
        self._catch_up(state, request)
        model = self.executor.config
        if (
            max(request.tokens[state.cache.num_cached :]) >= model.vocab_size
            or request.num_tokens + budget > model.max_context
        ):
            return None  # the text holds a token that the draft model cannot read, or is too long for it
        while not self.executor.kv.reserve(state.cache, request.num_tokens + budget):
            if not self._evict_one(batch):
                return None  # no memory for this one: the target decodes it plainly
        return Reading(request, state.cache, request.tokens[state.cache.num_cached :], budget)

    def _new_state(self, request: Request) -> _State:
        state = _State()
        self.executor.kv.adopt_prefix(state.cache, request.tokens)
        state.fed = request.tokens[: state.cache.num_cached]
        return state

    def _catch_up(self, state: _State, request: Request) -> None:
        """Keep what is still a prefix of the text, leaving at least the newest token to be read."""
        fed, rows, limit = state.fed, state.rows, request.num_tokens - 1
        if len(fed) > limit or fed != request.tokens[: len(fed)]:
            same = next(
                (i for i, (a, b) in enumerate(zip(fed, request.tokens[:limit], strict=False)) if a != b),
                min(len(fed), limit),
            )
            self.executor.kv.rewind(state.cache, same)
        else:
            path: list[int] = []
            edges = {edge: i for i, edge in enumerate(zip(rows.parents, rows.tokens, strict=True))}
            for token in request.tokens[len(fed) : limit]:
                row = edges.get((path[-1] if path else -1, token))
                if row is None:
                    break
                path.append(row)
            self.executor.kv.commit(state.cache, len(fed), path, request.tokens)
        state.fed, state.rows = request.tokens[: state.cache.num_cached], Rows()

    def _read_long_prompts(self, readings: list[Reading]) -> None:
        while long := [r for r in readings if len(r.unread) > CHUNK]:
            r = long[0]
            self.executor.forward([Segment(r.unread[:CHUNK], r.cache, num_logits=0)])
            r.cache.num_cached += CHUNK
            r.unread = r.unread[CHUNK:]

    def close(self, reading: Reading, fed: list[int], rows: Rows) -> None:
        state = self._states[reading.request.id]
        state.fed, state.rows = fed, rows
        self.executor.kv.register(state.cache, fed)

    def _evict_one(self, batch: Sequence[Request]) -> bool:
        """Forget the oldest sequence that is not being drafted now; it will be read again if it comes
        back.
        """
        busy = {r.id for r in batch}
        victim = next((key for key, s in self._states.items() if key not in busy and s.cache.blocks), None)
        if victim is None:
            return False
        self.executor.kv.free(self._states.pop(victim).cache)
        return True

    def release(self, request: Request) -> None:
        state = self._states.pop(request.id, None)
        if state is not None:
            self.executor.kv.free(state.cache)
