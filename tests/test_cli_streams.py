"""What goes through stdin and stdout: text unaltered, any encoding, and one line where a stream cannot be
used.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from paceline import LLM
from paceline.cli import console, race


@pytest.fixture(scope="module")
def tiny(tiny: LLM, tiny_folder: Path) -> str:
    """The folder; the model was loaded once, so no command below is the one that compiles kernels and says
    so.
    """
    return str(tiny_folder)


def run_script(*arguments: str, shell: str = "", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """A real process, with the redirections a shell can make."""
    command = shlex.join(
        [sys.executable, "-c", "from paceline.cli.entry import main; raise SystemExit(main())", *arguments]
    )
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(["sh", "-c", f"{command} {shell}"], capture_output=True, env=settings)


def is_one_line_error(done: subprocess.CompletedProcess[bytes], named: str) -> bool:
    text = done.stderr.decode()
    return done.returncode == 2 and text.startswith("error: ") and text.count("\n") == 1 and named in text


def test_text_reaches_a_pipe_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = "a\tb\rc\x0b\x07\x1b[31m[bold]:smile:\r\n"
    console.write(console.stdout(), text)
    console.write(console.stdout(), text, style="red")
    assert capsys.readouterr().out == text * 2


def test_a_terminal_gets_no_commands_from_a_model() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=20)
    console.write(screen, "a\tb\x1b[2Jc\x9b2Jd")
    assert screen.file.getvalue() == "a\tb[2Jc2Jd"  # type: ignore[attr-defined]


def test_a_recorded_console_still_records() -> None:
    screen = race.canvas()
    console.write(screen, "unstyled words")
    assert "unstyled" in screen.export_svg()


def test_streams_that_are_closed_or_full_or_not_utf8() -> None:
    flags = ("--model", "no-such-model")
    assert is_one_line_error(run_script("generate", "-", *flags, shell="<&-"), "stdin is closed")
    assert is_one_line_error(run_script("chat", *flags, shell="<&-"), "stdin is closed")
    latin = "'" + os.fsdecode(b"caf\xe9") + "'"
    assert is_one_line_error(
        run_script("generate", os.fsdecode(b"caf\xe9"), *flags), "the prompt is not UTF-8 text"
    )
    piped = run_script(
        "generate", "-", *flags, shell=f"<<EOF\n{latin}\nEOF", LC_ALL="C", PYTHONIOENCODING="ascii"
    )
    assert is_one_line_error(piped, "the prompt is not UTF-8 text")
    assert is_one_line_error(run_script("models", shell=">/dev/full"), "No space left")


@pytest.mark.slow
def test_utf8_goes_in_whatever_the_locale_and_ascii_comes_out(tiny: str) -> None:
    flags = ("demo", "--model", tiny, "--prompt", "café ☃", "--max-tokens", "4")
    shown = run_script(*flags, PYTHONIOENCODING="ascii")
    assert shown.returncode == 0, shown.stderr
    assert b"caf? ?" in shown.stdout
    assert json.loads(run_script(*flags, "--json", PYTHONIOENCODING="ascii").stdout)["prompt"] == "café ☃"
    same = ("--raw", "--json", "--temperature", "0", "--max-tokens", "4", "--model", tiny)
    piped = run_script("generate", "-", *same, shell="<<EOF\ncafé ☃\nEOF", PYTHONIOENCODING="latin-1")
    assert (
        json.loads(piped.stdout)["token_ids"]
        == json.loads(run_script("generate", "café ☃\n", *same).stdout)["token_ids"]
    )


def test_a_reader_that_leaves_is_no_error() -> None:
    done = run_script("--help", shell="| true")
    assert (done.returncode, done.stderr) == (0, b"")
