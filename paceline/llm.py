"""LLM: text in, text out. Batches, chats and streams all go through one engine, and may be interleaved."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from paceline.build import build
from paceline.engine.engine import Emission
from paceline.errors import ConfigError, RequestError
from paceline.intake import Intake
from paceline.loaders.detokenize import Detokenizer
from paceline.params import SamplingParams
from paceline.results import Chunk, Completion, Result, Token
from paceline.types import FinishReason, Request

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(slots=True)
class _Inbox:
    """What a request has said and its reader has not yet seen."""

    request: Request
    emissions: list[Emission] = field(default_factory=list)


class LLM:
    """A model with, if asked, a drafter.

    speculative_config: {"method": "ngram" | "draft_model" | "early_exit" | "quantized", "num_speculative_tokens": K, ...}
    kv_cache_memory: bytes, or a fraction of the free memory.
    """

    def __init__(
        self,
        model: str = "default",
        *,
        speculative_config: Mapping[str, Any] | None = None,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        max_model_len: int | None = None,
        kv_cache_memory: int | float | None = None,
        enable_prefix_caching: bool = True,
        kernels: str = "exact",
        progress: bool = True,
    ) -> None:
        limits = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "enable_prefix_caching": enable_prefix_caching,
        }
        built = build(model, speculative_config, kv_cache_memory, max_model_len, kernels, progress, **limits)
        self.engine, self.checkpoint, self.tokenizer = built
        self._intake = Intake(self.tokenizer, self.checkpoint.config.vocab_size)
        self._inboxes: dict[str, _Inbox] = {}
        self._lock = threading.RLock()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop what is still running and give back its memory."""
        with self._lock:
            for inbox in list(self._inboxes.values()):
                self._drop(inbox.request)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[Result]:
        """Complete raw prompts (text or token ids), all of them together. A failed request carries its error; alone, it raises.

        priority: one number a prompt; lower runs first.
        """
        many = _as_list(prompts)
        ranks = priority if priority is not None else [0] * len(many)
        if len(ranks) != len(many):
            raise ConfigError(f"there are {len(ranks)} priorities for {len(many)} prompts; give one for each")
        groups = [self._requests(*fields) for fields in zip(many, _per_prompt(params, len(many)), ranks, strict=True)]
        return self._run(many, groups)

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]:
        """Answer one conversation or several, through the model's own chat template."""
        many = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts = [self.tokenizer.encode_chat(m) for m in many]  # type: ignore[arg-type]
        groups = [self._requests(p, s) for p, s in zip(prompts, _per_prompt(params, len(prompts)), strict=True)]
        return self._run(prompts, groups)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Complete one raw prompt piece by piece. Closing the iterator stops the request."""
        params = params or SamplingParams()
        if params.n != 1:
            raise ConfigError(f"n is {params.n}; a stream is one completion: use n=1, or generate")
        return self._stream(prompt, self._requests(prompt, params)[0])

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Answer a conversation piece by piece."""
        return self.stream(self.tokenizer.encode_chat(messages), params)

    def _requests(self, prompt: Prompt, params: SamplingParams, priority: int = 0) -> list[Request]:
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token")
        requests = self._intake.requests(tokens, params, priority)
        self.engine.check_fits(requests[0])
        return requests

    def _run(self, prompts: Sequence[Prompt], groups: list[list[Request]]) -> list[Result]:
        flat = [r for group in groups for r in group]
        try:
            self._add(flat)
            for request in flat:
                while not request.is_finished:
                    self._pump()
            if any(r.finish_reason is FinishReason.ABORT for r in flat):
                raise RequestError("the LLM was closed while it was generating; make a new one")
            results = [_result(p, [self._completion(r, i) for i, r in enumerate(g)], g[0]) for p, g in zip(prompts, groups, strict=True)]
        finally:
            for request in flat:
                self._drop(request)
        failed = results[0].outputs[0].error if len(results) == 1 else None
        if failed is not None:
            raise failed
        return results

    def _stream(self, prompt: Prompt, request: Request) -> Iterator[Chunk]:
        self._add([request])
        inbox, seen = self._inboxes[request.id], 0
        tokens: tuple[Token, ...] = ()
        detokenizer = request.text_stop
        assert isinstance(detokenizer, Detokenizer)
        try:
            while not request.is_finished or seen < len(inbox.emissions):
                if seen == len(inbox.emissions):
                    self._pump()
                    continue
                tokens = tuple(t for e in inbox.emissions[seen:] for t in self._tokens(e))
                seen = len(inbox.emissions)
                if request.is_finished:
                    break
                yield Chunk(detokenizer.take(), tokens)
            if request.error is not None:
                raise request.error
            if request.finish_reason is FinishReason.ABORT:
                return  # the LLM was closed under it
            result = _result(prompt, [self._completion(request, 0)], request)
            yield Chunk(detokenizer.take(), tokens, request.finish_reason, result)
        finally:
            self._drop(request)

    def _add(self, requests: Sequence[Request]) -> None:
        with self._lock:
            for request in requests:
                self._inboxes[request.id] = _Inbox(request)
                self.engine.add(request)

    def _pump(self) -> None:
        """One step of the engine, for whoever is waiting."""
        with self._lock:
            for emission in self.engine.step():
                self._inboxes[emission.request.id].emissions.append(emission)

    def _drop(self, request: Request) -> None:
        with self._lock:
            if self._inboxes.pop(request.id, None) is not None:
                self.engine.abort(request)
                self.engine.stats.pop(request.id, None)

    def _completion(self, request: Request, index: int) -> Completion:
        detokenizer = request.text_stop
        assert isinstance(detokenizer, Detokenizer)
        assert request.finish_reason is not None
        detokenizer.finish()
        emissions = self._inboxes[request.id].emissions
        return Completion(
            text=detokenizer.text,
            token_ids=request.output,
            finish_reason=request.finish_reason,
            logprobs=[p for e in emissions for p in e.logprobs] if request.params.logprobs is not None else None,
            stats=self.engine.stats[request.id],
            index=index,
            error=request.error,
        )

    def _tokens(self, emission: Emission) -> list[Token]:
        texts = [self.tokenizer.token_text(t) for t in emission.tokens]
        sources = [emission.source if i < emission.num_accepted else None for i in range(len(texts))]
        return [Token(*fields) for fields in zip(emission.tokens, texts, sources, strict=True)]


def _result(prompt: Prompt, outputs: list[Completion], request: Request) -> Result:
    return Result(prompt if isinstance(prompt, str) else None, request.tokens[: request.num_prompt], outputs)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    if not prompts:
        raise RequestError("there is no prompt; give a text, token ids, or a list of them")
    return list(prompts)  # type: ignore[arg-type]


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ConfigError(f"there are {len(params)} SamplingParams for {count} prompts; give one, or one for each")
    return list(params)
