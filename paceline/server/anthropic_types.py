"""The bodies of Anthropic's Messages, and its errors. Invariant: as everywhere, a field that is not listed is
refused by name, and so is a value that would not be obeyed; blocks that clients send back, or mark for a
cache, hold fields of no meaning here: those are left out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from paceline.server.openai_types import MOST_MESSAGES, MOST_TOOLS, Body
from paceline.server.responses_types import MOST_ITEMS, Common, one_of


def _as_blocks(value: Any) -> Any:
    """A text is short for one block of it."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextBlock(BaseModel):
    type: Annotated[Literal["text"], one_of("text")]
    text: str


Text = Annotated[
    list[TextBlock],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock]),
    Field(max_length=MOST_ITEMS),
]


class ToolUse(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = {}


class ToolResult(BaseModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Text = []
    is_error: bool = False


class Thinking(BaseModel):
    type: Literal["thinking"]
    thinking: str


Block = Annotated[TextBlock | ToolUse | ToolResult | Thinking, Field(discriminator="type")]


class Message(BaseModel):
    role: Literal["user", "assistant"]
    content: Annotated[
        list[Block],
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block]),
        Field(max_length=MOST_ITEMS),
    ]


class Tool(BaseModel):
    type: Annotated[str, one_of("custom")] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingOptions(Body):
    """A budget could not be kept, so there is no "enabled"."""

    type: Annotated[str, one_of("disabled", "adaptive")]
    display: Literal["summarized"] | None = None
    budget_tokens: None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    format: OutputFormat | None = None


class CountRequest(Common):
    """What makes the prompt, which is all that counts for its tokens."""

    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    system: Text = Field(default=[])
    tools: list[Tool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None  # of no influence here: all prefixes are cached


class MessageRequest(CountRequest):
    max_tokens: int
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None  # of no influence here


class ErrorDetail(BaseModel):
    type: str
    message: str


class ErrorBody(BaseModel):
    """What every error of these routes looks like."""

    type: Literal["error"]
    error: ErrorDetail
