"""What `paceline tune` found, as a table with advice or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.cli import console
from paceline.cli.bench_console import new_table
from paceline.engine import costs
from paceline.measure.tuning.findings import Finding, Findings, Row

if TYPE_CHECKING:
    from rich.console import Console

WORTH = 1.02  # a speedup that is no more than this may be noise
AHEAD = 1.05  # by which a fixed length must beat the policy, which adapts, to be recommended instead
SHOWN_DEPTHS = 4
LEGEND = """α by depth: how often a token was right where one was guessed after tokens that were; drafted, τ: tokens guessed and written a
step; predicted: from what was guessed and the costs of passes and of drafting; measured: in turn with plain decoding.
"""


class Report(NamedTuple):
    model: str
    found: Findings
    num_asked: int  # prompts
    profile: Path | None  # where it was saved

    def to_json(self) -> dict[str, Any]:
        found = self.found
        return {
            "model": self.model,
            "prompts": found.num_prompts,
            "tokens": found.num_tokens,
            "plain_tokens_per_second": found.plain,
            "passes": found.costs.to_json(),
            "host_seconds": found.host,
            "drafters": {drafter.name: _drafter_json(drafter) for drafter in found.drafters},
            "auto": found.auto,
            "recommended": recommended(found),
            "profile": str(self.profile) if self.profile is not None else None,
        }


def _drafter_json(drafter: Finding) -> dict[str, Any]:
    return {
        "acceptance_by_depth": list(drafter.acceptance),
        "first_ask_seconds": drafter.entering,
        ("ask_seconds" if drafter.is_free else "token_seconds"): drafter.asking,
        "lengths": [{**row.prediction._asdict(), "measured": row.measured} for row in drafter.rows],
        "best_k": drafter.best.prediction.k,
        "predicted": [prediction.speedup for prediction in drafter.line],
    }


def recommended(found: Findings) -> str | dict[str, Any] | None:
    """A speculative_config: "auto", a drafter with its length, or None where nothing gains."""
    best = max(found.drafters, key=lambda drafter: drafter.best.measured or 0.0)
    gain, auto = best.best.measured or 0.0, found.auto or 0.0
    if max(gain, auto) <= WORTH:
        return None
    return (
        "auto"
        if gain < AHEAD * auto
        else {"method": best.name, "num_speculative_tokens": best.best.prediction.k}
    )


def print_report(screen: Console, report: Report) -> None:
    found = report.found
    passes = ", ".join(f"{rows}: {1e3 * s:.2f}" for rows, s in found.costs.seconds.items())
    console.write(
        screen,
        f"{report.model}: plain decoding {found.plain:,.1f} tokens/s; a pass over so many tokens takes, ms: {passes}\n",
    )
    console.write(
        screen, f"{found.num_prompts} prompts, {found.num_tokens:,} tokens, greedy, one request at a time\n"
    )
    if found.num_prompts < report.num_asked:
        console.write(
            screen,
            f"({report.num_asked - found.num_prompts} prompts left out for want of time; raise --seconds)\n",
            style="yellow",
        )
    _print_table(screen, found)
    console.write(screen, LEGEND, style="dim")
    for drafter in found.drafters:
        console.write(screen, f"{_verdict(drafter)}\n")
    console.write(screen, f"{_advice(found)}\n", style="bold")


def _print_table(screen: Console, found: Findings) -> None:
    table = new_table(
        "speedup over plain decoding",
        ("drafter",),
        ("K", "drafted", "τ", "predicted", "measured", "", "α by depth"),
        folds=False,
    )
    for drafter in found.drafters:
        for row in drafter.rows:
            is_first, is_best = row is drafter.rows[0], row is drafter.best
            alphas = (
                " ".join(f"{alpha:.2f}" for alpha in drafter.acceptance[:SHOWN_DEPTHS]) if is_first else ""
            )
            name = drafter.name if is_first else ""
            table.add_row(
                name, *_cells(row), "best" if is_best else "", alphas, style="bold" if is_best else None
            )
    if found.auto is not None:
        table.add_row("auto", "", "", "", "", f"{found.auto:.2f}", "", "")
    screen.print(table)


def _cells(row: Row) -> list[str]:
    p = row.prediction
    measured = "-" if row.measured is None else f"{row.measured:.2f}"
    return [str(p.k), f"{p.num_drafted:.2f}", f"{p.tau:.2f}", f"{p.speedup:.2f}", measured]


def _verdict(drafter: Finding) -> str:
    """What it would gain, or why it does not."""
    best = drafter.best
    p, gain = best.prediction, best.measured or best.prediction.speedup
    notes = ""
    if not drafter.is_free and drafter.entering > 2 * drafter.line[-1].k * drafter.asking:
        notes = f"; beside that it reads each prompt itself, {1e3 * drafter.entering:.0f} ms here"
    if gain > WORTH:
        return f"{drafter.name}: gains {gain:.2f}x with K = {p.k}{notes}"
    edge = costs.break_even_alpha(p.k, p.draft_cost, p.verify_cost)
    pays = "even perfect drafts would not pay" if edge is None else f"it would pay from α = {edge:.2f}"
    cost = p.k * p.draft_cost + p.verify_cost
    return f"{drafter.name}: gains nothing ({gain:.2f}x at best, K = {p.k}): a step costs {cost:.2f} plain ones, {pays}{notes}"


def _advice(found: Findings) -> str:
    choice = recommended(found)
    if choice is None:
        return "Use none of them here: nothing gains. auto does so by itself, at no cost."
    if choice == "auto":
        return f"Use auto, the default: {found.auto:.2f}x, and it adapts to the text."
    assert isinstance(choice, dict)
    gain = max(drafter.best.measured or 0.0 for drafter in found.drafters)
    beside = f" (auto: {found.auto:.2f}x)" if found.auto is not None else ""
    return f"Use --method {choice['method']} -k {choice['num_speculative_tokens']}: {gain:.2f}x{beside}."
