"""Counts of speculation, per request and in all. num_tokens == num_accepted + num_own, always."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpecStats:
    num_steps: int = 0  # target passes that spoke for this request
    num_tokens: int = 0  # emitted
    num_drafted: int = 0  # nodes the target checked
    num_accepted: int = 0  # of them, emitted
    num_own: int = 0  # emitted tokens that are the target's own: a bonus or a replacement
    drafted_at: list[int] = field(default_factory=list)  # by depth: rounds whose draft reached it
    accepted_at: list[int] = field(default_factory=list)  # by depth: rounds that accepted it
    accepted_by_source: dict[str, int] = field(default_factory=dict)

    @property
    def tau(self) -> float:
        """Mean tokens per target pass, bonus included."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def alpha(self) -> float:
        """Share of drafted tokens that were accepted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Of the rounds that drafted so deep, the share that accepted so deep."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    def record(self, num_drafted: int, max_depth: int, num_accepted: int, num_tokens: int, source: str) -> None:
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.num_own += num_tokens - num_accepted
        missing = max_depth - len(self.drafted_at)
        self.drafted_at.extend([0] * missing)
        self.accepted_at.extend([0] * missing)
        for depth in range(max_depth):
            self.drafted_at[depth] += 1
            self.accepted_at[depth] += depth < num_accepted
        if num_accepted:
            self.accepted_by_source[source] = self.accepted_by_source.get(source, 0) + num_accepted

    def to_dict(self) -> dict[str, object]:
        return {
            "tau": self.tau,
            "alpha": self.alpha,
            "acceptance_per_position": self.acceptance_per_position,
            "num_steps": self.num_steps,
            "num_tokens": self.num_tokens,
            "num_drafted": self.num_drafted,
            "num_accepted": self.num_accepted,
        }
