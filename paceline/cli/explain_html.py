"""Recorded steps as one HTML file: no script, no style or picture from elsewhere, every text escaped."""

from __future__ import annotations

from html import escape

from paceline.cli.explain_steps import EXPLAINED, Node, Step
from paceline.cli.explain_text import facts, kv_line, own_line, rows_line, shown

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
CLASSES = {"accepted": "accepted", "rejected": "rejected", "not reached": "unreached"}


def page(prompt: str, model: str, steps: list[Step]) -> str:
    rules = dict.fromkeys(step.rule for step in steps)
    parts = [
        f"<h1>{escape(model)}: how it answered</h1>",
        f"<p>Prompt: <code>{escape(shown(prompt))}</code></p>",
        f"<p>Answer so far, drafted tokens marked: <code>{_answer(steps)}</code></p>",
        *(f'<p class="why"><b>{rule}</b>. {escape(EXPLAINED[rule])}</p>' for rule in rules),
        *(_step(step) for step in steps),
    ]
    head = f'<meta charset="utf-8"><title>paceline explain</title><style>{STYLE}</style>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _answer(steps: list[Step]) -> str:
    said = [(text, i < len(step.path) - 1) for step in steps for i, text in enumerate(step.emitted)]
    mark = '<span class="drafted">{}</span>'
    return "".join(mark.format(escape(text)) if is_drafted else escape(text) for text, is_drafted in said)


def _step(step: Step) -> str:
    own = f"<p>own: {escape(own_line(step.own))}</p>" if step.own is not None else ""
    said = escape(" ".join(shown(text) for text in step.emitted))
    text = f"{escape(shown(step.before)[1:-1])} <b>{escape(shown(step.root))}</b>"
    return (
        f"<section><h2>Step {step.number}: {step.rule}</h2><p>{escape(rows_line(step))}</p>"
        f"<p><code>{text}</code> position {step.root_slot}</p>{_tree(step)}{own}"
        f'<p class="kv">{escape(kv_line(step))}</p><p class="said">said: <code>{said}</code></p></section>'
    )


def _tree(step: Step) -> str:
    """The tree in one go, whatever its depth: children come after their parents, so it is built from the
    end."""
    inner: dict[int, str] = {}
    for node in reversed(step.nodes):
        inner[node.parent] = _item(node, inner.get(node.index, "")) + inner.get(node.parent, "")
    return f"<ul>{inner[0]}</ul>" if inner else ""


def _item(node: Node, below: str) -> str:
    numbers = escape(" · ".join(facts(node)))
    inside = f"<ul>{below}</ul>" if below else ""
    token = f'<code class="{CLASSES[node.fate]}">{escape(shown(node.text))}</code>'
    return f'<li>{token}<span class="fact">{numbers}</span>{inside}</li>'
