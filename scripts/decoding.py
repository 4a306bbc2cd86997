"""Decoding alone, drafter by drafter: plain decoding and others take turns on one model, prompt by prompt,
and every text is compared.

    python scripts/decoding.py --prompts spec_bench_dev.jsonl
    python scripts/decoding.py --prompts spec_bench_dev.jsonl --first 2 --every 4 --rows
    plain,auto,free,ngram,lookahead,staged,early_exit python scripts/decoding.py --prompts
    spec_bench_dev.jsonl --rows plain,auto,auto:steps,eagle,eagle:steps,eagle/3 --exact  (on a GPU)

"eagle/3" drafts three tokens at a time. A row that ends with ":steps" is the same without rounds: the host
comes between every draft and the pass that checks it. Timed from a request's first token to its last: the
reading of prompts is the same for all. Engines keep what they learn from prompt to prompt, as in use. On a
GPU a prompt for which somebody recorded a CUDA graph, which happens once in a process's life, counts for
nobody. Invariant: a text that differs from plain decoding's ends the run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams
from paceline.drafters import registry
from paceline.engine.engine import Engine
from paceline.engine.policy import AutoPolicy

PINNED: dict[str, dict[str, Any]] = {
    "ngram": {"num_speculative_tokens": 3},
    "suffix": {"num_speculative_tokens": 3},
    "recycle": {"num_speculative_tokens": 3},
    "staged": {"num_speculative_tokens": 2},
    "quantized": {"num_speculative_tokens": 2},
}  # lengths; other methods take their usual one


def engine_of(llm: LLM, own: Engine, row: str) -> Engine:
    """`own` is that of auto; "free": auto without a head."""
    if row.endswith(":steps"):
        engine = engine_of(llm, own, row.removesuffix(":steps"))
        if engine is own:
            policy = AutoPolicy(
                own.policy.drafters,
                own.policy.costs.fresh(),
                most_nodes=own.policy.most_nodes,
                has_trees=own.policy.has_trees,
            )
            engine = Engine(own.runner, own.proposer, own.config, policy)
        engine.policy.may_fly = lambda drafter, asks: False  # type: ignore[method-assign]
        return engine
    if row == "auto":
        return own
    if row == "plain":
        return Engine(own.runner, None, replace(own.config, num_speculative_tokens=0))
    method, _, length = row.partition("/")
    pinned = {"num_speculative_tokens": int(length)} if length else PINNED.get(method, {})
    options = list(registry.AUTO) if row == "free" else [{"method": method, **pinned}]
    parsed = [registry.parse(each) for each in options]
    drafters = [registry.create(*each, llm.surroundings) for each in parsed]
    most = sum(config.num_speculative_tokens for _, config in parsed) or 8
    policy = AutoPolicy(drafters, own.policy.costs.fresh(), most_nodes=most) if row == "free" else None
    return Engine(own.runner, drafters[0], replace(own.config, num_speculative_tokens=most), policy)


def answer(llm: LLM, prompt: list[int], tokens: int) -> tuple[list[int], int, float]:
    """The text; its tokens after the first step, and their seconds."""
    times, text, first = [], [], 0
    for chunk in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=tokens)):
        times.append(time.perf_counter())
        text += [token.id for token in chunk.tokens]
        first = first or len(text)
    return text, len(text) - first, times[-1] - times[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--prompts", type=Path, required=True, help="lines of JSON with fields task and turns"
    )
    parser.add_argument(
        "--rows", default="plain,auto,free,ngram,suffix", help="plain first; free: auto without a head"
    )
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--model", default="default")
    parser.add_argument("--seconds", type=float, help="stop asking new prompts after so long")
    parser.add_argument(
        "--exact",
        action="store_true",
        help="on a GPU: else its texts may differ where two tokens are nearly as likely",
    )
    asked = parser.parse_args()
    lines = [json.loads(line) for line in asked.prompts.read_text(encoding="utf-8").splitlines()][
        asked.first :: asked.every
    ]
    llm = LLM(
        asked.model, speculative_config="auto", exact=asked.exact, enable_prefix_caching=False, progress=False
    )
    own = llm.engine
    engines = {row: engine_of(llm, own, row) for row in asked.rows.split(",")}
    # type: list[str], dict[tuple[str, str], list[Any]]
    names, sums = list(engines), defaultdict(lambda: [0, 0.0])
    for llm.engine in engines.values():
        answer(
            llm,
            llm.tokenizer.encode_chat(
                [{"role": "user", "content": "Hello, who are you and what do you do?"}]
            ),
            asked.tokens,
        )
        llm.engine.totals.__init__()  # type: ignore[misc]
    started, counted = time.perf_counter(), []  # type: float, list[str]
    for number, line in enumerate(lines):
        if asked.seconds and time.perf_counter() - started > asked.seconds:
            break
        prompt = llm.tokenizer.encode_chat([{"role": "user", "content": line["turns"][0]}])
        # type: dict[str, list[int]], dict[str, list[Any]], int
        texts, found, before = {}, {}, llm.engine.runner.num_recordings
        for name in names[number % len(names) :] + names[: number % len(names)]:
            llm.engine = engines[name]
            texts[name], *found[name] = answer(llm, prompt, asked.tokens)
        if llm.engine.runner.num_recordings == before:
            counted.append(line["task"])
            for name, (count, seconds) in found.items():
                for task in (line["task"], "overall"):
                    sums[name, task][0] += count
                    sums[name, task][1] += seconds
        if any(text != texts[names[0]] for text in texts.values()):
            raise SystemExit(f"prompt {number}: a text differs from that of {names[0]}")
    if not counted:
        raise SystemExit("no prompt counts: graphs were recorded in all of them; give more")
    tasks = ["overall", *dict.fromkeys(counted)]
    speed = {key: count / seconds for key, (count, seconds) in sums.items()}
    print(
        f"{len(counted)} prompts, all texts identical; {names[0]} {speed[names[0], 'overall']:.1f} tokens/s"
    )
    for name, engine in engines.items():
        ratios, step = (
            (f"{task} {speed[name, task] / speed[names[0], task]:.3f}" for task in tasks),
            engine.totals.tau / speed[name, "overall"],
        )
        print(f"{name:12}", *ratios, f"tau {engine.totals.tau:.2f}", f"{1000 * step:.3f} ms a pass")


if __name__ == "__main__":
    main()
