"""One client's request while it is being answered: what has been said and not yet been read, and how it
ended.

Invariant: a reader that is slow holds nothing up. What is said meanwhile is joined into one `Delta` a
choice, so what is held is at most the answer itself, whose length is bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.engine.stats import SpecStats
from paceline.server.errors import ApiError, from_engine
from paceline.server.usage import added, rounded


@dataclass(slots=True)
class Delta:
    """What one choice has said since it was last read."""

    index: int
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, list[Any]] | None = None
    end: str | None = None

    def add(self, said: Mapping[str, Any]) -> None:
        self.text += said.get("t", "")
        self.logprobs += said.get("lp", ())
        if "d" in said:
            self.details = self.details or {"tokens": [], "steps": []}
            self.details["tokens"] += said["d"]["tokens"]
            self.details["steps"] += said["d"]["steps"]
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
    first_at: float | None = None
    last_at: float = 0.0
    num_first: int = 0  # tokens that came with the first
    num_tokens: int = 0
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)  # by choice: its usage
    reasons: dict[int, str] = field(default_factory=dict)
    error: ApiError | None = None
    _news: dict[int, Delta] = field(default_factory=dict)
    _signal: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def total_choices(self) -> int:
        return self.num_parts * self.num_choices

    @property
    def is_over(self) -> bool:
        return self.error is not None or len(self.ends) == self.total_choices

    def admit(self, part: int, message: Mapping[str, Any]) -> None:
        self.prompts[part], self.echoes[part] = message["num_prompt"], message["echo"]
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
            self.ends[index], self.reasons[index] = said["usage"], said["end"]
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

    def stats(self) -> SpecStats:
        return added(end["stats"] for end in self.ends.values())

    def timings(self) -> dict[str, float]:
        now = time.monotonic()
        decoding, num = self.last_at - (self.first_at or now), self.num_tokens - self.num_first
        return {
            "queue_s": round(min((end["queue_s"] for end in self.ends.values()), default=0.0), 4),
            "first_token_s": round((self.first_at or now) - self.arrived, 4),
            "total_s": round(now - self.arrived, 4),
            "tokens_per_second": round(num / decoding, 2) if decoding > 0 else 0.0,
        }

    def usage(self) -> dict[str, Any]:
        """OpenAI's, and ours. Tokens of a prompt count once, however many choices it has."""
        firsts = [self.ends.get(part * self.num_choices, {}) for part in range(self.num_parts)]
        num_prompt, stats = sum(self.prompts.values()), self.stats()
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self.num_tokens,
            "total_tokens": num_prompt + self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(end.get("cached_tokens", 0) for end in firsts)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": stats.num_accepted,
                "rejected_prediction_tokens": stats.num_drafted - stats.num_accepted,
            },
            "speculative": rounded(stats.to_dict()),
            "timings": self.timings(),
        }
