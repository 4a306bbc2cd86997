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
from paceline.core.options import brief, nearest
from paceline.core.params import SamplingParams
from paceline.server import tools as tooling
from paceline.server.config import ServerConfig
from paceline.server.errors import ApiError, bad_request
from paceline.server.openai_types import (
    ChatRequest,
    CompletionRequest,
    FunctionCall,
    Message,
    NamedTool,
    Sampling,
    Speculative,
    TokenizeRequest,
    Tool,
)

# Fields of a body that are those of SamplingParams; these two have other types in JSON.
SAME_NAMES = {*Sampling.model_fields} & {*SamplingParams.__slots__} - {"logit_bias", "structured_outputs"}
# Each of these is gone through at every token, between steps that others wait for.
MOST = {"stop": 32, "bad_words": 128, "logit_bias": 1024, "allowed_token_ids": 16_384, "stop_token_ids": 1024}
MOST_STOP_CHARACTERS = 1000  # of all stop strings
DEFAULT_COMPLETION = 16  # tokens, as OpenAI has it
MOST_LOGPROBS = 20
TEMPLATE_NAMES = frozenset(
    ("messages", "tools", "add_generation_prompt", "documents", "bos_token", "eos_token", "template")
)


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
                "best_of asks for ranked answers, which are not made here; leave it out", "best_of"
            )
        if body.suffix:
            raise bad_request(
                "suffix is not supported: the model writes forward only; leave it out", "suffix"
            )
        if body.echo and body.logprobs is not None:
            why = "echo with logprobs would need those of the prompt, which are not kept"
            raise bad_request(f"{why}; leave one of them out", "echo")
        extra: dict[str, Any] = {}
        if body.max_tokens is None:
            extra["max_tokens"] = min(
                DEFAULT_COMPLETION, self.config.max_completion_tokens or DEFAULT_COMPLETION
            )
        if body.logprobs is not None:
            extra["logprobs"] = _checked_count("logprobs", body.logprobs)
        prompts = [_prompt_json(prompt) for prompt in _as_prompts(body.prompt)]
        return self._job(body, prompts, extra, echo=bool(body.echo))

    def chat(self, body: ChatRequest) -> Job:
        extra: dict[str, Any] = {}
        if body.max_completion_tokens is not None:
            extra["max_tokens"] = body.max_completion_tokens
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true; set it", "top_logprobs")
        if body.logprobs:
            extra["logprobs"] = _checked_count("top_logprobs", body.top_logprobs or 0)
        tools = [_tool_json(tool) for tool in body.tools or ()]
        choice = body.tool_choice or ("auto" if tools else "none")
        if choice != "none" and not tools:
            raise bad_request("tool_choice needs tools; list them, or leave it out", "tool_choice")
        if choice == "none":
            tools = []
        elif choice != "auto":
            extra["structured_outputs"] = {"json": _forced(body, tools, choice)}
        prompt = self._chat_prompt(
            body.messages, tools, body.chat_template_kwargs, body.add_generation_prompt
        )
        names = frozenset(tool["function"]["name"] for tool in tools)
        return self._job(body, [prompt], extra, tool_names=names)

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
        tools: list[dict[str, Any]],
        options: dict[str, Any] | None,
        is_open: bool | None,
    ) -> dict[str, Any]:
        if not self.info["has_template"]:
            raise bad_request("the model has no chat template; use /v1/completions")
        if taken := TEMPLATE_NAMES & set(options or ()):
            what = f"chat_template_kwargs holds {min(taken)!r}, which has a field of its own"
            raise bad_request(what, "chat_template_kwargs")
        plain, has_tools = [_message_json(message) for message in messages], bool(self.info["has_tools"])
        return {
            "messages": plain if has_tools else tooling.for_plain_template(plain, tools),
            "tools": tools if tools and has_tools else None,
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
            names = " and ".join(sorted(structured))
            raise bad_request(f"{names} exclude each other; use one of them", min(structured))
        if structured:
            options["structured_outputs"] = next(iter(structured.values()))
        has_details = self._speculation(body.speculative, options)
        params = _checked(options)
        self._check_limits(options, len(prompts) * params.n)
        if "logit_bias" in options:
            options["logit_bias"] = {str(token): bias for token, bias in options["logit_bias"].items()}
        common = {"params": options, "priority": body.priority or 0, "details": has_details}
        return Job(
            parts=[{"prompt": prompt, **common, "echo": more.get("echo", False)} for prompt in prompts],
            num_choices=params.n,
            is_stream=bool(body.stream),
            has_usage=bool(body.stream_options and body.stream_options.include_usage),
            has_logprobs=params.logprobs is not None,
            has_details=has_details,
            **more,
        )

    def _check_limits(self, options: Mapping[str, Any], num_choices: int) -> None:
        config, structured = self.config, options.get("structured_outputs")
        size, limit = len(json.dumps(structured)), config.max_grammar_bytes
        if structured is not None and size > limit:
            what = f"the grammar or schema has {size:,} characters"
            raise bad_request(f"{what}; this server takes at most {limit:,}")
        most, asked = config.max_completion_tokens, options.get("max_tokens", 0)
        if most is not None and asked > most:
            raise bad_request(
                f"max_tokens is {brief(asked)}; this server writes at most {most}", "max_tokens"
            )
        if num_choices > config.max_choices:
            what = f"prompts times n make {num_choices} answers"
            raise bad_request(f"{what}, more than {config.max_choices}; ask for fewer", "n")

    def _speculation(self, asked: bool | str | Speculative | None, options: dict[str, Any]) -> bool:
        """Put into the options what was asked for; whether the details of each step are wanted."""
        if asked is None or asked is True:
            return False
        if isinstance(asked, bool | str):
            asked = Speculative(method="off" if asked is False else asked)
        loaded = self.info["speculative"]
        known = {"auto", "off", "none", loaded["method"], *loaded["selectable"]}
        if asked.method is not None and asked.method not in known:
            what = f"speculative method is {asked.method!r:.60}; this server has loaded"
            drafters = ", ".join(loaded["selectable"]) or "none"
            near = nearest(asked.method, sorted(known))
            raise bad_request(f"{what}: {drafters} ({near})", "speculative")
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
        what = f"the stop strings have more than {MOST_STOP_CHARACTERS} characters together; shorten them"
        raise bad_request(what, "stop")


def check_model(name: str | None, served: str) -> None:
    if name not in (None, "", "default", served):
        what = f"the model {name!r:.80} does not exist; this server has {served!r}"
        raise ApiError(404, what, "model_not_found", "model")


def _forced(body: ChatRequest, tools: list[dict[str, Any]], choice: str | NamedTool) -> dict[str, Any]:
    """The schema of an answer that must call a tool."""
    wanted = None if isinstance(choice, str) else choice.function.name
    if wanted is not None and all(wanted != tool["function"]["name"] for tool in tools):
        raise bad_request(f"tool_choice names {wanted!r:.80}, which is not among the tools", "tool_choice")
    if _structured(body):
        why = "tool_choice forces a call, so there is no room for another format"
        raise bad_request(f"{why}; leave one of them out", "tool_choice")
    return tooling.forced_schema(tools, wanted)


def _checked(options: Mapping[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**options)
    except ConfigError as error:
        raise bad_request(str(error), str(error).split(" ", 1)[0].split(".")[0]) from None


def _checked_count(name: str, value: int) -> int:
    if not 0 <= value <= MOST_LOGPROBS:
        raise bad_request(f"{name} is {brief(value)}; use 0 to {MOST_LOGPROBS}", name)
    return value


def _structured(body: Sampling) -> dict[str, dict[str, Any]]:
    """By the field that asks for it: what the answer must look like."""
    found: dict[str, dict[str, Any]] = {
        name: {name.removeprefix("guided_"): getattr(body, name)}
        for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
        if getattr(body, name) is not None
    }
    if body.structured_outputs is not None:
        found["structured_outputs"] = body.structured_outputs
    wanted = body.response_format
    if wanted is not None and wanted.type == "json_object":
        found["response_format"] = {"json_object": True}
    if wanted is not None and wanted.type == "json_schema":
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            what = "response_format json_schema has no schema; give json_schema.schema"
            raise bad_request(what, "response_format")
        found["response_format"] = {"json": wanted.json_schema.schema_}
    return found


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in biases.items()}
    except ValueError:
        what = "logit_bias has a key that is no token id; use whole numbers"
        raise bad_request(what, "logit_bias") from None


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


def _function_json(function: FunctionCall) -> dict[str, Any]:
    try:
        return {"name": function.name, "arguments": json.loads(function.arguments or "{}")}
    except (ValueError, RecursionError):
        what = "a message has a tool call whose arguments are not JSON; give them as JSON text"
        raise bad_request(what, "messages") from None


def _content_text(message: Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for part in message.content:
        if part.type not in ("text", "input_text", "refusal") or part.text is None:
            what = f"a message has a part of type {part.type!r:.40}; this model reads text only"
            raise bad_request(what, "messages")
    return "".join(part.text or "" for part in message.content)
