"""Training curves as a picture: loss and held-out tokens a step over the tokens that were read. None where
there is no matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw_curves(path: Path, curve: Sequence[dict[str, Any]], kind: str) -> bool:
    """Whether there is a picture now."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    millions = [record["tokens"] / 1e6 for record in curve]
    left.plot(millions[1:], [record["loss"] for record in curve[1:]], color="#c2410c")
    left.set(xlabel="million tokens read", ylabel="loss", title=f"{kind}: loss")
    right.plot(millions, [record["tau"] for record in curve], color="#0f766e", label="tokens a step")
    for k in range(len(curve[0]["by_position"])):
        right.plot(
            millions,
            [record["by_position"][k] for record in curve],
            color="#0f766e",
            alpha=0.5 / (k + 1) + 0.1,
            linewidth=1,
        )
    right.set(xlabel="million tokens read", title="held-out: tokens a step; below, chance of each position")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    return True
