"""Paceline itself as a worker, loaded and timed like every peer. It also reads the prompts for all (`encode`:
token ids, and each answer's natural length).
"""

from __future__ import annotations

from typing import Any

from paceline import LLM, RequestError, SamplingParams
from paceline.drafters.suffix import Suffix
from paceline.measure.engines import answer, ids_of


def load(options: dict[str, Any]) -> dict[str, Any]:
    chosen = {"dtype": options["dtype"], "speculative_config": options["speculative_config"]}
    # no prefix caching: every repeat reads its prompt anew
    limits = {"max_num_seqs": options["in_flight"], "enable_prefix_caching": False, "progress": False}
    llm = LLM(options["model"], **chosen, **limits)
    answered: set[tuple[int, ...]] = set()  # prompts whose answers a drafter may remember

    def begin(prompts: list[dict[str, Any]]) -> None:
        """A repeat must not find its answer in what a drafter remembers of the last one."""
        asked = {tuple(prompt["ids"]) for prompt in prompts}
        if answered & asked:
            for drafter in llm.engine.policy.drafters:
                if isinstance(drafter, Suffix):
                    drafter.forget()
            answered.clear()
        answered.update(asked)

    def one(prompt: dict[str, Any]) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=prompt["num_tokens"], ignore_eos=True)
        return answer(llm, prompt["ids"], params)

    def encode(texts: dict[str, str], max_tokens: int, min_tokens: int) -> dict[str, Any]:
        """Each prompt as the model's chat template puts it, and how long its plain greedy answer is."""
        found, plain = {}, SamplingParams(temperature=0, max_tokens=max_tokens, num_speculative_tokens=0)
        for name, text in texts.items():
            try:
                ids = ids_of(llm, text)
                (result,) = llm.generate([ids], plain)
            except RequestError as error:
                raise RequestError(f"prompt {name}: {error}") from None
            answered.add(tuple(ids))
            room = llm.engine.config.max_model_len - len(ids)
            length = min(max(len(result.token_ids), min_tokens), max_tokens, room)
            found[name] = {"ids": ids, "num_tokens": length}
        return {"prompts": found}

    return {"answer": one, "begin": begin, "encode": encode}
