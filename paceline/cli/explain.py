"""`paceline explain`: a few real steps of the engine, with the numbers by which each drafted token was kept
or not.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paceline
from paceline import SamplingParams
from paceline.api.options import EngineOptions
from paceline.cli import console, options, parsing
from paceline.cli.options import LOADING, MAIN, Drafting, Given, Sampling, group
from paceline.cli.streaming import as_prompt, collect, given_prompt
from paceline.core.options import option, options_of

if TYPE_CHECKING:
    from paceline.api.results import Chunk


@dataclass(frozen=True, kw_only=True)
class Explain:
    """Walk through real steps: what was drafted, why it was kept or not, and what was said instead.

    p is the target's probability of a drafted token, q the drafter's (one-hot where nothing was drawn),
    chance that of being kept. The rule follows from the request: greedy at temperature 0, coupled with a
    seed, else deterministic, block or siblings, by how drafts are made.

    Examples:

      paceline explain "Say it twice: the line rides on. The line" --method ngram

      paceline explain "Why is the sky blue?" --method early_exit -k 3 --temperature 0.8 --html steps.html

      paceline explain "Count to ten." --temperature 0.8 --seed 7 --steps 3 --json
    """

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
    from paceline.cli.explain_render import page, print_step
    from paceline.cli.explain_steps import Recorder

    parsing.check_target("--html", asked.html)
    is_chosen = any(name in asked.engine for name in ("speculative_config", "method", "draft_model"))
    engine = parsing.engine_options(asked.engine | ({} if is_chosen else {"method": "ngram"}))
    chosen: dict[str, Any] = {"top_p": asked.top_p, "max_tokens": asked.max_tokens, **asked.sampling}
    params = SamplingParams(temperature=asked.temperature, **chosen)
    text, screen = given_prompt(asked.prompt), console.stdout(is_quiet=asked.json)
    rules: set[str] = set()

    def settle(chunk: Chunk) -> None:
        recorder.settle([token.id for token in chunk.tokens])
        step = recorder.steps[-1]
        print_step(screen, step, step.rule not in rules)
        rules.add(step.rule)

    with paceline.LLM(engine) as llm:
        llm.engine.watch = recorder = Recorder(llm.tokenizer)
        chunks = islice(llm.stream(as_prompt(llm, text, asked.raw), params), asked.steps)  # a chunk is a step
        answer = collect(chunks, settle)
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
        asked.html.write_text(page(text, name, recorder.steps), encoding="utf-8")
        console.write(console.stderr(), f"wrote {asked.html}\n")
    if answer.is_interrupted:
        raise KeyboardInterrupt
