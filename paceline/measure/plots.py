"""Every picture of a report: PNG files drawn by matplotlib (extra `bench`), without a display. Invariant: a
picture is drawn from the report alone, and one with nothing to show is not drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError
from paceline.measure.results import OVERALL
from paceline.measure.rows import PLAIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE, DPI = (8.0, 4.5), 120
LEGEND_COLUMNS = 4
CROWDED = 7  # more names than this overlap unless they are turned
LATENCIES = {"ttft": "time to first token", "tpot": "time for each further token", "e2el": "end to end"}
RATES = {"request_rate": "asked", "request_throughput": "answered", "request_goodput": "good"}
THROUGHPUTS = {"a second": {"output_throughput": "tokens written"}, "requests a second": RATES}
NAN = float("nan")
K_LABELS = ("K, tokens drafted a step", "speedup over plain decoding")
Report = dict[str, Any]
Picture = Callable[["Figure", Report], object]  # draws no axes where there is nothing to show
Points = tuple[Sequence[float], Sequence[float]]  # x and y


def check(folder: Path | None = None) -> None:
    """Refuse what could not be drawn or written, before the work whose result it is for."""
    if find_spec("matplotlib") is None:
        remedy = "run pip install 'paceline[bench]'"
        raise ConfigError(f"--plot needs matplotlib, which is not installed; {remedy}")
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plot {folder}: cannot be made ({error.strerror}); choose another") from None


def draw(verb: str, report: Report, target: Path) -> list[Path]:
    """The pictures of a verb that were written: into the folder, or of `tune` and `plan` that file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    device, written = {"cpu": "cpu", "cuda": "gpu"}.get(report.get("device", ""), ""), []
    for name, picture in PICTURES[verb].items():
        figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        picture(figure, report)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_ylim(bottom=0)
        if len(figure.axes) == 1 and figure.axes[0].get_legend_handles_labels()[0]:
            # above, where it covers nothing
            figure.legend(loc="outside upper center", ncols=LEGEND_COLUMNS, frameon=False, fontsize="small")
        if figure.axes:
            written.append(target / name.format(device=device))
            figure.savefig(written[-1])
    return written


def _lines(axes: Axes, lines: Mapping[str, Points], labels: tuple[str, str], **style: Any) -> None:
    for name, (x, y) in lines.items():
        axes.plot(x, y, **{"marker": "o", "label": name, **style})
    axes.set(xlabel=labels[0], ylabel=labels[1])


def _speedup(figure: Figure, report: Report) -> None:
    """A group of bars for each task, a bar for each engine and method that drafts."""
    drafted = [row for row in report["rows"] if row["method"] != PLAIN and row["speedup"] is not None]
    if not drafted:
        return
    axes, width = figure.add_subplot(), 0.8
    names = list(dict.fromkeys((row["engine"], row["method"]) for row in drafted))
    tasks = list(dict.fromkeys(row["task"] for row in drafted))
    for i, name in enumerate(names):
        heights = [row["speedup"] for row in drafted if (row["engine"], row["method"]) == name]
        places = [x + (i - (len(names) - 1) / 2) * width / len(names) for x in range(len(tasks))]
        axes.bar(places, heights, width / len(names), label=", ".join(name))
    axes.axhline(1, color="black", linewidth=0.8)
    turned: dict[str, Any] = {"rotation": 40, "ha": "right"} if len(tasks) > CROWDED else {}
    axes.set_xticks(range(len(tasks)), tasks, **turned)
    axes.set_ylabel(K_LABELS[1])


def _verify_cost(figure: Figure, report: Report) -> None:
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for row in (row for row in report["rows"] if row["ratio"] is not None):
        points = lines.setdefault(f"{row['dtype']}, {row['context']} tokens cached", ([], []))
        for values, name in zip(points, ("rows", "ratio"), strict=True):
            values.append(row[name])
    if lines:
        _lines(figure.add_subplot(), lines, ("tokens checked in one pass", "time relative to the first"))


def _acceptance(figure: Figure, report: Report) -> None:
    lines: dict[str, Points] = {}
    for row in report["rows"]:
        if row["task"] == OVERALL and (shares := row["acceptance_by_position"]):
            lines[f"{row['engine']}, {row['method']}"] = range(1, len(shares) + 1), shares
    if lines:
        _lines(figure.add_subplot(), lines, ("position in the draft", "share accepted"))


def _batch(figure: Figure, report: Report) -> None:
    axes, levels = figure.add_subplot(), [level["concurrency"] for level in report["levels"]]
    names = report["levels"][0]["ratio"]
    lines = {name: (levels, [level["ratio"][name] for level in report["levels"]]) for name in names}
    _lines(axes, lines, (f"requests at once ({report['model']})", "speed over plain decoding"))
    axes.set_xscale("log")
    axes.set_xticks(levels, [str(level) for level in levels])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def _over_loads(axes: Axes, levels: list[Report], title: str, lines: Mapping[str, Sequence[float]]) -> None:
    places, turned = range(len(levels)), 20 if len(levels) > 2 else 0
    _lines(axes, {name: (places, values) for name, values in lines.items()}, ("", ""))
    axes.set_xticks(places, [level["load"] for level in levels], rotation=turned, fontsize="small")
    axes.set_title(title, fontsize="medium", loc="left")
    if lines:
        axes.legend(frameon=False, fontsize="small")


def _latency(figure: Figure, report: Report) -> None:
    """A panel for each latency, a line for each percentile, over the loads."""
    levels = [level for level in report["levels"] if level.get("completed")]
    for i, (name, title) in enumerate(LATENCIES.items() if levels else ()):
        found = [level[f"{name}_ms"] or {} for level in levels]
        lines = {key: [each.get(key, NAN) for each in found] for key in found[0] if key != "mean"}
        _over_loads(figure.add_subplot(1, len(LATENCIES), i + 1), levels, f"{title}, ms", lines)


def _throughput(figure: Figure, report: Report) -> None:
    levels = [level for level in report["levels"] if level.get("completed")]
    for i, (title, names) in enumerate(THROUGHPUTS.items() if levels else ()):
        lines = {said: [level[key] or NAN for level in levels] for key, said in names.items()}
        _over_loads(figure.add_subplot(1, 2, i + 1), levels, title, lines)


def _first_tokens(figure: Figure, report: Report) -> None:
    """Of each load, the share of requests whose first token had come by then."""
    lines: dict[str, Points] = {}
    for level in report["levels"]:
        requests = level.get("requests", ())
        if values := sorted(request["ttft_ms"] for request in requests if request["error"] is None):
            lines[level["load"]] = values, [(i + 1) / len(values) for i in range(len(values))]
    if lines:
        labels = "milliseconds to the first token", "share of requests"
        _lines(figure.add_subplot(), lines, labels, marker="", drawstyle="steps-post")


def _planned(figure: Figure, report: Report) -> None:
    """One line for each α."""
    axes, lines = figure.add_subplot(), dict[str, Points]()
    for row in report["speedups"]:
        lines[f"α {row['alpha']:g}"] = list(row["by_k"]), [each["speedup"] for each in row["by_k"].values()]
    axes.axhline(1, color="black", linewidth=0.8)
    _lines(axes, lines, K_LABELS)
    title = f"{report['model']['name']} on {report['hardware']['name']}, batch {report['batch']}"
    axes.set_title(title, fontsize="medium", loc="left")


def _tuned(figure: Figure, report: Report) -> None:
    """For each drafter a line as predicted and a dot for each length timed; the policy's speed is a level."""
    axes = figure.add_subplot()
    axes.axhline(report["auto"] or 1, color="gray", linestyle="--", label="auto, measured")
    for i, (name, drafter) in enumerate(report["drafters"].items()):
        colour, line = f"C{i}", drafter["predicted"]
        _lines(axes, {name: (range(len(line)), line)}, K_LABELS, marker="", color=colour)
        timed = [(row["k"], row["measured"]) for row in drafter["lengths"] if row["measured"] is not None]
        axes.plot([k for k, _ in timed], [gain for _, gain in timed], "o", color=colour)
    axes.set_title(f"{report['model']}; lines: predicted, dots: measured", fontsize="medium", loc="left")


PICTURES: dict[str, dict[str, Picture]] = {
    "compare": {"speedup.png": _speedup, "acceptance.png": _acceptance},
    "step": {"verify_cost.png": _verify_cost},
    "batch": {"concurrency_{device}.png": _batch},
    "serve": {"latency.png": _latency, "throughput.png": _throughput, "ttft.png": _first_tokens},
    "plan": {"": _planned},
    "tune": {"": _tuned},
}
