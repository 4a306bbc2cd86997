"""What the engine process says of each step: text, log-probabilities, the end, and figures for /metrics.

Invariant: the texts said for a choice, joined, are what `LLM.generate` returns for it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.core.errors import PacelineError
from paceline.loaders.detokenize import Detokenizer

if TYPE_CHECKING:
    from paceline.core.types import Request, TokenLogprobs
    from paceline.engine.commit import Emission
    from paceline.engine.engine import Engine
    from paceline.engine.stats import SpecStats
    from paceline.loaders.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(slots=True)
class Choice:
    """One answer to a client's request, while it is being written."""

    call: str  # the client's id of the request
    index: int
    request: Request
    stats: SpecStats
    tokenizer: Tokenizer
    has_details: bool
    added_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None  # of the step in which it first ran
    first_at: float | None = None  # of its first token

    def message(self, emission: Emission, details: dict[str, Any] | None) -> dict[str, Any]:
        request, text = self.request, self.request.text_stop
        assert isinstance(text, Detokenizer)
        if request.is_finished:
            text.finish()
        said: dict[str, Any] = {"id": self.call, "i": self.index, "n": len(emission.tokens)}
        if new := text.take():
            said["t"] = new
        if request.params.logprobs is not None and emission.logprobs:
            said["lp"] = [self._logprobs_json(each) for each in emission.logprobs]
        if details is not None:
            said["d"] = details
        self.first_at = self.first_at or time.monotonic()
        if request.is_finished:
            said |= self._end(self.first_at)
        return said

    def _end(self, first_at: float) -> dict[str, Any]:
        request, started_at = self.request, self.started_at or first_at
        assert request.finish_reason is not None
        if request.error is not None:
            return {"error": error_json(request.error)}
        usage = {
            "prompt_tokens": request.num_prompt,
            "completion_tokens": request.num_output,
            "cached_tokens": request.num_prefix_hits,
            "queue_s": started_at - self.added_at,
            "prefill_s": first_at - started_at,
            "decode_s": time.monotonic() - first_at,
            "stats": stats_json(self.stats),
        }
        return {"end": request.finish_reason.value, "usage": usage}

    def _logprobs_json(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._token_json(token, logprob) for token, logprob in entry.top]
        return {**self._token_json(entry.token, entry.logprob), "top_logprobs": top}

    def _token_json(self, token: int, logprob: float) -> dict[str, Any]:
        data, logprob = self.tokenizer.token_bytes(token), max(logprob, LEAST_LOGPROB)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


def error_json(error: PacelineError) -> dict[str, str]:
    return {"kind": type(error).__name__, "message": str(error)}


def stats_json(stats: SpecStats) -> dict[str, Any]:
    """Counts only, so that those of several choices can be added; what follows from them is worked out by
    usage.py."""
    return {
        "num_steps": stats.num_steps,
        "num_tokens": stats.num_tokens,
        "num_drafted": stats.num_drafted,
        "num_accepted": stats.num_accepted,
        "drafted_at": stats.positions.drafted_at,
        "accepted_at": stats.positions.accepted_at,
        "lengths": {str(length): count for length, count in stats.lengths.items()},
        "by_source": {source: _source_json(stats, source) for source in stats.by_source},
    }


def _source_json(stats: SpecStats, source: str) -> dict[str, Any]:
    return {
        "num_drafted": stats.drafted_by_source[source],
        "num_accepted": stats.accepted_by_source[source],
        "drafted_at": stats.by_source[source].drafted_at,
        "accepted_at": stats.by_source[source].accepted_at,
    }


def figures(engine: Engine) -> dict[str, Any]:
    """Where the engine stands: sizes of now, and counts since it was started."""
    scheduler, pool = engine.scheduler, engine.executor.kv.pool
    return {
        "num_running": len(scheduler.running),
        "num_waiting": len(scheduler.waiting),
        "blocks_used": pool.num_used,
        "blocks_total": pool.num_blocks,
        "num_preemptions": scheduler.num_preemptions,
        "prefix_queries": scheduler.num_prefix_queries,
        "prefix_hits": scheduler.num_prefix_hits,
        "stats": stats_json(engine.totals),
    }
