"""The report as pictures: PNG files drawn by matplotlib (extra `bench`), without a display. A picture with
nothing to show is not drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError
from paceline.measure.plan import PLAIN
from paceline.measure.report import OVERALL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from paceline.measure.measure import Result

SIZE, DPI = (8.0, 4.5), 120
LEGEND_COLUMNS = 4
CROWDED = 7  # more names than this overlap unless they are turned


def check(folder: Path) -> None:
    """Refuse what could not be drawn or written, before the work whose result it is for."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed; run pip install 'paceline[bench]'"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--plot {folder}: cannot be made ({error.strerror}); choose another folder"
        ) from None


def draw(result: Result, folder: Path) -> list[Path]:
    """The pictures that were written."""
    pictures = (("speedup.png", _speedup), ("verify_cost.png", _verify_cost), ("acceptance.png", _acceptance))
    return [folder / name for name, picture in pictures if _save(result, picture, folder / name)]


def _save(result: Result, picture: Any, path: Path) -> bool:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if not picture(result, axes):
        return False
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:  # above, where it covers nothing
        figure.legend(loc="outside upper center", ncols=LEGEND_COLUMNS, frameon=False, fontsize="small")
    figure.savefig(path)
    return True


def _speedup(result: Result, axes: Axes) -> bool:
    """A group of bars for each task, a bar for each engine and method that drafts."""
    drafted = [row for row in result.rows if row["method"] != PLAIN and row["speedup"] is not None]
    names = list(dict.fromkeys((row["engine"], row["method"]) for row in drafted))
    tasks = list(dict.fromkeys(row["task"] for row in drafted))
    width = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        heights = [row["speedup"] for row in drafted if (row["engine"], row["method"]) == name]
        axes.bar(
            [x + (i - (len(names) - 1) / 2) * width for x in range(len(tasks))],
            heights,
            width,
            label=", ".join(name),
        )
    axes.axhline(1, color="black", linewidth=0.8)
    is_crowded = len(tasks) > CROWDED
    axes.set_xticks(
        range(len(tasks)), tasks, rotation=40 if is_crowded else 0, ha="right" if is_crowded else "center"
    )
    axes.set_ylabel("speedup over plain decoding")
    return bool(names)


def _verify_cost(result: Result, axes: Axes) -> bool:
    if result.verify_cost is None:
        return False
    axes.plot(
        result.verify_cost["tokens"],
        result.verify_cost["relative"],
        marker="o",
        label=result.verify_cost["engine"],
    )
    axes.plot(
        result.verify_cost["tokens"],
        result.verify_cost["tokens"],
        color="gray",
        linestyle=":",
        label="one pass a token",
    )
    axes.set_ylim(0, 1.2 * max(result.verify_cost["relative"]))  # one pass a token would be far above
    axes.set_xlabel("tokens checked in one pass")
    axes.set_ylabel("time relative to one token")
    return True


def _acceptance(result: Result, axes: Axes) -> bool:
    counted = [row for row in result.rows if row["task"] == OVERALL and row["acceptance_by_position"]]
    for row in counted:
        shares = row["acceptance_by_position"]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=f"{row['engine']}, {row['method']}")
    axes.set_ylim(0, 1)
    axes.set_xticks(range(1, 1 + max((len(row["acceptance_by_position"]) for row in counted), default=0)))
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("share accepted")
    return bool(counted)
