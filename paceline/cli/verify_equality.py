"""Is decoding with drafts the same as without? Every drafter, greedy and seeded, alone and in a batch. Plain
texts are made once for each mode, in a batch, and every other run is compared with them token by token: so
equality also says that the batch a request is in changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paceline.api.results import Result
from paceline.core.noise import Purpose, gumbel
from paceline.core.params import SamplingParams
from paceline.drafters.base import num_same

if TYPE_CHECKING:
    from paceline.api.llm import LLM
    from paceline.measure.prompts import Prompt
    from paceline.measure.results import Tell

Texts = Sequence[list[int]]  # token ids
Spell = Callable[[int], str]  # a token's text
How = tuple[str, float, int]  # the drafter's name, the temperature and the batch
BATCHES = (1, 8)
NEAR_TIE = 0.25  # logits: by this much, passes of other shapes may differ where kernels are not exact
MODES = {0.0: "greedy", 0.7: "seeded", 1.2: "seeded"}  # by temperature


class Difference(NamedTuple):
    prompt_id: str
    position: int  # of the first token that differs, counted from the start of the answer
    plain: str  # the two tokens, id and text
    drafted: str
    # by how much plain decoding preferred its own token, in logits; looked up where arithmetic is not exact
    margin: float = math.inf


class Check(NamedTuple):
    """All answers of one drafter in one mode; all but the differences is what the report says."""

    drafter: str
    mode: str
    temperature: float
    batch: int
    prompts: int
    identical: bool
    near_ties: int  # prompts that part where two tokens were as good as equal: only inexact arithmetic may
    tau: float
    differences: tuple[Difference, ...]


class Examination(NamedTuple):
    """The questions, the same for every drafter."""

    prompts: Sequence[Prompt]
    inputs: Sequence[str | list[int]]  # each prompt as the model reads it
    max_tokens: int

    def answers(self, llm: LLM, how: How, tell: Tell, **more: Any) -> list[Result]:
        """Batch 1: one prompt after the other; else all at once, as many together as `max_num_seqs` says.
        Each prompt has its own seed, so that equal noise cannot hide a mix-up of requests."""
        (_, temperature, batch), what = how, "{}, T={}, batch {}".format(*how)
        more |= {"temperature": temperature, "max_tokens": self.max_tokens}
        seeds = [1000 + i if temperature else None for i in range(len(self.prompts))]
        params, results = [SamplingParams(seed=seed, **more) for seed in seeds], list[Result]()
        step = 1 if batch == 1 else len(params)
        tell(what, 0)
        for start in range(0, len(params), step):
            results += llm.generate(list(self.inputs[start : start + step]), params[start : start + step])
            tell(what, step)
        return results

    def check(self, llm: LLM, how: How, plain: Texts, tell: Tell) -> Check:
        (drafter, temperature, batch), results = how, self.answers(llm, how, tell)
        said = [result.token_ids for result in results]
        is_exact, spell = llm.engine.executor.decoder.is_exact, llm.tokenizer.token_text
        found = []
        for i, prompt in enumerate(self.prompts):
            difference = first_difference(prompt.id, plain[i], said[i], spell)
            if difference is not None and not is_exact:
                difference = self._weighed(llm, temperature, i, difference, (plain[i], said[i]))
            found += [difference] if difference is not None else []
        stats = [result.stats for result in results]
        tau = sum(s.num_tokens for s in stats) / max(1, sum(s.num_steps for s in stats))
        differences = tuple(d for d in found if d.margin > NEAR_TIE)
        ties, count = len(found) - len(differences), len(self.prompts)
        labels = drafter, MODES[temperature], temperature, batch
        return Check(*labels, count, not found, ties, round(tau, 4), differences)

    def _weighed(self, llm: LLM, temperature: float, i: int, found: Difference, texts: Texts) -> Difference:
        """With the margin between the plain and the drafted token: logits, and seeded noise times T."""
        at, (plain, drafted) = found.position, texts
        if at >= min(len(plain), len(drafted)):
            return found
        pair, context = (plain[at], drafted[at]), [*self.inputs[i], *plain[:at]]
        logits = [_logprob(llm, context, token) for token in pair]
        if temperature:
            noise = gumbel(1000 + i, len(context), Purpose.TARGET, np.array(pair))
            logits = [logit + temperature * float(n) for logit, n in zip(logits, noise, strict=True)]
        return found._replace(margin=abs(logits[0] - logits[1]))


def _logprob(llm: LLM, context: Sequence[Any], token: int) -> float:
    """Of the raw distribution: what may be chosen does not change it."""
    chosen: dict[str, Any] = {"allowed_token_ids": (token,), "max_tokens": 1, "logprobs": 1}
    params = SamplingParams(temperature=0, ignore_eos=True, num_speculative_tokens=0, **chosen)
    (result,) = llm.generate([list(context)], params)
    assert result.outputs[0].logprobs, "asked for"
    return float(result.outputs[0].logprobs[0].logprob)


def first_difference(prompt: str, plain: list[int], drafted: list[int], spell: Spell) -> Difference | None:
    if plain == drafted:
        return None
    position = num_same(plain, drafted)
    tokens = [text[position : position + 1] for text in (plain, drafted)]
    at = [f"{token[0]} {spell(token[0])!r}" if token else "the end" for token in tokens]
    return Difference(prompt, position, at[0], at[1])
