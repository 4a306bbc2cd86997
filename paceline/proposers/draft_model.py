"""A smaller model with the same tokenizer drafts; its own KV cache is rolled back to what the target kept.

Sampled under the request's own settings with q recorded, so the rejection rules apply. After a round the model has read its
own guesses but the last; `_rewind` keeps those that became text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.config import require
from paceline.errors import ConfigError
from paceline.proposers.base import DrafterConfig, Surroundings
from paceline.proposers.chains import Chain, drafts_of, grow
from paceline.runtime.runner import Runner
from paceline.types import Cached, Draft, Needs, Request, Seen, Segment

CHUNK = 512  # prompt tokens the draft model reads in one pass


@dataclass(frozen=True, slots=True)
class DraftModelConfig(DrafterConfig):
    model: str = ""

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        require(
            bool(self.model) and isinstance(self.model, str),
            "model",
            self.model,
            "name the draft model: a path, 'default' or a Hugging Face name",
        )


@dataclass(slots=True)
class _State:
    cache: Cached = field(default_factory=Cached)
    fed: list[int] = field(default_factory=list)  # tokens whose K/V the cache holds
    num_settled: int = 0  # how many of them are known to be text, which only grows


class DraftModel:
    name = "draft_model"
    needs = Needs()
    is_free = False
    Config: type[DrafterConfig] = DraftModelConfig

    def __init__(self, config: DrafterConfig, surroundings: Surroundings) -> None:
        self.config = config
        self.vocab_size = surroundings.runner.config.vocab_size
        self.runner = self._load(surroundings)
        self._states: dict[str, _State] = {}

    def _load(self, surroundings: Surroundings) -> Runner:
        assert isinstance(self.config, DraftModelConfig)
        _, tokenizer, runner = surroundings.load_model(self.config.model)
        difference = surroundings.tokenizer.same_as(tokenizer) if surroundings.tokenizer else None
        if difference:
            raise ConfigError(
                f"draft model {self.config.model!r} has another tokenizer than the target ({difference}); use a draft of the same family"
            )
        return runner

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        chains = [c for r, b in zip(requests, budgets, strict=True) if b and (c := self._start(r, b, requests))]
        self._read_long_prompts(chains)
        grow(self.runner, chains, self.vocab_size)
        for grown in chains:
            self._remember(grown)
        return drafts_of(chains, requests, self.name)

    def _start(self, request: Request, budget: int, batch: Sequence[Request]) -> Chain | None:
        state = self._states.get(request.id) or self._states.setdefault(request.id, self._new_state(request))
        self._rewind(state, request)
        model = self.runner.config
        if max(request.tokens[state.cache.num_cached :]) >= model.vocab_size or request.num_tokens + budget > model.max_context:
            return None  # the text holds a token that the draft model cannot read, or is too long for it
        while not self.runner.kv.reserve(state.cache, request.num_tokens + budget):
            if not self._evict_one(batch):
                return None  # no memory for this one: the target decodes it plainly
        return Chain(request, state.cache, budget, request.tokens[state.cache.num_cached :])

    def _new_state(self, request: Request) -> _State:
        state = _State()
        self.runner.kv.adopt_prefix(state.cache, request.tokens)
        state.fed = request.tokens[: state.cache.num_cached]
        state.num_settled = len(state.fed)
        return state

    def _rewind(self, state: _State, request: Request) -> None:
        """Keep what is still a prefix of the text, leaving at least the newest token to be read."""
        limit = min(len(state.fed), request.num_tokens - 1)
        same = next((i for i in range(min(state.num_settled, limit), limit) if state.fed[i] != request.tokens[i]), limit)
        self.runner.kv.rewind(state.cache, same)
        del state.fed[same:]

    def _read_long_prompts(self, chains: list[Chain]) -> None:
        while long := [c for c in chains if len(c.pending) > CHUNK]:
            c = long[0]
            self.runner.forward([Segment(c.pending[:CHUNK], c.cache, num_logits=0)])
            c.cache.num_cached += CHUNK
            c.pending = c.pending[CHUNK:]

    def _remember(self, grown: Chain) -> None:
        state = self._states[grown.request.id]
        state.fed = [*grown.request.tokens, *grown.tokens][: state.cache.num_cached]
        state.num_settled = grown.request.num_tokens
        self.runner.kv.commit(state.cache, 0, range(state.cache.num_cached), state.fed)

    def _evict_one(self, batch: Sequence[Request]) -> bool:
        """Forget the oldest sequence that is not being drafted now; it will be read again if it comes back."""
        busy = {r.id for r in batch}
        victim = next((key for key, s in self._states.items() if key not in busy and s.cache.blocks), None)
        if victim is None:
            return False
        self.runner.kv.free(self._states.pop(victim).cache)
        return True

    def observe(self, seen: Sequence[Seen]) -> None:
        """Nothing to do: the next round rewinds to what became text."""

    def release(self, request: Request) -> None:
        state = self._states.pop(request.id, None)
        if state is not None:
            self.runner.kv.free(state.cache)
