"""`paceline export`: a head of ours in a format that other engines read."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console, options

DEFAULT_VERIFIER = "HuggingFaceTB/SmolLM2-135M-Instruct"  # where the default model comes from


Form = enum.StrEnum("Form", ["speculators", "vllm", "eagle"])


def export(
    head: Annotated[str, typer.Argument(help="The folder of a head: eagle, medusa or dflash.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where it is written.")],
    form: Annotated[
        Form,
        typer.Option("--format", help="speculators (eagle, dflash), vllm (all), or eagle (its authors')."),
    ] = Form.vllm,
    target: Annotated[str, typer.Option("--target", "-m", help=options.MODEL_HELP)] = "default",
    verifier: Annotated[
        str | None, typer.Option(help="What the other engine calls the target, if not the same.")
    ] = None,
) -> None:
    """Write a head as other engines read it.

    vLLM takes the result as "model" of its speculative_config, with method eagle3, medusa, dflash, or dspark
    for a DFlash head with a Markov head.

    Examples:

      paceline export ./head --format vllm -o ./head-vllm

      paceline export ./head -m ./my-model --format speculators -o ./speculator
    """
    from paceline.loaders import hub
    from paceline.loaders.checkpoint import open_checkpoint
    from paceline.loaders.export_heads import export_head
    from paceline.loaders.heads import open_head

    checkpoint = open_checkpoint(target)
    opened = open_head(head, checkpoint, ("eagle", "medusa", "dflash"))
    name = verifier or (DEFAULT_VERIFIER if target.lower() in hub.DEFAULT_ALIASES else checkpoint.name)
    export_head(opened, checkpoint, form.value, out, name)
    size = (out / "model.safetensors").stat().st_size
    what = f"{opened.config.kind} head for {name} in the {form.value} format"
    console.stderr().print(f"{what}: {out} ({size / 1e6:.1f} MB)")
