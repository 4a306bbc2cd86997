"""Recorded steps at a terminal: the rule, the tree with every node's numbers, what was said, what the cache
keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from paceline.cli.explain_steps import EXPLAINED, Node, Own, Step

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

MARKS = {"accepted": ("✓", "green"), "rejected": ("✗", "red"), "not reached": ("·", "dim")}
NEW_LINE = "⏎"


def shown(text: str) -> str:
    """In quotes, so that spaces are seen, and with nothing that could move a cursor."""
    visible = "".join(c if c.isprintable() else NEW_LINE if c == "\n" else repr(c)[1:-1] for c in text)
    return f'"{visible}"'


def facts(node: Node) -> list[str]:
    """A node's numbers, in the order in which they matter."""
    place = f"position {node.position}" + (f" in slot {node.slot}" if node.slot != node.position else "")
    said = [place]
    if node.p is not None:
        said = [f"p {node.p:.3f}", "q one-hot" if node.q is None else f"q {node.q:.3f}"]
    if node.weight is not None:
        said.append(f"weight {node.weight:.3f}")
    if node.chance is not None:
        said.append(f"chance {node.chance:.3f}")
    if node.draw is not None:
        said.append(f"the target's choice {shown(node.draw)}")
    elif node.q is not None:
        said.append("no coin" if node.coin is None else f"coin {node.coin:.3f}")
    said += [node.fate] if node.p is None else [node.fate, place]
    return [*said, f"by {node.source}"] if node.source else said


def own_line(own: Own) -> str:
    whence = {
        "plain": "nothing was drafted",
        "bonus": "a bonus: all before it stayed",
        "replacement": "in place of what was rejected",
    }
    rest = ", drawn from what p had left" if own.is_from_rest else ""
    likely = ", ".join(f"{shown(text)} {p:.3f}" for text, p in own.likely)
    return f"{shown(own.text)} p {own.p:.3f}, {whence[own.kind]}{rest}; most likely there: {likely}"


def rows_line(step: Step) -> str:
    known = step.num_rows - len(step.nodes)
    rows = f"{step.num_rows} tokens: {known} known, {len(step.nodes)} drafted"
    return f"one pass over {rows}; {step.num_cached} were cached before it"


def kv_line(step: Step) -> str:
    if step.num_cached_after is None:
        return "K/V: the request has ended and its blocks are free"
    moved = f", moved {', '.join(f'{a}→{b}' for a, b in step.moves)}" if step.moves else ""
    blocks = ""
    if step.blocks_after != step.blocks:
        blocks = f"; blocks {_ranges(step.blocks)} → {_ranges(step.blocks_after)}"
    slots = f"kept {_ranges(step.kept)}, dropped {_ranges(step.dropped) or 'none'}{moved}"
    return f"K/V: slots {slots}; {step.num_cached_after} tokens cached{blocks}"


def _ranges(numbers: list[int]) -> str:
    """3-5, 8"""
    pairs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])  # equal within a run
    runs = [[number for _, number in run] for _, run in pairs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def print_step(screen: Console, step: Step, is_new_rule: bool) -> None:
    from rich.text import Text

    screen.rule(f"step {step.number}: {step.rule}", style="dim", align="left")
    if is_new_rule:
        _print(screen, Text(EXPLAINED[step.rule], "dim"))
    _print(screen, Text(rows_line(step)))
    before = Text(f"{shown(step.before)[1:-1]} ", "dim")
    _print(screen, before, Text(shown(step.root), "bold"), Text(f"  position {step.root_slot}", "dim"))
    for guide, node in _drawn(step.nodes, 0):
        mark, style = MARKS[node.fate]
        token, numbers = Text(f"{mark} {shown(node.text)}", style), Text(f"  {'  '.join(facts(node))}")
        _print(screen, Text(guide, "dim"), token, numbers)
    if step.own is not None:
        _print(screen, Text(f"own: {own_line(step.own)}"))
    _print(screen, Text(kv_line(step), "dim"))
    _print(screen, Text("said: " + " ".join(shown(text) for text in step.emitted), "bold"))


def _print(screen: Console, *parts: Text) -> None:
    screen.print(*parts, sep="", soft_wrap=True)


def _drawn(nodes: list[Node], parent: int, guide: str = "") -> Iterator[tuple[str, Node]]:
    """The nodes below a parent, depth first, each behind the lines that lead to it."""
    below = [node for node in nodes if node.parent == parent]
    for node in below:
        is_last = node is below[-1]
        yield f"{guide}{'└─' if is_last else '├─'} ", node
        yield from _drawn(nodes, node.index, f"{guide}{'   ' if is_last else '│  '}")
