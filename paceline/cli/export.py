"""`paceline export`: a head of ours in a format that other engines read."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from paceline.cli import console
from paceline.cli.options import MAIN, MODEL_HELP
from paceline.core.options import option

DEFAULT_VERIFIER = "HuggingFaceTB/SmolLM2-135M-Instruct"  # where the default model comes from
FORMAT_HELP = "speculators (eagle, dflash), vllm (all), or eagle (its authors')."


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a head as other engines read it.

    vLLM takes the result as "model" of its speculative_config, with method eagle3, medusa, dflash, or dspark
    for a DFlash head with a Markov head.

    Examples:

      paceline export ./head --format vllm -o ./head-vllm

      paceline export ./head -m ./my-model --format speculators -o ./speculator
    """

    head: str = option(MISSING, MAIN, "The folder of a head: eagle, medusa or dflash.", is_argument=True)
    out: Path = option(MISSING, MAIN, "Where it is written.", "-o")
    format: str = option("vllm", MAIN, FORMAT_HELP)
    target: str = option("default", MAIN, MODEL_HELP, "-m")
    verifier: str | None = option(None, MAIN, "What the other engine calls the target, if not the same.")


def export(asked: Export) -> None:
    from paceline.loaders import hub
    from paceline.loaders.checkpoint import open_checkpoint
    from paceline.loaders.export_heads import export_head
    from paceline.loaders.heads import open_head

    checkpoint = open_checkpoint(asked.target)
    head = open_head(asked.head, checkpoint, ("eagle", "medusa", "dflash"))
    usual = DEFAULT_VERIFIER if asked.target.lower() in hub.DEFAULT_ALIASES else checkpoint.name
    name = asked.verifier or usual
    export_head(head, checkpoint, asked.format, asked.out, name)
    size = (asked.out / "model.safetensors").stat().st_size
    what = f"{head.config.kind} head for {name} in the {asked.format} format"
    console.stderr().print(f"{what}: {asked.out} ({size / 1e6:.1f} MB)")
