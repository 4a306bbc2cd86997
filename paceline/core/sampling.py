"""From raw logits to the distribution a request asked for, and draws from it.

Invariant: everything here is a function of one row of logits and one path, so a token's distribution does not
depend on the batch, the draft or the drafter. Target and drafter call the same functions: p and q are both
*after* every option. Order: the request's own processors, grammar, allowed ids, bad words, min tokens, bias,
penalties | temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paceline.core.errors import GrammarError, ModelError, ProcessorError
from paceline.core.noise import Noise, Purpose
from paceline.core.params import Processor, SamplingParams, num_arguments
from paceline.core.types import Draft, Pick, Request, TokenLogprobs

NEVER = -math.inf
FEW = 512  # top-p tries this many best tokens before it sorts the whole vocabulary


def processed(request: Request, path: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """Logits [vocab] for the token after `request.tokens + path`, with every option that precedes the
    temperature applied. A grammar is read in its present state: the caller has advanced it along `path`."""
    params = request.params
    has_options = _has_options(request)
    if has_options or not params.is_greedy:  # `choose` checks a greedy choice: one maximum is enough
        _best_of(request, logits)
    if not has_options:
        return logits
    logits = logits.float().clone()
    for processor in params.logits_processors:
        logits = _apply(processor, request, path, logits)
    if request.constraint is not None:
        logits[~request.constraint.allowed().to(logits.device)] = NEVER
    if params.allowed_token_ids is not None:
        allowed = torch.tensor(params.allowed_token_ids, device=logits.device)
        logits = torch.full_like(logits, NEVER).index_copy(0, allowed, logits[allowed])
    for *head, last in request.bad_sequences:
        if not head or [*request.tokens[-len(head) :], *path][-len(head) :] == head:
            logits[last] = NEVER
    if request.num_output + len(path) < params.min_tokens and request.banned_until_min:
        logits[list(request.banned_until_min)] = NEVER
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if params.repetition_penalty != 1:
        seen = torch.tensor([*request.tokens, *path], device=logits.device).unique()
        values, penalty = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        output = [*request.tokens[request.num_prompt :], *path]
        ids = torch.tensor(output, dtype=torch.int64, device=logits.device)
        seen, counts = ids.unique(return_counts=True)
        logits[seen] -= params.frequency_penalty * counts + params.presence_penalty
    if not bool((logits > NEVER).any()):
        place = f"request {request.id}: after {request.num_output + len(path)} tokens"
        remedy = "relax the grammar, allowed_token_ids, bad_words or min_tokens"
        raise GrammarError(f"{place} its options leave no token to choose; {remedy}")
    return logits


def _apply(processor: Processor, request: Request, path: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """It may change the logits in place, but must return them."""
    prompt, output = request.tokens[: request.num_prompt], [*request.tokens[request.num_prompt :], *path]
    name = getattr(processor, "__name__", type(processor).__name__)
    place = f"request {request.id}: after {len(output)} tokens its logits processor {name}"
    try:
        has_prompt = num_arguments(processor) == 3
        made = processor(prompt, output, logits) if has_prompt else processor(output, logits)
    except Exception as error:  # the user's own code may raise anything
        raise ProcessorError(f"{place} raised {type(error).__name__}: {error!s:.200}; correct it") from error
    if not isinstance(made, torch.Tensor) or made.shape != logits.shape:
        found = f"a tensor {list(made.shape)}" if isinstance(made, torch.Tensor) else f"{made!r:.40}"
        raise ProcessorError(f"{place} returned {found}; return the logits, a tensor {list(logits.shape)}")
    if not bool((made < math.inf).all()):
        raise ProcessorError(f"{place} returned NaN or +inf; use finite numbers, or -inf to ban a token")
    return made.to(logits)


def not_finite(request: Request) -> ModelError:
    causes = "its file is damaged, or it overflows in this precision"
    return ModelError(f"request {request.id}: the model's logits are not finite; {causes}")


def _best_of(request: Request, logits: torch.Tensor) -> int:
    """The id of the first of the largest logits, where NaN and +inf both show. On a CPU numpy is ten times as
    fast as torch."""
    best = int(logits.numpy().argmax() if logits.device.type == "cpu" else logits.argmax())
    if not math.isfinite(logits[best]):
        raise not_finite(request)
    return best


def _has_options(request: Request) -> bool:
    params = request.params
    is_limited = request.constraint is not None or params.allowed_token_ids is not None
    is_penalized = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    is_changed = params.min_tokens or params.logit_bias or params.logits_processors
    return bool(is_limited or is_penalized or request.bad_sequences or is_changed)


def warped(params: SamplingParams, logits: torch.Tensor) -> torch.Tensor:
    """Temperature, min-p, top-k, top-p: float64 logits [vocab], -inf outside the kept set; ties are kept."""
    logits = logits.double() / params.temperature
    if params.min_p:
        logits = logits.masked_fill(logits < logits.max() + math.log(params.min_p), NEVER)
    if 0 < params.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], NEVER)
    if params.top_p < 1:
        total = logits.logsumexp(0)
        for count in (FEW, logits.numel()):
            best = logits.topk(min(count, logits.numel())).values
            reached = int(((best - total).exp().cumsum(0) < params.top_p).sum())
            if reached < best.numel():
                break
        # the smallest logit of the smallest set of best tokens whose probabilities reach top_p
        edge = best[min(reached, best.numel() - 1)]
        logits = logits.masked_fill(logits < edge, NEVER)
    return logits


def probabilities(params: SamplingParams, logits: torch.Tensor) -> torch.Tensor:
    """The distribution [vocab] float64 that processed logits stand for."""
    return warped(params, logits).softmax(0)


def noise_of(request: Request) -> Noise:
    return Noise(request.seed, request.num_rounds)


def choose(request: Request, logits: torch.Tensor, position: int, noise: Noise) -> int:
    """The target's own token from processed logits: argmax, or a draw with the noise of this position."""
    if request.params.is_greedy:
        return _best_of(request, logits)
    return noise.draw(warped(request.params, logits).cpu().numpy(), position, Purpose.TARGET)


def pick_of(request: Request, draft: Draft) -> Pick | None:
    """What a device needs to choose as `choose` does; None where options or q need more than raw logits."""
    params = request.params
    is_reported = params.logprobs is not None or params.prompt_logprobs is not None
    if _has_options(request) or is_reported or (draft.q and request.is_sampled):
        return None
    if params.is_greedy:
        return Pick(0.0, 0)
    return Pick(params.temperature, request.seed, max(params.top_k, 0), params.top_p, params.min_p)


def logprobs_of(logits: torch.Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities under the target's raw logits [vocab]."""
    scores = logits.double().log_softmax(0)
    top = scores.topk(min(num_top, scores.numel())) if num_top else None
    pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top else ()
    return TokenLogprobs(token, float(scores[token]), pairs, int((scores > scores[token]).sum()) + 1)
