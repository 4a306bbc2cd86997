"""Pictures of what drafts gain: PNG files drawn by matplotlib (extra `bench`), without a display."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from paceline.measure.tuning.findings import Findings

SIZE, DPI = (8.0, 4.5), 120


def check() -> None:
    """Refuse to begin what could not be drawn."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed; run pip install 'paceline[bench]'"
        )


def save(path: Path, draw: Callable[[Axes], None]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path)


def speedup_over_k(
    axes: Axes, title: str, alphas: Sequence[float], ks: Sequence[int], speedup: Callable[[float, int], float]
) -> None:
    """One line for each α, its best K marked."""
    for alpha in alphas:
        gains = [speedup(alpha, k) for k in ks]
        (line,) = axes.plot(ks, gains, label=f"α {alpha:g}")
        best = max(range(len(ks)), key=gains.__getitem__)
        axes.plot([ks[best]], [gains[best]], marker="o", color=line.get_color())
    axes.set_title(title, fontsize="medium", loc="left")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("K, tokens drafted a step")
    axes.set_ylabel("speedup over plain decoding")


def model_and_measurement(axes: Axes, title: str, found: Findings) -> None:
    """For each drafter a line as predicted and a dot for each length that was timed; the policy's speed is a
    level.
    """
    for drafter in found.drafters:
        (line,) = axes.plot(
            [p.k for p in drafter.line], [p.speedup for p in drafter.line], label=drafter.name
        )
        timed = [(row.prediction.k, row.measured) for row in drafter.rows if row.measured is not None]
        axes.plot([k for k, _ in timed], [gain for _, gain in timed], "o", color=line.get_color())
    if found.auto is not None:
        axes.axhline(found.auto, color="gray", linestyle="--", label="auto, measured")
    axes.set_title(f"{title}; lines: predicted, dots: measured", fontsize="medium", loc="left")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("K, tokens drafted a step")
    axes.set_ylabel("speedup over plain decoding")
