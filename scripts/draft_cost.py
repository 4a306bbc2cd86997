"""What a learned drafter's draft costs, as a share of the target's plain step: `python scripts/draft_cost.py
--kinds dflash,medusa`.

Drafts of K tokens are timed as the engine asks for them, Python included, one request, texts of 128 to 400
tokens; plain passes of the target over 256 cached tokens take turns with them. Prints medians. Invariant:
both are timed in one process, a text of one, then some of the other. EAGLE drafts step by step: its share is
given for one step, too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median

from paceline import LLM, SamplingParams
from paceline.core.types import Draft, Request
from paceline.engine.engine import Engine
from paceline.measure.passes import Passes
from paceline.measure.prompts import load

SHORTEST, LONGEST, CONTEXT = 128, 400, 256  # tokens
PASSES = 12  # plain ones after each text
CHARACTERS = 700  # of a text's prompt


class Timed:
    """A drafter whose full drafts are timed."""

    def __init__(self, engine: Engine, length: int) -> None:
        (drafter,) = engine.policy.drafters
        self._propose, self._length, self.seconds = drafter.propose, length, []  # type: ignore[var-annotated]
        drafter.propose = self.propose  # type: ignore[method-assign]
        if hasattr(drafter, "_rounds"):
            drafter._rounds = None  # each draft by itself

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        started = time.perf_counter()
        drafts = self._propose(requests, budgets)
        spent = time.perf_counter() - started
        if drafts[0].num_drafted == self._length and SHORTEST <= len(requests[0].tokens) <= LONGEST:
            self.seconds.append(spent)
        return drafts


def cost_of(kind: str, asked: argparse.Namespace) -> str:
    llm = LLM(
        asked.model,
        device="cpu",
        speculative_config={"method": kind, "num_speculative_tokens": asked.length},
        progress=False,
    )
    timed, passes, plain, tokens, steps = (
        Timed(llm.engine, asked.length),
        Passes(llm.engine.runner, CONTEXT, 1),
        [],
        0,
        0,
    )
    texts, params = (
        [prompt.text for prompt in load()],
        SamplingParams(temperature=0, max_tokens=96, ignore_eos=True),
    )
    for turn in range(asked.turns + 1):
        if turn == 1:  # the first one compiles
            timed.seconds.clear()
            plain.clear()
        prompt = " ".join(texts[turn % 8 : turn % 8 + 6])[:CHARACTERS]
        (answer,) = llm.chat([{"role": "user", "content": prompt}], params)
        tokens, steps = tokens + answer.stats.num_tokens, steps + answer.stats.num_steps
        plain += [passes.seconds(1) for _ in range(PASSES)]
    draft, step = 1000 * median(timed.seconds), 1000 * median(plain)
    share = f"{draft / step:.3f} of a plain step" + (
        f", {draft / step / asked.length:.3f} a token" if kind in ("eagle", "draft") else ""
    )
    return f"{kind:7} {draft:.3f} ms of {step:.3f} ms: {share} (K = {asked.length}, {len(timed.seconds)} drafts, tau {tokens / steps:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default="eagle,medusa,dflash,draft")
    parser.add_argument("--model", default="default")
    parser.add_argument("--length", type=int, default=5, help="K")
    parser.add_argument("--turns", type=int, default=8, help="texts")
    asked = parser.parse_args()
    for kind in asked.kinds.split(","):
        print(cost_of(kind, asked), flush=True)


if __name__ == "__main__":
    main()
