"""Pictures of a server under load: PNG files drawn by matplotlib (extra `bench`). A picture with nothing to
show is not drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE, DPI = (8.0, 4.5), 120
TITLES = {"ttft": "time to first token", "tpot": "time for each further token", "e2el": "end to end"}


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """The pictures that were written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    levels = [level for level in report["levels"] if level["completed"]]
    written = []
    for name, picture in (
        ("latency.png", _latency),
        ("throughput.png", _throughput),
        ("ttft.png", _first_tokens),
    ):
        figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        if levels:
            picture(figure, levels)
            for axes in figure.axes:
                axes.spines[["top", "right"]].set_visible(False)
            figure.savefig(folder / name)
            written.append(folder / name)
    return written


def _loads(axes: Axes, levels: list[dict[str, Any]]) -> list[int]:
    axes.set_xticks(
        range(len(levels)),
        [level["load"] for level in levels],
        rotation=20 if len(levels) > 2 else 0,
        fontsize="small",
    )
    return list(range(len(levels)))


def _latency(figure: Figure, levels: list[dict[str, Any]]) -> None:
    """A panel for each latency, a line for each percentile, over the loads."""
    for i, (name, title) in enumerate(TITLES.items()):
        axes = figure.add_subplot(1, len(TITLES), i + 1)
        places = _loads(axes, levels)
        names = [key for key in (levels[0][f"{name}_ms"] or {}) if key != "mean"]
        for key in names:
            values = [(level[f"{name}_ms"] or {}).get(key, float("nan")) for level in levels]
            axes.plot(places, values, marker="o", label=key)
        axes.set_title(title, fontsize="medium", loc="left")
        axes.set_ylim(bottom=0)
        if i == 0:
            axes.set_ylabel("milliseconds")
        if names:
            axes.legend(frameon=False, fontsize="small")


def _throughput(figure: Figure, levels: list[dict[str, Any]]) -> None:
    left, right = figure.subplots(1, 2)
    places = _loads(left, levels)
    left.bar(places, [level["output_throughput"] for level in levels], 0.6)
    left.set_title("tokens written a second", fontsize="medium", loc="left")
    _loads(right, levels)
    right.plot(places, [level["request_throughput"] for level in levels], marker="o", label="answered")
    if all(level["request_goodput"] is not None for level in levels):
        right.plot(
            places, [level["request_goodput"] for level in levels], marker="o", label="within the goals"
        )
    asked = [level["request_rate"] or float("nan") for level in levels]
    right.plot(places, asked, color="gray", linestyle=":", label="asked")
    right.set_ylim(bottom=0)
    right.set_title("requests a second", fontsize="medium", loc="left")
    right.legend(frameon=False, fontsize="small")


def _first_tokens(figure: Figure, levels: list[dict[str, Any]]) -> None:
    """Of each load, the share of requests whose first token had come after so long."""
    axes = figure.add_subplot()
    for level in levels:
        values = sorted(request["ttft_ms"] for request in level["requests"] if request["error"] is None)
        axes.step(
            values, [(i + 1) / len(values) for i in range(len(values))], where="post", label=level["load"]
        )
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("milliseconds to the first token")
    axes.set_ylabel("share of requests")
    axes.legend(frameon=False, fontsize="small")
