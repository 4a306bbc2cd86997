"""Between the messages of the HTTP side and the engine: prompts become requests, with everything that takes a
while (tokens, templates, grammars) done beside the steps; each step becomes text, log-probabilities, the end,
and figures for /metrics. Invariant: what is refused is refused before anything is queued, by a PacelineError;
the texts said for a choice, joined, are what `LLM.generate` returns for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from paceline.api.build import Built
from paceline.api.inbox import Inbox
from paceline.api.intake import Intake
from paceline.api.results import Logprobs
from paceline.cli.explain_steps import Recorder, details_json
from paceline.core.errors import PacelineError, RequestError
from paceline.core.params import SamplingParams
from paceline.core.types import Request
from paceline.engine.commit import Emission
from paceline.engine.engine import Engine
from paceline.engine.stats import SpecStats
from paceline.loaders.detokenize import Detokenizer
from paceline.loaders.tokenizer import Tokenizer
from paceline.server import formats
from paceline.server.grammar_check import GrammarChecker

PROMPT_END = 8  # tokens: as many as a tag that opens the reasoning may have
LEAST_LOGPROB = -9999.0  # JSON has no infinity


class TooLong(RequestError):
    """A prompt that the context or a limit of the server does not hold."""


class Preparer(NamedTuple):
    engine: Engine
    intake: Intake
    checker: GrammarChecker
    max_prompt_tokens: int | None
    max_completion_tokens: int | None

    def prepare(self, message: Mapping[str, Any]) -> Any:
        """For an `add` its requests, else the answer itself."""
        if message["do"] == "detokenize":
            tokens = message["tokens"]
            self.intake.check_ids("tokens", tokens)
            return {"prompt": self.intake.tokenizer.decode(tokens, skip_special=False)}
        try:
            tokens = self._tokens(message["prompt"])
        except RecursionError:
            raise RequestError("the messages are nested too deeply; flatten them") from None
        if message["do"] == "tokenize":
            return {"tokens": tokens, "count": len(tokens), "max_model_len": self.intake.max_model_len}
        return self._requests(tokens, message)

    def _tokens(self, prompt: Mapping[str, Any]) -> list[int]:
        if "tokens" in prompt:
            return list(prompt["tokens"])
        if "text" in prompt:
            return self.intake.tokenizer.encode(prompt["text"], add_special=prompt.get("add_special", True))
        options = {name: prompt[name] for name in ("add_generation_prompt", "tools")}
        tokenizer, options = self.intake.tokenizer, options | prompt["template_options"]
        tokens = tokenizer.encode_chat(prompt["messages"], **options)
        return tokens + tokenizer.encode(prompt.get("opening", ""), add_special=False)

    def _requests(self, tokens: list[int], message: Mapping[str, Any]) -> list[Request]:
        context, limit, count = self.intake.max_model_len, self.max_prompt_tokens, len(tokens)
        if limit is not None and count > limit:
            raise TooLong(f"the prompt has {count:,} tokens; this server takes at most {limit:,}")
        if count >= context:
            what = f"the prompt has {count:,} tokens and the context holds {context:,}"
            raise TooLong(f"{what}; shorten it to at most {context - 1:,}")
        room = context - count
        options = {"max_tokens": min(room, self.max_completion_tokens or room), **message["params"]}
        if "logit_bias" in options:  # JSON has no whole numbers for keys
            options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items()}
        params = SamplingParams(**options)
        if params.structured_outputs is not None:
            self.checker.check(options["structured_outputs"])
        requests = self.intake.requests(tokens, params, message.get("priority", 0))
        self.engine.check_fits(requests[0])
        for request in requests:
            request.is_streamed = message.get("is_streamed", False)
        if names := message.get("shown"):
            tokenizer = self.intake.tokenizer
            hidden = tokenizer.special_ids - tokenizer.eos_ids
            for request in requests:
                assert isinstance(request.text_stop, Detokenizer)
                request.text_stop.show([each for each in hidden if tokenizer.token_name(each) in names])
        return requests


def description(built: Built, config: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """What the HTTP side must know of the model and the drafters. config: the speculative_config."""
    engine, selectable = built.engine, built.engine.policy.drafters
    template = built.checkpoint.tokenizer_source().chat_template
    method = config.get("method", "draft_model") if isinstance(config, Mapping) else config or "off"
    return {
        "max_model_len": engine.config.max_model_len,
        "max_num_seqs": engine.config.max_num_seqs,
        "num_blocks": engine.executor.kv.num_blocks,
        "has_template": template is not None,
        "has_tools": template is not None and "tools" in template,
        **formats.described(template or ""),
        "defaults": built.defaults,
        "speculative": {
            "method": "hybrid" if isinstance(method, list) else method,
            "drafters": [each.name for one in selectable for each in (one, *getattr(one, "drafters", ()))],
            "selectable": [drafter.name for drafter in selectable],
            "num_speculative_tokens": engine.config.num_speculative_tokens,
            "is_pinned": isinstance(config, Mapping) and "num_speculative_tokens" in config,
        },
    }


@dataclass(slots=True)
class Choice:
    """One answer to a client's request, while it is being written."""

    call: str  # the client's id of the request
    index: int
    request: Request
    stats: SpecStats
    tokenizer: Tokenizer
    has_details: bool = False  # of each step
    recorder: Recorder | None = None  # where p and q are wanted, too
    thoughts: Sequence[Any] | None = None  # formats.Thoughts, where there may be some
    num_steps: int = 0  # with details
    added_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None  # of the step in which it first ran
    first_at: float | None = None  # of its first token

    def message(self, emission: Emission) -> dict[str, Any]:
        request, text = self.request, self.request.text_stop
        assert isinstance(text, Detokenizer)
        if request.is_finished:
            text.finish()
        said: dict[str, Any] = {"id": self.call, "i": self.index, "n": len(emission.tokens)}
        if new := text.take():
            said["t"] = new
        if request.params.logprobs is not None and emission.logprobs:
            said["lp"] = [self._token_json(each.token, each.logprob) for each in emission.logprobs]
            for written, each in zip(said["lp"], emission.logprobs, strict=True):
                written["top_logprobs"] = [self._token_json(*top) for top in each.top]
        if self.has_details:
            self.num_steps += 1
            watched = None
            if self.recorder is not None and self.recorder.steps:
                watched = self.recorder.steps[-1]
                self.recorder.steps.clear()
            said["d"] = details_json(emission, self.num_steps, self.tokenizer.token_text, watched)
        self.first_at = first_at = self.first_at or time.monotonic()
        if request.error is not None:
            return said | {"error": error_json(request.error)}
        if request.finish_reason is not None:
            started_at = self.started_at or first_at
            usage: dict[str, Any] = {
                "prompt_tokens": request.num_prompt,
                "completion_tokens": request.num_output,
                "reasoning_tokens": self._num_reasoning(),
                "cached_tokens": request.num_prefix_hits,
                "queue_s": started_at - self.added_at,
                "prefill_s": first_at - started_at,
                "decode_s": time.monotonic() - first_at,
                "stop": text.stopped_by,
                "stats": asdict(self.stats),
            }
            if (scores := Inbox(request, self.stats, self.tokenizer).prompt_logprobs()) is not None:
                usage["prompt_logprobs"] = [each and _scores_json(each) for each in scores]
            said |= {"end": request.finish_reason.value, "usage": usage}
        return said

    @property
    def prompt_end(self) -> str:
        """Its last words, which may have opened the reasoning."""
        prompt = self.request.tokens[: self.request.num_prompt]
        return self.tokenizer.decode(prompt[-PROMPT_END:], skip_special=False)

    def _num_reasoning(self) -> int:
        tokens = self.request.output
        said = tokens[:-1] if tokens and tokens[-1] in self.request.stop_ids else tokens
        pieces = list(map(self.tokenizer.token_bytes, said))
        return formats.Thoughts(*self.thoughts).num_tokens(pieces, self.prompt_end) if self.thoughts else 0

    def _token_json(self, token: int, logprob: float) -> dict[str, Any]:
        data, logprob = self.tokenizer.token_bytes(token), max(logprob, LEAST_LOGPROB)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


def _scores_json(scores: Logprobs) -> Any:
    """As vLLM writes the log-probabilities of one of the prompt's tokens."""
    shown = {token: each._asdict() for token, each in scores.items()}
    return {token: each | {"logprob": max(each["logprob"], LEAST_LOGPROB)} for token, each in shown.items()}


def error_json(error: PacelineError) -> dict[str, str]:
    return {"kind": type(error).__name__, "message": str(error)}


def figures(engine: Engine) -> dict[str, Any]:
    """Where the engine stands, by the names of /metrics: sizes of now, and counts since it was started."""
    scheduler, kv = engine.scheduler, engine.executor.kv
    gauges = {
        "num_requests_running": len(scheduler.running),
        "num_requests_waiting": len(scheduler.waiting),
        "kv_cache_usage_perc": kv.num_used / kv.num_blocks,
        "kv_cache_blocks_used": kv.num_used,
        "kv_cache_blocks_total": kv.num_blocks,
    }
    counters = {
        "num_preemptions": scheduler.num_preemptions,
        "num_recordings": engine.executor.backend.num_recordings - engine.num_recorded,
        "prefix_cache_queries": scheduler.num_prefix_queries,
        "prefix_cache_hits": scheduler.num_prefix_hits,
    }
    return {"gauges": gauges, "counters": counters, "stats": asdict(engine.totals)}
