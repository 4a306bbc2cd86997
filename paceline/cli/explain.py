"""`paceline explain`: a few real steps of the engine, with the numbers by which each drafted token was kept
or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.api.options import EngineOptions
from paceline.cli import console, options, parsing
from paceline.cli.options import LOADING, Drafting, Given, Sampling
from paceline.cli.streaming import Answer, as_prompt, checked_prompt, collect
from paceline.core.options import options_of

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.api.results import Chunk
    from paceline.cli.explain_steps import Recorder, Step


def explain(
    prompt: Annotated[str, typer.Argument(help="The prompt, or - to read it from stdin.")],
    engine: Annotated[
        Given, [*LOADING, *options_of(EngineOptions, "speculative_config"), *options_of(Drafting)]
    ],
    sampling: Annotated[Given, options_of(Sampling, "seed")],
    temperature: Annotated[float, typer.Option(help="0 is greedy; above, add --seed or see draws.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this share.")] = 1.0,
    steps: Annotated[int, typer.Option(min=1, help="Show this many steps.")] = 6,
    max_tokens: Annotated[int, typer.Option(min=1, help="Stop after this many tokens.")] = 64,
    raw: options.Raw = False,
    html: Annotated[Path | None, typer.Option(help="Also write the steps to this HTML file.")] = None,
    as_json: options.Json = False,
) -> None:
    """Walk through real steps: what was drafted, why it was kept or not, and what was said instead.

    p is the target's probability of a drafted token, q the drafter's (one-hot where nothing was drawn),
    chance that of being kept. The rule follows from the request: greedy at temperature 0, coupled with a
    seed, else deterministic, block or siblings, by how drafts are made.

    Examples:

      paceline explain "Say it twice: the line rides on. The line" --method ngram

      paceline explain "Why is the sky blue?" --method early_exit -k 3 --temperature 0.8 --html steps.html

      paceline explain "Count to ten." --temperature 0.8 --seed 7 --steps 3 --json
    """
    from paceline import LLM, SamplingParams
    from paceline.cli.explain_steps import Recorder

    parsing.check_target("--html", html)
    if not any(name in engine for name in ("speculative_config", "method", "draft_model")):
        engine["method"] = "ngram"
    chosen = parsing.engine_options(engine)
    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, **sampling)
    text = checked_prompt(console.stdin().read() if prompt == "-" else prompt)
    with LLM(chosen) as llm:
        recorder = Recorder(llm.tokenizer)
        llm.engine.watch = recorder
        chunks = islice(llm.stream(as_prompt(llm, text, raw), params), steps)  # a chunk is a step
        answer = _walk(chunks, recorder, None if as_json else console.stdout())
        name = llm.checkpoint.name
    if as_json:
        console.write_json(
            console.stdout(), _to_json(text, chosen.speculative_config, answer, recorder.steps)
        )
    if html is not None:
        from paceline.cli.explain_html import page

        html.write_text(page(text, name, recorder.steps), encoding="utf-8")
        console.write(console.stderr(), f"wrote {html}\n")
    if answer.is_interrupted:
        raise KeyboardInterrupt


def _walk(chunks: Iterator[Chunk], recorder: Recorder, screen: Console | None) -> Answer:
    """Run the steps, showing each as soon as it is done."""
    from paceline.cli.explain_text import print_step

    rules: set[str] = set()

    def settle(chunk: Chunk) -> None:
        recorder.settle([token.id for token in chunk.tokens])
        step = recorder.steps[-1]
        if screen is not None:
            print_step(screen, step, step.rule not in rules)
        rules.add(step.rule)

    return collect(chunks, settle)


def _to_json(
    prompt: str, config: dict[str, Any] | str | None, answer: Answer, steps: list[Step]
) -> dict[str, Any]:
    reason = answer.completion.finish_reason if answer.completion is not None else None
    return {
        "prompt": prompt,
        "method": config["method"] if isinstance(config, dict) else config,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": reason,
        "steps": [step.to_json() for step in steps],
    }
