"""The readable half of `paceline verify`: two tables, each difference by name, one verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.cli.verify_equality import NEAR_TIE

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.cli.verify_distribution import RuleResult
    from paceline.cli.verify_equality import Check

MAX_NAMED = 10  # differences printed for each check


def print_report(screen: Console, checks: list[Check], rules: list[RuleResult]) -> None:
    _print_checks(screen, checks)
    _print_differences(screen, checks)
    _print_rules(screen, rules)
    num_bad = sum(bool(check.differences) for check in checks) + sum(not rule.is_ok for rule in rules)
    total = len(checks) + len(rules)
    if num_bad:
        screen.print(f"{num_bad} of {total} checks found a difference", style="bold red")
    else:
        passed = f"all {total} checks passed: drafts changed the time and not the text"
        screen.print(passed, style="bold green")
    if ties := sum(check.num_ties for check in checks):
        num_texts = sum(check.num_prompts for check in checks)
        what = f"{ties} of {num_texts} texts part at a near tie, where logits are within {NEAR_TIE}: "
        why = "half precision rounds differently in passes of other shapes; --exact does not"
        screen.print(what + why, style="yellow")


def _print_checks(screen: Console, checks: list[Check]) -> None:
    from rich.table import Table

    headings = ("drafter", "mode", "T", "batch", "prompts", "identical", "τ")
    table = Table(*headings, title="the same text as plain decoding", title_justify="left")
    for check in checks:
        num_same = check.num_prompts - len(check.differences)
        same = "[green]yes[/green]"
        if check.differences:
            same = f"[bold red]no[/bold red] ({num_same} of {check.num_prompts})"
        if check.num_ties:
            same += f", {check.num_ties} near ties"
        cells = (check.drafter, check.mode.name, check.mode.temperature, check.batch, check.num_prompts)
        table.add_row(*map(str, cells), same, f"{check.tau:.2f}")
    screen.print(table)


def _print_differences(screen: Console, checks: list[Check]) -> None:
    """Where each text first parts from the plain one."""
    for check in checks:
        for found in check.differences[:MAX_NAMED]:
            mode = f"{check.mode.name}, T={check.mode.temperature}"
            where = f"{check.drafter}, {mode}, batch {check.batch}, prompt {found.prompt_id}"
            what = f"token {found.position} is {found.drafted}, plain decoding says {found.plain}"
            screen.print(f"{where}: {what}", style="red", markup=False, soft_wrap=True)
        if len(check.differences) > MAX_NAMED:
            screen.print(f"... and {len(check.differences) - MAX_NAMED} more prompts", style="red")


def _print_rules(screen: Console, rules: list[RuleResult]) -> None:
    from rich.table import Table

    title = "the same distribution as the target (chi-square)"
    table = Table("rule", "p-value", "", title=title, title_justify="left")
    for rule in rules:
        verdict = "[green]ok[/green]" if rule.is_ok else "[bold red]differs[/bold red]"
        table.add_row(rule.rule, f"{rule.p_value:.4f}", verdict)
    screen.print(table)
