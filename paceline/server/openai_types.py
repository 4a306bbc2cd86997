"""The bodies that clients send: OpenAI's, with vLLM's further fields. Their shapes and sizes only: values are
checked by SamplingParams. Invariant: a field that is not listed is refused by name; one that is listed is
obeyed, or it is among the few that change no answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field
from pydantic_core import from_json

from paceline.core.content import plain_text
from paceline.core.errors import RequestError

MOST_MESSAGES, MOST_TOOLS, MOST_LOGPROBS = 2048, 128, 20
MOST_STOPS, MOST_STOP_CHARACTERS = 32, 1000  # characters of all stop strings together
TAKEN = {"messages", "tools", "add_generation_prompt", "documents", "bos_token", "eos_token", "template"}
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
REASONING = AliasChoices("reasoning_content", "reasoning")  # the older name, and the newer
Prompt = str | list[int] | list[str] | list[list[int]]


def _few_stops(stop: str | list[str] | None) -> str | list[str] | None:
    num_characters = sum(map(len, stop or ()))
    if num_characters > MOST_STOP_CHARACTERS or (isinstance(stop, list) and len(stop) > MOST_STOPS):
        raise ValueError(f"has over {MOST_STOPS} strings or {MOST_STOP_CHARACTERS} characters; shorten it")
    return stop


def _several(prompt: Prompt) -> list[str] | list[list[int]]:
    """One prompt or several, as a list of prompts."""
    is_one = isinstance(prompt, str) or isinstance(next(iter(prompt), None), int)
    many: Any = [prompt] if is_one else prompt
    if not many or not all(many):
        raise ValueError("is empty; give a text or token ids with at least one token, or a list of them")
    return list(many)


def _text(content: str | list[ContentPart] | None) -> str:
    parts: Any = content
    if isinstance(content, list):
        parts = [part.model_dump(exclude_none=True) for part in content]
    try:
        return plain_text(parts) or ""
    except RequestError as error:  # the place is named by what is shown of it
        raise ValueError(str(error).removeprefix("content ")) from None


def _arguments(text: str) -> Any:
    """What a template is given: JSON's value, or the text of what a model could not finish."""
    try:
        return from_json(text or "{}", allow_inf_nan=False)
    except ValueError:
        return text


def _free_names(options: dict[str, Any] | None) -> dict[str, Any] | None:
    if taken := TAKEN & set(options or ()):
        raise ValueError(f"holds {min(taken)!r}, which has a field of its own")
    return options


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Speculative(Body):
    method: str | None = None
    num_speculative_tokens: int | None = Field(default=None, ge=0, le=128)
    details: bool | Literal["drafts"] = False  # drafts: at full speed, without p and q


class JsonSchema(BaseModel):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Shared(Body):
    """What every protocol is asked in the same words."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    speculative: bool | str | Speculative | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31)
    service_tier: str | None = None  # of no influence here


class Sampling(Shared):
    """What completions and chats share."""

    n: int | None = None
    stream_options: StreamOptions | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    # Each of these collections is gone through at every token, between steps that others wait for.
    stop: Annotated[str | list[str] | None, AfterValidator(_few_stops)] = None
    stop_token_ids: list[int] | None = Field(None, max_length=1024)
    include_stop_str_in_output: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = Field(None, max_length=1024)
    bad_words: list[str] | None = Field(None, max_length=128)
    allowed_token_ids: list[int] | None = Field(None, max_length=16_384)
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Of no influence here:
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(Sampling):
    prompt: Annotated[Prompt, AfterValidator(_several)]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    best_of: int | None = None
    suffix: str | None = None


class ContentPart(BaseModel):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(BaseModel):
    name: str
    arguments: Annotated[str, AfterValidator(_arguments)] = Field("{}", validate_default=True)


class ToolCall(BaseModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """As templates know messages: content is text, arguments are objects. Clients send back what they were
    given, with fields of no meaning here: those are left out."""

    role: Role
    content: Annotated[str | list[ContentPart] | None, AfterValidator(_text)] = ""
    refusal: str | None = Field(None, exclude=True)
    reasoning_content: str | None = Field(None, validation_alias=REASONING)
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, AfterValidator(lambda calls: calls or None)] = None

    def model_post_init(self, context: Any) -> None:
        self.content = self.content or self.refusal or ""


class Function(BaseModel):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    type: Literal["function"]
    function: Function


class Templated(Body):
    """What is said of a chat template."""

    tools: list[Tool] | None = Field(None, max_length=MOST_TOOLS)
    chat_template_kwargs: Annotated[dict[str, Any] | None, AfterValidator(_free_names)] = None
    add_generation_prompt: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ChatRequest(Sampling, Templated):
    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tool_choice: Literal["none", "auto", "required"] | ToolCall | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    prediction: dict[str, Any] | None = None  # of no influence on the text


class TokenizeRequest(Templated):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MOST_MESSAGES)
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[int]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What every error looks like."""

    error: ErrorDetail
