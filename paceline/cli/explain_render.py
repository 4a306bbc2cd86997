"""Recorded steps for a reader: at a terminal as they come, or as one HTML file without script, style or
picture from elsewhere, every text escaped. Both have the same lines: the rule, the tree with every node's
numbers, what was said, what the cache keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import groupby

from rich.console import Console
from rich.text import Text

from paceline.cli.explain_steps import EXPLAINED, Node, Own, Step

NEW_LINE = "⏎"
# By a node's fate: the mark and style at a terminal, the class in HTML.
MARKS = {
    "accepted": ("✓", "green", "accepted"),
    "rejected": ("✗", "red", "rejected"),
    "not reached": ("·", "dim", "unreached"),
}
WHENCE = {
    "plain": "nothing was drafted",
    "bonus": "a bonus: all before it stayed",
    "replacement": "in place of what was rejected",
}
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .3rem; }
.why { opacity: .75; } .kv { opacity: .75; font-size: .9rem; margin: 0; }
code { font: 13px/1.4 ui-monospace, monospace; white-space: pre-wrap; }
ul { list-style: none; border-left: 1px solid #8888; margin: .2rem 0 .2rem .6rem; padding-left: .9rem; }
li { margin: .15rem 0; } .fact { font-size: .85rem; opacity: .8; margin-left: .6rem; }
.accepted { color: #14803c; font-weight: 600; } .rejected { color: #c0271d; text-decoration: line-through; }
.unreached { opacity: .5; }
.said { font-weight: 600; } .drafted { background: #14803c33; border-radius: 3px; }
"""


def shown(text: str) -> str:
    """In quotes, so that spaces are seen, and with nothing that could move a cursor."""
    visible = "".join(c if c.isprintable() else NEW_LINE if c == "\n" else repr(c)[1:-1] for c in text)
    return f'"{visible}"'


def _facts(node: Node) -> list[str]:
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


def _own_line(own: Own) -> str:
    rest = ", drawn from what p had left" if own.is_from_rest else ""
    likely = ", ".join(f"{shown(text)} {p:.3f}" for text, p in own.likely)
    return f"{shown(own.text)} p {own.p:.3f}, {WHENCE[own.kind]}{rest}; most likely there: {likely}"


def _rows_line(step: Step) -> str:
    known = step.num_rows - len(step.nodes)
    rows = f"{step.num_rows} tokens: {known} known, {len(step.nodes)} drafted"
    return f"one pass over {rows}; {step.num_cached} were cached before it"


def _kv_line(step: Step) -> str:
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
    screen.rule(f"step {step.number}: {step.rule}", style="dim", align="left")
    if is_new_rule:
        _print(screen, Text(EXPLAINED[step.rule], "dim"))
    _print(screen, Text(_rows_line(step)))
    before = Text(f"{shown(step.before)[1:-1]} ", "dim")
    _print(screen, before, Text(shown(step.root), "bold"), Text(f"  position {step.root_slot}", "dim"))
    for guide, node in _drawn(step.nodes, 0):
        mark, style, _ = MARKS[node.fate]
        token, numbers = Text(f"{mark} {shown(node.text)}", style), Text(f"  {'  '.join(_facts(node))}")
        _print(screen, Text(guide, "dim"), token, numbers)
    if step.own is not None:
        _print(screen, Text(f"own: {_own_line(step.own)}"))
    _print(screen, Text(_kv_line(step), "dim"))
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


def page(prompt: str, model: str, steps: list[Step]) -> str:
    said = [(escape(text), i < len(step.path) - 1) for step in steps for i, text in enumerate(step.emitted)]
    answer = "".join(f'<span class="drafted">{text}</span>' if drafted else text for text, drafted in said)
    parts = [
        f"<h1>{escape(model)}: how it answered</h1>",
        f"<p>Prompt: <code>{escape(shown(prompt))}</code></p>",
        f"<p>Answer so far, drafted tokens marked: <code>{answer}</code></p>",
    ]
    for rule in dict.fromkeys(step.rule for step in steps):
        parts.append(f'<p class="why"><b>{rule}</b>. {escape(EXPLAINED[rule])}</p>')
    body = "\n".join([*parts, *map(_section, steps)])
    head = f'<meta charset="utf-8"><title>paceline explain</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _section(step: Step) -> str:
    below: dict[
        int, str
    ] = {}  # a node's children as list items; they come after it, so it starts from the end
    for node in reversed(step.nodes):
        token = f'<code class="{MARKS[node.fate][2]}">{escape(shown(node.text))}</code>'
        numbers = f'<span class="fact">{escape(" · ".join(_facts(node)))}</span>'
        inside = f"<ul>{below[node.index]}</ul>" if node.index in below else ""
        below[node.parent] = f"<li>{token}{numbers}{inside}</li>" + below.get(node.parent, "")
    tree = f"<ul>{below[0]}</ul>" if below else ""
    own = f"<p>own: {escape(_own_line(step.own))}</p>" if step.own is not None else ""
    said = escape(" ".join(shown(text) for text in step.emitted))
    text = f"{escape(shown(step.before)[1:-1])} <b>{escape(shown(step.root))}</b>"
    return (
        f"<section><h2>Step {step.number}: {step.rule}</h2><p>{escape(_rows_line(step))}</p>"
        f"<p><code>{text}</code> position {step.root_slot}</p>{tree}{own}"
        f'<p class="kv">{escape(_kv_line(step))}</p><p class="said">said: <code>{said}</code></p></section>'
    )
