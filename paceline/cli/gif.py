"""A race as an animated GIF, drawn by Pillow in the font that matplotlib brings (extra `bench`). Invariant:
every frame holds, cell by cell, what a terminal would show at that moment.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.color import blend_rgb
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME as THEME

from paceline.cli.race import FRAMES, Race
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

FONT, FONT_SIZE, MARGIN = "fonts/ttf/DejaVuSansMono.ttf", 15, 12  # sizes in pixels
HELD_MS = 4000  # the last frame, before the first comes again
MOST_FRAMES = 160  # so that the file stays small


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


def save(race: Race, screen: Console, font: FreeTypeFont, path: Path) -> None:
    from PIL.Image import Dither

    seconds = race.seconds * race.slow
    count = min(math.ceil(seconds * FRAMES) + 1, MOST_FRAMES)
    images = [_draw(race, screen, font, i / count * race.seconds) for i in range(count + 1)]
    palette = images[-1].quantize()  # the last one has every colour
    first, *others = (image.quantize(palette=palette, dither=Dither.NONE) for image in images)
    durations = [*[max(round(1000 * seconds / count), 1000 // FRAMES)] * count, HELD_MS]
    first.save(path, format="GIF", save_all=True, append_images=others, duration=durations, loop=0)


def _draw(race: Race, screen: Console, font: FreeTypeFont, now: float) -> Image:
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
