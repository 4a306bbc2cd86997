"""Turns prompts and their options into engine requests, checking against the model what SamplingParams could
not; and conversations into prompts, by vLLM's options of `LLM.chat` and the model's chat template. Invariant:
what is not done as it was asked for is refused by name, before anything is queued.
"""

from __future__ import annotations

import itertools
import operator
import random
import secrets
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from paceline.core.content import for_plain_template, plain_messages, text_of
from paceline.core.errors import ConfigError, RequestError
from paceline.core.grammar import GrammarCompiler, GrammarConstraint
from paceline.core.noise import child_seed
from paceline.core.options import brief, require, unboxed
from paceline.core.params import SamplingParams
from paceline.core.types import Request
from paceline.loaders.detokenize import Detokenizer
from paceline.loaders.tokenizer import Tokenizer

# A text, token ids, or vLLM's {"prompt": text} and {"prompt_token_ids": [...]}.
Prompt = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None  # for all prompts, or one for each
Messages = Sequence[Mapping[str, Any]]  # a conversation
TAKEN = ("messages", "template", "chat_template", "tools", "add_generation_prompt")
FORMATS = ("auto", "string", "openai")
FORMS = "give a text, token ids, {'prompt': text} or {'prompt_token_ids': [...]}"


class Encoded(NamedTuple):
    text: str | None  # as the user wrote it; None where token ids were given
    tokens: list[int]


@dataclass(slots=True)
class Intake:
    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    seeds: random.Random | None = None  # of the requests that have none of their own, where one was chosen
    _grammars: GrammarCompiler | None = None
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    def encode(self, prompt: Prompt) -> Encoded:
        """Any form of a prompt as token ids."""
        if isinstance(prompt, Mapping):
            text, tokens = _from_mapping(prompt)
        else:
            text, tokens = (prompt, None) if isinstance(prompt, str) else (None, _token_ids(prompt))
        if not (text if tokens is None else tokens):
            raise RequestError("the prompt is empty; give at least one token")
        return Encoded(text, self.tokenizer.encode(text or "") if tokens is None else tokens)

    def requests(self, tokens: list[int], params: SamplingParams, priority: int = 0) -> list[Request]:
        """One request for each of the n completions; the later ones share the first one's prompt blocks."""
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token")
        if params.truncate_prompt_tokens is not None:
            cut = params.truncate_prompt_tokens
            tokens = tokens[-(self.max_model_len - 1 if cut < 0 else cut) :]
        self.check_ids("prompt", tokens)
        for field_name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            self.check_ids(field_name, getattr(params, field_name) or ())
        # More tokens than the context or the vocabulary holds mean all of them: no kernel may overflow.
        most = dict.fromkeys(("max_tokens", "min_tokens", "num_speculative_tokens"), self.max_model_len)
        most["top_k"] = self.vocab_size
        high: dict[str, Any] = {name: n for name, n in most.items() if (getattr(params, name) or 0) > n}
        if self.seeds is not None and params.seed is None:
            high["seed"] = self.seeds.getrandbits(63)
        params = replace(params, **high) if high else params
        seed = secrets.randbits(64) if params.seed is None else params.seed
        name = f"r{next(self._ids)}"
        requests: list[Request] = []
        ends, stops = self.tokenizer.eos_ids, frozenset(params.stop_token_ids)
        stop = params.stop, params.include_stop_str_in_output
        # each bad word as it is spelled at the start of a text and after a space
        spellings = [text for word in params.bad_words for text in (word, " " + word.lstrip())]
        bad = [tuple(self.tokenizer.encode(text, add_special=False)) for text in spellings]
        hidden, has_scores = self._hidden(params), params.prompt_logprobs is not None
        for index in range(params.n):
            own_seed = child_seed(seed, index)
            request = Request(f"{name}.{index}", params, list(tokens), len(tokens), own_seed, priority)
            request.constraint = self.constraint(params)
            request.bad_sequences = tuple(dict.fromkeys(tokens for tokens in bad if tokens))
            # A grammar that has ended can only be followed by an end token, so it is not ignored there.
            request.stop_ids = stops if params.ignore_eos and request.constraint is None else ends | stops
            request.banned_until_min = ends | stops if params.min_tokens else frozenset()
            request.text_stop = Detokenizer(self.tokenizer, *stop, params.min_tokens, hidden)
            if requests:  # they have one prompt, which is scored once
                request.leader = requests[0]
                request.params = replace(params, prompt_logprobs=None) if has_scores else params
            requests.append(request)
        return requests

    def _hidden(self, params: SamplingParams) -> Container[int] | None:
        """Tokens that are no part of the text. Where special ones are shown, the end token that ended it is
        as little a part of it as a stop string."""
        if not params.detokenize:
            return range(self.vocab_size)
        if params.skip_special_tokens:
            return None
        is_shown = params.ignore_eos or params.include_stop_str_in_output
        return frozenset() if is_shown else self.tokenizer.eos_ids

    def constraint(self, params: SamplingParams) -> GrammarConstraint | None:
        """The grammar of a request at its beginning."""
        if params.structured_outputs is None:
            return None
        self._grammars = self._grammars or GrammarCompiler(self.tokenizer, self.vocab_size)
        return self._grammars.compile(params.structured_outputs)

    def check_ids(self, name: str, ids: Iterable[int]) -> None:
        bad = next((i for i in ids if not isinstance(i, int) or not 0 <= i < self.vocab_size), None)
        if bad is not None:
            known = f"the model's ids go from 0 to {self.vocab_size - 1}"
            raise ConfigError(f"{name} holds token id {brief(bad)}; {known}")


def as_list(prompts: Any) -> list[Any]:
    """One prompt or several, as a list of prompts."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    prompts = _listed(prompts)
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(f"the prompt is {prompts!r:.40}; {FORMS}, or a list of them")
    many = [unboxed(each) for each in prompts]
    if not many:
        raise RequestError(f"there is no prompt; {FORMS}, or a list of them")
    return many if isinstance(many[0], Iterable) else [many]


def _listed(values: Any) -> Any:
    """An array of numpy or torch as lists; anything else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values


def _from_mapping(prompt: Mapping[str, Any]) -> tuple[str | None, list[int] | None]:
    """Its text and its token ids; the ids count where both are given, as in vLLM."""
    other = next((key for key in prompt if key not in ("prompt", "prompt_token_ids")), None)
    if other in ("role", "content"):
        raise RequestError(f"the prompt has the key {other!r}: messages are for chat; {FORMS}")
    if other is not None or not prompt:
        what = "is empty" if other is None else f"has the key {other!r:.40}"
        raise RequestError(f"the prompt {what}; give {{'prompt': text}} or {{'prompt_token_ids': [...]}}")
    text, tokens = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if not isinstance(text, str | None) or (text is None and tokens is None):
        raise RequestError(f"the prompt is {text!r:.40}; give a text in {{'prompt': text}}")
    return text, None if tokens is None else _token_ids(tokens)


def _token_ids(prompt: Any) -> list[int]:
    prompt = _listed(prompt)
    if isinstance(prompt, str | bytes | Mapping) or not isinstance(prompt, Iterable):
        raise RequestError(f"the prompt is {prompt!r:.40}; give a list of token ids")
    tokens = [unboxed(token) for token in prompt]
    try:
        if any(isinstance(token, bool) for token in tokens):
            raise TypeError
        return [operator.index(token) for token in tokens]
    except TypeError:
        raise RequestError(f"the prompt holds {tokens!r:.40}; give a text or a list of token ids") from None


def per_prompt(
    params: Params, count: int, default: SamplingParams, adapter: object = None
) -> list[SamplingParams]:
    require(adapter is None, "lora_request", adapter, "there are no adapters; merge it into the weights")
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        remedy = "give a SamplingParams, or a list with one for each prompt"
        raise ConfigError(f"sampling_params is {params!r:.60}; {remedy}")
    if len(params) != count:
        found = f"{len(params)} SamplingParams for {count} prompts"
        raise ConfigError(f"there are {found}; give one, or one for each")
    return list(params)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    chat_template: str | None = None  # a Jinja text, instead of the model's own
    chat_template_content_format: str = "auto"  # "openai": the template is given lists of parts as they are
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer goes on where the last message ends
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None  # what only some templates read

    def __post_init__(self) -> None:
        name, chosen = "chat_template_content_format", self.chat_template_content_format
        require(chosen in FORMATS, name, chosen, f"use one of {', '.join(FORMATS)}")
        for name in ("add_generation_prompt", "continue_final_message"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "use True or False")
        is_both = self.continue_final_message and self.add_generation_prompt
        require(not is_both, "continue_final_message", True, "it needs add_generation_prompt=False")
        tools, more = self.tools or (), self.chat_template_kwargs or {}
        is_list = isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)
        require(is_list, "tools", tools, "give a list of dicts, or None")
        require(isinstance(more, Mapping), "chat_template_kwargs", more, "give a dict, or None")
        taken = next((name for name in more if name in TAKEN), None)
        require(taken is None, "chat_template_kwargs", more, f"{taken} has an option of its own")
        is_text = isinstance(self.chat_template, str | None)
        require(is_text, "chat_template", self.chat_template, "give the template's text, or None")

    def written(self, tokenizer: Tokenizer, messages: Messages) -> str:
        """The conversation as the template writes it."""
        keeps_parts = self.chat_template_content_format == "openai"
        plain = plain_messages(messages, keeps_parts)
        if not any(message["content"] or message.get("tool_calls") for message in plain):
            raise RequestError("the conversation is empty; give at least one message with content")
        template = self.chat_template or tokenizer.chat_template
        knows_tools = template is None or "tools" in template
        shown = plain if knows_tools else for_plain_template(plain, self.tools)
        variables = dict(self.chat_template_kwargs or {}, add_generation_prompt=self.add_generation_prompt)
        if knows_tools:
            variables["tools"] = self.tools or None
        text = tokenizer.chat(shown, template=template, **variables)
        return _up_to(text, text_of(plain[-1]["content"])) if self.continue_final_message else text


def _up_to(text: str, last: str) -> str:
    """The text without what the template writes after the last message."""
    for words in (last, last.strip()):
        place = text.rfind(words)
        if place >= 0 and words:
            return text[: place + len(words)]
    remedy = "the chat template changes it, or it is empty; put it into the prompt of generate"
    raise RequestError(f"continue_final_message cannot find the last message; {remedy}")
