"""What `paceline demo` found: two answers to one prompt, as a table or as JSON.

Invariant: a speed is only named where something was timed; the tokens of the first step came with the prompt
and are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.cli import console

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.cli.streaming import Answer
    from paceline.engine.stats import SpecStats


@dataclass(frozen=True, slots=True)
class Comparison:
    prompt: str
    method: str
    plain: Answer
    drafted: Answer

    @property
    def is_same(self) -> bool:
        return self.plain.token_ids == self.drafted.token_ids

    @property
    def speedup(self) -> float | None:
        is_timed = self.plain.is_timed and self.drafted.is_timed
        return self.drafted.tokens_per_second / self.plain.tokens_per_second if is_timed else None

    def to_json(self) -> dict[str, Any]:
        stats = _stats(self.drafted)
        return {
            "prompt": self.prompt,
            "method": self.method,
            "plain": _answer_json(self.plain),
            "drafted": _answer_json(self.drafted),
            "tau": round(stats.tau, 4),
            "alpha": round(stats.alpha, 4) if stats.num_drafted else None,
            "speedup": None if self.speedup is None else round(self.speedup, 4),
            "identical": self.is_same,
        }


def _stats(answer: Answer) -> SpecStats:
    assert answer.completion is not None, "a stream that was not interrupted ends with its result"
    return answer.completion.stats


def _answer_json(answer: Answer) -> dict[str, Any]:
    speed = round(answer.tokens_per_second, 2) if answer.is_timed else None
    return {"text": answer.text, "token_ids": answer.token_ids, "tokens_per_second": speed}


def print_table(screen: Console, found: Comparison) -> None:
    from rich.table import Table

    table = Table(title_justify="left")
    for heading in ("", "tokens/s", "τ", "α", "speedup", "identical"):
        table.add_column(heading, justify="left" if heading in ("", "identical") else "right")
    same = "[green]yes[/green]" if found.is_same else "[bold red]no[/bold red]"
    baseline = None if found.speedup is None else 1.0
    rows = [("plain", found.plain, baseline, ""), (found.method, found.drafted, found.speedup, same)]
    for name, answer, ratio, cell in rows:
        stats = _stats(answer)
        speed = f"{answer.tokens_per_second:.1f}" if answer.is_timed else "-"
        alpha = f"{stats.alpha:.2f}" if stats.num_drafted else "-"
        table.add_row(name, speed, f"{stats.tau:.2f}", alpha, "-" if ratio is None else f"{ratio:.2f}x", cell)
    screen.print(table)
    legend = "τ: tokens a step of the target; α: share of drafted tokens accepted; time: decoding alone.\n"
    console.write(screen, legend, style="dim")
    if found.speedup is None:
        why = "There is nothing to time: the whole answer came with the first step; raise --max-tokens.\n"
        console.write(screen, why, style="dim")
