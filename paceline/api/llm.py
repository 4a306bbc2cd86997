"""LLM: text in, text out. Batches, chats and streams all go through one engine, and may be interleaved.

Invariant: each caller that waits for an answer steps the engine for all requests. So a stream that is not
read holds up no other: it is written on with the others' steps, at most up to its max_tokens, and is read
from its inbox later. Closing or forgetting it stops it.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.api.build import build, handovers_of
from paceline.api.inbox import Inbox, result_of
from paceline.api.intake import ChatOptions, Encoded, Intake, Messages, Params, Prompt, as_list, per_prompt
from paceline.api.names import to_ours
from paceline.api.options import EngineOptions
from paceline.api.progress import progress
from paceline.api.results import Chunk, Result, Token
from paceline.core.errors import ConfigError, RequestError
from paceline.core.options import from_options, is_whole
from paceline.core.params import SamplingParams
from paceline.core.types import FinishReason, Request
from paceline.engine.commit import Emission
from paceline.engine.handover import READING, Handover, Handovers
from paceline.loaders.tokenizer import Tokenizer
from paceline.runtime.backend import give_back

Asked = tuple[Encoded, SamplingParams, int]  # and its priority
Bar = bool | Callable[..., Any]
HELD = ("engine", "checkpoint", "tokenizer", "context", "_intake", "handovers")  # what `close` gives back
CLOSED = "the LLM is closed; make a new one"
ABSENT = dict.fromkeys(
    ("embed", "classify", "score", "reward"), "it only writes text; log-probabilities come with generate"
) | {
    "encode": "for token ids use get_tokenizer().encode(text)",
    "beam_search": "ask generate for SamplingParams(n=...)",
}


class LLM:
    """A model, and drafters that make it faster without changing what it says.

    Takes the fields of EngineOptions (api/options.py) as keywords, or one EngineOptions in the model's place;
    vLLM's names by the rule of api/names.py: obeyed, ignored with a word, or refused with the remedy.
    """

    def __init__(self, model: str | EngineOptions = "default", **options: Any) -> None:
        if isinstance(model, EngineOptions):
            chosen = {f.name: getattr(model, f.name) for f in fields(model)} | options
        else:
            chosen = {"model": model, **options}
        self._inboxes: dict[str, Inbox] = {}
        self._dropped: list[Request] = []
        self._is_stepping = False
        self._lock = threading.RLock()
        self.options = EngineOptions(**to_ours(chosen))
        built = build(self.options)
        self.engine, self.checkpoint, self.tokenizer = built.engine, built.checkpoint, built.tokenizer
        self.context = built.context  # what further drafters would be made with
        self._defaults = SamplingParams(**built.defaults)
        vocab_size, length = self.checkpoint.config.vocab_size, self.engine.config.max_model_len
        seeds = None if self.options.seed is None else random.Random(self.options.seed)
        self._intake = Intake(self.tokenizer, vocab_size, length, seeds)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name in HELD and "_lock" in vars(self):
                raise RequestError(CLOSED)
            known = f"; {ABSENT[name]}" if name in ABSENT else ""
            raise AttributeError(f"an LLM has no {name!r}{known}")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop what is still running and give back all memory; whatever is asked after that is refused."""
        with self._lock:
            if "engine" not in vars(self):
                return
            executor, device = self.engine.executor, self.engine.executor.device
            for inbox in list(self._inboxes.values()):
                self._drop(inbox.request)
            executor.close()
            for name in HELD:
                vars(self).pop(name, None)
        gc.collect()  # parts of an engine know each other
        give_back(device)

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What counts where none are given: of the model's own defaults, and else SamplingParams()."""
        return self._defaults

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, *,
        use_tqdm: Bar = False, lora_request: None = None, priority: Sequence[int] | None = None,
    ) -> list[Result]:  # fmt: skip
        """Complete raw prompts (each a text, token ids, or vLLM's mapping), all of them together. A failed
        request carries its error; alone, it raises. priority: one number a prompt; lower runs first."""
        many = [self._intake.encode(prompt) for prompt in as_list(prompts)]
        ranks = [0] * len(many) if priority is None else priority
        is_list = isinstance(ranks, Sequence) and len(ranks) == len(many)
        if not is_list or not all(is_whole(rank) for rank in ranks):
            remedy = f"give one whole number for each of the {len(many)} prompts"
            raise ConfigError(f"priority is {priority!r:.40}; {remedy}")
        params = per_prompt(sampling_params, len(many), self._defaults, lora_request)
        return self._run(zip(many, params, ranks, strict=True), use_tqdm)

    def chat(
        self, messages: str | Messages | Sequence[Messages], sampling_params: Params = None, *,
        use_tqdm: Bar = False, lora_request: None = None, **options: Any,
    ) -> list[Result]:  # fmt: skip
        """Answer one conversation or several, through the model's own chat template. A text is a conversation
        of one message. options: see ChatOptions (api/intake.py)."""
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
        is_several = is_list and messages and not isinstance(messages[0], Mapping | str)
        many: Any = messages if is_several else [messages]
        params = per_prompt(sampling_params, len(many), self._defaults, lora_request)
        each = zip([self._encode_chat(each, options) for each in many], params, strict=True)
        return self._run(((prompt, own, 0) for prompt, own in each), use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Complete one raw prompt piece by piece. Closing the iterator stops the request."""
        return self._begin(self._intake.encode(prompt), sampling_params)

    def stream_chat(
        self, messages: str | Messages, sampling_params: SamplingParams | None = None, **options: Any
    ) -> Iterator[Chunk]:
        """Answer a conversation piece by piece."""
        return self._begin(self._encode_chat(messages, options), sampling_params)

    def export(self, prompt: Prompt) -> Handover:
        """Read a prompt and give what is kept of it, for another LLM with the same options."""
        with self._lock:
            asked = self._intake.encode(prompt)
            request = self._requests(asked, READING)[0]
            ((inbox,),) = self._add([(asked, [request])])
            try:
                while not inbox.emissions:
                    self._pump()
                if request.error is not None:
                    raise request.error
                return self.handovers.export(asked.tokens)
            finally:
                self._drop(request)

    def adopt(self, handover: Handover) -> int:
        """Take what another LLM has exported; tokens of that prompt that will not be read again here."""
        with self._lock:
            return self.handovers.adopt(handover)

    @cached_property
    def handovers(self) -> Handovers:
        return handovers_of(self.engine, self.checkpoint, self.options)

    def _begin(self, prompt: Encoded, params: SamplingParams | None) -> Iterator[Chunk]:
        (params,) = per_prompt(params, 1, self._defaults)
        if params.n != 1:
            raise ConfigError(f"n is {params.n}; a stream is one completion: use n=1, or generate")
        return self._stream(prompt, self._requests(prompt, params)[0])

    def _encode_chat(self, messages: Any, options: Mapping[str, Any]) -> Encoded:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        text = from_options(ChatOptions, options, "chat").written(self.tokenizer, messages)
        # The template writes the BOS itself where the model wants one.
        return Encoded(text, self.tokenizer.encode(text, add_special=False))

    def _requests(self, prompt: Encoded, params: SamplingParams, priority: int = 0) -> list[Request]:
        requests = self._intake.requests(prompt.tokens, params, priority)
        self.engine.check_fits(requests[0])
        return requests

    def _run(self, asked: Iterable[Asked], use_tqdm: Bar) -> list[Result]:
        groups = [(prompt, self._requests(prompt, params, rank)) for prompt, params, rank in asked]
        with progress(use_tqdm, len(groups)) as show:
            made = self._add(groups)
            inboxes = [inbox for group in made for inbox in group]
            try:
                for inbox in inboxes:
                    while not inbox.request.is_finished:
                        self._pump()
                        if show is not None:
                            show(sum(all(i.request.is_finished for i in group) for group in made))
            finally:
                for inbox in inboxes:
                    self._drop(inbox.request)
        if any(inbox.request.finish_reason is FinishReason.ABORT for inbox in inboxes):
            raise RequestError("the LLM was closed while it was generating; make a new one")
        results = [result_of(g, [inbox.completion(i) for i, inbox in enumerate(g)]) for g in made]
        failed = results[0].outputs[0].error if len(results) == 1 else None
        if failed is not None:
            raise failed
        return results

    def _stream(self, prompt: Encoded, request: Request) -> Iterator[Chunk]:
        request.is_streamed = True
        ((inbox,),) = self._add([(prompt, [request])])
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
                result = result_of([inbox], [inbox.completion(0)])
                yield Chunk(text + inbox.detokenizer.take(), tokens, request.finish_reason, result)
        finally:
            self._drop(request)

    def _add(self, groups: Iterable[tuple[Encoded, Sequence[Request]]]) -> list[list[Inbox]]:
        """One group of inboxes a prompt."""
        with self._lock:
            made = []
            for prompt, requests in groups:
                for request in requests:
                    self.engine.add(request)
                    stats = self.engine.stats[request.id]
                    self._inboxes[request.id] = Inbox(request, stats, self.tokenizer, prompt.text)
                made.append([self._inboxes[request.id] for request in requests])
            return made

    def _pump(self) -> None:
        """One step of the engine, for all that wait."""
        with self._lock:
            engine, self._is_stepping = self.engine, True
            try:
                for emission in engine.step():
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
