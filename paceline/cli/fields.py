"""A command whose options are the fields of a dataclass: names, types, defaults and help are written once.

A field's metadata holds its help and what a command line needs beside: min, panel, envvar, flags (further
names) and is_argument. Invariant: the command calls its function with one value of that dataclass.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_type_hints

import typer


def as_command(kind: type, run: Callable[[Any], None]) -> Callable[..., None]:
    """`run` as typer wants it; its help is the dataclass's docstring."""

    def command(**chosen: Any) -> None:
        run(kind(**chosen))

    return with_fields(command, kind)


def with_fields(
    command: Callable[..., None], kind: type, first: Mapping[str, Any] | None = None
) -> Callable[..., None]:
    """`first`: parameters before the options, by name, such as typer's context."""
    hints = get_type_hints(kind)
    made = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=each)
        for name, each in (first or {}).items()
    ]
    for each in dataclasses.fields(kind):
        hint: Any = hints[each.name]
        annotation: Any = Annotated[hint, _parameter(each)]
        made.append(
            inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=each.default
            )
        )
    command.__doc__ = kind.__doc__
    command.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in made}
    return command


def _parameter(each: dataclasses.Field[Any]) -> Any:
    more = each.metadata
    if more.get("is_argument"):
        return typer.Argument(help=more["help"])
    limits = {"min": more["min"]} if "min" in more else {}
    return typer.Option(
        "--" + each.name.replace("_", "-"), *more.get("flags", ()), help=more["help"],
        rich_help_panel=more.get("panel"), envvar=more.get("envvar"), **limits,
    )  # fmt: skip
