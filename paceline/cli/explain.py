"""`paceline explain`: a few real steps of the engine, with the numbers by which drafted tokens were kept or
not. Invariant: an HTML file is what a terminal shows, every text escaped, and needs nothing from elsewhere.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

import paceline
from paceline import SamplingParams
from paceline.api.options import EngineOptions
from paceline.cli import console, options
from paceline.cli.options import LOADING, MAIN, Drafting, Given, Sampling, group
from paceline.core.options import option, options_of

if TYPE_CHECKING:
    from paceline.api.results import Chunk
    from paceline.cli.explain_steps import Node, Step

# By a node's fate.
MARKS = {"accepted": ("✓", "green"), "rejected": ("✗", "red"), "not reached": ("·", "dim")}
WHENCE = {"plain": "nothing was drafted", "bonus": "a bonus: all before it stayed"}
WHENCE["replacement"] = "in place of what was rejected"
WIDTH = 110  # columns of a page
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>paceline explain</title><style>
:root {{ color-scheme: light dark; }} body {{ max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }}
pre {{ font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; }}
{stylesheet}</style></head>
<body><pre>{code}</pre></body></html>
"""


@dataclass(frozen=True, kw_only=True)
class Explain:
    """Walk through real steps: what was drafted, why it was kept or not, and what was said instead.

    p is the target's probability of a drafted token, q the drafter's (one-hot where nothing was drawn),
    chance that of being kept. The rule follows from the request: greedy at temperature 0, coupled with a
    seed, else deterministic, block or siblings, by how drafts are made.

    Examples:

      paceline explain "Say it twice: the line rides on. The line" --method ngram

      paceline explain "Why is the sky blue?" --method early_exit -k 3 --temperature 0.8 --html steps.html

      paceline explain "Count to ten." --temperature 0.8 --seed 7 --steps 3 --json"""

    prompt: str = option(MISSING, MAIN, options.PROMPT_HELP, is_argument=True)
    engine: Given = group([*LOADING, *options_of(EngineOptions, "speculative_config"), *options_of(Drafting)])
    sampling: Given = group(options_of(Sampling, "seed"))
    temperature: float = option(0.0, MAIN, "0 is greedy; above, add --seed or see draws.")
    top_p: float = option(1.0, MAIN, "Keep the likeliest tokens up to this share.")
    steps: int = option(6, MAIN, "Show this many steps.", min=1)
    max_tokens: int = option(64, MAIN, "Stop after this many tokens.", min=1)
    raw: bool = option(False, MAIN, options.RAW_HELP)
    html: Path | None = option(None, MAIN, "Also write the steps to this HTML file.")
    json: bool = option(False, MAIN, options.JSON_HELP)


def explain(asked: Explain) -> None:
    from paceline.cli.explain_steps import Recorder

    options.check_target("--html", asked.html)
    is_chosen = any(name in asked.engine for name in ("speculative_config", "method", "draft_model"))
    engine = options.engine_options(asked.engine | ({} if is_chosen else {"method": "ngram"}))
    chosen: dict[str, Any] = {"top_p": asked.top_p, "max_tokens": asked.max_tokens, **asked.sampling}
    params = SamplingParams(temperature=asked.temperature, **chosen)
    text, screen = console.given_prompt(asked.prompt), console.stdout(is_quiet=asked.json)

    def settle(chunk: Chunk) -> None:
        recorder.settle([token.id for token in chunk.tokens], llm.engine.executor.decoder.woken)
        print_step(screen, recorder.steps)

    with paceline.LLM(engine) as llm:
        llm.engine.watch = recorder = Recorder(llm.tokenizer)
        prompt = console.as_prompt(llm, text, asked.raw)
        answer = console.collect(islice(llm.stream(prompt, params), asked.steps), settle)  # a chunk is a step
        name = llm.checkpoint.name
    if asked.json:
        config = engine.speculative_config
        report = {
            "prompt": text,
            "method": config["method"] if isinstance(config, dict) else config,
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.completion.finish_reason if answer.completion is not None else None,
            "steps": [step.to_json() for step in recorder.steps],
        }
        console.write_json(console.stdout(), report)
    if asked.html is not None:
        options.write_result(asked.html, page(text, name, recorder.steps))
        console.write(console.stderr(), f"wrote {asked.html}\n")
    if answer.is_interrupted:
        raise KeyboardInterrupt


def shown(text: str) -> str:
    """In quotes, so that spaces are seen, and with nothing that could move a cursor."""
    visible = "".join(c if c.isprintable() else "⏎" if c == "\n" else repr(c)[1:-1] for c in text)
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


def _kv_line(step: Step) -> str:
    if step.num_cached_after is None:
        return "K/V: the request has ended and its blocks are free"
    moved = f", moved {', '.join(f'{a}→{b}' for a, b in step.moves)}" if step.moves else ""
    is_moved = step.blocks_after != step.blocks
    blocks = f"; blocks {_ranges(step.blocks)} → {_ranges(step.blocks_after)}" if is_moved else ""
    slots = f"kept {_ranges(step.kept)}, dropped {_ranges(step.dropped) or 'none'}{moved}"
    return f"K/V: slots {slots}; {step.num_cached_after} tokens cached{blocks}"


def _ranges(numbers: list[int]) -> str:
    """3-5, 8"""
    pairs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])  # equal within a run
    runs = [[number for _, number in run] for _, run in pairs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def print_step(screen: Console, steps: list[Step]) -> None:
    """The last of them; a rule is explained where it is met first."""
    *before, step = steps
    screen.rule(f"step {step.number}: {step.rule}", style="dim", align="left")
    if step.rule not in {other.rule for other in before}:
        _print(screen, Text(step.explanation, "dim"))
    rows = f"{step.num_rows} tokens: {step.num_rows - len(step.nodes)} known, {len(step.nodes)} drafted"
    woke = f"; it woke {step.experts:.1f} experts a layer" if step.experts is not None else ""
    _print(screen, Text(f"one pass over {rows}; {step.num_cached} were cached before it{woke}"))
    text = Text(f"{shown(step.before)[1:-1]} ", "dim")
    _print(screen, text, Text(shown(step.root), "bold"), Text(f"  position {step.root_slot}", "dim"))
    for guide, node in _drawn(step.nodes, 0):
        mark, style = MARKS[node.fate]
        token, numbers = Text(f"{mark} {shown(node.text)}", style), Text(f"  {'  '.join(_facts(node))}")
        _print(screen, Text(guide, "dim"), token, numbers)
    if (own := step.own) is not None:
        rest = ", drawn from what p had left" if own.is_from_rest else ""
        likely = ", ".join(f"{shown(text)} {p:.3f}" for text, p in own.likely)
        came = f"{shown(own.text)} p {own.p:.3f}, {WHENCE[own.kind]}{rest}"
        _print(screen, Text(f"own: {came}; most likely there: {likely}"))
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
    screen = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    _print(screen, Text(f"{model}: how it answered", "bold"))
    _print(screen, Text(f"Prompt: {shown(prompt)}"))
    said = [(text, i < len(step.path) - 1) for step in steps for i, text in enumerate(step.emitted)]
    answer = [Text(text, "green" if is_drafted else "") for text, is_drafted in said]
    _print(screen, Text("Answer so far, drafted tokens marked: "), *answer)
    for count in range(len(steps)):
        print_step(screen, steps[: count + 1])
    return screen.export_html(code_format=PAGE)
