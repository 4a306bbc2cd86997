"""Renders a model's chat template: the messages of a chat as the one text the model was trained on.

Invariant: templates come with model files and are untrusted: they run in template_sandbox.py, and whatever
they do wrong ends in one line. The names a template may use are those of Hugging Face's
`apply_chat_template`, so the text is the same.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.core.errors import ModelFileError, PacelineError, RequestError

if TYPE_CHECKING:
    import jinja2

    from paceline.loaders.template_sandbox import BoundedEnvironment

MAX_TEMPLATE = 256 * 2**10  # characters
MAX_NESTING = 100


class _Compiled(NamedTuple):
    environment: BoundedEnvironment
    template: jinja2.Template
    lock: threading.Lock  # one render at a time: the budget is the environment's


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos_token: str | None = None,
    eos_token: str | None = None,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **extra: Any,
) -> str:
    """The chat as text. `extra` holds variables that some templates read, such as enable_thinking."""
    from paceline.loaders.template_sandbox import MAX_STRING, Budget, TooCostly

    _check_messages(messages)
    ends = {
        name: token
        for name, token in (("bos_token", bos_token), ("eos_token", eos_token))
        if token is not None
    }
    variables = {
        "messages": _plain(messages),
        "tools": None if tools is None else _plain(tools),
        "documents": None,
        **ends,
        **_plain(extra),
    }
    try:
        environment, compiled, lock = _compile(template)
        with lock:
            environment.budget = Budget()
            text = compiled.render(add_generation_prompt=add_generation_prompt, **variables)
    except PacelineError:
        raise
    except TooCostly as error:
        raise ModelFileError(
            f"the chat template was stopped: {error}; use generate, or pass another chat template"
        ) from error
    except Exception as error:  # untrusted code may raise anything
        raise _in_one_line(error) from error
    if len(text) > MAX_STRING:
        raise ModelFileError(
            f"the chat template wrote {len(text)} characters; shorten the messages to fit {MAX_STRING}"
        )
    return text


def _in_one_line(error: Exception) -> PacelineError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    if isinstance(error, _Refused):
        return RequestError(f"the chat template refuses these messages: {reason}; change the messages")
    return ModelFileError(
        f"the chat template fails: {reason}; check the messages, or pass another chat template"
    )


class _Refused(Exception):
    """A template's own `raise_exception`: about the messages, not the template."""


@lru_cache(maxsize=16)
def _compile(template: str) -> _Compiled:
    if len(template) > MAX_TEMPLATE:
        raise ModelFileError(
            f"the chat template has {len(template)} characters; templates over {MAX_TEMPLATE} are not read"
        )
    from paceline.loaders.template_sandbox import BoundedEnvironment

    environment = BoundedEnvironment(extensions=["jinja2.ext.loopcontrols", _generation_tag()])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    environment.charge_filters_and_tests()
    return _Compiled(environment, environment.from_string(template), threading.Lock())


def _generation_tag() -> type[Any]:
    """`{% generation %}` marks an assistant's words for training; when rendering, its body is all there is to
    it.
    """
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags: set[str] = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _refuse(message: str) -> None:
    raise _Refused(message)


def _now(pattern: str) -> str:
    from datetime import datetime

    if len(pattern) > 100:
        raise ValueError("strftime_now takes at most 100 characters")
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without jinja2's escapes for HTML: models were trained on plain JSON."""
    if (indent is not None and not 0 <= indent <= 16) or (
        separators is not None and max(map(len, separators)) > 16
    ):
        raise ValueError("tojson takes an indent of 0 to 16 and short separators")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages is {messages!r:.60}; give a list such as [{{'role': 'user', 'content': 'Hello'}}]"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"message {index} is {message!r:.60}; give a dict with 'role' and 'content'")


def _plain(value: Any, depth: int = 0) -> Any:
    """Only JSON's own types reach a template: no object whose methods it could call."""
    if depth > MAX_NESTING:
        raise RequestError(f"messages are nested deeper than {MAX_NESTING}; flatten them")
    if value is None or type(value) in (int, float, bool):
        return value
    if isinstance(value, str):
        return _utf8(str.__str__(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value]
    raise RequestError(f"messages hold a {type(value).__name__}; give strings, numbers, lists and dicts only")


def _utf8(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(f"messages hold {text!r:.60}, which is not UTF-8 text; decode it first") from None
    return text
