"""The body of POST /v1/responses: OpenAI's, with some of vLLM's further fields. Invariant: as everywhere, a
field that is not listed is refused by name, and so is a value that would not be obeyed. Items that clients
send back hold fields of no meaning here: those are left out.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from paceline.server.openai_types import MOST_TOOLS, Body, Shared

MOST_ITEMS = 8192
Roles = Literal["user", "assistant", "system", "developer"]


def one_of(*taken: str) -> AfterValidator:
    """A type that is one of those; any other is refused by its name."""

    def check(kind: str) -> str:
        if kind not in taken:
            raise ValueError(f"is {kind!r:.60}; this server takes {', '.join(taken)} only")
        return kind

    return AfterValidator(check)


def _is_finite(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    """It is sent back, and JSON has no NaN."""
    try:
        json.dumps(schema, allow_nan=False)
    except RecursionError:
        raise ValueError("is nested too deeply; flatten it") from None
    return schema


Schema = Annotated[dict[str, Any], AfterValidator(_is_finite)]


def _as_list(kind: str, role: str | None = None) -> Any:
    """A text is short for a list of one."""

    def listed(value: Any) -> Any:
        if isinstance(value, str):
            one: dict[str, Any] = {"type": kind, "text": value}
            return [{"type": "message", "role": role, "content": [one]} if role else one]
        if role and isinstance(value, list):  # a message's type may be left out
            return [{"type": "message", **each} if isinstance(each, dict) else each for each in value]
        return value

    return listed


TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class TextPart(BaseModel):
    type: Annotated[str, one_of(*TEXTS)]
    text: str


Parts = Annotated[
    list[TextPart],
    BeforeValidator(_as_list("input_text"), json_schema_input_type=str | list[TextPart]),
    Field(max_length=MOST_ITEMS),
]


class MessageItem(BaseModel):
    type: Literal["message"]
    role: Roles
    content: Parts


class CallItem(BaseModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResultItem(BaseModel):
    type: Literal["function_call_output"]
    call_id: str
    output: Parts


class ReasoningItem(BaseModel):
    type: Literal["reasoning"]
    summary: list[TextPart] = Field(default=[], max_length=MOST_ITEMS)
    content: list[TextPart] | None = Field(None, max_length=MOST_ITEMS)


Item = Annotated[MessageItem | CallItem | ResultItem | ReasoningItem, Field(discriminator="type")]
Items = Annotated[
    list[Item],
    BeforeValidator(_as_list("input_text", "user"), json_schema_input_type=str | list[Item]),
    Field(max_length=MOST_ITEMS),
]


class FunctionTool(BaseModel):
    type: Annotated[str, one_of("function")]
    name: str
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class NamedTool(BaseModel):
    type: Annotated[str, one_of("function")]
    name: str


class TextFormat(BaseModel):
    model_config = ConfigDict(serialize_by_alias=True)
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None  # the whole of it is given anyway


class Common(Shared):
    """What Responses and Messages are asked in the chat's own words."""

    chat_template_kwargs: dict[str, Any] | None = None


class ResponseRequest(Common):
    input: Items
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = None
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = (
        Field(None, max_length=16)
    )
    store: bool | None = None
    truncation: Literal["disabled"] | None = None  # nothing of a conversation is left out
    background: Literal[False] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = Field(None, max_length=1)  # never hidden
    # Of no influence here:
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
