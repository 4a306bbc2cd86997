"""Paceline itself as a worker, loaded and timed like every peer.

Besides `generate` it reads the prompts for all (`encode`: token ids, and each answer's natural length).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from paceline import LLM, RequestError, SamplingParams
from paceline.drafters.suffix import Suffix
from paceline.measure.engines import answer, ids_of


def load(options: dict[str, Any]) -> dict[str, Callable[..., dict[str, Any]]]:
    chosen = {"dtype": options["dtype"], "speculative_config": options["speculative_config"]}
    # no prefix caching: every repeat reads its prompt anew
    limits = {"max_num_seqs": options["in_flight"], "enable_prefix_caching": False, "progress": False}
    worker = Worker(LLM(options["model"], **chosen, **limits))
    return {"generate": worker.generate, "encode": worker.encode}


@dataclass(frozen=True, slots=True)
class Worker:
    llm: LLM
    answered: set[tuple[int, ...]] = field(default_factory=set)  # whose answers a drafter may remember

    def generate(self, prompts: list[dict[str, Any]], in_flight: int) -> dict[str, Any]:
        self._forget({tuple(prompt["ids"]) for prompt in prompts})
        started = time.perf_counter()
        if in_flight == 1:
            answers = [self._answer(prompt) for prompt in prompts]
        else:  # the thread that waits steps the engine for all
            with ThreadPoolExecutor(in_flight) as pool:
                answers = list(pool.map(self._answer, prompts))
        return {"wall_s": time.perf_counter() - started, "answers": answers}

    def _forget(self, asked: set[tuple[int, ...]]) -> None:
        """A repeat must not find its answer in what a drafter remembers of the last one."""
        if self.answered & asked:
            for drafter in self.llm.engine.policy.drafters:
                if isinstance(drafter, Suffix):
                    drafter.forget()
            self.answered.clear()
        self.answered.update(asked)

    def _answer(self, prompt: dict[str, Any]) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=prompt["num_tokens"], ignore_eos=True)
        return answer(self.llm, prompt["ids"], params)

    def encode(self, texts: dict[str, str], max_tokens: int, min_tokens: int) -> dict[str, Any]:
        """Each prompt as the model's chat template puts it, and how long its plain greedy answer is."""
        found = {}
        for name, text in texts.items():
            try:
                ids = ids_of(self.llm, text)
                plain = SamplingParams(temperature=0, max_tokens=max_tokens, num_speculative_tokens=0)
                (result,) = self.llm.generate([ids], plain)
            except RequestError as error:
                raise RequestError(f"prompt {name}: {error}") from None
            self.answered.add(tuple(ids))
            room = self.llm.engine.config.max_model_len - len(ids)
            length = min(max(len(result.token_ids), min_tokens), max_tokens, room)
            found[name] = {"ids": ids, "num_tokens": length}
        return {"prompts": found}
