"""The race of `paceline demo`: runs that were timed one after the other, replayed together. Invariant: what
is shown at a moment had come by then, counted from each run's first token; nothing is timed here. An animated
GIF of it is drawn by Pillow in the font that matplotlib brings (extra `bench`), as a terminal would show it.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len
from rich.color import blend_rgb
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.style import Style
from rich.table import Table
from rich.terminal_theme import SVG_EXPORT_THEME as THEME
from rich.text import Text

from paceline.cli.console import ESCAPES
from paceline.core.errors import ConfigError
from paceline.measure.results import cell

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")
WIDE = 92  # columns of a terminal from which runs stand side by side
FRAMES = 20  # a second
PICTURE = 100  # columns of a picture
FONT, FONT_SIZE, MARGIN = "fonts/ttf/DejaVuSansMono.ttf", 15, 12  # sizes in pixels
HELD_MS = 4000  # the last frame, before the first comes again
MOST_FRAMES = 160  # so that the file stays small
REPLAYED = "Each ran alone; both are replayed together as they were timed"


class Step(NamedTuple):
    """A pass of the target."""

    at: float  # seconds after the first
    tokens: Sequence[tuple[str, str | None]]  # each one's text, and who proposed it: None is the target


class Lane(NamedTuple):
    title: str
    steps: Sequence[Step]

    def text(self, now: float, colours: dict[str, str]) -> Text:
        parts = [token for step in self.steps if step.at <= now for token in step.tokens]
        return Text.assemble(*((text.translate(ESCAPES), colours.get(who or "", "")) for text, who in parts))

    def panel(self, now: float, colours: dict[str, str], height: int) -> Panel:
        """Tokens of the first step came with the prompt, so the speed is without them."""
        counts = [len(step.tokens) for step in self.steps if step.at <= now]
        count, at, end = sum(counts), self.steps[len(counts) - 1].at, self.steps[-1].at
        speed, tau = cell((count - counts[0]) / at if at else None, "{:.1f}"), f"{count / len(counts):.2f}"
        counters = Text(f"{count} tokens, {speed}/s, {len(counts)} passes, τ {tau}")
        title = Text(f"{self.title} {min(now, end):.2f} s", style="bold")
        border, text = "green" if now >= end else "dim", self.text(now, colours)
        return Panel(text, title=title, subtitle=counters, height=height, border_style=border)


@dataclass(frozen=True)
class Race:
    lanes: Sequence[Lane]
    slow: float = 1.0  # times slower than it was

    @property
    def seconds(self) -> float:
        return max(lane.steps[-1].at for lane in self.lanes)

    def frame(self, screen: Console, now: float) -> Group:
        """All runs at a moment, as high as they will be in the end so that nothing jumps."""
        tokens = [token for lane in self.lanes for step in lane.steps for token in step.tokens]
        sources = list(dict.fromkeys(source for _, source in tokens if source is not None))
        colours = {source: COLOURS[i % len(COLOURS)] for i, source in enumerate(sources)}
        across = len(self.lanes) if screen.width >= WIDE else 1
        inner = max(screen.width // across - 4, 1)  # within a border
        height = 2 + max(len(lane.text(self.seconds, {}).wrap(screen, inner)) for lane in self.lanes)
        panels = [lane.panel(now, colours, height) for lane in self.lanes]
        grid, legend = Table.grid(expand=True), Text()
        for _ in range(across):
            grid.add_column(ratio=1)
        for first in range(0, len(panels), across):
            grid.add_row(*panels[first : first + across])
        has_colours = screen.color_system is not None and not screen.no_color
        for source, colour in colours.items() if has_colours else ():
            legend.append("■ ", style=colour).append(f"drafted by {source}  ", style="dim")
        slower = "" if self.slow == 1 else f", {self.slow:g} times slower"
        return Group(grid, *([legend] if legend else ()), Text(f"{REPLAYED}{slower}.", style="dim"))

    def show(self, screen: Console) -> None:
        with Live(console=screen, auto_refresh=False) as live:
            started, now = time.perf_counter(), 0.0
            while now < self.seconds:
                live.update(self.frame(screen, now), refresh=True)
                time.sleep(1 / FRAMES)
                now = (time.perf_counter() - started) / self.slow
            live.update(self.frame(screen, self.seconds), refresh=True)


def canvas() -> Console:
    """What pictures are drawn on, whatever the terminal can show."""
    return Console(
        record=True,
        width=PICTURE,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
        highlight=False,
    )


def load_font() -> FreeTypeFont:
    """Call it before the work whose picture is wanted: what it needs may not be installed."""
    try:
        import matplotlib
        from PIL import ImageFont
    except ModuleNotFoundError as error:
        remedy = "run pip install 'paceline[bench]'"
        raise ConfigError(f"--gif needs {error.name}, which is not installed; {remedy}") from None
    path, whole_pixels = Path(matplotlib.get_data_path()) / FONT, ImageFont.Layout.BASIC
    return ImageFont.truetype(path, FONT_SIZE, layout_engine=whole_pixels)


def save_gif(race: Race, screen: Console, font: FreeTypeFont, path: Path) -> None:
    from PIL.Image import Dither

    seconds = race.seconds * race.slow
    count = min(math.ceil(seconds * FRAMES) + 1, MOST_FRAMES)
    images = [_drawn(race, screen, font, i / count * race.seconds) for i in range(count + 1)]
    palette = images[-1].quantize()  # the last one has every colour
    first, *others = (image.quantize(palette=palette, dither=Dither.NONE) for image in images)
    durations = [*[max(round(1000 * seconds / count), 1000 // FRAMES)] * count, HELD_MS]
    first.save(path, format="GIF", save_all=True, append_images=others, duration=durations, loop=0)


def _drawn(race: Race, screen: Console, font: FreeTypeFont, now: float) -> Image:
    from PIL import Image, ImageDraw

    lines = screen.render_lines(race.frame(screen, now))
    across, down = round(font.getlength("M")), sum(font.getmetrics())
    size = (screen.width * across + 2 * MARGIN, len(lines) * down + 2 * MARGIN)
    image = Image.new("RGB", size, tuple(THEME.background_color))
    draw = ImageDraw.Draw(image)
    for row, line in enumerate(lines):
        column = 0
        for text, style, _ in line:
            at = MARGIN + column * across, MARGIN + row * down
            draw.text(at, text, fill=_colour(style), font=font)
            column += cell_len(text)
    return image


def _colour(style: Style | None) -> tuple[int, ...]:
    style = style or Style.null()
    colour = THEME.foreground_color if style.color is None else style.color.get_truecolor(THEME)
    return tuple(blend_rgb(colour, THEME.background_color, 0.4) if style.dim else colour)
