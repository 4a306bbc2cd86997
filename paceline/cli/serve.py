"""`paceline serve`: the engine behind OpenAI's routes. Its flags are the fields of server/config.py, so that
flags, variables and the file can never differ.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import typer

from paceline.cli.options import MAIN, MODEL_HELP, SHORT, Drafting, Given, group, speculative_config
from paceline.core.errors import ConfigError
from paceline.core.options import option, options_of
from paceline.server.config import PREFIX, ServerConfig, resolve

SETTINGS = [each for each in options_of(ServerConfig) if each[0].name != "model"]


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a model to OpenAI clients.

    Every option can also be a variable (PACELINE_PORT=8001) or a line of a TOML file (port = 8001); flags win
    over variables, variables over the file.

    Examples:

      paceline serve --port 8000

      paceline serve ./llama-8b --api-key-file keys.txt --max-num-seqs 32

      paceline serve --config server.toml --method ngram -k 3
    """

    settings: Given = group([*options_of(Drafting), *SETTINGS])
    model: str | None = option(None, MAIN, MODEL_HELP, is_argument=True)
    config: str | None = option(None, MAIN, f"A TOML file with settings; also {PREFIX}CONFIG.")


def serve(asked: Serve) -> None:
    flags = {**asked.settings, "model": asked.model}
    if any(name in flags for name in SHORT):
        flags["speculative_config"] = speculative_config(asked.settings) or "off"
    chosen = resolve(flags, os.environ, asked.config)
    try:
        from paceline.server.run import serve as run
    except ModuleNotFoundError as error:
        remedy = "run: pip install 'paceline[server]'"
        raise ConfigError(f"the server needs {error.name}, which is not installed; {remedy}") from None
    raise typer.Exit(run(chosen))
