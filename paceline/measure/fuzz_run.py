"""Runs the cases of fuzz.py and makes those that fail small. Invariant: a request's text is compared with
plain decoding of that request alone: token for token, and its logprobs bit for bit where the device computes
so; the books are checked after every step, and at the end no block is held.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from paceline.api.intake import Intake
from paceline.api.llm import LLM
from paceline.api.options import EngineOptions
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.noise import child_seed
from paceline.core.params import SamplingParams
from paceline.core.types import BLOCK_SIZE, Request, TokenLogprobs
from paceline.engine.engine import Engine
from paceline.loaders.detokenize import Detokenizer
from paceline.measure.fuzz import Ask, Case

MOST_STEPS = 5000  # of a case; each of its requests needs a few dozen
NUM_LONGEST = 256  # tokens of a text: longer ones only take longer
LOGPROBS_ERROR = 1e-3  # where the device's sums depend on the shape of a pass
# Tries of a case that should fail: a policy that looks at the clock does not always draft the same. What is
# made small may fail only now and then, so it is replayed more often than it was tried.
TRIES, REPLAYS = 3, 12
MINIMISE_S = 60.0


class Said(NamedTuple):
    tokens: list[int]
    text: str
    end: str  # the reason, and the error's words if there is one
    logprobs: list[TokenLogprobs]


class Failure(NamedTuple):
    kind: str  # difference or crash
    what: str


class Runner:
    """Holds the plain engine, which is loaded once; counts what was run."""

    def __init__(self, options: EngineOptions) -> None:
        self.options, self.counts = options, Counter[str]()
        self.plain = LLM(options, speculative_config=None, enable_prefix_caching=False, max_num_seqs=1)
        executor = self.plain.engine.executor
        if not executor.decoder.is_exact:
            remedy = "add --exact, or use --device cpu"
            raise ConfigError(f"texts are only certain to be equal where arithmetic is exact; {remedy}")
        self.is_bitwise = executor.memory.device.type == "cpu"
        memory = executor.memory
        self._block_bytes = sum(part.nbytes for part in memory.parts) // (memory.num_blocks + 1)
        self.longest = min(self.plain.engine.config.max_model_len, NUM_LONGEST)
        self._known: dict[str, Said] = {}
        vocab_size = self.plain.checkpoint.config.vocab_size
        self._intake = Intake(self.plain.tokenizer, vocab_size, self.longest)  # keeps what grammars need
        gc.freeze()  # what is here by now stays: the collections after each case need not look at it

    def fails_again(self, case: Case, kind: str = "", tries: int = TRIES) -> Failure | None:
        """In one of a few runs, which are not counted; in this way, if it is said in which."""
        counts, self.counts = self.counts, Counter[str]()
        try:
            found = (self.failure(case) for _ in range(tries))
            return next((each for each in found if each and kind in ("", each.kind)), None)
        finally:
            self.counts = counts

    def failure(self, case: Case) -> Failure | None:
        num_blocks = -(-case.engine["max_model_len"] // BLOCK_SIZE) + case.num_spare
        memory = (num_blocks + 1) * self._block_bytes
        llm = None
        try:
            llm = LLM(self.options, **case.engine, kv_cache_memory=memory, progress=False)
            intake = replace(self._intake, max_model_len=llm.engine.config.max_model_len)
            answers = run(llm.engine, intake, case.asks, self.counts)
        except Exception as error:  # whatever it is, it is what is looked for
            if llm is None and isinstance(error, PacelineError):  # what does not go together, said in words
                self.counts["refused engines"] += 1
                return None
            return Failure("crash", f"{type(error).__name__}: {error}")
        finally:
            del llm
            gc.collect()  # engines are large, and hold themselves
        for number, (ask, said) in enumerate(zip(case.asks, answers, strict=True)):
            for index, one in enumerate(said):
                if ask.is_determined and (what := self._difference(ask, index, one, case)):
                    return Failure("difference", f"request {number}, answer {index}: {what}")
        return None

    def _difference(self, ask: Ask, index: int, said: Said, case: Case) -> str | None:
        length = case.engine["max_model_len"]
        if len(ask.prompt) >= length:
            return "a prompt that does not fit was answered" if said.tokens else None
        plain = self._alone(ask, index, length)
        is_cut = said.end == "abort"
        expected = plain.tokens[: len(said.tokens)] if is_cut else plain.tokens
        if said.tokens != expected:
            pairs = enumerate(zip(said.tokens, expected, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(said.tokens), len(expected)))
            tokens = (text[at] if at < len(text) else "the end" for text in (said.tokens, expected))
            return "token {} is {}, plain decoding says {}".format(at, *tokens)
        if not is_cut and (said.end, said.text) != (plain.end, plain.text):
            return f"it ended {said.end!r} with {said.text[-40:]!r}, plain {plain.end!r} {plain.text[-40:]!r}"
        for at, (ours, its) in enumerate(zip(said.logprobs, plain.logprobs, strict=False)):
            error = abs(ours.logprob - its.logprob)
            if (ours != its) if self.is_bitwise else error > LOGPROBS_ERROR:
                return f"the logprobs of token {at} are {ours}, plain decoding has {its}"
        is_short = len(said.logprobs) != len(plain.logprobs) and not is_cut
        return f"{len(said.logprobs)} logprobs, not {len(plain.logprobs)}" if is_short else None

    def _alone(self, ask: Ask, index: int, length: int) -> Said:
        """One answer of a request, from plain decoding with nothing beside it."""
        params, room = {**ask.params, "n": 1, "num_speculative_tokens": 0}, length - len(ask.prompt)
        if index and params.get("seed") is not None:
            params["seed"] = child_seed(params["seed"], index)
        for name, default in (("max_tokens", 128), ("min_tokens", 0)):
            params[name] = min(params.get(name, default), room)
        alone = Ask(ask.prompt, params)
        if (key := repr(alone)) not in self._known:
            ((self._known[key],),) = run(self.plain.engine, self._intake, [alone])
        return self._known[key]

    def forget(self) -> None:
        """What plain decoding said: a new case has other requests."""
        self._known.clear()


def run(
    engine: Engine, intake: Intake, asks: Sequence[Ask], counts: Counter[str] | None = None
) -> list[list[Said]]:
    """The answers of every request; raises where the engine fails, hangs or keeps a block."""
    groups: dict[int, list[Request]] = {}
    logprobs: dict[str, list[TokenLogprobs]] = {}
    refused: dict[int, str] = {}
    last = max(max(ask.arrives, ask.leaves or 0) for ask in asks)
    for step in range(MOST_STEPS):
        for number, ask in enumerate(asks):
            if ask.arrives == step:
                try:
                    groups[number] = intake.requests(ask.prompt, SamplingParams(**ask.params), ask.priority)
                    engine.check_fits(groups[number][0])
                    for request in groups[number]:
                        engine.add(request)
                except PacelineError as error:
                    refused[number] = str(error)
            if ask.leaves == step and number not in refused:
                for request in groups[number]:
                    engine.abort(request)
        for emission in engine.step() if engine.has_work else ():
            logprobs.setdefault(emission.request.id, []).extend(emission.logprobs)
        engine.check()
        if step >= last and not engine.has_work:
            break
    assert not engine.has_work, f"requests are still running after {MOST_STEPS} steps"
    assert engine.executor.kv.num_used == 0, f"{engine.executor.kv.num_used} blocks are still held"
    if counts is not None:
        _count(counts, engine, [request for group in groups.values() for request in group])
    engine.stats.clear()
    return [
        [Said([], "", refused[i], [])]
        if i in refused
        else [_said(r, logprobs.get(r.id, [])) for r in groups[i]]
        for i in range(len(asks))
    ]


def _said(request: Request, logprobs: list[TokenLogprobs]) -> Said:
    words = request.text_stop
    assert isinstance(words, Detokenizer)
    words.finish()
    end = f"{request.finish_reason}: {request.error or ''}".replace(request.id, "ID").rstrip(": ")
    return Said(request.output, words.text, end, logprobs)


def _count(counts: Counter[str], engine: Engine, requests: Sequence[Request]) -> None:
    totals = engine.totals
    counts["cases"] += 1
    counts["requests"] += len(requests)
    counts["tokens"] += sum(request.num_output for request in requests)
    counts["drafted"] += totals.num_drafted
    counts["accepted"] += totals.num_accepted
    counts["preemptions"] += sum(request.num_preemptions for request in requests)
    counts["prefix hits"] += sum(request.num_prefix_hits > 0 for request in requests)
    counts["aborts"] += sum(request.finish_reason == "abort" for request in requests)
    counts["errors"] += sum(request.error is not None for request in requests)


def minimise(case: Case, fails: Callable[[Case], object], seconds: float = MINIMISE_S) -> Case:
    """The smallest case that still fails, by trying what is simpler until nothing simpler does."""
    tried, end = {case.to_json()}, time.monotonic() + seconds
    while True:
        for simpler in _simpler(case):
            if time.monotonic() > end:
                return case
            if (key := simpler.to_json()) not in tried:
                tried.add(key)
                if fails(simpler):
                    case = simpler
                    break
        else:
            return case


def _simpler(case: Case) -> Iterator[Case]:
    """Fewer requests, fewer options of the engine and the drafter, simpler requests; the boldest first."""
    for asks in _shorter(case.asks):
        yield replace(case, asks=tuple(asks))
    for name in case.engine:
        if name not in ("max_model_len", "speculative_config"):
            yield replace(case, engine=_without(case.engine, name))
    if isinstance(config := case.engine.get("speculative_config"), dict):
        for name in config:
            if name not in ("method", "model"):
                yield replace(case, engine={**case.engine, "speculative_config": _without(config, name)})
    yield replace(case, num_spare=64)
    for number, ask in enumerate(case.asks):
        for simpler in _simpler_asks(ask):
            yield replace(case, asks=(*case.asks[:number], simpler, *case.asks[number + 1 :]))


def _simpler_asks(ask: Ask) -> Iterator[Ask]:
    yield Ask(ask.prompt, ask.params)
    for name in ask.params:
        if name != "max_tokens":
            yield replace(ask, params=_without(ask.params, name))
    if ask.params.get("temperature"):
        yield replace(ask, params={**ask.params, "temperature": 0.0})
    for tokens in _shorter(ask.prompt):
        yield replace(ask, prompt=list(tokens))
    most = ask.params.get("max_tokens", 1)
    for count in dict.fromkeys((1, most // 2, most - 1)):
        if max(ask.params.get("min_tokens", 0), 1) <= count < most:
            yield replace(ask, params={**ask.params, "max_tokens": count})


def _shorter(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Without a half, a quarter, ... of them: the pieces of delta debugging, never nothing."""
    size = len(items) // 2
    while size:
        for start in range(0, len(items), size):
            if left := (*items[:start], *items[start + size :]):
                yield left
        size //= 2


def _without(options: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}
