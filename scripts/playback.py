"""`auto` as it would do on a GPU, on a machine without one: the model's own texts played back, passes that
only wait.

    python scripts/playback.py --prompts spec_bench_dev.jsonl --texts texts.json --levels 1,2,4,8,16,32,64,128

The engine, the policy, suffix matching and what fills a pass's inputs are the real ones, so the host's time
is real. A pass takes what it takes on an H200 with SmolLM2-135M (PASS_MS) and begins when the one before has
ended; a head stands in for EAGLE: right as often, and able to draft and check in rounds without the host.
Prints tokens a second over plain decoding. Texts are written once, which takes minutes on a CPU, and kept.
Invariant: every text is the one that is played back.
"""

from __future__ import annotations

import argparse
import bisect
import gc
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import torch
from waves import wave

from paceline import LLM, SamplingParams
from paceline.core.tree import Tree
from paceline.core.types import Draft, Needs, Output, Request, Round, Segment
from paceline.cuda.batch import Bucket, Inputs, bucket_for
from paceline.drafters import registry
from paceline.engine.costs import CostModel
from paceline.engine.engine import Engine
from paceline.engine.plan import FixedPolicy
from paceline.engine.policy import AutoPolicy
from paceline.measure.prompts import load
from paceline.runtime.batch import build

PASS_MS = {
    1: 0.62,
    2: 0.63,
    4: 0.64,
    8: 0.66,
    16: 0.80,
    32: 0.85,
    64: 0.91,
    128: 1.1,
    256: 1.5,
    1024: 4.0,
    8192: 20.0,
}  # by rows
DRAFT_MS, FOR_EACH, ROUND_MS = (
    0.33,
    0.2,
    0.87,
)  # of a chain of LENGTH; more for each request, of it; of a round
ENTRY_MS, RECORDING_MS = (
    0.004,
    30.0,
)  # of a token that a head reads before its first draft; of what happens once for a bucket
LENGTH = 5
CLAIMS = (0.4, 0.6, 0.8, 0.95)  # of a head's token, each as often
WAYS = ("", "Answer in other words than usual. ")  # of asking a prompt: an answer given before is known

Texts = dict[tuple[int, ...], list[int]]  # by prompt: prompt and answer


def wait_until(moment: float) -> None:
    while time.perf_counter() < moment:
        pass


class Late(Sequence[int]):
    """Tokens that are there when the device is done."""

    def __init__(self, tokens: list[int], moment: float) -> None:
        self._tokens, self._moment = tokens, moment

    def __len__(self) -> int:
        wait_until(self._moment)
        return len(self._tokens)

    def __getitem__(self, index: Any) -> Any:
        return self._tokens[index]


class Player:
    """Stands where a Runner does."""

    num_recordings = 0

    def __init__(self, llm: LLM) -> None:
        self.kv, self.config = llm.engine.runner.kv, llm.engine.runner.config
        self.decoder = SimpleNamespace(
            runs_by_itself=True, checks_trees=True, is_exact=False, config=self.config
        )
        self.texts: dict[int, list[int]] = {}  # by a request's blocks
        self.free_at = 0.0  # when the device has done all it was given
        self._inputs: dict[Bucket, Inputs] = {}

    def record(self) -> None:
        self.num_recordings += 1
        wait_until(time.perf_counter() + 1e-3 * RECORDING_MS)

    def forward(self, segments: Sequence[Segment], **_: Any) -> Output:
        columns = build(segments, self.kv).columns
        bucket = bucket_for(columns)
        if bucket not in self._inputs:
            self._inputs[bucket] = Inputs(bucket, 0, torch.device("cpu"))
            self.record()
        self._inputs[bucket].fill(
            columns, [pick for segment in segments for pick in [segment.pick] * segment.num_logits if pick]
        )
        picked = [token for segment in segments for token in self._picked(segment)]
        rows = sum(len(segment.tokens) for segment in segments)
        milliseconds = list(PASS_MS.values())[bisect.bisect_left(list(PASS_MS), rows)]
        self.free_at = max(time.perf_counter(), self.free_at) + 1e-3 * milliseconds
        self.decoder.latest = Late(picked, self.free_at)
        return Output(torch.zeros((len(picked), 1)), {}, self.decoder.latest)

    def _picked(self, segment: Segment) -> list[int]:
        """After each wanted row: what follows in the text, if the row's path is the text."""
        text, found = self.texts[id(segment.cache.blocks)], []
        places, is_right = [0] * len(segment.tokens), [False] * len(segment.tokens)
        for i, token in enumerate(segment.tokens):
            parent = i - 1 if segment.parents is None else segment.parents[i]
            places[i] = segment.cache.num_cached if parent < 0 else places[parent] + 1
            is_right[i] = (
                (parent < 0 or is_right[parent])
                and places[i] + 1 < len(text)
                and (token < 0 or text[places[i]] == token)
            )
            if i >= len(segment.tokens) - segment.num_logits:
                found.append(text[places[i] + 1] if is_right[i] else 0)
        return found


class Head:
    """As good as a learned one, and as quick."""

    name, needs, is_free, most_rounds, is_weighing = "head", Needs(verdicts=False), False, 16, False

    def __init__(self, player: Player, share: float) -> None:
        self.player, self.share, self.draw = player, share, random.Random(1)
        self.read: set[str] = set()  # requests
        self.recorded: set[int] = set()  # for how many of them

    def chain(self, text: list[int], start: int) -> tuple[list[int], list[float]]:
        tokens, chances = [], [1.0]
        for place in range(start, start + LENGTH):
            claim = self.draw.choice(CLAIMS)
            is_right = place < len(text) and self.draw.random() < claim * self.share / mean(CLAIMS)
            tokens.append(text[place] if is_right else 7)
            chances.append(chances[-1] * claim)
        return tokens, chances

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        if len(requests) not in self.recorded:
            self.recorded.add(len(requests))
            self.player.record()
        entering = sum(request.num_tokens for request in requests if request.id not in self.read)
        self.read.update(request.id for request in requests)
        done = time.perf_counter() + 1e-3 * (DRAFT_MS * (1 + FOR_EACH * len(requests)) + ENTRY_MS * entering)
        drafts = []
        for request, budget in zip(requests, budgets, strict=True):
            tokens, chances = self.chain(self.player.texts[id(request.cache.blocks)], len(request.tokens))
            count = min(budget, LENGTH)
            drafts.append(
                Draft(
                    Tree.chain(request.tokens[-1], tokens[:count]),
                    self.name,
                    None,
                    tuple(chances[: 1 + count]),
                )
            )
        wait_until(done)
        return drafts

    def usual_round(self, num_requests: int) -> int:
        return LENGTH if num_requests <= 4 else 0

    def round_length(self, requests: Sequence[Request], most: int) -> int:
        return self.usual_round(len(requests)) if most >= LENGTH else 0

    def fly(self, requests: Sequence[Request], count: int, *rest: Any) -> Rounds:
        return Rounds(self, requests, count)

    def land(self, requests: Sequence[Request], said: Round, number: int) -> list[Draft]:
        trees = [
            Tree.chain(request.tokens[-1], tokens)
            for request, tokens in zip(requests, said.tokens, strict=True)
        ]
        return [
            Draft(tree, self.name, None, (1.0, *chances))
            for tree, chances in zip(trees, said.chances, strict=True)
        ]

    def observe(self, seen: Any) -> None: ...
    def release(self, request: Request) -> None: ...


class Rounds:
    """Two under way at a time, each as long as the last."""

    is_first = False

    def __init__(self, head: Head, requests: Sequence[Request], count: int) -> None:
        self._head, self.num_left = head, count
        self._texts = [head.player.texts[id(request.cache.blocks)] for request in requests]
        self._places = [len(request.tokens) for request in requests]
        self._said: list[tuple[Round, float]] = []
        for _ in range(min(2, count)):
            self.more()

    def __len__(self) -> int:
        return len(self._said)

    def hidden(self, number: int) -> dict[int, torch.Tensor]:
        return {}

    def more(self) -> None:
        said, player = Round([], [], []), self._head.player
        for i, (text, start) in enumerate(zip(self._texts, self._places, strict=True)):
            tokens, chances = self._head.chain(text, start)
            padded = text[start:] + [0] * LENGTH
            said.tokens.append(tokens)
            said.chances.append(chances[1:])
            said.picked.append(padded[: LENGTH + 1])
            self._places[i] += next((n for n in range(LENGTH) if tokens[n] != padded[n]), LENGTH) + 1
        player.free_at = max(time.perf_counter(), player.free_at) + 1e-3 * ROUND_MS
        self._said.append((said, player.free_at))
        self.num_left -= 1

    def round(self, number: int) -> Round:
        said, moment = self._said[number]
        wait_until(moment)
        return said


def texts_of(llm: LLM, prompts: Path | None, kept: Path, tokens: int) -> Texts:
    if not kept.exists():
        asked = [f"{way}{prompt.text}" for way in WAYS for prompt in load(prompts)]
        ids = [llm.tokenizer.encode_chat([{"role": "user", "content": text}])[-1000:] for text in asked]
        answers = llm.generate(ids, SamplingParams(temperature=0, max_tokens=tokens + 2, ignore_eos=True))
        kept.write_text(
            json.dumps([[p, list(a.outputs[0].token_ids)] for p, a in zip(ids, answers, strict=True)]),
            encoding="utf-8",
        )
    return {tuple(prompt): prompt + answer for prompt, answer in json.loads(kept.read_text(encoding="utf-8"))}


def engines_of(llm: LLM, player: Player, share: float) -> dict[str, Engine]:
    """Each with drafters of its own, new for each level."""
    config, head = llm.engine.config, Head(player, share)
    around = replace(llm.surroundings, runner=player)  # type: ignore[arg-type]  # else suffix matching makes rounds with the CPU's own model
    costs = CostModel({rows: 1e-3 * milliseconds for rows, milliseconds in PASS_MS.items() if rows <= 256})

    def auto(*more: Any) -> Engine:
        drafters = [*(registry.create(*registry.parse(each), around) for each in registry.AUTO), *more]
        known = {Head.name: (1e-4 * PASS_MS[1], (share,))}  # as build.py takes a head to cost
        return Engine(player, drafters[0], config, AutoPolicy(drafters, costs.fresh(), known=known))  # type: ignore[arg-type]

    fixed = Engine(player, head, config, FixedPolicy(head, LENGTH))  # type: ignore[arg-type]
    return {
        "plain": Engine(player, None, config),
        "training-free": auto(),
        "auto": auto(Head(player, share)),
        "head": fixed,
    }  # type: ignore[arg-type]


def measure(
    llm: LLM, player: Player, texts: Texts, level: int, asked: argparse.Namespace
) -> Mapping[str, float]:
    params, prompts = (
        SamplingParams(temperature=0, max_tokens=asked.tokens, ignore_eos=True),
        [list(prompt) for prompt in texts],
    )
    # type: dict[str, Engine], dict[str, list[float]]
    engines, speeds = engines_of(llm, player, asked.share), {}
    names = list(engines)
    for number in range(1 + max(4 if level < 128 else 2, 24 // level)):
        chosen = [prompts[(number * level + i) % len(prompts)] for i in range(level)]
        for name in names[number % len(names) :] + names[: number % len(names)]:
            speed, said, _ = wave(llm, engines[name], chosen, params)
            assert all(
                texts[tuple(p)][len(p) :][: asked.tokens] == list(s)
                for p, s in zip(chosen, said, strict=True)
            ), name
            if number:
                speeds.setdefault(name, []).append(speed)
    return {name: mean(found) for name, found in speeds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, help="default: those of the package")
    parser.add_argument(
        "--texts", type=Path, required=True, help="where the model's answers are kept; written if not there"
    )
    parser.add_argument("--levels", default="1,2,4,8,16,32,64,128")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument(
        "--share", type=float, default=0.68, help="of a head's tokens that are right if those before them are"
    )
    asked = parser.parse_args()
    levels = [int(level) for level in asked.levels.split(",")]
    with LLM(speculative_config="auto", max_num_seqs=max(levels), max_model_len=1536, max_num_batched_tokens=8192,
             enable_prefix_caching=False, kv_cache_memory=3 << 30, progress=False) as llm:  # fmt: skip
        texts, player, add = texts_of(llm, asked.prompts, asked.texts, asked.tokens), Player(llm), llm._add

        def added(requests: list[Request]) -> Any:
            player.texts.update(
                {id(request.cache.blocks): texts[tuple(request.tokens)] for request in requests}
            )
            return add(requests)

        llm._add = added  # type: ignore[method-assign]
        gc.collect()
        gc.freeze()
        for level in levels:
            speeds = measure(llm, player, texts, level, asked)
            ratios = "  ".join(
                f"{name} {speed / speeds['plain']:.3f}" for name, speed in speeds.items() if name != "plain"
            )
            print(f"{level:4d} requests: plain {speeds['plain']:8.0f} tokens/s  {ratios}", flush=True)


if __name__ == "__main__":
    main()
