"""LLM: text in, text out. Batches, chats and streams all go through one engine, and may be interleaved."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from paceline.api.build import build
from paceline.api.intake import Encoded, Intake, Prompt, as_list
from paceline.api.options import EngineOptions
from paceline.api.results import Chunk, Completion, Result, Token
from paceline.core.errors import ConfigError, RequestError
from paceline.core.options import from_options
from paceline.core.params import SamplingParams
from paceline.core.types import FinishReason, Request
from paceline.engine.commit import Emission
from paceline.engine.stats import SpecStats
from paceline.loaders.detokenize import Detokenizer

Message = Mapping[str, Any]
Conversation = Sequence[Message]
Params = SamplingParams | Sequence[SamplingParams] | None  # for all prompts, or one for each
Asked = tuple[Encoded, SamplingParams, int]  # and its priority


@dataclass(slots=True)
class _Inbox:
    """All that was emitted for a request."""

    request: Request
    stats: SpecStats
    emissions: list[Emission] = field(default_factory=list)

    @property
    def detokenizer(self) -> Detokenizer:
        assert isinstance(self.request.text_stop, Detokenizer)
        return self.request.text_stop

    def completion(self, index: int) -> Completion:
        request = self.request
        assert request.finish_reason is not None
        self.detokenizer.finish()
        logprobs = [each for emission in self.emissions for each in emission.logprobs]
        shown = None if request.params.logprobs is None else logprobs
        text, tokens = self.detokenizer.text, request.output
        return Completion(text, tokens, request.finish_reason, shown, self.stats, index, request.error)


class LLM:
    """A model, and drafters that make it faster without changing what it says.

    Takes the fields of EngineOptions (api/options.py) as keywords, or one EngineOptions in the model's place.
    """

    def __init__(self, model: str | EngineOptions = "default", **options: Any) -> None:
        if isinstance(model, EngineOptions):
            chosen = {f.name: getattr(model, f.name) for f in fields(model)} | options
        else:
            chosen = {"model": model, **options}
        self.options = from_options(EngineOptions, chosen, "LLM")
        built = build(self.options)
        self.engine, self.checkpoint, self.tokenizer = built.engine, built.checkpoint, built.tokenizer
        self.context = built.context  # what further drafters would be made with
        vocab_size, length = self.checkpoint.config.vocab_size, self.engine.config.max_model_len
        self._intake = Intake(self.tokenizer, vocab_size, length)
        self._inboxes: dict[str, _Inbox] = {}
        self._dropped: list[Request] = []
        self._is_stepping = False
        self._lock = threading.RLock()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop what is still running and give back its memory."""
        with self._lock:
            for inbox in list(self._inboxes.values()):
                self._drop(inbox.request)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, priority: Sequence[int] | None = None
    ) -> list[Result]:
        """Complete raw prompts (each a text, token ids, or vLLM's mapping), all of them together. A failed
        request carries its error; alone, it raises. priority: one number a prompt; lower runs first."""
        many = [self._intake.encode(prompt) for prompt in as_list(prompts)]
        ranks = [0] * len(many) if priority is None else priority
        is_list = isinstance(ranks, Sequence) and len(ranks) == len(many)
        if not is_list or not all(isinstance(rank, int) for rank in ranks):
            remedy = f"give one whole number for each of the {len(many)} prompts"
            raise ConfigError(f"priority is {priority!r:.40}; {remedy}")
        return self._run(zip(many, _per_prompt(params, len(many)), ranks, strict=True))

    def chat(self, messages: Conversation | Sequence[Conversation], params: Params = None) -> list[Result]:
        """Answer one conversation or several, through the model's own chat template."""
        many = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts = [Encoded(None, self._encode_chat(m)) for m in many]  # type: ignore[arg-type]
        each = zip(prompts, _per_prompt(params, len(prompts)), strict=True)
        return self._run((prompt, own, 0) for prompt, own in each)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Complete one raw prompt piece by piece. Closing the iterator stops the request."""
        (params,) = _per_prompt(params, 1)
        if params.n != 1:
            raise ConfigError(f"n is {params.n}; a stream is one completion: use n=1, or generate")
        encoded = self._intake.encode(prompt)
        return self._stream(encoded, self._requests(encoded, params)[0])

    def stream_chat(self, messages: Conversation, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Answer a conversation piece by piece."""
        return self.stream(self._encode_chat(messages), params)

    def _encode_chat(self, messages: Conversation) -> list[int]:
        if not messages or not any(message.get("content") for message in messages):
            raise RequestError("the conversation is empty; give at least one message with content")
        return self.tokenizer.encode_chat(messages)

    def _requests(self, prompt: Encoded, params: SamplingParams, priority: int = 0) -> list[Request]:
        requests = self._intake.requests(prompt.tokens, params, priority)
        self.engine.check_fits(requests[0])
        return requests

    def _run(self, asked: Iterable[Asked]) -> list[Result]:
        groups = [(prompt, self._requests(prompt, params, rank)) for prompt, params, rank in asked]
        inboxes = self._add([r for _, group in groups for r in group])
        try:
            for inbox in inboxes:
                while not inbox.request.is_finished:
                    self._pump()
        finally:
            for inbox in inboxes:
                self._drop(inbox.request)
        if any(inbox.request.finish_reason is FinishReason.ABORT for inbox in inboxes):
            raise RequestError("the LLM was closed while it was generating; make a new one")
        left, results = iter(inboxes), []
        for prompt, group in groups:
            outputs = [next(left).completion(index) for index in range(len(group))]
            results.append(Result(prompt.text, prompt.tokens, outputs))
        failed = results[0].outputs[0].error if len(results) == 1 else None
        if failed is not None:
            raise failed
        return results

    def _stream(self, prompt: Encoded, request: Request) -> Iterator[Chunk]:
        request.is_streamed = True
        (inbox,) = self._add([request])
        try:
            is_finished, num_seen = False, 0
            while not is_finished:
                with self._lock:  # one look at what another thread's step may be changing
                    emissions, text = inbox.emissions[num_seen:], inbox.detokenizer.take()
                    num_seen, is_finished = len(inbox.emissions), request.is_finished
                    if not emissions and not is_finished:
                        self._pump()
                        continue
                tokens = tuple(t for e in emissions for t in self._tokens(e))
                if not is_finished:
                    yield Chunk(text, tokens)
            if request.error is not None:
                raise request.error
            if request.finish_reason is not FinishReason.ABORT:  # else the LLM was closed under it
                result = Result(prompt.text, prompt.tokens, [inbox.completion(0)])
                yield Chunk(text + inbox.detokenizer.take(), tokens, request.finish_reason, result)
        finally:
            self._drop(request)

    def _add(self, requests: Sequence[Request]) -> list[_Inbox]:
        with self._lock:
            made = []
            for request in requests:
                self.engine.add(request)
                made.append(_Inbox(request, self.engine.stats[request.id]))
                self._inboxes[request.id] = made[-1]
            return made

    def _pump(self) -> None:
        """One step of the engine, for all that wait."""
        with self._lock:
            self._is_stepping = True
            try:
                for emission in self.engine.step():
                    self._inboxes[emission.request.id].emissions.append(emission)
            finally:
                self._is_stepping = False
            while self._dropped:
                self._drop(self._dropped.pop())

    def _drop(self, request: Request) -> None:
        with self._lock:
            if self._is_stepping:  # the garbage collector may close a stream in the middle of a step
                self._dropped.append(request)
            elif self._inboxes.pop(request.id, None) is not None:
                self.engine.abort(request)
                self.engine.stats.pop(request.id, None)

    def _tokens(self, emission: Emission) -> list[Token]:
        texts = [self.tokenizer.token_text(t) for t in emission.tokens]
        sources = [*emission.sources, *[None] * (len(texts) - len(emission.sources))]
        return [Token(*fields) for fields in zip(emission.tokens, texts, sources, strict=True)]


def _per_prompt(params: Params, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        remedy = "give a SamplingParams, or a list with one for each prompt"
        raise ConfigError(f"params is {params!r:.60}; {remedy}")
    if len(params) != count:
        found = f"{len(params)} SamplingParams for {count} prompts"
        raise ConfigError(f"there are {found}; give one, or one for each")
    return list(params)
