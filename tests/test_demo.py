"""`paceline demo`: a right answer that ends by itself, its race in terminals of every kind, and its pictures."""

from __future__ import annotations

import fcntl
import io
import json
import pty
import struct
import sys
import termios
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from paceline import LLM
from paceline.cli import race
from paceline.cli.demo import LETTER
from paceline.cli.main import app
from paceline.cli.race import Lane, Race, Step
from tests.test_cli_interrupt import Terminal, start

MISTAKES = {
    "\nthank": "\nThank",
    "Tom have": "Tom has",
    "invites": "invite",
    "brings": "bring",
    "joins": "join",
}
WORDS = ["the ", "line ", "goes ", "faster"]
PLAIN = Lane("plain", [Step(0.1 * i, [(word, None)]) for i, word in enumerate(WORDS)])
AUTO = Lane("auto", [Step(0.0, [(WORDS[0], None)]), Step(0.1, [(word, "ngram") for word in WORDS[1:]])])


def test_the_default_answer_is_right_ends_by_itself_and_is_drawn(tmp_path: Path) -> None:
    picture, moving = tmp_path / "demo.svg", tmp_path / "demo.gif"
    done = CliRunner().invoke(app, ["demo", "--json", "--svg", str(picture), "--gif", str(moving)])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    right = LETTER.partition("\n\n")[2]
    for wrong, corrected in MISTAKES.items():
        assert right.count(wrong) == 1
        right = right.replace(wrong, corrected)
    for name in ("plain", "drafted"):
        assert (report[name]["text"], report[name]["finish_reason"]) == (right, "stop")
    assert report["identical"] is True
    assert report["tau"] >= 1.7
    shown = "".join(ET.parse(picture).getroot().itertext()).replace("\xa0", " ")
    assert all(words in shown for words in ("plain", "auto", "drafted by", "Thank you for the lovely", "■"))
    with Image.open(moving) as image:
        assert (image.format, image.is_animated) == ("GIF", True)
        assert image.n_frames >= 3
        for number in range(image.n_frames):
            image.seek(number)  # a broken frame cannot be read
            image.load()
    assert moving.stat().st_size < 1_000_000


def shown(width: int, now: float, **options: object) -> str:
    screen = Console(file=io.StringIO(), width=width, force_terminal=True, **options)  # type: ignore[arg-type]
    screen.print(Race((PLAIN, AUTO)).frame(screen, now))
    return screen.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_moment_of_a_race_shows_what_had_come_by_then() -> None:
    first, later = shown(100, 0.0, no_color=True), shown(100, 0.15, no_color=True)
    assert first.count("1 tokens, -/s, 1 passes, τ 1.00") == 2
    assert "2 tokens, 10.0/s, 2 passes, τ 1.00" in later
    assert "4 tokens, 30.0/s, 2 passes, τ 2.00" in later
    assert "auto 0.10 s" in later  # its clock stands still
    assert ("line" in first, later.count("faster")) == (False, 1)
    assert len(first.splitlines()) == len(later.splitlines())  # nothing jumps


def test_a_race_stands_side_by_side_where_there_is_room_and_is_coloured_where_there_are_colours() -> None:
    wide, narrow = (shown(width, 9.0, color_system="standard", no_color=False) for width in (100, 40))
    assert any("plain" in line and "auto" in line for line in wide.splitlines())
    assert not any("plain" in line and "auto" in line for line in narrow.splitlines())
    assert "\x1b[32mline" in wide
    assert "■" in wide
    bare = shown(100, 9.0, no_color=True)
    assert "■" not in bare
    assert "\x1b[32m" not in bare


def test_a_terminal_gets_no_commands_from_a_race() -> None:
    lane = Lane("plain", [Step(0.0, [("a\x1b[2Jb", None)])])
    assert "\x1b" not in lane.text(0.0, {}).plain
    canvas = race.canvas()
    canvas.print(Race((lane, lane)).frame(canvas, 0.0))  # of one step: there is no speed, and no error
    assert "a[2Jb" in canvas.export_text()


def test_pictures_need_an_extra_that_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    done = CliRunner().invoke(app, ["demo", "--model", "no-such-model", "--gif", str(tmp_path / "a.gif")])
    assert done.exit_code == 2
    assert "paceline[bench]" in done.stderr
    done = CliRunner().invoke(app, ["demo", "--model", "no-such-model", "--slow", "0"])
    assert "--slow is 0" in done.stderr


@pytest.fixture
def terminal(tiny: LLM, tiny_folder: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    """As wide and as slow as the test says; the model was loaded before, so its kernels are compiled."""
    width, slow, length = request.param
    prompt = ("--prompt", "the line the line the line", "--max-tokens", length, "--slow", slow)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    yield from start(("demo", "--model", str(tiny_folder), *prompt), (ours, theirs), TERM="xterm-256color")


@pytest.mark.parametrize("terminal", [(100, "20", "24")], indirect=True)
def test_a_race_at_a_terminal(terminal: Terminal) -> None:
    assert terminal.exit_status() == 0
    assert "replayed together" in terminal.seen
    assert "\x1b[1A" in terminal.seen  # what was drawn is drawn over
    assert terminal.seen.rindex("\x1b[?25h") > terminal.seen.rindex("\x1b[?25l")  # the cursor is there again
    assert "identical" in terminal.seen.split("replayed together")[-1]


@pytest.mark.parametrize("terminal", [(50, "1000", "120")], indirect=True)
def test_an_interrupted_race_leaves_the_terminal_as_it_was(terminal: Terminal) -> None:
    terminal.read_until("replayed together")
    terminal.type("\x03")
    assert terminal.exit_status() == 130
    assert "Traceback" not in terminal.seen
    assert "\x1b[?25h" in terminal.seen
