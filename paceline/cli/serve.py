"""`paceline serve`: the engine behind OpenAI's routes. Its flags are the fields of server/config.py, so that
flags, variables and the file can never differ.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from paceline.cli import options, parsing
from paceline.cli.options import Drafting, Given
from paceline.core.errors import ConfigError
from paceline.core.options import options_of
from paceline.server.config import PREFIX, ServerConfig, resolve

SETTINGS = [each for each in options_of(ServerConfig) if each[0].name != "model"]


def serve(
    settings: Annotated[Given, [*options_of(Drafting), *SETTINGS]],
    model: Annotated[str | None, typer.Argument(help=options.MODEL_HELP)] = None,
    config: Annotated[
        str | None, typer.Option(help=f"A TOML file with settings; also {PREFIX}CONFIG.")
    ] = None,
) -> None:
    """Serve a model to OpenAI clients.

    Every option can also be a variable (PACELINE_PORT=8001) or a line of a TOML file (port = 8001); flags win
    over variables, variables over the file.

    Examples:

      paceline serve --port 8000

      paceline serve ./llama-8b --api-key-file keys.txt --max-num-seqs 32

      paceline serve --config server.toml --method ngram -k 3
    """
    flags = {**settings, "model": model}
    if any(name in settings for name in parsing.SHORT):
        flags["speculative_config"] = parsing.speculative_config(settings) or "off"
    chosen = resolve(flags, os.environ, config)
    try:
        from paceline.server.run import serve as run
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the server needs {error.name}, which is not installed; run: pip install 'paceline[server]'"
        ) from None
    raise typer.Exit(run(chosen))
