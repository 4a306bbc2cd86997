"""Is decoding with drafts the same as without? Every drafter, greedy and seeded, alone and in a batch, on the same prompts.

The plain texts are made once for each mode, in a batch, and every other run is compared with them token by token: so equality
also says that the batch a request is in changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.params import SamplingParams

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.prompts import Prompt
    from paceline.results import Result

BATCHES = (1, 8)


class Mode(NamedTuple):
    name: str
    temperature: float


MODES = (Mode("greedy", 0.0), Mode("seeded", 0.7), Mode("seeded", 1.2))


class Difference(NamedTuple):
    prompt_id: str
    position: int  # of the first token that differs, counted from the start of the answer
    plain: str  # the two tokens, id and text
    drafted: str


@dataclass(frozen=True, slots=True)
class Check:
    drafter: str
    mode: Mode
    batch: int
    num_prompts: int
    tau: float
    differences: tuple[Difference, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "drafter": self.drafter,
            "mode": self.mode.name,
            "temperature": self.mode.temperature,
            "batch": self.batch,
            "prompts": self.num_prompts,
            "identical": not self.differences,
            "tau": round(self.tau, 4),
        }


@dataclass(frozen=True, slots=True)
class Examination:
    """The questions: prompts, modes and lengths, the same for every drafter."""

    prompts: Sequence[Prompt]
    inputs: Sequence[str | list[int]]  # each prompt as the model reads it
    max_tokens: int

    def params(self, mode: Mode, **options: Any) -> list[SamplingParams]:
        """Each prompt has its own seed, so that equal noise cannot hide a mix-up of requests."""
        seeds = [None if mode.temperature == 0 else 1000 + i for i in range(len(self.prompts))]
        return [SamplingParams(temperature=mode.temperature, seed=seed, max_tokens=self.max_tokens, **options) for seed in seeds]

    def plain(self, llm: LLM, mode: Mode) -> list[list[int]]:
        results = llm.generate(list(self.inputs), self.params(mode, num_speculative_tokens=0))
        return [list(result.token_ids) for result in results]

    def check(self, llm: LLM, drafter: str, mode: Mode, batch: int, plain: list[list[int]], advance: Callable[[int], None]) -> Check:
        results = self._run(llm, mode, batch, advance)
        spell = llm.tokenizer.token_text
        found = (first_difference(p.id, a, r.token_ids, spell) for p, a, r in zip(self.prompts, plain, results, strict=True))
        stats = [result.outputs[0].stats for result in results]
        tau = sum(s.num_tokens for s in stats) / max(1, sum(s.num_steps for s in stats))
        return Check(drafter, mode, batch, len(self.prompts), tau, tuple(d for d in found if d is not None))

    def _run(self, llm: LLM, mode: Mode, batch: int, advance: Callable[[int], None]) -> list[Result]:
        """Batch 1: one prompt after the other. Else all at once, and the engine runs as many together as `max_num_seqs` says."""
        params = self.params(mode)
        step = 1 if batch == 1 else len(params)
        results: list[Result] = []
        for start in range(0, len(params), step):
            results += llm.generate(list(self.inputs[start : start + step]), params[start : start + step])
            advance(step)
        return results


def first_difference(prompt_id: str, plain: Sequence[int], drafted: Sequence[int], spell: Callable[[int], str]) -> Difference | None:
    if list(plain) == list(drafted):
        return None
    shared = min(len(plain), len(drafted))
    position = next((i for i in range(shared) if plain[i] != drafted[i]), shared)
    at = [f"{text[position]} {spell(text[position])!r}" if position < len(text) else "the end" for text in (plain, drafted)]
    return Difference(prompt_id, position, *at)
