"""The policy's two bounds, measured on a real model: a drafter that is always wrong, and one that is always
right.

    python scripts/policy_bounds.py [--model default] [--prompts 6] [--tokens 128] [--repeats 3] [--json FILE]

Both know the answer, because plain decoding wrote it first; one drafts it, the other drafts something else.
Plain, wrong and right runs take turns, so that noise hits all alike. Speeds are given twice: over all runs,
what was paid for learning included, and with the median of each prompt's repeats, which noise disturbs less
and which leaves that price out. Expected: wrong at least 0.97 of plain; right within a tenth of what the cost
model allows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

from paceline import LLM, SamplingParams
from paceline.core.types import Draft, Needs, Request, Seen
from paceline.drafters.base import chain
from paceline.engine.engine import Engine
from paceline.engine.policy import AutoPolicy
from paceline.measure.prompts import load

LENGTH = 16  # most tokens they draft


class Knowing:
    """Drafts the answer, or a token beside each of its tokens."""

    needs = Needs()
    is_free = True

    def __init__(
        self, name: str, is_right: bool, answers: dict[tuple[int, ...], list[int]], vocab_size: int
    ) -> None:
        self.name, self.is_right, self.answers, self.vocab_size = name, is_right, answers, vocab_size

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return [
            self._draft(request, min(budget, LENGTH))
            for request, budget in zip(requests, budgets, strict=True)
        ]

    def _draft(self, request: Request, count: int) -> Draft:
        answer = self.answers[tuple(request.tokens[: request.num_prompt])]
        tokens = answer[request.num_output : request.num_output + count]
        return chain(
            request, tokens if self.is_right else [(t + 1) % self.vocab_size for t in tokens], self.name
        )

    def observe(self, seen: Sequence[Seen]) -> None: ...
    def release(self, request: Request) -> None: ...


def decode_seconds(llm: LLM, ids: list[int], params: SamplingParams) -> tuple[float, list[int], int]:
    """Of everything after the first token, the tokens, and how many of them that was."""
    times, tokens, first = [], [], 0
    for chunk in llm.stream(ids, params):
        times.append(time.perf_counter())
        first = first or len(chunk.tokens)
        tokens += [token.id for token in chunk.tokens]
    return times[-1] - times[0], tokens, len(tokens) - first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="default")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    llm = LLM(options.model, enable_prefix_caching=False, progress=False)
    auto = llm.engine
    assert isinstance(auto.policy, AutoPolicy)
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    chosen = load()[:: max(1, len(load()) // options.prompts)][: options.prompts]
    prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": prompt.text}]) for prompt in chosen]
    plain = Engine(auto.runner, None, auto.config)
    engines = {"plain": plain}
    answers: dict[tuple[int, ...], list[int]] = {}
    llm.engine = plain
    for ids in prompts:
        answers[tuple(ids)] = decode_seconds(llm, ids, params)[1]
    for name in ("wrong", "right"):
        drafter = Knowing(name, name == "right", answers, llm.checkpoint.config.vocab_size)
        engines[name] = Engine(
            auto.runner,
            drafter,
            auto.config,
            AutoPolicy([drafter], auto.policy.costs.fresh(), most_nodes=LENGTH),
        )
    speeds, totals, bounds = run(llm, engines, prompts, answers, params, options.repeats)
    report = {
        "tokens_per_second": {name: round(value, 2) for name, value in speeds.items()},
        "all_runs": {name: round(totals[name] / totals["plain"], 4) for name in ("wrong", "right")},
        "wrong_over_plain": round(speeds["wrong"] / speeds["plain"], 4),
        "right_over_plain": round(speeds["right"] / speeds["plain"], 4),
        "bound": round(bounds, 4),
        "right_over_bound": round(speeds["right"] / speeds["plain"] / bounds, 4),
        "steps": {str(k): v for k, v in sorted(engines["right"].totals.lengths.items())},
        "microseconds_a_step": {
            n: {k: round(1e6 * v / e.totals.num_steps) for k, v in e.phases.to_dict().items()}
            for n, e in engines.items()
        },
    }
    print(json.dumps(report, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def run(
    llm: LLM, engines: dict[str, Engine], prompts: list[list[int]], answers: dict[tuple[int, ...], list[int]], params: SamplingParams,
    repeats: int,
) -> tuple[dict[str, float], dict[str, float], float]:  # fmt: skip
    """Tokens a second of each engine, by medians and over all runs, and the most that right drafts could gain
    by the same run's costs.
    """
    rates: dict[tuple[str, int], list[float]] = {}  # seconds a token, by engine and prompt
    policy = engines["right"].policy
    assert isinstance(policy, AutoPolicy)
    best = plain = 0.0
    for repeat in range(repeats):
        for number, ids in enumerate(prompts):
            names = list(engines)
            for name in names[(number + repeat) % 3 :] + names[: (number + repeat) % 3]:
                llm.engine = engines[name]
                took, tokens, count = decode_seconds(llm, ids, params)
                assert tokens == answers[tuple(ids)], f"{name} drafts changed the text"
                rates.setdefault((name, number), []).append(took / count)
    for ids in prompts:
        context = len(ids) + params.max_tokens // 2
        plain += policy.costs.pass_seconds(1, context, context)
        best += min(policy.costs.pass_seconds(n, context, n * context) / n for n in range(1, LENGTH + 2))
    speeds = {
        name: len(prompts) / sum(median(rates[name, number]) for number in range(len(prompts)))
        for name in engines
    }
    totals = {
        name: 1 / mean(rate for (other, _), runs in rates.items() if other == name for rate in runs)
        for name in engines
    }
    return speeds, totals, plain / best


if __name__ == "__main__":
    main()
