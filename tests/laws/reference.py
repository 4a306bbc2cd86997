"""The law: what plain decoding says, in the plainest code. No cache, no engine, no draft, no code of
paceline.core but the noise itself, which *defines* what a seed means. Everything in tests/laws is compared
with `reference_loop`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from paceline.core.noise import Purpose, gumbel
from paceline.core.params import SamplingParams

Model = Callable[[Sequence[int]], np.ndarray]  # tokens -> raw logits [vocab] of the next one
Allowed = Callable[[Sequence[int]], np.ndarray]  # output so far -> bool [vocab]: a grammar


def reference_loop(
    model: Model,
    prompt: Sequence[int],
    params: SamplingParams,
    seed: int,
    ends: frozenset[int] = frozenset(),
    bad: Sequence[Sequence[int]] = (),
    allowed: Allowed | None = None,
) -> list[int]:
    output: list[int] = []
    stops = (frozenset() if params.ignore_eos else ends) | set(params.stop_token_ids)
    while len(output) < params.max_tokens:
        logits = constrained(model([*prompt, *output]), prompt, output, params, ends, bad, allowed)
        if params.temperature == 0:
            token = int(np.argmax(logits))
        else:
            noise = gumbel(seed, len(prompt) + len(output), Purpose.TARGET, np.arange(len(logits)))
            token = int(np.argmax(warped(logits, params) + noise))
        output.append(token)
        if token in stops:
            break
    return output


def constrained(
    raw: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    ends: frozenset[int] = frozenset(),
    bad: Sequence[Sequence[int]] = (),
    allowed: Allowed | None = None,
) -> np.ndarray:
    logits = np.array(raw, np.float32)
    for processor in params.logits_processors:
        known = ([*prompt], [*output]) if processor.__code__.co_argcount == 3 else ([*output],)
        logits = processor(*known, torch.from_numpy(logits)).numpy()
    if allowed is not None:
        logits[~allowed(output)] = -np.inf
    if params.allowed_token_ids is not None:
        logits[[t for t in range(len(logits)) if t not in params.allowed_token_ids]] = -np.inf
    text = [*prompt, *output]
    for word in bad:
        if text[len(text) - len(word) + 1 :] == list(word[:-1]):
            logits[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        logits[[*ends, *params.stop_token_ids]] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += np.float32(bias)
    for token in set(text):
        logits[token] = (
            logits[token] / np.float32(params.repetition_penalty)
            if logits[token] > 0
            else logits[token] * np.float32(params.repetition_penalty)
        )
    for token in set(output):
        logits[token] -= np.float32(params.frequency_penalty * output.count(token) + params.presence_penalty)
    return logits


def warped(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    scores = logits.astype(np.float64) / params.temperature
    if params.min_p:
        scores = np.where(scores < scores.max() + np.log(params.min_p), -np.inf, scores)
    if 0 < params.top_k < len(scores):
        scores = np.where(scores < np.sort(scores)[-params.top_k], -np.inf, scores)
    if params.top_p < 1:
        order = np.sort(scores)[::-1]
        mass = np.cumsum(softmax(order))
        scores = np.where(
            scores < order[min(int((mass < params.top_p).sum()), len(order) - 1)], -np.inf, scores
        )
    return scores


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def distribution(
    model: Model,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    allowed: Allowed | None = None,
) -> np.ndarray:
    """p(next | prompt, output) after every option."""
    return softmax(
        warped(constrained(model([*prompt, *output]), prompt, output, params, allowed=allowed), params)
    )
