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

from paceline.server import usage
from paceline.server.errors import ApiError, from_engine


@dataclass(slots=True)
class Delta:
    """What one choice has said since it was last read."""

    index: int
    text: str = ""
    num_tokens: int = 0
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, list[Any]] | None = None
    end: str | None = None

    def add(self, said: Mapping[str, Any]) -> None:
        self.text += said.get("t", "")
        self.num_tokens += said["n"]
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
    parts: list[dict[str, Any]]  # the `add` messages
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
        return len(self.parts) * self.num_choices

    @property
    def is_over(self) -> bool:
        return self.error is not None or len(self.ends) == self.total_choices

    @property
    def is_admitted(self) -> bool:
        return len(self.prompts) == len(self.parts)

    def admit(self, part: int, message: Mapping[str, Any]) -> None:
        self.prompts[part] = message["num_prompt"]
        self.echoes[part] = message["echo"]
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
        while not self.is_admitted and self.error is None:
            await self._wait()
        if self.error is not None:
            raise self.error

    async def news(self) -> list[Delta]:
        """What is new, as soon as there is something; nothing at the end. Raises what went wrong."""
        while not self._news and not self.is_over:
            await self._wait()
        if self._news:
            news, self._news = self._news, {}
            return [news[index] for index in sorted(news)]
        if self.error is not None:
            raise self.error
        return []

    async def everything(self) -> list[Delta]:
        """The whole answer, one Delta a choice. Raises what went wrong."""
        while not self.is_over:
            await self._wait()
        if self.error is not None:
            raise self.error
        return [self._news.get(index, Delta(index, end="stop")) for index in range(self.total_choices)]

    async def _wait(self) -> None:
        self._signal.clear()
        await self._signal.wait()

    def stats(self) -> usage.Counts:
        return usage.added(end["stats"] for end in self.ends.values())

    def timings(self) -> dict[str, float]:
        now = time.monotonic()
        decoding, num = self.last_at - (self.first_at or now), self.num_tokens - self.num_first
        return {
            "queue_s": round(min((end["queue_s"] for end in self.ends.values()), default=0.0), 4),
            "first_token_s": round((self.first_at or now) - self.arrived, 4),
            "total_s": round(now - self.arrived, 4),
            "tokens_per_second": round(num / decoding, 2) if decoding > 0 else 0.0,
        }

    def usage(self) -> usage.Counts:
        firsts = [self.ends.get(part * self.num_choices, {}) for part in range(len(self.parts))]
        prompts, cached = sum(self.prompts.values()), sum(first.get("cached_tokens", 0) for first in firsts)
        return usage.usage_json(prompts, cached, self.num_tokens, self.stats(), self.timings())
