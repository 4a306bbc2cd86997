"""A draft model that fits: in which of its forms, by dtype and by layers left out, would it gain most here?

Each layer is left out alone, and how often the model then agrees with what the target wrote says which are
needed least. Those are left out together, ever more of them. From agreement, the time of a pass and what
checking costs follow the speedup of every form and K. Invariant: forms are judged on the target's own greedy
texts, so an estimate is of greedy drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.core.types import Cached, Segment
from paceline.drafters.base import DrafterContext
from paceline.loaders.checkpoint import describe, open_checkpoint
from paceline.measure import roofline
from paceline.measure.results import Tell
from paceline.runtime.executor import LocalExecutor
from paceline.runtime.timing import Timed

SHARES = (0.0, 0.125, 0.25, 0.375, 0.5)  # of the layers, that are left out
SMALL = "int4"  # tried beside the target's dtype
MOST_K, PASSES = 8, 5  # of the passes that time a form the quickest counts
Text = tuple[Sequence[int], Sequence[int]]  # a prompt, and the target's answer


class Form(NamedTuple):
    dtype: str
    skip_layers: tuple[int, ...]
    agreement: float  # how often its likeliest token is the target's
    cost: float  # of a drafted token, in plain steps
    k: int  # the best length of a draft; 0: it cannot gain
    speedup: float  # with that, as expected


def agreement(executor: LocalExecutor, texts: Sequence[Text]) -> float:
    right = total = 0
    for prompt, answer in texts:
        cache, tokens = Cached(), [*prompt, *answer[:-1]]
        if max(tokens) >= executor.config.vocab_size or not executor.kv.reserve(cache, len(tokens)):
            continue
        logits = executor.forward([Segment(tokens, cache, None, len(answer))]).logits
        right += sum(a == b for a, b in zip(logits.argmax(-1).tolist(), answer, strict=True))
        total += len(answer)
        executor.kv.free(cache)
    return right / total if total else 0.0


def seconds_of(executor: LocalExecutor, context: int) -> float:
    """Of a pass over one token."""
    passes = Timed(executor, context + 1)
    try:
        return min(passes.seconds(1, min(context, passes.room - 1)) for _ in range(PASSES))
    finally:
        passes.free()


def num_loads(model: str) -> int:
    """How many forms `fit` tries at most."""
    return describe(model).config.num_layers + 2 * len(SHARES)


def fit(
    context: DrafterContext, model: str, dtype: str, texts: Sequence[Text], plain: float,
    verify_cost: Callable[[int], float], tell: Tell,
) -> list[Form]:  # fmt: skip
    """The best first. plain: seconds of a step; verify_cost: of a pass, by its rows, in such steps."""
    source, length = open_checkpoint(model, False), max(len(prompt) + len(said) for prompt, said in texts)
    num_layers, found = source.config.num_layers, list[Form]()

    def loaded(its_dtype: str, skipped: Sequence[int]) -> LocalExecutor:
        tell("fitting the draft model", 1)
        return context.load_model(source, its_dtype, skipped=skipped)[2]

    alone = [agreement(loaded(dtype, (i,)), texts) if num_layers > 1 else 0.0 for i in range(num_layers)]
    needed_least = sorted(range(num_layers), key=lambda i: -alone[i])
    for its_dtype in dict.fromkeys((dtype, SMALL)):
        for count in sorted({int(share * num_layers) for share in SHARES}):
            skipped = tuple(sorted(needed_least[:count]))
            executor = loaded(its_dtype, skipped)
            alpha, cost = agreement(executor, texts), seconds_of(executor, length) / plain
            k = roofline.best_k(alpha, cost, verify_cost, MOST_K)
            gain = roofline.speedup(alpha, k, cost, verify_cost(k + 1))
            found.append(Form(its_dtype, skipped, alpha, cost, k, gain))
    return sorted(found, key=lambda form: -form.speedup)
