"""`paceline serve`: the engine behind OpenAI's routes. Its options are the fields of server/config.py, made
into flags here, so that flags, variables and the file can never differ.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from paceline.cli import options, parsing
from paceline.core.errors import ConfigError
from paceline.server.config import PREFIX, all_settings, default_of, resolve

_EXAMPLES = """Serve a model to OpenAI clients.

    Every option can also be a variable (PACELINE_PORT=8001) or a line of a TOML file (port = 8001); flags win over variables, variables
    over the file.

    Examples:

      paceline serve --port 8000

      paceline serve ./llama-8b --api-key-file keys.txt --max-num-seqs 32

      paceline serve --config server.toml --method ngram -k 3
    """


def _serve(
    model: str | None,
    config: str | None,
    method: str | None,
    num_speculative_tokens: int | None,
    draft_model: str | None,
    **flags: Any,
) -> None:
    if any(value is not None for value in (method, num_speculative_tokens, draft_model)):
        if flags["speculative_config"] is not None:
            raise ConfigError(
                "--speculative-config and the shorthand --method, --draft-model, -k exclude each other; use one spelling"
            )
        flags["speculative_config"] = (
            parsing.speculative_config(None, method, num_speculative_tokens, draft_model) or "off"
        )
    settings = resolve({"model": model, **flags}, os.environ, config)
    try:
        from paceline.server.run import serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the server needs {error.name}, which is not installed; run: pip install 'paceline[server]'"
        ) from None
    raise typer.Exit(serve(settings))


def _parameters() -> list[inspect.Parameter]:
    config_help = f"A TOML file with settings; also {PREFIX}CONFIG."
    made = {
        "model": (Annotated[str | None, typer.Argument(help=options.MODEL_HELP)], None),
        "config": (Annotated[str | None, typer.Option(help=config_help)], None),
        "method": (options.Method, None),
        "num_speculative_tokens": (options.NumSpeculative, None),
        "draft_model": (options.DraftModel, None),
    }
    for setting, kind in all_settings():
        if setting.name != "model":
            made[setting.name] = (_flag(setting, kind), None)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(name, keyword, annotation=kind, default=default)
        for name, (kind, default) in made.items()
    ]


def _flag(setting: Any, kind: Any) -> Any:
    """An option whose absence is None: the default is the schema's."""
    default = default_of(setting)
    shown = (
        ""
        if default in (None, (), "")
        else f" [dim]\\[default: {str(default).lower() if isinstance(default, bool) else default}][/dim]"
    )
    name = "--" + setting.name.replace("_", "-")
    flags = [*setting.metadata["flags"], f"{name}/--no-{name[2:]}" if kind is bool else name]
    option = typer.Option(
        *flags,
        help=setting.metadata["help"] + shown,
        rich_help_panel=setting.metadata["panel"],
        show_default=False,
    )
    simple = {bool: bool, tuple[str, ...]: list[str], int: int, int | None: int, float: float}.get(kind, str)
    return Annotated[simple | None, option]


def _as_command(function: Callable[..., None]) -> Callable[..., None]:
    def serve(**chosen: Any) -> None:
        function(**chosen)

    parameters = _parameters()
    serve.__doc__ = _EXAMPLES
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return serve


serve = _as_command(_serve)
