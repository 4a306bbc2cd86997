"""One client's request while it is being answered: what has been said and not yet been read, and how it
ended. Invariant: a reader that is slow holds nothing up. What is said meanwhile is joined into one `Delta` a
choice, so what is held is at most the answer itself, whose length is bounded.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

from pydantic import TypeAdapter

from paceline.engine.stats import SpecStats
from paceline.server.responses import ApiError, from_engine

_STATS = TypeAdapter(SpecStats)


@dataclass(slots=True)
class Delta:
    """What one choice has said since it was last read."""

    index: int
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, list[Any]] = field(default_factory=dict)  # tokens and steps, where wanted
    end: str | None = None

    def add(self, said: Mapping[str, Any]) -> None:
        self.text += said.get("t", "")
        self.logprobs += said.get("lp", ())
        for name, new in said.get("d", {}).items():
            self.details.setdefault(name, []).extend(new)
        self.end = said.get("end", self.end)


@dataclass(slots=True)
class Call:
    """Several prompts of one request are several parts, each with n choices."""

    name: str
    num_parts: int
    num_choices: int  # of each part
    arrived: float = field(default_factory=time.monotonic)
    prompts: dict[int, int] = field(default_factory=dict)  # by part: its number of tokens, once admitted
    echoes: dict[int, str] = field(default_factory=dict)  # by part: its prompt as text
    prompt_ends: dict[int, str] = field(default_factory=dict)  # by part: the last words of its prompt
    first_at: float | None = None
    last_at: float = 0.0
    num_first: int = 0  # tokens that came with the first
    num_tokens: int = 0
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)  # by choice: its usage, and why it ended
    error: ApiError | None = None
    _news: dict[int, Delta] = field(default_factory=dict)
    _signal: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def total_choices(self) -> int:
        return self.num_parts * self.num_choices

    @property
    def is_over(self) -> bool:
        return self.error is not None or len(self.ends) == self.total_choices

    def admit(self, part: int, prompt: Mapping[str, Any]) -> None:
        self.prompts[part], self.echoes[part] = prompt["num_prompt"], prompt["echo"]
        self.prompt_ends[part] = prompt["end"]
        self._signal.set()

    def fail(self, error: ApiError) -> None:
        if not self.is_over:
            self.error = error
        self._signal.set()

    def hear(self, part: int, said: Mapping[str, Any]) -> None:
        if "error" in said:
            return self.fail(from_engine(said["error"]))
        index = part * self.num_choices + said["i"]
        self.last_at = time.monotonic()
        if self.first_at is None:
            self.first_at = self.last_at
        if self.last_at == self.first_at:
            self.num_first += said["n"]
        self.num_tokens += said["n"]
        self._news.setdefault(index, Delta(index)).add(said)
        if "end" in said:
            self.ends[index] = said["usage"] | {"reason": said["end"]}
        self._signal.set()
        return None

    async def admitted(self) -> None:
        """Until all prompts were taken; raises if one was not."""
        while len(self.prompts) < self.num_parts and self.error is None:
            await self._wait()
        if self.error is not None:
            raise self.error

    async def news(self, is_whole: bool) -> list[Delta]:
        """What is new by choice, as soon as there is something, or when all has been said; nothing at the
        end. Raises what went wrong."""
        while not self.is_over and (is_whole or not self._news):
            await self._wait()
        if self.error is not None and (is_whole or not self._news):
            raise self.error
        news, self._news = self._news, {}
        return [news[index] for index in sorted(news)]

    async def _wait(self) -> None:
        self._signal.clear()
        await self._signal.wait()

    def timings(self) -> dict[str, float]:
        now = time.monotonic()
        decoding, num = self.last_at - (self.first_at or now), self.num_tokens - self.num_first
        return {
            "queue_s": round(min((end["queue_s"] for end in self.ends.values()), default=0.0), 4),
            "first_token_s": round((self.first_at or now) - self.arrived, 4),
            "total_s": round(now - self.arrived, 4),
            "tokens_per_second": round(num / decoding, 2) if decoding > 0 else 0.0,
        }

    def counts(self) -> dict[str, Any]:
        """Tokens so far. Those of a prompt count once, however many choices it has."""
        num_prompt, num = sum(self.prompts.values()), self.num_tokens
        return {"prompt_tokens": num_prompt, "completion_tokens": num, "total_tokens": num_prompt + num}

    def usage(self) -> dict[str, Any]:
        """OpenAI's, and ours."""
        firsts = [self.ends.get(part * self.num_choices, {}) for part in range(self.num_parts)]
        stats = added(end["stats"] for end in self.ends.values())
        speculative = json.loads(json.dumps(stats.to_dict()), parse_float=lambda text: round(float(text), 4))
        return {
            **self.counts(),
            "prompt_tokens_details": {"cached_tokens": sum(end.get("cached_tokens", 0) for end in firsts)},
            "completion_tokens_details": {
                "reasoning_tokens": sum(end["reasoning_tokens"] for end in self.ends.values()),
                "accepted_prediction_tokens": stats.num_accepted,
                "rejected_prediction_tokens": stats.num_drafted - stats.num_accepted,
            },
            "speculative": speculative,
            "timings": self.timings(),
        }

    def speculation(self) -> dict[str, Any]:
        """As vLLM's per-request metrics. The histogram's place j: steps whose draft had j tokens accepted."""
        stats = added(end["stats"] for end in self.ends.values())
        num_steps = stats.num_drafts
        mean = 1 + (stats.num_accepted / num_steps if num_steps else 0.0)
        return {
            "mean_acceptance_length": round(mean, 4),
            "draft_acceptance_rate": round(stats.alpha, 4),
            "acceptance_histogram": [a - b for a, b in pairwise([num_steps, *stats.accepted_at, 0])],
            "num_spec_steps": num_steps,
            "num_accepted_draft_tokens": stats.num_accepted,
            "num_draft_tokens": stats.num_drafted,
        }


def added(parts: Iterable[Mapping[str, Any]]) -> SpecStats:
    """The sum of statistics that came as JSON."""
    return _STATS.validate_python(functools.reduce(_plus, parts, {}))


def _plus(one: Any, other: Any) -> Any:
    """Numbers add, lists place by place, dicts key by key."""
    if isinstance(other, Mapping):
        return {**one, **{name: _plus(one.get(name, type(value)()), value) for name, value in other.items()}}
    if isinstance(other, list):
        return [a + b for a, b in zip_longest(one, other, fillvalue=0)]
    return one + other
