"""What a message says, as text. Invariant: what is no text is refused, never left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.core.errors import RequestError


def plain_text(content: Any) -> str | None:
    """A message's content: a text, None, or OpenAI's list of parts, whose texts become lines, as in vLLM."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"content is {content!r:.40}; give a text or a list of parts with text")
    return "\n".join(map(_part_text, content))


def _part_text(part: Any) -> str:
    kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else part
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise RequestError(f"content has a part of type {kind!r:.40}; this model reads text only")
    if not isinstance(text, str):
        raise RequestError(f"content has a part without text: {part!r:.60}; give its text")
    return text
