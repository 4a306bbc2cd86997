"""A draft model with another vocabulary: what it writes is drafted as text, in the target's own tokens.

Each request has a shadow, the same text in the draft model's tokens, which that model reads and guesses on.
Invariant: a draft is tokens without q, so what it came from cannot change a text; how either text was encoded
decides only how much of it is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.core.options import require
from paceline.core.params import SamplingParams
from paceline.core.types import Draft, Request
from paceline.drafters.base import Drafter, DrafterContext, chain, empty
from paceline.drafters.draft_model import DraftModel, DraftModelConfig, load_asked
from paceline.loaders.tokenizer import Tokenizer
from paceline.runtime.executor import LocalExecutor

WINDOW = 64  # tokens at the end of a text that are encoded anew each time, at most,
KEPT = 16  # and at least, where a word begins: encoding may join what comes with them
ANCHOR = 8  # tokens before a draft that are encoded together with it
BROKEN = "\N{REPLACEMENT CHARACTER}"  # in place of a part of a character


@dataclass(frozen=True, slots=True)
class UniversalConfig(DraftModelConfig):
    def __post_init__(self) -> None:
        DraftModelConfig.__post_init__(self)
        require(self.tree_width == 1, "tree_width", self.tree_width, "a text is one path; use 1")


class _Reader(DraftModel):
    """The draft model, in its own vocabulary."""

    tokenizer: Tokenizer

    def _load(self, context: DrafterContext) -> LocalExecutor:
        _, self.tokenizer, executor = load_asked(self.config, context)
        self.vocab_size = executor.config.vocab_size
        return executor


@dataclass(slots=True)
class _Shadow:
    request: Request  # in the draft model's tokens
    num_settled: int = 0  # tokens of the text that are not encoded anew,
    num_before: int = 0  # and what they are in the draft model's


class Universal(Drafter):
    name = "universal"
    Config = UniversalConfig

    def __init__(self, config: UniversalConfig, context: DrafterContext) -> None:
        super().__init__(config)
        if context.tokenizer is None:
            raise ConfigError("method 'universal' needs the target's tokenizer; use it with a model that has")
        self._reader, self._tokenizer = _Reader(config, context), context.tokenizer
        self._vocab_size = context.vocab_size or context.executor.config.vocab_size
        self._shadows: dict[str, _Shadow] = {}

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        shadows = [self._shadow(request) for request in requests]
        drafts = self._reader.propose(shadows, budgets)
        found = []
        for request, draft, budget in zip(requests, drafts, budgets, strict=True):
            tokens = self._translated(request, draft.tree.tokens[1:])[:budget] if draft.num_drafted else []
            found.append(chain(request, tokens, self.name) if tokens else empty(request, self.name))
        return found

    def release(self, request: Request) -> None:
        shadow = self._shadows.pop(request.id, None)
        if shadow is not None:
            self._reader.release(shadow.request)

    def _shadow(self, request: Request) -> Request:
        """With all that the text has now. What it had at the end may be other tokens than before."""
        theirs, params = self._reader.tokenizer, SamplingParams(temperature=0)
        shadow = self._shadows.get(request.id)
        if shadow is None:
            made = Request(request.id, params, [], 0, 0, stop_ids=theirs.eos_ids)
            shadow = self._shadows[request.id] = _Shadow(made)
        tail, tokens = request.tokens[shadow.num_settled :], shadow.request.tokens
        if len(tail) > WINDOW:
            first = self._word_before(tail, len(tail) - KEPT)
            tokens[shadow.num_before :] = self._encoded(tail[:first])
            shadow.num_settled, shadow.num_before = shadow.num_settled + first, len(tokens)
            tail = tail[first:]
        tokens[shadow.num_before :] = self._encoded(tail)
        return shadow.request

    def _encoded(self, tokens: Sequence[int]) -> list[int]:
        return self._reader.tokenizer.encode(self._tokenizer.decode(tokens, False), add_special=False)

    def _word_before(self, tokens: Sequence[int], most: int) -> int:
        """The last token up to there that begins with a space or a line's end."""
        read = self._tokenizer.token_bytes
        return next((i for i in range(most, 0, -1) if read(tokens[i])[:1] in (b" ", b"\n")), most)

    def _translated(self, request: Request, guessed: Sequence[int]) -> list[int]:
        """The target's tokens of what was guessed. The last is left out, since its word may go on, but for
        one that ends a text."""
        own, theirs = self._tokenizer, self._reader.tokenizer
        text = theirs.decode(guessed, skip_special=False).rstrip(BROKEN)
        before = own.decode(request.tokens[-ANCHOR:], skip_special=False)
        ids, end = own.encode(before + text, add_special=False), len(before.encode())
        length = -1 if own.strips_leading_space else 0  # of the bytes up to a token
        for i, token in enumerate(ids):
            if length >= end:
                ids = ids[i:] if length == end else own.encode(text, add_special=False)
                break
            length += len(own.token_bytes(token))
        else:
            return []
        ids = ids if guessed[-1] in theirs.eos_ids else ids[:-1]
        return ids if max(ids, default=0) < self._vocab_size else []
