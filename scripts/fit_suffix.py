"""Finds the two constants of the suffix drafter: how much a match is doubted, in a request's own text and in
past answers.

    python scripts/fit_suffix.py PROMPTS.jsonl        one {"turns": [prompt, ...]} a line; the first turn is
    asked, greedily

For each doubt on a grid: at every position of every answer take the best vote count / (total + doubt /
length) over all match lengths, and score it as a forecast that the next token is the one voted for. The least
mean log loss wins; then a table of forecast against outcome. Strings are counted here one by one, without the
drafter's own trees.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paceline import LLM, SamplingParams

DEPTH = 24
GRID = (1.0, 1.4, 1.8, 2.0, 2.2, 2.6, 3.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0)


class Vote(NamedTuple):
    length: int  # tokens matched
    count: int
    total: int
    is_right: bool


class Followers:
    """What followed each string of a text, and how often."""

    def __init__(self) -> None:
        self.after: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def add(self, context: Sequence[int], token: int) -> None:
        for n in range(1, min(DEPTH - 1, len(context)) + 1):
            self.after[tuple(context[-n:])][token] += 1

    def votes(self, context: Sequence[int], token: int) -> Iterator[Vote]:
        for n in range(1, min(DEPTH - 1, len(context)) + 1):
            followers = self.after.get(tuple(context[-n:]))
            if followers is None:
                return
            best, count = followers.most_common(1)[0]
            yield Vote(n, count, followers.total(), best == token)


def answers(path: Path, max_tokens: int = 128) -> list[tuple[list[int], list[int]]]:
    """Prompt and greedy answer of the default model, as ids."""
    turns = [json.loads(line)["turns"][0] for line in path.read_text(encoding="utf-8").splitlines()]
    with LLM(max_num_seqs=8) as llm:
        prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": turn}]) for turn in turns]
        results = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    return [
        (prompt, list(result.outputs[0].token_ids)) for prompt, result in zip(prompts, results, strict=True)
    ]


def collect(texts: Sequence[tuple[list[int], list[int]]]) -> tuple[list[list[Vote]], list[list[Vote]]]:
    """The votes at each position, from the request's own text and from the answers before it."""
    own: list[list[Vote]] = []
    past: list[list[Vote]] = []
    others = Followers()
    for prompt, answer in texts:
        mine, text = Followers(), [*prompt, *answer]
        for place in range(1, len(text)):
            context = text[max(place - DEPTH, 0) : place]
            if place > len(prompt):
                own.append(list(mine.votes(context, text[place])))
                past.append(list(others.votes(context, text[place])))
            mine.add(context, text[place])
        for place in range(1, len(answer)):
            others.add(answer[max(place - DEPTH, 0) : place], answer[place])
    return own, past


def forecasts(positions: Sequence[list[Vote]], doubt: float) -> tuple[np.ndarray, np.ndarray]:
    """The best vote of each position that has one, and whether it was right."""
    best = [
        max((v.count / (v.total + doubt / v.length), v.is_right) for v in votes)
        for votes in positions
        if votes
    ]
    chances, outcomes = np.array(best).T
    return chances, outcomes


def log_loss(chances: np.ndarray, outcomes: np.ndarray) -> float:
    return float(-np.log(np.where(outcomes > 0, chances, 1 - chances)).mean())


def main() -> None:
    for name, positions in zip(
        ("own text", "past answers"), collect(answers(Path(sys.argv[1]))), strict=True
    ):
        losses = {doubt: log_loss(*forecasts(positions, doubt)) for doubt in GRID}
        doubt = min(losses, key=losses.__getitem__)
        print(name, *(f"{d:g}: {loss:.4f}" for d, loss in losses.items()), f"-> doubt {doubt:g}", sep="  ")
        chances, outcomes = forecasts(positions, doubt)
        for low in np.arange(0.0, 1.0, 0.1):
            inside = (chances >= low) & (chances < low + 0.1)
            if inside.any():
                print(
                    f"  forecast {chances[inside].mean():.2f}  right {outcomes[inside].mean():.2f}  positions {inside.sum():,}"
                )


if __name__ == "__main__":
    main()
