"""From a client's body to what the engine is asked: the parts of a call, checked as far as that can be done
without the model.

Invariant: what passes here can only be refused by the engine for what needs the model's tokenizer: lengths,
ids, grammars, templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.options import nearest
from paceline.core.params import SamplingParams
from paceline.server import tools as tooling
from paceline.server.config import ServerConfig
from paceline.server.errors import ApiError, bad_request
from paceline.server.openai_types import (
    ChatRequest,
    CompletionRequest,
    Message,
    Sampling,
    Speculative,
    TokenizeRequest,
    Tool,
)

SAME_NAMES = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words",
    "allowed_token_ids",
)  # fmt: skip
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
# Each of these is gone through at every token, between steps that others wait for.
MOST = {"stop": 32, "bad_words": 128, "logit_bias": 1024, "allowed_token_ids": 16_384, "stop_token_ids": 1024}
MOST_STOP_CHARACTERS = 1000  # of all stop strings
DEFAULT_COMPLETION = 16  # tokens, as OpenAI has it
MOST_CHAT_LOGPROBS, MOST_LOGPROBS = 20, 20


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request for the engine."""

    parts: list[dict[str, Any]]
    num_choices: int
    is_stream: bool
    has_usage: bool
    has_logprobs: bool
    has_details: bool
    echo: bool = False
    tool_names: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Translator:
    config: ServerConfig
    info: Mapping[str, Any]  # what the engine said of itself

    def completion(self, body: CompletionRequest) -> Job:
        if body.best_of not in (None, body.n or 1):
            raise bad_request(
                f"best_of is {body.best_of}; answers are not ranked here, leave it out", "best_of"
            )
        if body.suffix:
            raise bad_request(
                "suffix is not supported: the model writes forward only; leave it out", "suffix"
            )
        if body.echo and body.logprobs is not None:
            raise bad_request(
                "echo with logprobs would need those of the prompt, which are not kept; leave one of them out",
                "echo",
            )
        extra: dict[str, Any] = (
            {} if body.max_tokens is not None else {"max_tokens": self._clipped(DEFAULT_COMPLETION)}
        )
        if body.logprobs is not None:
            extra["logprobs"] = _checked_count("logprobs", body.logprobs, MOST_LOGPROBS)
        return self._job(
            body, [_prompt_json(prompt) for prompt in _as_prompts(body.prompt)], extra, echo=bool(body.echo)
        )

    def chat(self, body: ChatRequest) -> Job:
        extra: dict[str, Any] = {}
        if body.max_completion_tokens is not None:
            extra["max_tokens"] = body.max_completion_tokens
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request(
                f"top_logprobs is {body.top_logprobs} but logprobs is not true; set it", "top_logprobs"
            )
        if body.logprobs:
            extra["logprobs"] = _checked_count("top_logprobs", body.top_logprobs or 0, MOST_CHAT_LOGPROBS)
        listed = [_tool_json(tool) for tool in body.tools or ()]
        names = frozenset(tool["function"]["name"] for tool in listed)
        choice = body.tool_choice or ("auto" if listed else "none")
        if choice != "none" and not listed:
            raise bad_request("tool_choice needs tools; list them, or leave it out", "tool_choice")
        if choice not in ("none", "auto"):
            wanted = None if isinstance(choice, str) else choice.function.name
            if wanted is not None and wanted not in names:
                raise bad_request(
                    f"tool_choice names {wanted!r:.80}, which is not among the tools", "tool_choice"
                )
            if any(_structured(body)):
                raise bad_request(
                    "tool_choice forces a call, so there is no room for another format; leave one of them out",
                    "tool_choice",
                )
            extra["structured_outputs"] = {"json": tooling.forced_schema(listed, wanted)}
        prompt = self._chat_prompt(
            body.messages,
            listed if choice != "none" else [],
            body.chat_template_kwargs,
            body.add_generation_prompt,
        )
        return self._job(body, [prompt], extra, tool_names=names if choice != "none" else frozenset())

    def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if body.messages is None:
            return {"text": body.prompt, "add_special": body.add_special_tokens}
        listed = [_tool_json(tool) for tool in body.tools or ()]
        return self._chat_prompt(body.messages, listed, body.chat_template_kwargs, body.add_generation_prompt)

    def _chat_prompt(
        self,
        messages: Sequence[Message],
        listed: list[dict[str, Any]],
        options: dict[str, Any] | None,
        is_open: bool | None,
    ) -> dict[str, Any]:
        if not self.info["has_template"]:
            raise bad_request("the model has no chat template; use /v1/completions")
        plain = [_message_json(message) for message in messages]
        taken = {
            "messages",
            "tools",
            "add_generation_prompt",
            "documents",
            "bos_token",
            "eos_token",
            "template",
        } & set(options or ())
        if taken:
            raise bad_request(
                f"chat_template_kwargs holds {min(taken)!r}, which has a field of its own",
                "chat_template_kwargs",
            )
        has_tools = bool(self.info["has_tools"])
        return {
            "messages": plain if has_tools else tooling.for_plain_template(plain, listed),
            "tools": listed if listed and has_tools else None,
            "add_generation_prompt": is_open is not False,
            "template_options": options or {},
        }

    def _job(self, body: Sampling, prompts: list[dict[str, Any]], extra: dict[str, Any], **more: Any) -> Job:
        options = {
            name: getattr(body, name) for name in SAME_NAMES if getattr(body, name) is not None
        } | extra
        if body.logit_bias is not None:
            options["logit_bias"] = _biases(body.logit_bias)
        _check_sizes(options)
        structured = _structured(body)
        if len(structured) > 1:
            raise bad_request(
                f"{' and '.join(sorted(structured))} exclude each other; use one of them", min(structured)
            )
        if structured:
            options["structured_outputs"] = next(iter(structured.values()))
        self._check_grammar(options.get("structured_outputs"))
        limit = self.config.max_completion_tokens
        if limit is not None and options.get("max_tokens", 0) > limit:
            raise bad_request(
                f"max_tokens is {options['max_tokens']}; this server writes at most {limit}", "max_tokens"
            )
        has_details = self._speculation(body.speculative, options)
        params = _checked(options)
        if len(prompts) * params.n > self.config.max_choices:
            raise bad_request(
                f"{len(prompts)} prompts times n {params.n} are more than {self.config.max_choices} answers; ask for fewer",
                "n",
            )
        if "logit_bias" in options:
            options["logit_bias"] = {str(token): bias for token, bias in options["logit_bias"].items()}
        common = {
            "params": options,
            "priority": body.priority or 0,
            "details": has_details,
            "echo": more.get("echo", False),
        }
        return Job(
            parts=[{"prompt": prompt, **common} for prompt in prompts],
            num_choices=params.n,
            is_stream=bool(body.stream),
            has_usage=bool(body.stream_options and body.stream_options.include_usage),
            has_logprobs=params.logprobs is not None,
            has_details=has_details,
            **more,
        )

    def _clipped(self, num_tokens: int) -> int:
        return min(num_tokens, self.config.max_completion_tokens or num_tokens)

    def _check_grammar(self, structured: dict[str, Any] | None) -> None:
        limit = self.config.max_grammar_bytes
        if structured is not None and (size := len(json.dumps(structured))) > limit:
            raise bad_request(
                f"the grammar or schema has {size:,} characters; this server takes at most {limit:,}"
            )

    def _speculation(self, asked: bool | str | Speculative | None, options: dict[str, Any]) -> bool:
        """Put into the options what was asked for; whether the details of each step are wanted."""
        if asked is None or asked is True:
            return False
        asked = (
            Speculative(method="off" if asked is False else asked) if isinstance(asked, bool | str) else asked
        )
        loaded = self.info["speculative"]
        known = {"auto", "off", "none", loaded["method"], *loaded["selectable"]}
        if asked.method is not None and asked.method not in known:
            drafters = ", ".join(loaded["selectable"]) or "none"
            raise bad_request(
                f"speculative method is {asked.method!r:.60}; this server has loaded: {drafters} ({nearest(asked.method, sorted(known))})",
                "speculative",
            )
        if asked.method in ("off", "none"):
            options["num_speculative_tokens"] = 0
        elif asked.num_speculative_tokens is not None:
            options["num_speculative_tokens"] = asked.num_speculative_tokens
        if asked.method in loaded["selectable"] and len(loaded["selectable"]) > 1:
            options["speculative_method"] = asked.method
        return asked.details


def _check_sizes(options: Mapping[str, Any]) -> None:
    for name, most in MOST.items():
        given = options.get(name, ())
        if not isinstance(given, str) and len(given) > most:
            raise bad_request(f"{name} has {len(given)} entries; give at most {most}", name)
    if sum(map(len, options.get("stop", ()))) > MOST_STOP_CHARACTERS:
        raise bad_request(
            f"the stop strings have more than {MOST_STOP_CHARACTERS} characters together; shorten them",
            "stop",
        )


def check_model(name: str | None, served: str) -> None:
    if name not in (None, "", "default", served):
        raise ApiError(
            404,
            f"the model {name!r:.80} does not exist; this server has {served!r}",
            "model_not_found",
            "model",
        )


def _checked(options: Mapping[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**options)
    except ConfigError as error:
        raise bad_request(str(error), str(error).split(" ", 1)[0].split(".")[0]) from None


def _checked_count(name: str, value: int, most: int) -> int:
    if not 0 <= value <= most:
        raise bad_request(f"{name} is {value}; use 0 to {most}", name)
    return value


def _structured(body: Sampling) -> dict[str, dict[str, Any]]:
    """By the field that asks for it: what the answer must look like."""
    found: dict[str, dict[str, Any]] = {
        name: {key: getattr(body, name)} for name, key in GUIDED.items() if getattr(body, name) is not None
    }
    if body.structured_outputs is not None:
        found["structured_outputs"] = body.structured_outputs
    wanted = body.response_format
    if wanted is not None and wanted.type == "json_object":
        found["response_format"] = {"json_object": True}
    if wanted is not None and wanted.type == "json_schema":
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            raise bad_request(
                "response_format json_schema has no schema; give json_schema.schema", "response_format"
            )
        found["response_format"] = {"json": wanted.json_schema.schema_}
    return found


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in biases.items()}
    except ValueError:
        raise bad_request(
            "logit_bias has a key that is no token id; use whole numbers", "logit_bias"
        ) from None


def _as_prompts(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str] | list[list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt is an empty list; give a text, token ids, or a list of them", "prompt")
    return [prompt] if isinstance(prompt[0], int) else prompt


def _prompt_json(prompt: str | list[int]) -> dict[str, Any]:
    if not prompt:
        raise bad_request("the prompt is empty; give at least one token", "prompt")
    return {"text": prompt} if isinstance(prompt, str) else {"tokens": prompt}


def _tool_json(tool: Tool) -> dict[str, Any]:
    return tool.model_dump(exclude_none=True)


def _message_json(message: Message) -> dict[str, Any]:
    """As templates know messages: content is text, arguments are objects."""
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content_text(message),
    }
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": c.id, "type": c.type, "function": _function_json(c.function)} for c in message.tool_calls
        ]
    return plain


def _function_json(function: Any) -> dict[str, Any]:
    try:
        return {"name": function.name, "arguments": json.loads(function.arguments or "{}")}
    except (ValueError, RecursionError):
        raise bad_request(
            "a message has a tool call whose arguments are not JSON; give them as JSON text", "messages"
        ) from None


def _content_text(message: Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for part in message.content:
        if part.type not in ("text", "input_text", "refusal") or part.text is None:
            raise bad_request(
                f"a message has a part of type {part.type!r:.40}; this model reads text only", "messages"
            )
    return "".join(part.text or "" for part in message.content)
