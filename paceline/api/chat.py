"""How a conversation becomes a prompt: vLLM's options of `LLM.chat`, and the model's chat template.

Invariant: what an option asks for is done, or refused by name: a template that knows no tools swallows none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.content import for_plain_template, plain_messages, text_of
from paceline.core.errors import RequestError
from paceline.core.options import require
from paceline.loaders.tokenizer import Tokenizer

Message = Mapping[str, Any]
Conversation = Sequence[Message]
TAKEN = ("messages", "template", "chat_template", "tools", "add_generation_prompt")
FORMATS = ("auto", "string", "openai")


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

    def written(self, tokenizer: Tokenizer, messages: Conversation) -> str:
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
