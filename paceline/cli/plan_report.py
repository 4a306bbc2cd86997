"""What `paceline plan` found, as tables or as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.cli import console
from paceline.cli.bench_console import new_table
from paceline.engine import costs
from paceline.measure.tuning.plan import Footing, Gains, Training, training

if TYPE_CHECKING:
    from rich.console import Console

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
UNITS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


class Report(NamedTuple):
    name: str
    target: Footing
    draft_name: str | None = None
    draft: Footing | None = None
    alphas: tuple[float, ...] = ()
    ks: tuple[int, ...] = ()
    budget: float | None = None

    @property
    def gains(self) -> Gains:
        return Gains(self.target, self.draft)

    @property
    def training(self) -> Training | None:
        return training(self.budget, self.target) if self.budget is not None else None

    @property
    def memory(self) -> dict[str, Any]:
        """Bytes of both models and their K/V, and what fits."""
        target, draft = self.target, self.draft
        held = {"target_weights": target.weight_bytes, "target_kv": target.kv_bytes}
        if draft is not None:
            held |= {"draft_weights": draft.weight_bytes, "draft_kv": draft.kv_bytes}
        total, beside = sum(held.values()), draft.context * draft.kv_bytes_per_token if draft else 0
        most = target.most_sequences(draft.weight_bytes if draft else 0, beside) if target.context else None
        return {
            **held,
            "total": total,
            "available": target.hardware.memory,
            "fits": total <= target.hardware.memory,
            "most_sequences": most,
        }

    def to_json(self) -> dict[str, Any]:
        target, gains, trained = self.target, self.gains, self.training
        return {
            "model": {"name": self.name, **_figures(target)},
            "draft": None if self.draft is None else {"name": self.draft_name, **_figures(self.draft)},
            "hardware": {
                "name": target.hardware.name,
                "bandwidth": target.hardware.bandwidth,
                "flops": target.hardware.product_flops(target.dtype),
                "memory": target.hardware.memory,
                "ridge": target.hardware.ridge(target.dtype),
            },
            "batch": target.batch,
            "context": target.context,
            "passes": [_pass(target, n) for n in ROWS],
            "free_tokens": max(target.free_rows - 1, 0),
            "draft_cost": gains.draft_cost,
            "speedups": [_speedups(gains, alpha, self.ks) for alpha in self.alphas],
            "break_even_alpha": {k: gains.break_even(k) for k in self.ks},
            "memory": self.memory,
            "training": None if trained is None else trained._asdict(),
        }


def _figures(footing: Footing) -> dict[str, Any]:
    return {
        "parameters": footing.num_parameters,
        "dtype": footing.dtype,
        "kv_dtype": footing.kv_dtype,
        "weight_bytes": footing.weight_bytes,
        "bytes_read": footing.bytes_read,
        "kv_bytes_per_token": footing.kv_bytes_per_token,
        "kv_bytes": footing.kv_bytes,
        "tokens_per_second": footing.batch / footing.seconds(1),
    }


def _pass(footing: Footing, num_rows: int) -> dict[str, Any]:
    work = footing.work(num_rows)
    return {
        "tokens": num_rows,
        "flops": work.flops,
        "bytes": work.num_bytes,
        "intensity": work.intensity,
        "bound": "memory" if footing.is_memory_bound(num_rows) else "arithmetic",
        "ms": 1000 * footing.seconds(num_rows),
        "relative": footing.relative(num_rows),
    }


def _speedups(gains: Gains, alpha: float, ks: tuple[int, ...]) -> dict[str, Any]:
    best = gains.best_k(alpha)
    by_k = {k: {"tokens": costs.expected_tokens(alpha, k), "speedup": gains.speedup(alpha, k)} for k in ks}
    return {"alpha": alpha, "by_k": by_k, "best_k": best, "best_speedup": gains.speedup(alpha, best)}


def print_report(screen: Console, report: Report) -> None:
    _print_models(screen, report)
    _print_passes(screen, report.target)
    _print_speedups(screen, report)
    if report.training is not None:
        _print_training(screen, report, report.training)


def _print_models(screen: Console, report: Report) -> None:
    target, machine, memory = report.target, report.target.hardware, report.memory
    for name, footing in ((report.name, target), (report.draft_name, report.draft)):
        if footing is not None:
            held = f"{_amount(footing.num_parameters)} parameters, {footing.dtype} weights {_amount(footing.weight_bytes)}B"
            kept = f"K/V {_amount(footing.kv_bytes_per_token)}B a token, {_amount(footing.kv_bytes)}B for {footing.batch} x {footing.context}"
            console.write(screen, f"{name}: {held}, {kept} ({footing.kv_dtype})\n")
    limits = f"reads {_amount(machine.bandwidth)}B/s, multiplies {_amount(machine.product_flops(target.dtype))}FLOP/s"
    console.write(
        screen,
        f"{machine.name}: {limits}, ridge at {machine.ridge(target.dtype):.0f} FLOP a byte, {_amount(machine.memory)}B\n",
    )
    fits = "fits" if memory["fits"] else "does not fit"
    most = (
        ""
        if memory["most_sequences"] is None
        else f"; at most {memory['most_sequences']:,} sequences of this context"
    )
    console.write(
        screen, f"memory: {_amount(memory['total'])}B of {_amount(memory['available'])}B, {fits}{most}\n"
    )


def _print_passes(screen: Console, target: Footing) -> None:
    table = new_table("a pass of the target", (), ("tokens", "FLOP/byte", "bound by", "ms", "t(n)/t(1)"))
    for n in ROWS:
        found = _pass(target, n)
        table.add_row(
            str(n),
            f"{found['intensity']:.1f}",
            found["bound"],
            f"{found['ms']:.3g}",
            f"{found['relative']:.2f}",
        )
    screen.print(table)
    free = max(target.free_rows - 1, 0)
    why = (
        "reading the weights takes longer than multiplying"
        if free
        else "multiplying takes longer than reading already"
    )
    console.write(screen, f"Drafted tokens checked for free, a sequence: {free} ({why}).\n")
    console.write(screen, f"Plain decoding: at most {target.batch / target.seconds(1):,.1f} tokens/s.\n")


def _print_speedups(screen: Console, report: Report) -> None:
    from rich.text import Text

    gains = report.gains
    cost = (
        "drafts cost nothing"
        if report.draft is None
        else f"a drafted token costs {gains.draft_cost:.3f} of a pass"
    )
    table = new_table(
        f"speedup over plain decoding, {cost}",
        ("α",),
        (*(f"K={k}" for k in report.ks), "best K", "speedup"),
        folds=False,
    )
    for alpha in report.alphas:
        best = gains.best_k(alpha)
        cells = [gains.speedup(alpha, k) for k in report.ks]
        shown = [Text(f"{cell:.2f}", style="green" if cell >= 1 else "red") for cell in cells]
        table.add_row(f"{alpha:g}", *shown, str(best), f"{gains.speedup(alpha, best):.2f}")
    edges = [gains.break_even(k) for k in report.ks]
    table.add_row("pays from", *("never" if edge is None else f"{edge:.2f}" for edge in edges), "", "")
    screen.print(table)
    console.write(
        screen,
        "α: chance that a drafted token is accepted; E[tokens a pass] = (1 - α^(K+1)) / (1 - α), over K drafts and t(K+1)\n",
    )


def _print_training(screen: Console, report: Report, found: Training) -> None:
    edge = costs.break_even_alpha(4, found.draft_cost, report.target.relative(5))
    pays = "never pays with K = 4" if edge is None else f"pays from α = {edge:.2f} with K = 4"
    size = f"{_amount(found.parameters)} parameters on {_amount(found.tokens)} tokens"
    console.write(
        screen,
        f"training a drafter with {found.flops:.3g} FLOPs: {size} (C = 6ND, D = 20N), about {found.hours:.3g} hours here; "
        f"a token of it costs {found.draft_cost:.3f} of a pass and {pays}\n",
    )


def _amount(number: float) -> str:
    """12.3 G"""
    for unit, size in UNITS:
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g} "
