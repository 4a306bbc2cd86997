"""`paceline plan`: what drafting could gain for a model on a machine, worked out from its shape and the
machine's limits alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import console, options, parsing
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from paceline.cli.plan_report import Report
    from paceline.measure.tuning.hardware import Hardware

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
KS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
_HARDWARE, _DRAFTS = "Hardware", "Drafts"
MODEL_HELP = "default, a folder, config.json or .gguf file, a Hugging Face name, or a shape: llama-8b, smollm2-135m. No weights are read."


def plan(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = "default",
    hardware: Annotated[
        str | None,
        typer.Option(
            help="h200, h100, a100, rtx4090, l4, m2, or this: measured here.", rich_help_panel=_HARDWARE
        ),
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="GB/s it reads memory with.", rich_help_panel=_HARDWARE)
    ] = None,
    flops: Annotated[
        float | None, typer.Option(help="TFLOP/s it multiplies with, dense.", rich_help_panel=_HARDWARE)
    ] = None,
    memory: Annotated[float | None, typer.Option(help="GB of memory.", rich_help_panel=_HARDWARE)] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="Of the weights: auto (int8 on this CPU, else bfloat16), int8, int4, float32, float16."
        ),
    ] = "auto",
    kv_dtype: Annotated[
        str, typer.Option(help="Of the cached keys and values: auto, float32, bfloat16, float16.")
    ] = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Sequences that run together.")] = 1,
    context: Annotated[
        int | None, typer.Option(min=0, help="Tokens cached of each; left out: 1024, or the model's context.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="A draft model; left out: drafts are free.", rich_help_panel=_DRAFTS)
    ] = None,
    alpha: Annotated[
        list[float] | None,
        typer.Option(help="Chance that a drafted token is accepted.", rich_help_panel=_DRAFTS),
    ] = None,
    k: Annotated[
        list[int] | None, typer.Option("--k", "-k", help="Tokens drafted a step.", rich_help_panel=_DRAFTS)
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="FLOPs to train a drafter with, such as 1e18.", rich_help_panel=_DRAFTS),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw speedup over K into this PNG file.")] = None,
    as_json: options.Json = False,
) -> None:
    """Work out on paper what drafting could gain.

    A pass reads all weights once, however many tokens it checks, and multiplies for each of them. While
    reading takes longer, tokens are checked for free. From that follow the price of a draft, the best K for
    each chance α of a drafted token, and the α from which it pays. --alpha and -k may be repeated: they are
    the rows and columns of the table.

    Examples:

      paceline plan llama-8b --hardware h200 --draft smollm2-135m

      paceline plan ./config.json --hardware rtx4090 --dtype int4 --batch 8 --context 4096 --alpha 0.7 -k 4

      paceline plan llama-8b --bandwidth 2000 --flops 300 --memory 80 --budget 1e18 --plot speedup.png
    """
    from paceline.cli.plan_report import print_report

    if plot is not None:
        from paceline.measure.tuning import plots

        plots.check()
        parsing.check_target("--plot", plot)
    _check_drafts(alpha, k, budget)
    report = _report(
        model, _machine(hardware, bandwidth, flops, memory), dtype, kv_dtype, batch, context, draft
    )
    report = report._replace(alphas=tuple(alpha or ALPHAS), ks=tuple(k or KS), budget=budget)
    if as_json:
        console.write_json(console.stdout(), report.to_json())
    else:
        print_report(console.stdout(), report)
    if plot is not None:
        _draw(report, plot)


def _check_drafts(alphas: list[float] | None, ks: list[int] | None, budget: float | None) -> None:
    from paceline.measure.tuning.plan import MOST_K

    for alpha in alphas or ():
        if not 0 <= alpha <= 1:
            raise ConfigError(f"--alpha is {alpha}; it is a chance, give a number from 0 to 1")
    for k in ks or ():
        if not 1 <= k <= MOST_K:
            raise ConfigError(f"-k is {k}; give a whole number from 1 to {MOST_K}")
    if budget is not None and not 1e6 <= budget <= 1e30:
        raise ConfigError(f"--budget is {budget:g}; give FLOPs between 1e6 and 1e30, such as 1e18")


def _machine(
    name: str | None, bandwidth: float | None, flops: float | None, memory: float | None
) -> Hardware:
    from paceline.measure.tuning import hardware

    if bandwidth is None and flops is None and memory is None:
        name = name or hardware.THIS
        if name != hardware.THIS:
            return hardware.named(name)
        with console.stderr().status("measuring this machine"):
            return hardware.this()
    return hardware.explicit(bandwidth, flops, memory, hardware.named(name) if name is not None else None)


def _report(
    model: str,
    machine: Hardware,
    dtype: str,
    kv_dtype: str,
    batch: int,
    context: int | None,
    draft: str | None,
) -> Report:
    from paceline.cli.plan_report import Report
    from paceline.core.options import nearest
    from paceline.loaders.dummy import describe
    from paceline.measure.tuning.plan import KV_WIDTHS, WIDTHS, Footing, beside

    dtype = ("int8" if machine.int8_flops is not None else "bfloat16") if dtype == "auto" else dtype
    kv_dtype = machine.kv_dtype if kv_dtype == "auto" else kv_dtype
    for option, value, known in (("--dtype", dtype, WIDTHS), ("--kv-dtype", kv_dtype, KV_WIDTHS)):
        if value not in known:
            raise ConfigError(f"{option} is {value!r}; {nearest(value, ['auto', *known])}")
    name, config = describe(model)
    drafter = describe(draft) if draft is not None else None
    most = min(config.max_context, drafter.config.max_context if drafter else config.max_context)
    context = min(1024, most) if context is None else context
    if context > most:
        raise ConfigError(f"--context is {context}; the longest context here is {most}, give at most that")
    target = Footing(config, machine, dtype, kv_dtype, batch, context)
    return Report(
        name, target, drafter.name if drafter else None, beside(target, drafter.config) if drafter else None
    )


def _draw(report: Report, path: Path) -> None:
    from paceline.measure.tuning import plots

    title = (
        f"{report.name} on {report.target.hardware.name}, {report.target.dtype}, batch {report.target.batch}"
    )
    ks = range(max(*report.ks, 8) + 1)
    plots.save(path, lambda axes: plots.speedup_over_k(axes, title, report.alphas, ks, report.gains.speedup))
    console.write(console.stderr(), f"wrote {path}\n")
