"""From a client's body to what the engine is asked: the parts of a call, checked as far as that can be done
without the model. Invariant: what passes here can only be refused by the engine for what needs the model's
tokenizer (lengths, ids, grammars, templates).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from paceline.core.content import for_plain_template
from paceline.core.errors import ConfigError
from paceline.core.options import brief, nearest
from paceline.core.params import SamplingParams
from paceline.server import openai_types as types
from paceline.server.config import ServerConfig
from paceline.server.formats import FORMATS, HERMES, Fields, Format, forced_schema
from paceline.server.reading import Reading
from paceline.server.responses import ApiError

# Fields of a body that are those of SamplingParams.
SAME_NAMES = {*types.Sampling.model_fields} & {*SamplingParams.__slots__} - {"structured_outputs"}
Chat = types.ChatRequest | types.TokenizeRequest
DEFAULT_COMPLETION = 16  # tokens, as OpenAI has it
FINAL = "<|channel|>final<|message|>"  # where gpt-oss writes what it was asked for


class Job(NamedTuple):
    """One HTTP request for the engine."""

    parts: list[Fields]
    num_choices: int
    is_stream: bool
    has_usage: bool
    has_logprobs: bool
    has_details: bool
    echo: bool = False
    reading: Reading = Reading()
    has_reasoning: bool = True  # shown to the client, where the model writes some
    has_counts: bool = False  # in every chunk


def _refuse_if(is_wrong: bool, name: str, what: str) -> None:
    """name: the field that is wrong, and the message's first word."""
    if is_wrong:
        raise ApiError(400, f"{name} {what}", param=name)


class Translator(NamedTuple):
    config: ServerConfig
    info: Mapping[str, Any]  # what the engine said of itself

    def completion(self, body: types.CompletionRequest) -> Job:
        is_ranked = body.best_of not in (None, body.n or 1)
        _refuse_if(is_ranked, "best_of", "asks for ranked answers, which are not made here; leave it out")
        _refuse_if(bool(body.suffix), "suffix", "is not supported: models write forward only; leave it out")
        what = "with logprobs would need those of the prompt, which are not kept; leave one of them out"
        _refuse_if(bool(body.echo) and body.logprobs is not None, "echo", what)
        most = self.config.max_completion_tokens or DEFAULT_COMPLETION
        extra = {"max_tokens": min(DEFAULT_COMPLETION, most)} if body.max_tokens is None else {}
        if body.logprobs is not None:
            extra["logprobs"] = body.logprobs
        prompts = [{"text" if isinstance(prompt, str) else "tokens": prompt} for prompt in body.prompt]
        return self._job(body, prompts, extra, echo=bool(body.echo))

    def chat(self, body: types.ChatRequest) -> Job:
        extra: Fields = {}
        if body.max_completion_tokens is not None:
            extra["max_tokens"] = body.max_completion_tokens
        is_alone = body.top_logprobs is not None and not body.logprobs
        _refuse_if(is_alone, "top_logprobs", "needs logprobs to be true; set it")
        if body.logprobs:
            extra["logprobs"] = body.top_logprobs or 0
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        choice = body.tool_choice or ("auto" if tools else "none")
        _refuse_if(choice != "none" and not tools, "tool_choice", "needs tools; list them, or leave it out")
        if choice == "none":
            tools = []
        names = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        forced = tuple[str, ...]()
        if choice not in ("none", "auto"):
            wanted = None if isinstance(choice, str) else choice.function.name
            what = f"names {wanted!r:.80}, which is not among the tools"
            _refuse_if(wanted is not None and wanted not in names, "tool_choice", what)
            forced = (wanted,) if wanted is not None else tuple(names)
            extra["structured_outputs"] = {"json": forced_schema(tools, wanted)}
        is_json = bool(forced) or any({"json", "json_object"} & set(s) for s in _structured(body).values())
        prompt, written = self._chat_prompt(body, tools), self._format()
        thinking = self.info["thinking"]
        if is_json:  # from the first token on: there is no room for reasoning
            prompt["template_options"] = {"enable_thinking": False} | prompt["template_options"]
            prompt["opening"] = FINAL if written.is_channels else ""
            written, thinking = HERMES if written.is_channels else written, None
        reading = Reading(written, names, thinking, forced, 1 if body.parallel_tool_calls is False else None)
        is_shown = body.include_reasoning is not False
        return self._job(body, [prompt], extra, reading=reading, has_reasoning=is_shown)

    def _format(self) -> Format:
        return FORMATS[self.config.tool_call_parser or self.info["format"]]

    def tokenize(self, body: types.TokenizeRequest) -> Fields:
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        if body.messages is None:
            return {"text": body.prompt, "add_special": body.add_special_tokens}
        return self._chat_prompt(body, [tool.model_dump(exclude_none=True) for tool in body.tools or ()])

    def _chat_prompt(self, body: Chat, tools: list[Fields]) -> Fields:
        if not self.info["has_template"]:
            raise ApiError(400, "the model has no chat template; use /v1/completions")
        messages = [self._message(message) for message in body.messages or ()]
        has_tools, effort = self.info["has_tools"], body.reasoning_effort
        options: Fields = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":
            options["enable_thinking"] = False
        return {
            "messages": messages if has_tools else for_plain_template(messages, tools),
            "tools": tools if tools and has_tools else None,
            "add_generation_prompt": body.add_generation_prompt is not False,
            "template_options": options | (body.chat_template_kwargs or {}),
        }

    def _message(self, message: types.Message) -> Fields:
        """With the names that the template has."""
        written = message.model_dump(exclude_none=True)
        if message.role == "developer" and not self.info["has_developer"]:
            written["role"] = "system"
        if message.tool_calls and not message.content and self._format().is_channels:
            written["thinking"] = message.reasoning_content or ""
        return written

    def _job(self, body: types.Sampling, prompts: list[Fields], extra: Fields, **more: Any) -> Job:
        options = self.info["defaults"] | body.model_dump(include=SAME_NAMES, exclude_none=True) | extra
        what = "comes with a whole answer only; leave it out, or set stream to false"
        _refuse_if(bool(body.stream) and body.prompt_logprobs is not None, "prompt_logprobs", what)
        structured = _structured(body)
        if "structured_outputs" in extra:
            structured["tool_choice"] = extra["structured_outputs"]
        if len(structured) > 1:
            names = " and ".join(sorted(structured))
            raise ApiError(400, f"{names} exclude each other; use one of them", param=min(structured))
        if structured:
            (options["structured_outputs"],) = structured.values()
        details = self._speculation(body.speculative, options)
        try:
            params = SamplingParams(**options)
        except ConfigError as error:
            raise ApiError(400, str(error), param=str(error).split(" ", 1)[0].split(".")[0]) from None
        self._check_limits(options, len(prompts) * params.n)
        common = {"params": options, "priority": body.priority or 0, "details": details}
        common |= {"is_streamed": bool(body.stream), "echo": more.get("echo", False)}
        reading = more.get("reading", Reading())
        common |= {"shown": reading.tokens, "thoughts": reading.thoughts}
        streamed = body.stream_options or types.StreamOptions()
        return Job(
            parts=[{"prompt": prompt, **common} for prompt in prompts],
            num_choices=params.n,
            is_stream=bool(body.stream),
            has_usage=bool(streamed.include_usage),
            has_counts=bool(streamed.include_usage and streamed.continuous_usage_stats),
            has_logprobs=params.logprobs is not None,
            has_details=bool(details),
            **more,
        )

    def _check_limits(self, options: Mapping[str, Any], num_choices: int) -> None:
        config, size = self.config, len(json.dumps(options.get("structured_outputs")))
        if size > config.max_grammar_bytes:
            what = f"the grammar or schema has {size:,} characters"
            raise ApiError(400, f"{what}; this server takes at most {config.max_grammar_bytes:,}")
        most, asked = config.max_completion_tokens, options.get("max_tokens", 0)
        what = f"is {brief(asked)}; this server writes at most {most}"
        _refuse_if(most is not None and asked > most, "max_tokens", what)
        what = f"times prompts makes {num_choices} answers, more than {config.max_choices}; ask for fewer"
        _refuse_if(num_choices > config.max_choices, "n", what)

    def _speculation(self, asked: bool | str | types.Speculative | None, options: Fields) -> bool | str:
        """Put into the options what was asked for; whether the details of each step are wanted."""
        if asked is None or asked is True:
            return False
        if isinstance(asked, bool | str):
            asked = types.Speculative(method="off" if asked is False else asked)
        loaded = self.info["speculative"]
        known = {"auto", "off", "none", loaded["method"], *loaded["selectable"]}
        if asked.method is not None and asked.method not in known:
            drafters, near = ", ".join(loaded["selectable"]) or "none", nearest(asked.method, sorted(known))
            what = f"speculative method is {asked.method!r:.60}; this server has loaded: {drafters} ({near})"
            raise ApiError(400, what, param="speculative")
        if asked.method in ("off", "none"):
            options["num_speculative_tokens"] = 0
        elif asked.num_speculative_tokens is not None:
            options["num_speculative_tokens"] = asked.num_speculative_tokens
        if asked.method in loaded["selectable"] and len(loaded["selectable"]) > 1:
            options["speculative_method"] = asked.method
        return asked.details


def _structured(body: types.Sampling) -> dict[str, Fields]:
    """By the field that asks for it: what the answer must look like."""
    found: dict[str, Fields] = {
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
        schema = wanted.json_schema and wanted.json_schema.schema_
        _refuse_if(schema is None, "response_format", "json_schema has no schema; give json_schema.schema")
        found["response_format"] = {"json": schema}
    return found
