"""Acceptance of the shipped heads, task by task: chains of five, joined with suffix matching, trees; greedy
and with a temperature.

    python scripts/heads_table.py --prompts spec_bench_dev.jsonl --device cuda --batch 16 --trees --json
    heads.json

Prints tokens a target pass (τ) for each task and over all: the target's own token included, the pass that
reads the prompt left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import paceline
from paceline import LLM, SamplingParams
from paceline.measure.prompts import Prompt, load

HEADS = Path(paceline.__file__).parent / "data" / "heads"
KINDS = ("eagle", "dflash", "draft", "medusa")
CHAT = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)  # of MT-bench


def task_of(prompt: Prompt) -> str:
    return "mt_bench" if prompt.category in CHAT else prompt.category


def methods(kinds: list[str], length: int, with_trees: bool) -> dict[str, dict[str, Any]]:
    """Name -> speculative_config. Lengths are pinned, and nothing is cut for want of confidence: τ is what a
    head can do.
    """

    def head(kind: str, **more: Any) -> dict[str, Any]:
        return {
            "method": kind,
            "model": str(HEADS / kind),
            "num_speculative_tokens": length,
            "confidence_threshold": 0.0,
            **more,
        }

    found = {kind: head(kind) for kind in kinds}
    if "eagle" in kinds:
        suffix = {"method": "suffix", "num_speculative_tokens": length}
        found["eagle + suffix"] = {
            "method": "hybrid",
            "drafters": [suffix, head("eagle")],
            "num_speculative_tokens": 2 * length,
        }
        if with_trees:
            found["eagle tree 63"] = head("eagle", num_speculative_tokens=63, tree_width=8, tree_depth=8)
            tree = head("eagle", num_speculative_tokens=48, tree_width=8, tree_depth=8)
            suffix_tree = {"method": "suffix", "num_speculative_tokens": 15}
            found["eagle tree + suffix 63"] = {
                "method": "hybrid",
                "drafters": [suffix_tree, tree],
                "num_speculative_tokens": 63,
            }
    return found


def rates(llm: LLM, prompts: list[Prompt], params: SamplingParams, batch: int) -> dict[str, list[int]]:
    """Tokens and steps of each task."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for begin in range(0, len(prompts), batch):
        part = prompts[begin : begin + batch]
        answers = llm.chat([[{"role": "user", "content": p.text}] for p in part], params)
        for prompt, answer in zip(part, answers, strict=True):
            for i, number in enumerate((answer.stats.num_tokens - 1, answer.stats.num_steps - 1)):
                sums[task_of(prompt)][i] += number
                sums["overall"][i] += number
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, default=None, help="default: those that ship")
    parser.add_argument("--every", type=int, default=1, help="take each so many-th prompt")
    parser.add_argument("--model", default="default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--length", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--trees", action="store_true", help="trees of up to 63 nodes too")
    parser.add_argument("--only", help="just the rows whose name contains this")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    prompts, table = load(asked.prompts)[:: asked.every], {}
    tasks = [*dict.fromkeys(map(task_of, prompts)), "overall"]
    print("| drafter | T |", " | ".join(tasks), "|\n|---|---|" + "---|" * len(tasks), flush=True)
    for name, config in methods(asked.kinds.split(","), asked.length, asked.trees).items():
        if asked.only and asked.only not in name:
            continue
        for (
            temperature
        ) in asked.temperatures:  # an engine each: what the suffix drafter has read must not flatter it
            started, params = (
                time.perf_counter(),
                SamplingParams(temperature=temperature, max_tokens=asked.tokens, seed=1),
            )
            with LLM(
                asked.model, device=asked.device, speculative_config=config, max_num_seqs=asked.batch, progress=False,
                # so that nobody's draft is cut for want of room
                max_num_batched_tokens=512 + 64 * asked.batch,
            ) as llm:  # fmt: skip
                sums = rates(llm, prompts, params, asked.batch)
            taus = {task: round(sums[task][0] / max(sums[task][1], 1), 3) for task in tasks}
            table[f"{name} T={temperature}"] = taus
            print(
                f"| {name} | {temperature} |",
                " | ".join(f"{taus[task]:.2f}" for task in tasks),
                "|",
                flush=True,
            )
            print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
