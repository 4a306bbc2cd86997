"""What speculation gains on a GPU for an acceptance rate, K and a batch, with a model of random weights:
nothing needs a download.

    python scripts/gpu_speculation.py --model llama-8b --rates 0.6,0.8,0.9 --lengths 2,4,8,16 --batches 1,8

The drafter is a fake that belongs to this script: plain decoding wrote the answers first, and it drafts them
with a wrong token wherever a coin, thrown once for each position, says so. All else is the engine as it is:
passes, acceptance, caches. Beside each speedup stands what the formula says, (1 - a^(K+1)) / (1 - a) tokens a
pass over the measured cost of a pass with K more rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from waves import wave

from paceline import LLM, SamplingParams
from paceline.core.types import Draft, Needs, Request, Seen
from paceline.drafters.base import chain
from paceline.engine.costs import expected_tokens
from paceline.engine.engine import Engine
from paceline.engine.plan import FixedPolicy

PROMPT, ANSWER = 256, 128


class Coin:
    """Drafts the known answer; each of its tokens is right with the chance `rate`."""

    name, needs, is_free = "coin", Needs(), True

    def __init__(self, rate: float, answers: dict[tuple[int, ...], list[int]], vocab_size: int) -> None:
        self.rate, self.answers, self.vocab_size = rate, answers, vocab_size

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return [self._draft(request, budget) for request, budget in zip(requests, budgets, strict=True)]

    def _draft(self, request: Request, count: int) -> Draft:
        answer, first = self.answers[tuple(request.tokens[: request.num_prompt])], request.num_output
        coins = np.random.default_rng(request.tokens[0]).random(len(answer))
        known = [
            t if coins[first + i] < self.rate else (t + 1) % self.vocab_size
            for i, t in enumerate(answer[first : first + count])
        ]
        return chain(request, known, self.name)

    def observe(self, seen: Sequence[Seen]) -> None: ...
    def release(self, request: Request) -> None: ...


def run(llm: LLM, engine: Engine, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """The second of two waves; the first records graphs."""
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    wave(llm, engine, prompts, params)
    return wave(llm, engine, prompts, params)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="random weights make many near ties",
    )
    parser.add_argument("--rates", default="0.6,0.8,0.9")
    parser.add_argument("--lengths", default="2,4,8,16")
    parser.add_argument("--batches", default="1")
    asked = parser.parse_args()
    with LLM(
        asked.model, load_format=asked.load_format, dtype=asked.dtype, device=asked.device, exact=asked.exact, speculative_config="off",
        max_num_batched_tokens=2048, max_model_len=PROMPT + ANSWER + 64, enable_prefix_caching=False, progress=False,
    ) as llm:  # fmt: skip
        plain, size = llm.engine, llm.checkpoint.config.vocab_size
        for batch in (int(count) for count in asked.batches.split(",")):
            prompts = [
                [(i * 977 + j * 31) % min(size, 30_000) for j in range(PROMPT)] for i in range(1, batch + 1)
            ]
            base, texts = run(llm, plain, prompts)
            answers = {tuple(prompt): text for prompt, text in zip(prompts, texts, strict=True)}
            print(json.dumps({"batch": batch, "plain_tokens_per_s": round(base, 1)}), flush=True)
            for rate in (float(rate) for rate in asked.rates.split(",")):
                for length in (int(length) for length in asked.lengths.split(",")):
                    coin = Coin(rate, answers, size)
                    config = replace(plain.config, num_speculative_tokens=length)
                    engine = Engine(plain.runner, coin, config, FixedPolicy(coin, length))
                    speed, said = run(llm, engine, prompts)
                    record = {
                        "batch": batch,
                        "rate": rate,
                        "K": length,
                        "tokens_per_s": round(speed, 1),
                        "speedup": round(speed / base, 2),
                    }
                    tau = engine.totals.num_tokens / engine.totals.num_steps
                    same = sum(a == b for a, b in zip(said, texts, strict=True))
                    print(
                        json.dumps(
                            record
                            | {
                                "tau": round(tau, 2),
                                "formula": round(expected_tokens(rate, length), 2),
                                "same": same,
                            }
                        ),
                        flush=True,
                    )


if __name__ == "__main__":
    main()
