"""Every picture of a report: PNG files drawn by matplotlib (extra `bench`), without a display. A picture with
nothing to show is not drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError
from paceline.measure.report import OVERALL
from paceline.measure.rows import PLAIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE, DPI = (8.0, 4.5), 120
LEGEND_COLUMNS = 4
CROWDED = 7  # more names than this overlap unless they are turned
LATENCIES = {"ttft": "time to first token", "tpot": "time for each further token", "e2el": "end to end"}
Report = dict[str, Any]
Picture = Callable[[Report, "Figure"], bool]  # whether there was anything to show


def check(folder: Path | None = None) -> None:
    """Refuse what could not be drawn or written, before the work whose result it is for."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed; run pip install 'paceline[bench]'"
        )
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = f"cannot be made ({error.strerror}); choose another folder"
        raise ConfigError(f"--plot {folder}: {remedy}") from None


def draw(verb: str, report: Report, folder: Path) -> list[Path]:
    """The pictures of a verb of `bench` that were written."""
    device = {"cpu": "cpu", "cuda": "gpu"}.get(report.get("device", ""), "")
    pictures = {folder / name.format(device=device): picture for name, picture in PICTURES[verb].items()}
    return [path for path, picture in pictures.items() if save(path, partial(picture, report))]


def save(path: Path, picture: Callable[[Figure], bool]) -> bool:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    if not picture(figure):
        return False
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    if (
        len(figure.axes) == 1 and figure.axes[0].get_legend_handles_labels()[0]
    ):  # above, where it covers nothing
        figure.legend(loc="outside upper center", ncols=LEGEND_COLUMNS, frameon=False, fontsize="small")
    figure.savefig(path)
    return True


def _labelled(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def _speedup(report: Report, figure: Figure) -> bool:
    """A group of bars for each task, a bar for each engine and method that drafts."""
    axes = figure.add_subplot()
    drafted = [row for row in report["rows"] if row["method"] != PLAIN and row["speedup"] is not None]
    names = list(dict.fromkeys((row["engine"], row["method"]) for row in drafted))
    tasks = list(dict.fromkeys(row["task"] for row in drafted))
    width = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        heights = [row["speedup"] for row in drafted if (row["engine"], row["method"]) == name]
        places = [x + (i - (len(names) - 1) / 2) * width for x in range(len(tasks))]
        axes.bar(places, heights, width, label=", ".join(name))
    axes.axhline(1, color="black", linewidth=0.8)
    turned: dict[str, Any] = {"rotation": 40, "ha": "right"} if len(tasks) > CROWDED else {}
    axes.set_xticks(range(len(tasks)), tasks, **turned)
    axes.set_ylabel("speedup over plain decoding")
    return bool(names)


def _verify_cost(report: Report, figure: Figure) -> bool:
    curve = report["verify_cost"]
    if curve is None:
        return False
    axes, tokens, relative = figure.add_subplot(), curve["tokens"], curve["relative"]
    axes.plot(tokens, relative, marker="o", label=curve["engine"])
    axes.plot(tokens, tokens, color="gray", linestyle=":", label="one pass a token")
    axes.set_ylim(0, 1.2 * max(relative))  # one pass a token would be far above
    _labelled(axes, "tokens checked in one pass", "time relative to one token")
    return True


def _acceptance(report: Report, figure: Figure) -> bool:
    axes = figure.add_subplot()
    counted = [row for row in report["rows"] if row["task"] == OVERALL and row["acceptance_by_position"]]
    for row in counted:
        shares = row["acceptance_by_position"]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=f"{row['engine']}, {row['method']}")
    axes.set_ylim(0, 1)
    axes.set_xticks(range(1, 1 + max((len(row["acceptance_by_position"]) for row in counted), default=0)))
    _labelled(axes, "position in the draft", "share accepted")
    return bool(counted)


def _batch(report: Report, figure: Figure) -> bool:
    axes, levels = figure.add_subplot(), [level["concurrency"] for level in report["levels"]]
    for name in report["levels"][0]["ratio"]:
        axes.plot(levels, [level["ratio"][name] for level in report["levels"]], marker="o", label=name)
    axes.set_xscale("log")
    axes.set_xticks(levels, [str(level) for level in levels])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    _labelled(axes, f"requests at once ({report['model']})", "speed over plain decoding")
    return True


def _loads(axes: Axes, levels: list[Report], title: str) -> list[int]:
    """A place on the x axis for each load."""
    places, turned = list(range(len(levels))), 20 if len(levels) > 2 else 0
    axes.set_xticks(places, [level["load"] for level in levels], rotation=turned, fontsize="small")
    axes.set_title(title, fontsize="medium", loc="left")
    return places


def _answered(report: Report) -> list[Report]:
    return [level for level in report["levels"] if level.get("completed")]


def _latency(report: Report, figure: Figure) -> bool:
    """A panel for each latency, a line for each percentile, over the loads."""
    levels = _answered(report)
    for i, (name, title) in enumerate(LATENCIES.items() if levels else ()):
        axes = figure.add_subplot(1, len(LATENCIES), i + 1)
        places, names = (
            _loads(axes, levels, title),
            [key for key in levels[0][f"{name}_ms"] or {} if key != "mean"],
        )
        for key in names:
            values = [(level[f"{name}_ms"] or {}).get(key, float("nan")) for level in levels]
            axes.plot(places, values, marker="o", label=key)
        axes.set_ylim(bottom=0)
        if i == 0:
            axes.set_ylabel("milliseconds")
        if names:
            axes.legend(frameon=False, fontsize="small")
    return bool(levels)


def _throughput(report: Report, figure: Figure) -> bool:
    levels = _answered(report)
    if not levels:
        return False
    left, right = figure.subplots(1, 2)
    left.bar(
        _loads(left, levels, "tokens written a second"), [level["output_throughput"] for level in levels], 0.6
    )
    places = _loads(right, levels, "requests a second")
    right.plot(places, [level["request_throughput"] for level in levels], marker="o", label="answered")
    if all(level["request_goodput"] is not None for level in levels):
        goodput = [level["request_goodput"] for level in levels]
        right.plot(places, goodput, marker="o", label="within the goals")
    asked = [level["request_rate"] or float("nan") for level in levels]
    right.plot(places, asked, color="gray", linestyle=":", label="asked")
    right.set_ylim(bottom=0)
    right.legend(frameon=False, fontsize="small")
    return True


def _first_tokens(report: Report, figure: Figure) -> bool:
    """Of each load, the share of requests whose first token had come by then."""
    axes, levels = figure.add_subplot(), _answered(report)
    for level in levels:
        values = sorted(request["ttft_ms"] for request in level["requests"] if request["error"] is None)
        shares = [(i + 1) / len(values) for i in range(len(values))]
        axes.step(values, shares, where="post", label=level["load"])
    axes.set_ylim(0, 1.02)
    _labelled(axes, "milliseconds to the first token", "share of requests")
    return bool(levels)


PICTURES: dict[str, dict[str, Picture]] = {
    "compare": {"speedup.png": _speedup, "verify_cost.png": _verify_cost, "acceptance.png": _acceptance},
    "batch": {"concurrency_{device}.png": _batch},
    "serve": {"latency.png": _latency, "throughput.png": _throughput, "ttft.png": _first_tokens},
}


def _over_k(figure: Figure, title: str) -> Axes:
    axes = figure.add_subplot()
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_title(title, fontsize="medium", loc="left")
    _labelled(axes, "K, tokens drafted a step", "speedup over plain decoding")
    return axes


def planned(
    figure: Figure,
    title: str,
    alphas: Sequence[float],
    ks: Sequence[int],
    speedup: Callable[[float, int], float],
) -> bool:
    """One line for each α, its best K marked."""
    axes = _over_k(figure, title)
    for alpha in alphas:
        gains = [speedup(alpha, k) for k in ks]
        (line,) = axes.plot(ks, gains, label=f"α {alpha:g}")
        best = max(range(len(ks)), key=gains.__getitem__)
        axes.plot([ks[best]], [gains[best]], marker="o", color=line.get_color())
    axes.set_ylim(bottom=0)
    return True


def tuned(figure: Figure, report: Report) -> bool:
    """For each drafter a line as predicted and a dot for each length that was timed; the policy's speed is a
    level.
    """
    axes = _over_k(figure, f"{report['model']}; lines: predicted, dots: measured")
    for name, drafter in report["drafters"].items():
        (line,) = axes.plot(range(len(drafter["predicted"])), drafter["predicted"], label=name)
        timed = [(row["k"], row["measured"]) for row in drafter["lengths"] if row["measured"] is not None]
        axes.plot([k for k, _ in timed], [gain for _, gain in timed], "o", color=line.get_color())
    if report["auto"] is not None:
        axes.axhline(report["auto"], color="gray", linestyle="--", label="auto, measured")
    axes.set_ylim(bottom=0)
    return True
